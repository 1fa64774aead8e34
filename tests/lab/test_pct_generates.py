"""The LXC configuration that pct makes of a guest's at every start."""

import pytest

from tests.lab.layout import GUESTS, pct_config
from tests.lab.pct import conf as grammar
from tests.lab.pct.conf import ConfError
from tests.lab.pct.lxcconfig import Device, generate

THERE = {"/dev/nvidia0": Device("c", 195, 0), "/dev/nvidia-uvm": Device("c", 511, 0), "/dev/sda": Device("b", 8, 0)}


def ask(path):
    if path not in THERE:
        raise ConfError(f"Device {path} does not exist")
    return THERE[path]


def generated(text, controllers=()):
    section = grammar.parse(text, 200).main
    return generate(200, section, ask, frozenset(controllers), lambda path: False, "1500").splitlines()


MINIMAL = "arch: amd64\nostype: debian\nrootfs: local:200/x\n"


def test_devices_get_the_major_they_have_now_with_their_exact_minor_and_no_right_to_make_nodes():
    lines = generated(MINIMAL + "dev1: path=/dev/nvidia-uvm,mode=0666\ndev0: /dev/nvidia0\ndev2: /dev/sda\n")
    assert [line for line in lines if "devices" in line] == [
        "lxc.cgroup2.devices.allow = c 195:0 rw",
        "lxc.cgroup2.devices.allow = c 511:0 rw",
        "lxc.cgroup2.devices.allow = b 8:0 rw",
    ]


def test_deny_write_allows_reading_and_denies_writing():
    lines = generated(MINIMAL + "dev0: /dev/nvidia0,deny-write=1\n")
    assert "lxc.cgroup2.devices.allow = c 195:0 r" in lines
    assert "lxc.cgroup2.devices.deny = c 195:0 w" in lines


def test_a_device_that_is_not_there_stops_the_start():
    with pytest.raises(ConfError, match=r"^Device /dev/nvidia9 does not exist$"):
        generated(MINIMAL + "dev0: /dev/nvidia9\n")


def test_raw_lines_come_last_so_that_they_win():
    lines = generated(MINIMAL + "lxc.cgroup2.devices.allow: c 509:* rwm\ndev0: /dev/nvidia0\n")
    assert lines[-1] == "lxc.cgroup2.devices.allow = c 509:* rwm"


def test_an_unprivileged_guest_includes_the_rules_that_allow_everything_and_maps_its_ids():
    lines = generated(MINIMAL + "unprivileged: 1\n")
    includes = [line.rpartition("/")[2] for line in lines if line.startswith("lxc.include")]
    assert includes == ["common.conf", "userns.conf"]
    assert "lxc.idmap = u 0 100000 65536" in lines


def test_an_idmap_of_its_own_makes_a_guest_unprivileged_too_and_is_the_only_one():
    lines = generated(MINIMAL + "lxc.idmap: u 0 200000 65536\nlxc.idmap: g 0 200000 65536\n")
    assert [line for line in lines if line.startswith("lxc.idmap")] == [
        "lxc.idmap = u 0 200000 65536",
        "lxc.idmap = g 0 200000 65536",
    ]
    assert "lxc.include = /usr/share/lxc/config/userns.conf" in lines


def test_memory_limits_are_those_of_pve_and_only_where_the_kernel_can_hold_them():
    text = MINIMAL + "memory: 65536\nswap: 0\n"
    assert not any("memory" in line for line in generated(text))
    assert [line for line in generated(text, {"memory"}) if "memory" in line] == [
        "lxc.cgroup2.memory.max = 68719476736",
        "lxc.cgroup2.memory.high = 68585259008",
        "lxc.cgroup2.memory.swap.max = 0",
    ]


@pytest.mark.parametrize("guest", GUESTS, ids=lambda guest: guest.name)
def test_the_labs_own_guests_are_written_the_way_pct_would_rewrite_them(guest):
    text = pct_config(guest, "198.18.0")
    conf = grammar.parse(text, guest.vmid)
    assert conf.warnings == []
    assert grammar.render(conf) == text
