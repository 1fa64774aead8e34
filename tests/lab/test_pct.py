"""pct on a node: what gpuctl and a person there rely on."""

import re

import pytest

from tests.lab.faults.boot import reboot
from tests.lab.faults.conf import KINDS

pytestmark = pytest.mark.lab


@pytest.fixture
def pct(lab):
    def run(*words, timeout=60):
        return lab.run("kpro6", ["pct", *words], timeout=timeout)

    return run


@pytest.fixture
def conf(lab):
    """The conf of guest 202, put back afterwards; the guest runs at the end."""
    file = lab.conf(202)
    before = file.read_text()
    yield file
    file.write_text(before)
    lab.run("kpro6", ["pct", "stop", "202"])
    assert lab.run("kpro6", ["pct", "start", "202"]).returncode == 0
    lab.wait("ct202")


def allowed_majors(lab, vmid):
    """Of the program that the kernel asks at each open in the guest."""
    shown = lab.check("kpro6", ["bpftool", "-j", "cgroup", "show", f"/sys/fs/cgroup/lxc/{vmid}"])
    number = re.search(r'"id":(\d+),"attach_type":"cgroup_device"', shown)[1]
    program = lab.check("kpro6", ["bpftool", "prog", "dump", "xlated", "id", number])
    return {int(major, 16) for major in re.findall(r"r4 != (0x[0-9a-f]+)", program)}


def test_list_has_fixed_columns_and_an_empty_lock(pct):
    lines = pct("list").stdout.splitlines()
    assert lines[0] == f"{'VMID':<10} {'Status':<10} {'Lock':<12} {'Name':<20}"
    assert lines[1] == f"{'200':<10} {'running':<10} {'':<12} {'ct200':<20}"
    assert len(lines) == 4


def test_only_guests_of_the_node_are_its_own(lab):
    assert lab.check("kpro7", ["pct", "status", "210"]) == "status: running\n"
    done = lab.run("kpro7", ["pct", "status", "200"])
    assert (done.returncode, done.stderr) == (2, "Configuration file 'nodes/kpro7/lxc/200.conf' does not exist\n")
    assert lab.check("kpro7", ["ls", "/etc/pve/nodes/kpro6/lxc"]).split() == ["200.conf", "201.conf", "202.conf"]


def test_exec_gives_the_exit_code_stdin_and_stdout_of_the_command(lab):
    done = lab.run("kpro6", ["pct", "exec", "202", "--keep-env", "0", "--", "sh", "-c", "cat; exit 7"], stdin="in\n")
    assert (done.returncode, done.stdout) == (7, "in\n")
    assert lab.run("kpro6", ["pct", "exec", "202", "--", "no-such-command"]).returncode == 127


def test_exec_leaks_the_nodes_environment_unless_told_not_to(lab):
    leak = ["env", "CUDA_VISIBLE_DEVICES=7", "pct", "exec", "202"]
    show = ["--", "sh", "-c", "echo ${CUDA_VISIBLE_DEVICES-none}"]
    assert lab.check("kpro6", [*leak, *show]) == "7\n"
    assert lab.check("kpro6", [*leak, "--keep-env", "0", *show]) == "none\n"


def test_what_cannot_be_done_is_said_in_pcts_words_and_with_its_exit_code(pct):
    for words, code, said in (
        (["start", "200"], 255, "CT 200 already running\n"),
        (["status", "999"], 2, "Configuration file 'nodes/kpro6/lxc/999.conf' does not exist\n"),
        (["exec", "999", "--", "true"], 2, "Configuration file 'nodes/kpro6/lxc/999.conf' does not exist\n"),
        (["set", "200"], 255, "no options specified\n"),
        (["set", "200", "--digest", "0" * 40, "--tags", "x"], 255, "detected modified configuration - file changed"),
        (["config", "200", "--snapshot", "nope"], 255, "snapshot 'nope' does not exist\n"),
        (["status"], 255, "400 not enough arguments\npct status <vmid> [OPTIONS]\n"),
        (["status", "abc"], 255, "400 Parameter verification failed.\nvmid: type check ('integer') failed - got 'abc'"),
        (["set", "200", "--frobnicate", "1"], 255, "Unknown option: frobnicate\n400 unable to parse option\n"),
        (["set", "200", "--dev0", "/dev/nope"], 255, "Device /dev/nope does not exist\n"),
        (["frobnicate"], 255, "ERROR: unknown command 'pct frobnicate'\n"),
    ):
        done = pct(*words)
        assert (done.returncode, done.stderr[: len(said)]) == (code, said), words


def test_a_guest_that_is_off_cannot_be_asked_and_keeps_its_files(lab, pct, conf):
    lab.check("ct202", ["sh", "-c", "echo kept > /root/disk; echo lost > /dev/shm/memory"])
    assert pct("stop", "202").returncode == 0
    assert pct("status", "202").stdout == "status: stopped\n"
    done = pct("exec", "202", "--", "true")
    assert (done.returncode, done.stderr) == (255, "container '202' not running!\n")
    assert pct("stop", "202").stderr == "CT 202 not running\n"
    assert pct("start", "202").returncode == 0
    lab.wait("ct202")
    assert lab.check("ct202", ["sh", "-c", "cat /root/disk; ls /dev/shm"]) == "kept\n"


@pytest.mark.parametrize("way", ["pct reboot", "from inside"])
def test_a_restart_reads_the_configuration_anew_and_gives_the_guest_another_boot_id(lab, pct, conf, way):
    conf.write_text(conf.read_text() + "lxc.cgroup2.devices.allow: c 77:* rwm\n")
    before = lab.boot_id("ct202")
    if way == "pct reboot":
        assert pct("reboot", "202").returncode == 0
        lab.wait("ct202", since={"ct202": before})
    else:
        reboot(lab, "ct202")
    assert lab.boot_id("kpro6") != lab.boot_id("ct202") != before
    assert "lxc.cgroup2.devices.allow = c 77:* rwm" in lab.check("kpro6", ["cat", "/var/lib/lxc/202/config"])
    assert 77 in allowed_majors(lab, 202)


def test_a_device_that_is_missing_stops_the_start_and_says_so(lab, pct, conf):
    pct("stop", "202")
    conf.write_text("dev0: /dev/nvidia-not-there\n" + conf.read_text())
    done = pct("start", "202")
    assert (done.returncode, done.stderr) == (255, "Device /dev/nvidia-not-there does not exist\n")
    assert pct("status", "202").stdout == "status: stopped\n"


def test_a_start_that_lxc_gives_up_is_said_and_leaves_its_reason_on_the_node(lab, pct, conf):
    pct("stop", "202")
    conf.write_text(KINDS["mount-not-optional"](conf.read_text()))
    done = pct("start", "202")
    assert done.returncode == 255
    assert done.stderr.endswith("startup for container '202' failed\n")
    assert "/dev/nvidia-not-there" in done.stderr
    assert lab.check("kpro6", ["cat", "/run/pve/ct-202.stderr"]).startswith("lxc-start: 202: ")
    assert pct("status", "202").stdout == "status: stopped\n"


def test_rules_that_lxc_cannot_read_are_left_out_of_the_program_and_the_guest_starts(lab, pct, conf):
    pct("stop", "202")
    for rule in ("c 511:*rwm", "c 510:* rw # read and write", "c 508:* rwm # uvm"):
        conf.write_text(conf.read_text() + f"lxc.cgroup2.devices.allow: {rule}\n")
    assert pct("start", "202").returncode == 0
    assert {511, 510} & allowed_majors(lab, 202) == set()
    assert {195, 509, 508} <= allowed_majors(lab, 202)
    said = lab.check("kpro6", ["cat", "/run/pve/ct-202.stderr"])
    assert "Failed to parse device rule devices.allow=c 511:*rwm" in said
    assert "Failed to parse device rule devices.allow=c 510:* rw # read and write" in said


def test_a_passed_device_has_todays_number_the_mode_asked_for_and_can_be_opened(lab, pct, conf):
    # /dev/full has a driver everywhere and is in no GPU's way.
    lab.check("kpro6", ["sh", "-c", "test -e /dev/lab-full || mknod -m 600 /dev/lab-full c 1 7"])
    pct("stop", "202")
    conf.write_text("dev0: /dev/lab-full,mode=0640,gid=44\n" + conf.read_text())
    assert pct("start", "202").returncode == 0
    assert lab.check("ct202", ["stat", "-c", "%t:%T %a %g", "/dev/lab-full"]) == "1:7 640 44\n"
    assert lab.check("ct202", ["head", "-c", "1", "/dev/lab-full"]) == "\0"
    monitor = lab.check("kpro6", ["systemctl", "show", "-P", "MainPID", "pve-container@202"]).strip()
    listed = f"cat /proc/{monitor}/root/var/lib/lxc/202/passthrough/devices"
    assert lab.check("kpro6", ["sh", "-c", listed]) == "c:1:7:/dev/lab-full\n"


@pytest.mark.parametrize("vmid", ["200", "201"])
def test_a_new_device_is_plugged_into_a_running_guest(lab, pct, vmid):
    lab.check("kpro6", ["sh", "-c", "test -e /dev/lab-full || mknod -m 600 /dev/lab-full c 1 7"])
    before = lab.conf(int(vmid)).read_text()
    try:
        done = pct("set", vmid, "-dev0", "/dev/lab-full,mode=0666")
        assert (done.returncode, done.stderr) == (0, "")
        assert lab.check(vmid, ["head", "-c", "1", "/dev/lab-full"]) == "\0"
        assert "dev0: /dev/lab-full,mode=0666" in pct("config", vmid, "--current").stdout
        # Changing one that is there waits for the next start.
        assert pct("set", vmid, "-dev0", "/dev/lab-full,mode=0600").returncode == 0
        pending = pct("pending", vmid).stdout
        assert "cur dev0: /dev/lab-full,mode=0666\nnew dev0: /dev/lab-full,mode=0600\n" in pending
        assert "mode=0666" in pct("config", vmid, "--current").stdout
        assert "mode=0600" in pct("config", vmid).stdout
    finally:
        lab.conf(int(vmid)).write_text(before)
        reboot(lab, vmid)


def test_set_rewrites_the_file_as_a_whole_and_config_can_be_guarded_by_its_digest(lab, pct, conf):
    conf.write_text("# remark\n" + conf.read_text().replace("lxc.cgroup2", "# inside\nlxc.cgroup2", 1))
    assert pct("set", "202", "--onboot", "0").returncode == 0
    assert conf.read_text().startswith("# remark\n# inside\narch: amd64\n")
    assert "onboot: 0\n" in conf.read_text()
    assert pct("set", "202", "--delete", "onboot").returncode == 0
    assert "onboot" not in conf.read_text()


def test_a_locked_guest_is_not_started_until_it_is_unlocked(pct, conf):
    pct("stop", "202")
    conf.write_text("lock: backup\n" + conf.read_text())
    assert pct("start", "202").stderr == "CT is locked (backup)\n"
    assert re.search(r"^202 +stopped +backup +ct202 +$", pct("list").stdout, re.M)
    assert pct("unlock", "202").returncode == 0
    assert pct("start", "202").returncode == 0


def test_a_guest_without_onboot_stays_off_when_its_node_boots_and_the_others_come_in_order(lab):
    file = lab.conf(210)
    before = file.read_text()
    file.write_text(before.replace("onboot: 1", "onboot: 0"))
    try:
        boots = {"kpro7": lab.boot_id("kpro7")}
        lab.peek("kpro7", ["systemctl", "--no-block", "reboot"])
        lab.wait("kpro7", since=boots)
        assert lab.check("kpro7", ["pct", "status", "210"]) == "status: stopped\n"
    finally:
        file.write_text(before)
        lab.check("kpro7", ["pct", "start", "210"])
        lab.wait("ct210")
