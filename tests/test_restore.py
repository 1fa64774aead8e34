"""Restoring a simulated box: from the lowest layer up, nothing twice, nothing on a healthy one, and it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from gpuctl import restore
from gpuctl.cli import _console
from gpuctl.cli import restore as cli
from gpuctl.cli._mending import Mending, allow
from gpuctl.config import ConfigError
from gpuctl.doctor.healing import key
from gpuctl.hosts import Machine
from tests.test_healing import FLAGSHIP, STYLES, world
from tests.world import CTL, UVM, conf

ROOT = Path(__file__).parents[1]


class Restorer(restore.Restorer):
    """The real one, on a box of tests/world.py: looked at and changed there."""

    def __init__(self, world, *, allowed=None, tell=None):
        self.world, self.machine = world, Machine("ct200", "guest", node="kpro6", vmid=200)
        self.allowed, self.looks, self.spent, self.said = allowed, 0, {}, []
        self.tell = tell or (lambda event, **facts: self.said.append((event, facts)))

    def look(self):
        self.looks += 1
        return self.world.box()

    def would(self, remedy):
        return "-c 509:* rwm\n+c 511:* rwm\n"

    def play(self, remedy):
        self.tell("playing", remedy=remedy, where=self.machine.node if remedy.on == "node" else self.machine.name)
        if self.allowed is not None and not self.allowed(remedy, "kpro6", ""):
            raise restore.NotAllowed(remedy, "kpro6")
        return self.world.play(remedy)

    def close(self):
        pass


def serving(text=FLAGSHIP, uvm=511, **more):
    return world(text, uvm, serves=True, **more)


def order(healing):
    return [step.finding.id for step in healing.steps]


def test_after_the_reboot_each_layer_is_mended_from_the_lowest_up():
    box = serving(source="metadata only", tuned=False)
    restorer = Restorer(box)
    healing = restorer.heal()
    assert healing.state == "mended"
    assert order(healing) == [
        "lxc_rule_stale",
        "memory_not_mounted",
        "model_not_staged",
        "server_down",
        "settings_lost",
    ]
    assert box.server == "active"
    assert [event for event, _ in restorer.said].count("mended") == len(healing.steps)


def test_a_healthy_box_takes_one_look_and_no_change():
    box = serving(mounted=True)
    Restorer(box).heal()
    played, starts = len(box.played), box.starts
    restorer = Restorer(box)
    assert restorer.heal().state == "well"
    assert restorer.looks == 1
    assert (len(box.played), box.starts) == (played, starts)


def test_a_warning_alone_changes_nothing_and_beside_a_mended_cause_it_goes_too():
    box = world(conf(devn=True, unprivileged=True))
    box.node_unit = False
    assert Restorer(box).heal().state == "well"
    assert box.played == []
    box.conf = FLAGSHIP
    box.start()
    box.node_unit = False
    assert Restorer(box).heal().state == "mended"
    assert box.node_unit, "what was mended comes back after the next reboot"


def test_a_server_that_hangs_is_started_anew_and_one_that_only_starts_is_waited_for():
    box = serving(mounted=True)
    Restorer(box).heal()
    box.server = "hung"
    healing = Restorer(box).heal()
    assert (healing.state, order(healing)) == ("mended", ["server_silent"])
    assert healing.steps[0].remedy.vars["anew"]


def test_without_a_source_it_is_stuck_and_says_why():
    box = serving(source="absent")
    healing = Restorer(box).heal()
    assert healing.state == "failed"
    assert healing.steps[-1].played.text == "qwen: nothing to stage it from"
    assert "model_not_staged" in [finding.id for finding in healing.left]


def test_settings_that_do_not_take_do_not_keep_the_server_down():
    box = serving(tuned=False, wedged=True)
    healing = Restorer(box).heal()
    assert box.server == "active"
    assert healing.state == "stuck"
    assert [finding.id for finding in healing.left] == ["settings_lost"]


def test_what_nobody_allows_is_not_done():
    box = serving()
    with pytest.raises(
        restore.NotAllowed, match=r"needs a change: container.yml on kpro6, and a restart of the service"
    ):
        Restorer(box, allowed=lambda *_: False).heal()
    assert box.played == []


def told(box, *, check=False, allowed=None):
    """What the command prints of a box, with the times left out, and what it has for --json."""
    lines = []
    mending = Mending(lines.append, live=False)
    restorer = Restorer(box, allowed=allowed, tell=mending.tell)
    answer = cli._restored(restorer, restorer.machine, check, lines.append)
    text = "".join(f"{re.sub(r'[0-9.]+ s', 'N s', line)}\n" for line in lines)
    return text, json.loads(json.dumps(answer, default=str))


def test_what_a_person_reads(golden):
    box = serving(source="metadata only")
    would, seen = told(box, check=True)
    assert (seen["state"], box.played) == ("wrong", [])
    first, mended = told(box)
    second, well = told(box)
    stuck, left = told(serving(source="absent"))
    parts = {"--check": would, "--yes": first, "again": second, "no source": stuck}
    golden("restore.txt", "".join(f"$ gpuctl restore ({name})\n{text}\n" for name, text in parts.items()))
    assert [mended["state"], well["state"], left["state"]] == ["mended", "well", "failed"]
    assert (well["looks"], well["steps"]) == (1, [])
    assert [step["did"] for step in mended["steps"]] == ["container", "tmpfs", "stage", "server"]
    assert left["left"][0]["id"] == "memory_not_mounted" or left["left"][0]["id"] == "model_not_staged"


def test_nobody_there_to_allow_it_is_one_line_and_an_exit_code(capsys):
    _, answer = told(serving(), allowed=allow)
    assert cli.CODES[answer["state"]] == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "ct200 needs a change: container.yml on kpro6" in said
    assert "--yes does" in said


@pytest.mark.parametrize(
    ("serves", "said"),
    [
        (
            "tp1-atuo",
            "hosts.yml:15: ct200: gpuctl_serves: no server 'tp1-atuo' in servers.yml; did you mean 'tp1-auto'?",
        ),
        ("{a: 1}", "hosts.yml:15: ct200: gpuctl_serves: a server, or a list of servers, is expected, not {'a': 1}"),
    ],
)
def test_a_mistake_in_the_inventory_is_told_before_anything_is_asked(tmp_path, serves, said):
    shutil.copytree(ROOT / "inventory" / "kpro6", tmp_path / "inv")
    hosts = tmp_path / "inv" / "hosts.yml"
    hosts.write_text(
        hosts.read_text().replace("gpuctl_vmid: 200", f"gpuctl_vmid: 200\n          gpuctl_serves: {serves}\n#")
    )
    done = gpuctl("restore", "-i", str(tmp_path / "inv"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().endswith(said)


def test_no_such_box_is_a_mistake_and_one_that_does_not_answer_is_not_known(tmp_path):
    assert gpuctl("restore", "-i", "kpro6", "-t", "ct999").returncode == 2
    shutil.copytree(ROOT / "inventory" / "kpro6", tmp_path / "inv")
    hosts = "all:\n  hosts:\n    lost: {ansible_host: 127.0.0.1, ansible_port: 1}\n"
    (tmp_path / "inv" / "hosts.yml").write_text(hosts)
    (tmp_path / "inv" / "phases.yml").write_text("phases: {}\n")
    done = gpuctl("restore", "-i", str(tmp_path / "inv"), "-t", "lost", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["boxes"][0]["state"] == "unknown"
    assert done.stderr.count("\n") == 1


def machines_of(nodes):
    """{node: [box ...]} as the command has them."""
    return [[Machine(name=name, kind="guest", node=node) for name in boxes] for node, boxes in nodes.items()]


def test_nodes_are_restored_side_by_side_and_the_boxes_of_one_node_in_turn():
    both, lines, busy = threading.Barrier(2, timeout=10), [], set()

    def one(machine, line, heard):
        heard()
        assert machine.node not in busy, "another box of the node is at work"
        busy.add(machine.node)
        if machine.name in ("a1", "b"):
            both.wait()  # one would wait for ever if the other came after it
        line("  SAW  something")
        line(f"{machine.name}: in order")
        busy.remove(machine.node)
        return {"box": machine.name}

    told = cli._side_by_side(machines_of({"n1": ["a1", "a2"], "n2": ["b"]}), one, lines.append)
    assert told == {name: {"box": name} for name in ("a1", "a2", "b")}
    assert sorted(lines) == sorted(
        [
            *(f"{name:<2}  SAW  something" for name in ("a1", "a2", "b")),
            *(f"{name}: in order" for name in ("a1", "a2", "b")),
        ]
    )


def test_a_fault_at_one_box_is_told_when_the_others_are_done():
    done = []

    def one(machine, line, heard):
        if machine.name == "a":
            raise ConfigError(["servers.yml: no"])
        time.sleep(0.2)
        done.append(machine.name)
        return {}

    with pytest.raises(ConfigError):
        cli._side_by_side(machines_of({"n1": ["a"], "n2": ["b"]}), one, print)
    assert done == ["b"]


def test_ctrl_c_ends_all_boxes_at_the_next_thing_that_happens_there(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        """
import os, signal, sys, threading, time
from gpuctl.cli import _console
from gpuctl.cli import restore as cli
from gpuctl.hosts import Machine

both = threading.Barrier(2)

def one(machine, line, heard):
    both.wait()
    if machine.name == "a":
        os.kill(os.getpid(), signal.SIGINT)
    try:
        while True:
            time.sleep(0.05)
            heard()
    finally:
        os.write(1, f"{machine.name} cleaned up\\n".encode())

try:
    cli._side_by_side([[Machine(name=name, kind="guest", node=name)] for name in "ab"], one, print)
except KeyboardInterrupt:
    print("interrupted")
"""
    )
    done = subprocess.run([sys.executable, str(program)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert sorted(done.stdout.splitlines()) == ["a cleaned up", "b cleaned up", "interrupted"], done.stderr


def test_several_boxes_that_do_not_answer_are_each_told(tmp_path):
    shutil.copytree(ROOT / "inventory" / "kpro6", tmp_path / "inv")
    lost = "{ansible_host: 127.0.0.1, ansible_port: 1}"
    (tmp_path / "inv" / "hosts.yml").write_text(f"all:\n  hosts:\n    lost: {lost}\n    gone: {lost}\n")
    (tmp_path / "inv" / "phases.yml").write_text("phases: {}\n")
    done = gpuctl("restore", "-i", str(tmp_path / "inv"), "-t", "all", "--check", "--json")
    assert done.returncode == 3
    boxes = json.loads(done.stdout)["boxes"]
    assert [(box["box"], box["state"]) for box in boxes] == [("lost", "unknown"), ("gone", "unknown")]
    assert done.stderr.count("\n") == 2


def gpuctl(*words):
    done = subprocess.run(
        [sys.executable, "-m", "gpuctl", *words], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("style", sorted(STYLES))
def test_nothing_is_staged_while_the_memory_file_system_does_not_come(style):
    """Its playbook says that all is well, and it is not there."""
    box = world(STYLES[style], 509, node_unit=True, serves=True)
    box.deaf = frozenset({"tmpfs"})
    healing = Restorer(box).heal()
    assert healing.state == "failed", "its server was tried, which does not need that file system for all that is known"
    assert any("no memory file system" in finding.summary for finding in healing.left)
    assert "stage" not in {remedy.playbook for remedy in box.played}


class Reboots(RuleBasedStateMachine):
    """Boots, kills, losses and edits in any order, restored now and then."""

    @initialize(
        style=st.sampled_from(sorted(STYLES)),
        uvm=st.integers(505, 511),
        unit=st.booleans(),
        at_boot=st.booleans(),
        tuned=st.sampled_from([None, True, False]),
    )
    def begin(self, style, uvm, unit, at_boot, tuned):
        self.world = world(STYLES[style], uvm, node_unit=unit, serves=True, at_boot=at_boot, tuned=tuned)

    @rule(uvm=st.integers(505, 511))
    def boot(self, uvm):
        self.world.boot(uvm)
        self.world.tuned = None if self.world.tuned is None else not self.world.wedged

    @rule()
    def restart_guest(self):
        self.world.start()

    @rule(path=st.sampled_from([UVM, CTL, "/dev/nvidia1"]))
    def lose_a_node(self, path):
        self.world.host.pop(path, None)

    @rule(style=st.sampled_from(sorted(STYLES)))
    def edit(self, style):
        self.world.conf = STYLES[style]

    @rule(state=st.sampled_from(["partial", "corrupt", ""]))
    def lose_the_copy(self, state):
        self.world.staged = state if self.world.mounted else ""

    @rule(source=st.sampled_from(["complete", "metadata only", "absent"]))
    def change_the_source(self, source):
        self.world.source = source

    @rule(server=st.sampled_from(["inactive", "failed", "hung"]))
    def lose_the_server(self, server):
        self.world.server = server if self.world.running else "inactive"

    @rule(wedged=st.booleans())
    def settings(self, wedged):
        if self.world.tuned is not None:
            self.world.tuned, self.world.wedged = False, wedged

    @rule(deaf=st.sampled_from([frozenset(), frozenset({"container"}), frozenset({"tmpfs"}), frozenset({"server"})]))
    def go_deaf(self, deaf):
        self.world.deaf = deaf

    @rule()
    def restore(self):
        before = len(self.world.played)
        curable = not self.world.deaf and not self.world.wedged
        has_model = self.world.source != "absent" or self.world.staged == "staged"
        healing = Restorer(self.world).heal()
        played = self.world.played[before:]
        # the second pass, for warnings, may see anew what the first left; each pass plays nothing twice
        assert max([played.count(one) for one in played] or [0]) <= 2
        assert len({key(remedy) for remedy in played}) >= len(played) - 1
        assert len(played) <= 24
        if healing.state in ("well", "mended"):
            assert self.world.server == "active"
            assert self.world.staged == "staged"
            restorer, count = Restorer(self.world), len(self.world.played)
            assert restorer.heal().state == "well"
            assert (restorer.looks, len(self.world.played)) == (1, count), "a healthy box was touched"
        else:
            assert healing.left, "it is stuck and does not say on what"
            assert not (curable and has_model and self.world.source != "absent"), (healing.state, healing.left)


TestReboots = Reboots.TestCase
TestReboots.settings = settings(
    max_examples=int(os.environ.get("EXAMPLES", "20")),
    stateful_step_count=12,
    phases=[Phase.generate] if "EXAMPLES" in os.environ else list(Phase),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_a_no_is_not_taken_for_an_interruption(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("click.confirm", lambda *_, **__: False)
    with pytest.raises(_console.Declined) as no:
        _console.consent("set 3 on kpro6?")
    assert _console.explain(no.value) == 4
    assert capsys.readouterr().err == "nothing was changed\n"
    _, answer = told(serving(), allowed=allow)
    assert cli.CODES[answer["state"]] == 1
    assert capsys.readouterr().err.endswith(
        "container.yml on kpro6, and a restart of the service; it was not allowed\n"
    )
