"""Many machines side by side, saved answers, and trying again."""

from __future__ import annotations

import threading
import time

import pytest

from gpuctl.transport import Completed, Local, Refused, Replay, TimedOut, Unreachable, each
from gpuctl.waiting import reached
from tests.patience import ends_within


def named(count):
    return [Local(f"box{n}") for n in range(count)]


def test_answers_come_by_name_in_the_order_given():
    done = each(named(5), lambda one: one.run(["echo", one.name]).text, limit=2)
    assert list(done.items()) == [(f"box{n}", f"box{n}\n") for n in range(5)]


def test_no_machine_at_all():
    assert each([], lambda one: 1) == {}


def test_never_more_at_once_than_the_limit():
    now, most, lock = [0], [0], threading.Lock()

    def work(one):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1

    each(named(20), work, limit=3)
    assert most[0] == 3


def test_machines_that_hang_give_their_place_to_the_next():
    release = threading.Event()

    def work(one):
        if one.name in ("box0", "box1"):
            release.wait(30)
        return one.name

    with ends_within(2):
        done = each(named(6), work, limit=2, timeout=0.3)
    assert {name for name, answer in done.items() if isinstance(answer, TimedOut)} == {"box0", "box1"}
    assert done["box5"] == "box5"
    release.set()


def test_one_that_cannot_be_asked_is_an_answer_about_that_one():
    def work(one):
        if one.name == "box1":
            raise Refused("box1: host key")
        return 1

    done = each(named(3), work)
    assert isinstance(done["box1"], Refused)
    assert (done["box0"], done["box2"]) == (1, 1)


def test_a_fault_of_ours_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        each(named(3), lambda one: 1 // 0)


def test_saved_answers():
    saved = Replay(
        "ct200",
        {
            "cat /proc/devices": b"511 nvidia-uvm\n",
            "python3 *": Completed(1, b"half", b"why\n"),
            "reboot": Unreachable("ct200: gone"),
        },
    )
    seen = []
    assert saved.run(["cat", "/proc/devices"]).text == "511 nvidia-uvm\n"
    assert saved.run(["python3", "-c", "x y"], on_stdout=seen.append) == Completed(1, b"", b"why\n")
    assert seen == [b"half"]
    with pytest.raises(Unreachable):
        saved.run(["reboot"])
    assert saved.run(["other"]).rc == 127
    assert saved.asked == ["cat /proc/devices", "python3 -c 'x y'", "reboot", "other"]


def trying(*outcomes):
    left, waits, heard = list(outcomes), [], []

    def work():
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def run(within=60):
        return reached(work, within=within, on_wait=lambda error: heard.append(str(error)), sleep=waits.append)

    return run, waits, heard


def test_an_unreachable_machine_is_tried_again_until_it_answers():
    run, waits, heard = trying(Unreachable("a"), Unreachable("b"), "here")
    assert run() == "here"
    assert heard == ["a", "b"]
    assert len(waits) == 2
    assert all(0 <= wait <= 10 for wait in waits)


@pytest.mark.parametrize("error", [Refused("key"), TimedOut("long"), ValueError("ours")])
def test_an_answer_is_not_tried_again(error):
    run, waits, _ = trying(error)
    with pytest.raises(type(error)):
        run()
    assert waits == []


def test_when_the_time_is_over_the_last_reason_is_said():
    run, _, _ = trying(Unreachable("gone for good"))
    with pytest.raises(Unreachable, match="gone for good"):
        run(within=0)
