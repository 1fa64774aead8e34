"""Faults in a guest's configuration: each really is what it says, and touches only the section that is in force."""

import pytest

from tests.lab.faults.conf import KINDS
from tests.lab.layout import GUESTS, pct_config
from tests.lab.pct import conf as grammar

TEXT = pct_config(GUESTS[0], "198.18.0")
SNAPSHOT = "\n[before]\nsnaptime: 1764000000\nlxc.cgroup2.devices.allow: c 509:* rwm\n"


def rules(text):
    return [value for key, value in grammar.parse(text, 200).main.lxc if key == "lxc.cgroup2.devices.allow"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_changes_the_configuration_and_leaves_snapshots_as_they_are(kind):
    for text in (TEXT, TEXT + SNAPSHOT):
        broken = KINDS[kind](text)
        assert broken != text
        before, after = (grammar.parse(t, 200).snapshots for t in (text, broken))
        assert {name: after[name].lxc for name in before} == {name: before[name].lxc for name in before}
        assert broken.endswith("\n")
        assert "\n\n\n" not in broken


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_goes_on_top_of_another(kind):
    for other in KINDS.values():
        grammar.parse(KINDS[kind](other(TEXT)), 200)


def test_stale_major_leaves_one_rule_besides_the_fixed_ones():
    assert rules(KINDS["stale-major"](TEXT)) == ["c 195:* rwm", "c 509:* rwm"]


def test_devn_passes_the_same_nodes_without_a_major_in_the_file():
    conf = grammar.parse(KINDS["devn"](TEXT), 200)
    assert conf.main.keys["dev9"] == "/dev/nvidia-uvm,mode=0666"
    assert conf.main.lxc == []
