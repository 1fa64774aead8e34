"""The incident the lab was made for: a node reboots, nvidia-uvm gets another major, and CUDA does not start in the guest.

Then it is healed by hand, with the commands that docs/lab.md shows.
"""

import re

import pytest

from tests.lab.cuda import DENIED, UVM, cuinit, opened
from tests.lab.faults import conf, driver
from tests.lab.faults.boot import reboot

pytestmark = pytest.mark.lab

SERVER = """\
[Unit]
ConditionPathExists=/dev/shm/model
[Service]
ExecStart=sleep infinity
[Install]
WantedBy=multi-user.target
"""


@pytest.fixture(scope="module")
def incident(lab_to_break):
    """A guest that serves a model from memory, and then the reboot."""
    lab = lab_to_break
    lab.check(
        "ct200", ["sh", "-c", "mkdir -p /root/disk && echo weights > /root/disk/model && cp /root/disk/* /dev/shm/"]
    )
    lab.check("ct200", ["sh", "-c", "cat > /etc/systemd/system/served.service"], stdin=SERVER)
    lab.check("ct200", ["systemctl", "enable", "--now", "served"])
    assert lab.check("ct200", ["systemctl", "is-active", "served"]) == "active\n"
    assert (int(opened(lab, "ct200")) > 2, cuinit(lab, "ct200")) == (True, 0)
    assert lab.check("ct200", ["stat", "-c", "%t", UVM]) == f"{509:x}\n"
    driver.renumber_uvm(lab, "kpro6", 511)
    reboot(lab, "kpro6")
    return lab


def test_the_device_node_looks_right_but_may_not_be_opened_and_cuda_says_999(incident):
    lab = incident
    assert lab.check("ct200", ["stat", "-c", "%t:%T %a %F", UVM]) == "1ff:0 666 character special file\n"
    assert lab.check("ct200", ["sh", "-c", "grep nvidia-uvm /proc/devices"]) == "511 nvidia-uvm\n"
    assert opened(lab, "ct200") == DENIED
    assert cuinit(lab, "ct200") == 999
    assert lab.run("ct200", ["nvidia-smi", "-L"]).returncode == 0  # it does not need nvidia-uvm, and sees nothing wrong


def test_what_was_in_memory_is_gone_and_the_server_with_it_and_nothing_failed(incident):
    lab = incident
    assert lab.check("ct200", ["sh", "-c", "ls -A /dev/shm; cat /root/disk/model"]) == "weights\n"
    shown = lab.check("ct200", ["systemctl", "show", "-p", "ActiveState,ConditionResult,Result", "served"])
    assert set(shown.split()) == {"ActiveState=inactive", "ConditionResult=no", "Result=success"}
    assert lab.check("ct200", ["systemctl", "is-system-running"]) == "running\n"


def test_an_unprivileged_guest_with_the_same_stale_rule_is_well(incident):
    assert cuinit(incident, "ct201") == 0
    assert int(opened(incident, "ct201")) > 2


def test_it_is_healed_live_by_one_rule_for_the_running_guest(incident):
    lab = incident
    assert opened(lab, "ct200") == DENIED
    assert lab.ssh("kpro6", "lxc-cgroup", "-n", "200", "devices.allow", "c 511:* rwm").returncode == 0
    assert (int(opened(lab, "ct200")) > 2, cuinit(lab, "ct200")) == (True, 0)
    assert lab.ssh("ct200", "cp", "/root/disk/model", "/dev/shm/").returncode == 0
    assert lab.ssh("ct200", "systemctl", "start", "served").returncode == 0
    assert lab.check("ct200", ["systemctl", "is-active", "served"]) == "active\n"


def test_a_live_rule_is_lost_at_the_next_start_and_one_in_the_conf_is_not(incident):
    lab = incident
    reboot(lab, "ct200")
    assert opened(lab, "ct200") == DENIED
    assert lab.ssh("kpro6", "sed", "-i", "s/c 509:/c 511:/", "/etc/pve/lxc/200.conf").returncode == 0
    assert opened(lab, "ct200") == DENIED  # not before a restart
    assert lab.ssh("kpro6", "pct", "reboot", "200").returncode == 0
    lab.wait("ct200")
    assert (int(opened(lab, "ct200")) > 2, cuinit(lab, "ct200")) == (True, 0)


def test_devn_lines_follow_the_major_through_the_next_reboot(incident):
    lab = incident
    conf.edit_conf(lab, 200, "devn", restart=True)
    assert cuinit(lab, "ct200") == 0
    driver.renumber_uvm(lab, "kpro6", 508)
    reboot(lab, "kpro6")
    assert lab.check("ct200", ["stat", "-c", "%t", UVM]) == f"{508:x}\n"
    assert (int(opened(lab, "ct200")) > 2, cuinit(lab, "ct200")) == (True, 0)


def test_devn_lines_keep_the_guest_off_when_the_node_boots_without_the_device(incident):
    lab = incident
    driver.remove_gpu(lab, "kpro6", 7)
    before = {"kpro6": lab.boot_id("kpro6")}
    lab.peek("kpro6", ["systemctl", "--no-block", "reboot"])
    lab.wait("kpro6", "ct201", "ct202", since=before)
    assert lab.check("kpro6", ["pct", "status", "200"]) == "status: stopped\n"
    said = lab.check("kpro6", ["journalctl", "-b", "-u", "pve-guests", "-o", "cat"])
    assert re.search("^Device /dev/nvidia7 does not exist$", said, re.M)
