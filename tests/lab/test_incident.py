"""The incident the lab was made for: nvidia-uvm gets another major, and the guest may not open its node any more.

A device number without a driver is enough to show it: the kernel asks the device program before it looks for a driver,
so EPERM is the program's word and ENXIO says: allowed, but nobody is registered there.
"""

import re

import pytest

from tests.lab.faults.boot import reboot
from tests.lab.faults.conf import edit_conf

pytestmark = pytest.mark.lab

UVM = "/dev/nvidia-uvm"
TRY = ["strace", "-f", "-e", "trace=openat", "python3", "-c", f"import os; os.open('{UVM}', os.O_RDWR | os.O_CLOEXEC)"]


def opened(lab):
    """What the kernel says when ct200 opens the node, seen with strace."""
    said = lab.run("ct200", TRY).stderr
    return re.search(rf'openat\(AT_FDCWD, "{UVM}", O_RDWR\|O_CLOEXEC\) = (.*)', said)[1]


def register(lab, major):
    """The node's driver has this major, and its device node too."""
    lab.check("kpro6", ["sh", "-c", f"rm -f {UVM}; mknod -m 666 {UVM} c {major} 0"])


@pytest.fixture(scope="module")
def incident(lab_to_break):
    """Before: rule and node say 509. Then the driver comes back with 511, and the guest restarts."""
    lab = lab_to_break
    lab.check("ct200", ["sh", "-c", "mkdir -p /root/disk && echo weights > /root/disk/model"])
    register(lab, 509)
    edit_conf(lab, 200, "stale-major", restart=True)
    lab.check("ct200", ["sh", "-c", "cp /root/disk/model /dev/shm/"])
    assert "ENXIO" in opened(lab)
    register(lab, 511)
    reboot(lab, "ct200")
    return lab


def test_the_node_is_there_and_looks_right_but_may_not_be_opened(incident):
    lab = incident
    assert lab.check("ct200", ["stat", "-c", "%t:%T %a %F", UVM]) == "1ff:0 666 character special file\n"
    assert opened(lab) == "-1 EPERM (Operation not permitted)"


def test_what_was_in_memory_is_gone_and_what_was_on_disk_is_there(incident):
    assert incident.check("ct200", ["sh", "-c", "ls -A /dev/shm; cat /root/disk/model"]) == "weights\n"


def test_an_unprivileged_guest_with_the_same_stale_rule_may_open_it(incident):
    lab = incident
    reboot(lab, "ct201")
    said = lab.run("ct201", TRY).stderr
    assert "EPERM" not in said
    assert "ENXIO" in said


def test_it_is_healed_live_by_one_rule_for_the_running_guest(incident):
    lab = incident
    assert "EPERM" in opened(lab)
    assert lab.ssh("kpro6", "lxc-cgroup", "-n", "200", "devices.allow", "c 511:* rwm").returncode == 0
    assert "ENXIO" in opened(lab)


def test_a_live_rule_is_lost_at_the_next_start_and_one_in_the_conf_is_not(incident):
    lab = incident
    reboot(lab, "ct200")
    assert "EPERM" in opened(lab)
    assert lab.ssh("kpro6", "sed", "-i", "s/c 509:/c 511:/", "/etc/pve/lxc/200.conf").returncode == 0
    assert "EPERM" in opened(lab)  # not before a restart
    assert lab.ssh("kpro6", "pct", "reboot", "200").returncode == 0
    lab.wait("ct200")
    assert "ENXIO" in opened(lab)


def test_devn_lines_follow_the_major_through_the_next_change(incident):
    lab = incident
    lab.check(
        "kpro6", ["sh", "-c", "for n in nvidia0:0 nvidiactl:255; do mknod -m 666 /dev/${n%:*} c 195 ${n#*:}; done"]
    )
    lab.check("kpro6", ["sh", "-c", "mknod -m 666 /dev/nvidia-uvm-tools c 511 1"])
    edit_conf(lab, 200, "devn", restart=True)
    assert "ENXIO" in opened(lab)
    register(lab, 508)
    reboot(lab, "ct200")
    assert lab.check("ct200", ["stat", "-c", "%t", UVM]) == "1fc\n"
    assert "ENXIO" in opened(lab)


def test_devn_lines_keep_the_guest_off_when_the_node_boots_without_the_device(incident):
    lab = incident
    before = {"kpro6": lab.boot_id("kpro6")}
    lab.peek("kpro6", ["systemctl", "--no-block", "reboot"])
    lab.wait("kpro6", "ct201", "ct202", since=before)
    assert lab.run("kpro6", ["test", "-e", UVM]).returncode != 0
    assert lab.check("kpro6", ["pct", "status", "200"]) == "status: stopped\n"
    said = lab.check("kpro6", ["journalctl", "-b", "-u", "pve-guests", "-o", "cat"])
    assert re.search("^Device /dev/nvidia0 does not exist$", said, re.M)
