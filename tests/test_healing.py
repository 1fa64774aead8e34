"""Healing a simulated box: it ends, plays nothing twice, and a box that can be mended ends well."""

from __future__ import annotations

import os

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpuctl.doctor import heal, render_healing
from gpuctl.doctor.healing import key
from gpuctl.facts import lxc
from tests.world import CTL, UVM, World, conf

FLAGSHIP = conf(rules=("195:*", "226:*", "509:*"))


def healed(world):
    return heal(world.box(), world.box, world.play)


def world(text, uvm=511, **more):
    made = World(conf=text, **more)
    made.boot(uvm)
    return made


def test_the_flagship_is_mended_without_restarting_the_guest():
    box = world(FLAGSHIP)
    starts = box.starts
    healing = healed(box)
    assert healing.state == "mended"
    assert [step.finding.id for step in healing.steps] == ["lxc_rule_stale"]
    assert healing.steps[0].remedy.restarts == "service"
    assert box.starts == starts
    assert "lxc.cgroup2.devices.allow: c 226:* rwm" in box.conf
    assert "509" not in box.conf


def test_what_was_mended_stays_so_after_the_next_boot():
    box = world(FLAGSHIP)
    healed(box)
    box.boot(507)
    assert healed(box).state == "well"


def test_mending_twice_changes_nothing_the_second_time():
    box = world(FLAGSHIP)
    healed(box)
    before = (box.conf, len(box.played))
    assert healed(box).state == "well"
    assert (box.conf, len(box.played)) == before


def test_a_service_that_is_not_root_is_mended_too():
    box = world(conf(devn=True, mode="", unprivileged=True), user="sglang")
    healing = healed(box)
    assert healing.state == "mended"
    assert healing.steps[0].remedy.restarts == "guest"


def test_a_guest_that_cannot_start_gets_its_nodes_and_is_started():
    box = world(conf(devn=True, unprivileged=True), node_unit=False)
    assert not box.running
    assert healed(box).state == "mended"
    assert box.running


def test_a_remedy_that_does_not_help_is_told_and_not_repeated():
    box = world(FLAGSHIP, deaf=frozenset({"container"}))
    healing = healed(box)
    assert healing.state == "stuck"
    assert [f.id for f in healing.left] == ["lxc_rule_stale"]
    assert len({key(remedy) for remedy in box.played}) == len(box.played)
    assert any("not mended" in line for line in render_healing(healing))


def test_a_configuration_that_somebody_else_changed_is_left_alone():
    box = world(FLAGSHIP)
    first = box.box()
    box.conf += "# edited meanwhile\n"
    healing = heal(first, box.box, box.play)
    assert healing.state == "failed"
    assert "edited meanwhile" in box.conf
    assert any("somebody else" in line for line in render_healing(healing))


def test_a_warning_is_mended_without_any_restart():
    box = world(conf(devn=True, unprivileged=True))
    box.node_unit = False
    starts = box.starts
    healing = healed(box)
    assert [step.finding.id for step in healing.steps] == ["boot_order"]
    assert healing.state == "mended"
    assert box.starts == starts


@pytest.mark.parametrize("text", [FLAGSHIP, conf(rules=("195:*",)), conf(devn=True)], ids=["rules", "only 195", "devN"])
def test_other_lines_of_the_configuration_are_kept(text):
    text = (
        text.replace("arch: amd64", "arch: amd64\nmp0: /srv/models,mp=/models")
        + "\n[before]\narch: amd64\nsnaptime: 1\n"
    )
    box = world(text)
    healed(box)
    for line in ("# the inference guest", "mp0: /srv/models,mp=/models", "[before]", "snaptime: 1", "hostname: ct200"):
        assert line in box.conf.splitlines()
    assert lxc.parse(box.conf).sections() == ("before",)


STYLES = {
    "rules": conf(rules=("195:*", "509:*")),
    "only 195": conf(rules=("195:*",)),
    "cgroup v1": conf().replace("lxc.mount", "lxc.cgroup.devices.allow: c 195:* rwm\nlxc.mount", 1),
    "one GPU by number": conf(rules=("195:0", "195:255", "509:0")),
    "snapshot": conf(rules=("195:*",)) + "\n[old]\nlxc.cgroup2.devices.allow: c 511:* rwm\n",
    "allow all": conf(extra=("lxc.cgroup2.devices.allow: a",)),
    "devN": conf(devn=True),
    "devN, 0660": conf(devn=True, mode=""),
    "unprivileged": conf(devn=True, unprivileged=True),
    "unprivileged, mounts": conf(unprivileged=True, rules=("509:*",)),
    "unprivileged, deny": conf(unprivileged=True, extra=("lxc.cgroup2.devices.deny: a",)),
    "no uvm": conf(devn=True, paths=(CTL, "/dev/nvidia0", "/dev/nvidia1")),
    "hook": conf(devn=True, unprivileged=True, extra=("lxc.hook.mount: /usr/share/lxc/hooks/nvidia",)),
}


class Incidents(RuleBasedStateMachine):
    """Boots, edits and reloads in any order, healed now and then."""

    @initialize(
        style=st.sampled_from(sorted(STYLES)),
        uvm=st.integers(505, 511),
        unit=st.booleans(),
        user=st.sampled_from([None, "sglang"]),
        gpus=st.just(2),
    )
    def begin(self, style, uvm, unit, user, gpus):
        self.world = world(STYLES[style], uvm, node_unit=unit, user=user, gpus=gpus)

    @rule(uvm=st.integers(505, 511))
    def boot(self, uvm):
        self.world.boot(uvm)

    @rule(uvm=st.integers(505, 511))
    def reload_uvm(self, uvm):
        self.world.uvm = uvm
        self.world.host.update(
            {path: number for path, number in self.world.numbers().items() if path in self.world.host}
        )

    @rule()
    def restart_guest(self):
        self.world.start()

    @rule(path=st.sampled_from([UVM, CTL, "/dev/nvidia1"]))
    def lose_a_node(self, path):
        self.world.host.pop(path, None)

    @rule(style=st.sampled_from(sorted(STYLES)))
    def edit(self, style):
        self.world.conf = STYLES[style]

    @rule()
    def heal(self):
        before = len(self.world.played)
        healing = heal(self.world.box(), self.world.box, self.world.play)
        played = self.world.played[before:]
        assert len({key(remedy) for remedy in played}) == len(played), "a remedy was played twice"
        assert len(played) <= 12
        assert healing.state in ("well", "mended"), [*render_healing(healing), self.world.conf]
        views = self.world.box().guest.document["cuda"]
        assert all(view["cuInit"] == 0 for view in views.values())
        count = len(self.world.played)
        assert heal(self.world.box(), self.world.box, self.world.play).state == "well"
        assert len(self.world.played) == count, "the second healing changed something"

    @invariant()
    def the_configuration_stays_readable(self):
        if hasattr(self, "world"):
            assert all(line.kind != "unparsable" for line in lxc.parse(self.world.conf).lines)


TestIncidents = Incidents.TestCase
PHASES = [Phase.generate] if "EXAMPLES" in os.environ else list(Phase)
TestIncidents.settings = settings(
    max_examples=int(os.environ.get("EXAMPLES", "20")),
    stateful_step_count=10,
    phases=PHASES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
