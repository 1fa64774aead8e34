"""The guard of a campaign, on boxes whose machines go and come: it waits, says what happened, heals, and ends."""

from __future__ import annotations

import pytest

from gpuctl.facts.boot import Happened
from gpuctl.guard import Guard, Guards, Stopped, Ways, look
from gpuctl.store import Run
from gpuctl.transport import Completed, Refused, Unreachable

A, B, C, D = (f"{n}1111111-1111-4111-8111-111111111111" for n in range(4))


class Machine:
    """Answers who it is, as told at each moment: (boot_id, ticks, container, state), or an error."""

    def __init__(self, name, answer):
        self.name, self.answer, self.pct = name, answer, "status: running"

    def run(self, argv, *, stdin=b"", timeout=None, on_stdout=None):
        if isinstance(self.answer, Exception):
            raise self.answer
        if "pct" in argv[2]:
            return Completed(0, self.pct.encode(), b"")
        boot, ticks, container, state = self.answer
        text = f"{boot}\n1 (systemd) S {' '.join(['0'] * 18)} {ticks} 0\n{container}\n{state}\n"
        return Completed(0, text.encode(), b"")

    def close(self):
        pass


def up(boot, ticks=500, state="running"):
    return boot, ticks, "lxc", state


class Box:
    """ct200 on kpro6; `then` happens while the guard sleeps, one after the other."""

    def __init__(self, folder, then=(), within_s=600.0, heal=None, name="ct200", run=None):
        self.guest, self.node = Machine(name, up(B)), Machine("kpro6", (A, 1, "", "running"))
        self.then, self.time, self.told, self.healed = list(then), 0.0, [], []
        self.run = run or Run(folder / "run")
        self.run.folder.mkdir(parents=True, exist_ok=True)
        self.guard = Guard(
            Ways(name, self.guest, self.node, int(name[2:])),
            self.run,
            lambda event, **facts: self.told.append((event, facts)),
            heal or self.heal,
            within_s=within_s,
            first=run is None,
            sleep=self.sleep,
            clock=lambda: self.time,
        )
        self.guard.known = look(self.guard.ways).boot
        self.serves = True

    def heal(self, what):
        self.healed.append(what)
        return [{"finding": "lxc_rule_stale", "did": "container"}]

    def sleep(self, seconds):
        self.time += max(seconds, 1.0)
        if self.then:
            change = self.then.pop(0)
            change(self)

    def recover(self):
        return self.guard.recover("lost sight of it", lambda: self.serves)

    def events(self):
        return [event["event"] for event in self.run.events()]


def set_to(guest=None, node=None):
    def change(box):
        box.guest.answer = guest if guest is not None else box.guest.answer
        box.node.answer = node if node is not None else box.node.answer

    return change


GONE = Unreachable("ct200: no answer in time")
NODE_GONE = Unreachable("kpro6: no answer in time")


def test_a_reboot_of_the_node_is_waited_for_named_and_healed(tmp_path):
    box = Box(tmp_path, [
        set_to(GONE, (A, 1, "", "stopping")), set_to(node=NODE_GONE), lambda _: None,
        set_to(node=(C, 1, "", "starting")), set_to(up(D, 300, "starting")), set_to(up(D, 300), (C, 1, "", "running")),
    ])  # fmt: skip
    box.guest.answer = up(B, state="stopping")
    assert box.recover() is Happened.NODE_REBOOT
    assert box.healed == [Happened.NODE_REBOOT]
    assert box.events() == ["machine_away", "machine_back", "healed", "tended"]
    assert box.guard.known.node.boot_id == C
    assert box.run.events()[-1]["boot"]["node"] == C, "what follows carries the new boot"
    waited = [facts for event, facts in box.told if event == "away"]
    assert [facts["why"] for facts in waited][1:3] == ["ct200 is going down", "ct200: no answer in time"]
    assert all(facts["within_s"] == 600 for facts in waited)


def test_a_restarted_guest_is_told_from_a_reboot(tmp_path):
    box = Box(tmp_path, [set_to(up(D, 9000))])
    box.guest.answer = GONE
    assert box.recover() is Happened.GUEST_RESTART


def test_a_network_that_was_away_heals_nothing(tmp_path):
    box = Box(tmp_path, [lambda _: None, set_to(up(B))])
    box.guest.answer = GONE
    assert box.recover() is Happened.NETWORK
    assert box.healed == []


def test_a_server_that_ended_meanwhile_is_looked_after(tmp_path):
    box = Box(tmp_path, [set_to(up(B))])
    box.guest.answer, box.serves = GONE, False
    assert box.recover() is Happened.SERVICE_DIED
    assert box.healed == [Happened.SERVICE_DIED]


def test_a_guest_that_its_node_does_not_start_is_healed_through_the_node(tmp_path):
    healed = []

    def started(what):
        healed.append(what)
        box.guest.answer = up(D, 300)
        return []

    box = Box(tmp_path, [set_to(node=(C, 1, "", "running"))], heal=started)
    box.guest.answer, box.guest_state = GONE, None
    box.node.pct = "status: stopped"
    assert box.recover() is Happened.NODE_REBOOT
    assert healed == [Happened.NODE_REBOOT]
    assert box.time >= 10, "not at the first word of it"


@pytest.mark.parametrize("error", [Refused("ct200: the host key is another"), Refused("ct200: login refused")])
def test_a_wrong_key_or_a_refused_login_is_an_answer(tmp_path, error):
    box = Box(tmp_path)
    box.guest.answer = error
    with pytest.raises(Refused):
        box.recover()
    assert box.time == 0


def test_a_machine_that_does_not_come_back_ends_the_campaign_resumably(tmp_path):
    box = Box(tmp_path, within_s=0.01)
    box.guest.answer = box.node.answer = GONE
    with pytest.raises(Stopped) as caught:
        box.recover()
    assert "ct200 did not come back within" in str(caught.value)
    assert not caught.value.stuck


def test_a_box_that_goes_away_while_it_is_healed_is_waited_for_again_but_not_for_ever(tmp_path):
    healed = []

    def heal(what):
        healed.append(what)
        raise Unreachable("ct200: the connection broke")

    box = Box(tmp_path, heal=heal)
    box.guest.answer = up(D, 9000)
    with pytest.raises(Stopped) as caught:
        box.recover()
    assert "while it was healed" in str(caught.value)
    assert len(healed) == 3


def test_a_box_that_restarts_while_it_is_looked_after_is_not_taken_for_the_one_it_was(tmp_path):
    """Its survey, and what is to be measured there, are of the boot before."""
    for gone in (GONE, up(B, state="stopping"), up(D, 9000)):
        box = Box(tmp_path / str(id(gone)), heal=lambda _: [])
        box.guest.answer = gone
        with pytest.raises(Unreachable):
            box.guard.tend(None, same=True)
        assert box.guard.known.guest.boot_id == B
        box.guest.answer = up(D, 9000)
        assert "the machine restarted" in box.guard.away()
        assert box.recover() is Happened.GUEST_RESTART


def test_a_remedy_that_restarts_the_guest_makes_it_known_anew(tmp_path):
    box = Box(tmp_path, heal=lambda _: [])
    box.guest.answer = up(D, 9000)
    box.guard.tend(None)
    assert box.guard.known.guest.boot_id == D
    assert box.guard.away() == ""


def test_a_machine_that_never_finishes_booting_holds_up_for_minutes_and_not_for_ever(tmp_path):
    box = Box(tmp_path)
    box.guest.answer = up(D, 9000, "starting")
    assert box.recover() is Happened.GUEST_RESTART
    assert 180 <= box.time < 200
    assert box.guard.away() == "", "and while it is measured it is not asked for that"


def test_what_happened_between_two_commands_is_known_from_the_run_folder(tmp_path):
    box = Box(tmp_path)
    assert box.guard.begin() is None
    assert box.healed == [None], "the first time, the box is healed as it is"
    box.run.event("cell_done")
    later = Guard(box.guard.ways, box.run, lambda *_, **__: None, box.heal)
    assert later.begin() is Happened.UNKNOWN
    assert box.healed == [None]
    box.guest.answer = up(D, 9000)
    assert Guard(box.guard.ways, box.run, lambda *_, **__: None, box.heal).begin() is Happened.GUEST_RESTART
    assert box.events()[-3:] == ["started_anew", "healed", "tended"]


def test_what_was_killed_while_it_healed_is_healed_by_the_next_command(tmp_path):
    """The boot is known by then, and nothing was mended in it."""
    box = Box(tmp_path)
    box.guard.begin()

    class Killed(BaseException):
        pass

    def killed(what):
        raise Killed

    box.guest.answer = up(D, 9000)
    box.guard.heal = killed
    with pytest.raises(Killed):
        box.recover()
    assert box.events()[-1] == "machine_back"
    for healed in ([None, Happened.UNKNOWN], [None, Happened.UNKNOWN]):  # and the one after it has nothing to do
        Guard(box.guard.ways, box.run, lambda *_, **__: None, box.heal).begin()
        assert box.healed == healed


def test_a_box_that_is_away_when_the_command_is_given_is_waited_for_where_the_campaign_knows_it(tmp_path):
    box = Box(tmp_path, [set_to(up(D, 9000))])
    box.guest.answer = GONE
    with pytest.raises(Unreachable, match="no answer in time"):
        box.guard.begin()  # it may be no machine at all
    box.guest.answer = up(B)
    box.guard.begin()
    box.run.event("cell_done")
    box.guest.answer, box.guard.known = GONE, None
    with pytest.raises(Unreachable):
        box.guard.begin(check=True)
    assert box.guard.begin() is Happened.GUEST_RESTART
    assert box.healed == [None, Happened.GUEST_RESTART]


def test_that_a_run_started_is_said_with_the_boot_it_started_in(tmp_path):
    box = Box(tmp_path)
    box.guest.answer = up(B)
    box.guard.begin(started=lambda: box.run.event("run_started"))
    assert box.run.events()[0]["event"] == "run_started"
    assert box.run.events()[0]["boot"]["guest"] == B
    box.guest.answer = GONE
    later = Guard(box.guard.ways, box.run, lambda *_, **__: None, lambda _: [], within_s=0, sleep=lambda _: None)
    with pytest.raises(Stopped):
        later.begin(started=lambda: box.run.event("run_started"))
    assert all(event["boot"]["guest"] == B for event in box.run.events()), "away: what was known of it last"


def test_away_says_why_in_one_line(tmp_path):
    box = Box(tmp_path)
    assert box.guard.away() == ""
    for answer, said in (
        (GONE, "no answer"),
        (up(B, state="stopping"), "going down"),
        (up(D, 9000), "the machine restarted"),
    ):
        box.guest.answer = answer
        assert said in box.guard.away()
        assert "\n" not in box.guard.away()


class Two:
    """ct200, on which it is measured, and ct210 beside it for some of the servers."""

    def __init__(self, folder, then=()):
        self.first = Box(folder)
        self.second = Box(folder, then, name="ct210", run=self.first.run)
        self.guards = Guards([self.first.guard, self.second.guard])
        self.guards.begin()
        self.first.healed.clear()
        self.second.healed.clear()

    def recover(self, *names):
        return self.guards.recover("lost sight of it", lambda: True, names)


def test_of_a_server_over_two_machines_the_one_that_started_anew_is_healed(tmp_path):
    two = Two(tmp_path, [set_to(up(D, 9000))])
    two.second.guest.answer = GONE
    assert two.guards.away(["ct200"]) == "", "a server on the first alone has nothing to do with it"
    assert "no answer" in two.guards.away(["ct200", "ct210"])
    assert two.recover("ct200", "ct210") is Happened.GUEST_RESTART
    assert (two.first.healed, two.second.healed) == ([], [Happened.GUEST_RESTART])
    assert [event["box"] for event in two.first.run.events() if event["event"] == "machine_back"] == ["ct210"]


def test_both_machines_of_a_server_are_waited_for_and_healed_when_both_went(tmp_path):
    two = Two(tmp_path)
    two.first.guest.answer = up(D, 9000)
    two.second.guest.answer, two.second.node.answer = up(C, 8000), (D, 1, "", "running")
    assert two.recover("ct200", "ct210") is Happened.GUEST_RESTART
    assert (two.first.healed, two.second.healed) == ([Happened.GUEST_RESTART], [Happened.NODE_REBOOT])


def test_when_only_the_server_ended_each_of_its_machines_is_looked_after(tmp_path):
    two = Two(tmp_path)
    two.guards.tend(Happened.SERVICE_DIED, ["ct200", "ct210"])
    assert two.first.healed == two.second.healed == [Happened.SERVICE_DIED]


def test_what_happened_to_the_further_machine_between_two_commands_is_known_too(tmp_path):
    two = Two(tmp_path)
    two.first.run.event("cell_done")
    assert two.first.run.events()[-1]["boot"]["box"] == "ct200", "what is measured is measured on the first"
    two.second.guest.answer = up(D, 9000)
    anew = Guard(two.second.guard.ways, two.first.run, lambda *_, **__: None, two.second.heal, first=False)
    assert anew.begin() is Happened.GUEST_RESTART
    assert two.second.healed == [Happened.GUEST_RESTART]
