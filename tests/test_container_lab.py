"""A guest whose device rules went stale over a reboot of its node, mended by the playbooks."""

from __future__ import annotations

import hashlib

import pytest

from gpuctl.playbook import play
from tests.lab.cuda import DENIED, cuinit, opened
from tests.lab.faults import driver
from tests.lab.faults.boot import reboot

pytestmark = pytest.mark.lab

CONF = "/etc/pve/lxc/200.conf"


@pytest.fixture(scope="module")
def stale(lab_to_break):
    driver.renumber_uvm(lab_to_break, "kpro6", 511)
    reboot(lab_to_break, "kpro6")
    assert opened(lab_to_break, "ct200") == DENIED
    return lab_to_break


def changed(outcome):
    assert outcome.well, outcome.why
    return dict(outcome.changed)


def new_conf(lab):
    text = lab.check("kpro6", ["cat", CONF])
    return {
        "vmid": 200,
        "conf_path": CONF,
        "conf_text": text.replace("c 509:*", "c 511:*"),
        "conf_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def test_a_live_rule_lets_cuda_start_at_once_and_is_given_once(stale):
    given = {"vmid": 200, "live_rules": ["c 511:* rwm"]}
    assert changed(play("container", stale.inventory, ["kpro6"], given, check=True)) == {"kpro6": 1}
    assert opened(stale, "ct200") == DENIED
    assert changed(play("container", stale.inventory, ["kpro6"], given)) == {"kpro6": 1}
    assert cuinit(stale, "ct200") == 0
    assert changed(play("container", stale.inventory, ["kpro6"], given)) == {}


def test_a_file_that_somebody_edits_meanwhile_stays_as_it_is(stale):
    given = new_conf(stale)
    before = stale.check("kpro6", ["cat", CONF])
    stale.check("kpro6", ["sh", "-c", f"echo '# by hand' >> {CONF}"])
    got = play("container", stale.inventory, ["kpro6"], given)
    assert "was changed by somebody meanwhile; nothing is placed" in got.why
    assert stale.check("kpro6", ["cat", CONF]) == before + "# by hand\n"
    stale.check("kpro6", ["sed", "-i", "$d", CONF])


def test_the_whole_file_is_placed_the_guest_restarted_and_undone(stale):
    before, given = stale.check("kpro6", ["cat", CONF]), new_conf(stale)
    boot = stale.boot_id("ct200")
    would = play("container", stale.inventory, ["kpro6"], given, check=True)
    assert "-lxc.cgroup2.devices.allow: c 509:* rwm\n+lxc.cgroup2.devices.allow: c 511:* rwm\n" in would.diff
    assert changed(play("container", stale.inventory, ["kpro6"], {**given, "restart": True})) == {"kpro6": 2}
    stale.wait("ct200")
    assert stale.boot_id("ct200") != boot
    assert cuinit(stale, "ct200") == 0
    assert changed(play("container", stale.inventory, ["kpro6"], given)) == {}
    undo = {"vmid": 200, "conf_path": CONF, "undo": True}
    assert changed(play("container", stale.inventory, ["kpro6"], undo)) == {"kpro6": 1}
    assert stale.check("kpro6", ["cat", CONF]) == before


def test_device_nodes_that_are_gone_stale_or_no_devices_are_made_anew(stale):
    stale.check(
        "kpro6",
        ["sh", "-c", "cd /dev && rm nvidia-uvm nvidia3 && mknod nvidia-uvm c 509 0 && rm nvidiactl && touch nvidiactl"],
    )
    would = play("devices", stale.inventory, ["kpro6"], check=True)
    assert changed(would)["kpro6"] >= 2
    assert stale.check("kpro6", ["stat", "-c", "%t", "/dev/nvidia-uvm"]) == f"{509:x}\n"
    done = play("devices", stale.inventory, ["kpro6"])
    assert changed(done) == changed(would)
    seen = stale.check("kpro6", ["stat", "-c", "%n %t:%T", "/dev/nvidia-uvm", "/dev/nvidia3", "/dev/nvidiactl"])
    assert seen.split("\n")[:3] == ["/dev/nvidia-uvm 1ff:0", "/dev/nvidia3 c3:3", "/dev/nvidiactl c3:ff"]
    assert changed(play("devices", stale.inventory, ["kpro6"])) == {}


def test_they_are_made_before_the_guests_start_at_the_next_boot(stale):
    driver.renumber_uvm(stale, "kpro6", 507)
    reboot(stale, "kpro6")
    order = stale.check("kpro6", ["systemctl", "show", "-P", "Before", "gpuctl-devices"])
    assert "pve-guests.service" in order
    assert stale.check("kpro6", ["systemctl", "is-active", "gpuctl-devices"]) == "active\n"
    assert stale.check("kpro6", ["stat", "-c", "%t", "/dev/nvidia-uvm"]) == f"{507:x}\n"
