"""The doctor on real containers: faults are made, named over every way to the guest, mended, and gone.

Guests are broken and mended side by side, each in another way, for a restart of one takes as long as that of four.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from gpuctl import doctor, hosts, playbook, snapshots
from gpuctl.asking import ask
from gpuctl.transport import agent
from tests.lab.faults import conf, devices, driver, machine, network
from tests.lab.faults.boot import reboot
from tests.lab.layout import GUESTS, pct_config

pytestmark = pytest.mark.lab

ROOT = Path(__file__).parents[1]
UVM, CTL = "/dev/nvidia-uvm", "/dev/nvidiactl"
NODE_OF = {guest.name: guest.node for guest in GUESTS}
VMID = {guest.name: guest.vmid for guest in GUESTS}
WITH_SSHD = [guest.name for guest in GUESTS if guest.sshd]
UNIT = "served.service"


def at_once(work: Callable, items) -> dict:
    items = list(items)
    with ThreadPoolExecutor(max(1, len(items))) as pool:
        return dict(zip(items, pool.map(work, items), strict=True))


@dataclass
class Ward:
    """The lab's guests, and the ways to them: their own sshd and their node, `pct exec` alone, their sshd alone,
    and the probe as it runs on the spot."""

    lab: object
    folder: Path
    original: Mapping[str, str]
    boxes: dict = field(default_factory=dict)  # guest -> its box, as guest and node answered last

    def inventory(self, way):
        if way == "ssh and node":
            return self.lab.inventory
        document = yaml.safe_load((self.lab.inventory / "hosts.yml").read_text())
        for name, variables in document["all"]["children"]["guests"]["hosts"].items():
            if way == "pct exec":
                variables["ansible_connection"] = "pct"
                variables.pop("ansible_host", None)
            elif "ansible_host" in variables:
                variables = {"ansible_host": variables["ansible_host"]}
            document["all"]["children"]["guests"]["hosts"][name] = variables
        if way == "ssh alone":
            del document["all"]["children"]["nodes"]
            for name in set(VMID) - set(WITH_SSHD):
                del document["all"]["children"]["guests"]["hosts"][name]
        folder = self.folder / way.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        (folder / "hosts.yml").write_text(yaml.safe_dump(document))
        return folder

    def look(self, way, names, **eyes):
        """Guest -> its diagnosis; None where nothing of the box answered.

        On a machine as busy as this one a question may run out of time, and the doctor says that it could not tell:
        such a guest is looked at again, as a person would.
        """
        seen = self._look(way, names, eyes)
        for _ in range(3):
            slow = [name for name, diagnosis in seen.items() if ran_out_of_time(diagnosis)]
            if not slow:
                break
            seen |= self._look(way, slow, eyes)
        return seen

    def _look(self, way, names, eyes):
        if way == "local":
            return at_once(lambda name: self.on_the_spot(name, eyes), names)
        if way == "ssh alone":
            names = [name for name in names if name in WITH_SSHD]
        asked = ask(hosts.load(self.inventory(way)), names, **eyes) if names else []
        if way != "ssh alone":
            self.boxes |= {one.name: one.box for one in asked}
        return {one.name: None if one.box is None else doctor.diagnose(one.box) for one in asked}

    def on_the_spot(self, name, eyes):
        command, stdin = agent("probe", {"name": name, **({"service": eyes} if eyes else {})})
        done = self.lab.run(name, command, stdin=stdin.decode())
        return doctor.diagnose(doctor.box_from(snapshots.read(done.stdout, name))) if done.stdout else None

    def started(self, texts):
        """These configurations, each guest started anew if it starts at all."""

        def start(name):
            self.lab.run(NODE_OF[name], ["pct", "stop", str(VMID[name])])
            self.lab.conf(VMID[name]).write_text(texts[name])
            self.lab.run(NODE_OF[name], ["pct", "start", str(VMID[name])])

        at_once(start, texts)

    def fresh(self, *names):
        """Those guests as they were at first, with the number nvidia-uvm has now."""
        return {name: self.original[name].replace("c 509:*", f"c {self.major(name)}:*") for name in names or VMID}

    def major(self, name):
        return self.lab.check(NODE_OF[name], ["awk", '$2 == "nvidia-uvm" {print $1}', "/proc/devices"]).strip()

    def heal(self, name, **eyes):
        """Mends what the last look at guest and node saw."""
        played = []

        def play(remedy):
            where = NODE_OF[name] if remedy.on == "node" else name
            outcome = playbook.play(remedy.playbook, self.lab.inventory, [where], remedy.vars)
            played.append(remedy.playbook)
            return doctor.Played(outcome.well, bool(sum(outcome.changed.values())), outcome.why)

        def box():
            (asked,) = ask(hosts.load(self.lab.inventory), [name], **eyes)
            return asked.box

        return doctor.heal(self.boxes[name], box, play), played


@pytest.fixture(scope="module")
def ward(lab_to_break, tmp_path_factory):
    lab = lab_to_break
    outcome = playbook.play("devices", lab.inventory, ["kpro6", "kpro7"])
    assert outcome.well, outcome.why
    original = {guest.name: pct_config(guest, lab.subnet) for guest in GUESTS}
    return Ward(lab, tmp_path_factory.mktemp("ways"), original)


def told(diagnosis):
    return "nothing answered" if diagnosis is None else "\n".join(doctor.render_text(diagnosis, everything=True))


def leading(diagnosis):
    """The id of what stops CUDA, or of what leads."""
    return diagnosis.findings[0].id if diagnosis is not None and diagnosis.findings else None


def ran_out_of_time(diagnosis):
    if diagnosis is None:
        return False
    said = [*diagnosis.unknowns.values(), diagnosis.headline]
    return any(re.search(r"\bhang\b|no answer in \d|does not return", each) for each in said)


ALONE = ("local", "ssh alone")  # ways that ask the guest and nobody else
WITH_NODE = ("pct exec", "ssh and node")  # the last look at guest and node is the one that is healed


def assert_named(ward, wanted, inside, *, also=None, also_inside=None, **eyes):
    """Every guest's fault over every way: by its cause where the node is asked too, by `inside` from the guest alone
    (where that can be asked at all). `also`, `also_inside`: what has to be said besides what leads."""
    for way in (*ALONE, *WITH_NODE):
        expected, besides = (wanted, also) if way in WITH_NODE else (inside, also_inside)
        seen = ward.look(way, expected, **eyes)
        for name, diagnosis in seen.items():
            assert leading(diagnosis) == expected[name], f"{name} over {way}\n{told(diagnosis)}"
        assert_also(way, seen, besides or {})


def assert_said(ward, wanted, ways=(*ALONE, *WITH_NODE)):
    """Every guest's faults over these ways, whatever leads."""
    for way in ways:
        assert_also(way, ward.look(way, wanted), wanted)


def assert_also(way, seen, wanted):
    for name in wanted.keys() & seen.keys():
        assert wanted[name] <= {found.id for found in seen[name].all}, f"{name} over {way}\n{told(seen[name])}"


def assert_mended(ward, names, **eyes):
    """Mended by the playbooks, and well by a look of its own, after which mending again has nothing to play."""
    for name, (healing, played) in at_once(lambda name: ward.heal(name, **eyes), names).items():
        if healing.state == "unknown" and ran_out_of_time(healing.after):
            assert_well(ward, [name], ("ssh and node",), **eyes)  # the look that healing ends with, again
        else:
            assert healing.state == "mended", "\n".join([name, *doctor.render_healing(healing)])
        assert played, name
    assert_well(ward, names, ("local",), **eyes)


def assert_well(ward, names, ways, **eyes):
    for way in ways:
        for name, diagnosis in ward.look(way, names, **eyes).items():
            assert diagnosis is not None, name
            assert diagnosis.verdict == "well", f"{name} over {way}\n{told(diagnosis)}"


def gpuctl(lab, *words):
    command = [sys.executable, "-m", "gpuctl", "doctor", "-i", str(lab.inventory), *words]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_rules_that_do_not_allow_what_cuda_needs(ward):
    texts = ward.fresh()
    ward.started(
        {
            "ct200": conf.no_uvm_rule(texts["ct200"]),
            "ct201": texts["ct201"] + f"lxc.cgroup2.devices.deny: c {ward.major('ct201')}:* rwm\n",
            "ct202": conf.v1_keys(texts["ct202"]),
            "ct210": conf.malformed_rule(texts["ct210"]),
        }
    )
    wanted = {
        "ct200": "lxc_rule_missing",
        "ct201": "lxc_explicit_deny",
        "ct202": "lxc_rule_v1",
        "ct210": "lxc_rule_malformed",
    }
    ward.lab.wait()
    driver.answer_cuinit(ward.lab, "kpro7", 999)  # and something else is wrong, which nobody sees
    assert_named(ward, wanted, dict.fromkeys(wanted, "device_refused"))
    with ThreadPoolExecutor(1) as aside:
        fixing = aside.submit(gpuctl, ward.lab, "-t", "ct210", "--fix", "--yes")
        assert_mended(ward, ["ct200", "ct201", "ct202"])
    code, out, err = fixing.result()
    assert (code, "ct210 on kpro7: not mended: what is left has no remedy, or its remedy did not help" in out) == (
        1,
        True,
    ), out + err
    assert "[possible; cuda_unexplained]" in out, out
    driver.answer_cuinit(ward.lab, "kpro7", undo=True)
    assert_well(ward, ["ct210"], ("local",))


def test_entries_and_sections_that_do_not_do_what_they_seem_to(ward):
    texts = ward.fresh()
    ward.started(
        {
            "ct200": conf.devn_deny_write(texts["ct200"]),
            "ct201": conf.devn_default_mode(texts["ct201"]),
            "ct202": conf.rule_in_snapshot(texts["ct202"]).replace("c 511:*", f"c {ward.major('ct202')}:*"),
            "ct210": conf.no_uvm_rule(texts["ct210"]),
        }
    )
    ward.lab.wait()
    ward.lab.conf(210).write_text(texts["ct210"])  # put right, and not restarted
    wanted = {
        "ct200": "devn_deny_write",
        "ct201": "node_mode",
        "ct202": "lxc_wrong_section",
        "ct210": "lxc_not_restarted",
    }
    inside = {**dict.fromkeys(wanted, "device_refused"), "ct201": "node_mode"}
    assert_named(ward, wanted, inside, user="nobody")
    assert_mended(ward, wanted, user="nobody")


def test_guests_that_do_not_start(ward):
    lab, texts = ward.lab, ward.fresh()
    ward.started(
        {
            "ct200": conf.devn_missing(texts["ct200"]),
            "ct201": conf.locked(texts["ct201"]) + "GPU for everybody\n",
            "ct202": conf.mount_not_optional(texts["ct202"]),
            "ct210": conf.nvidia_hook(texts["ct210"]),
        }
    )
    wanted = {
        "ct200": "devn_node_missing",
        "ct201": "guest_not_running",
        "ct202": "mount_source_missing",
        "ct210": "hook_privileged",
    }
    assert_named(ward, wanted, {}, also={"ct201": {"conf_unparsable"}})
    lab.check("kpro6", ["pct", "unlock", "201"])  # as it is told; and somebody adds to it
    ward.started({"ct201": conf.devn_and_hook(texts["ct201"])})
    assert_named(ward, {"ct201": "devn_with_hook"}, {})
    assert_mended(ward, wanted)


def test_nodes_that_went_wrong_inside(ward):
    lab, texts = ward.lab, ward.fresh()
    ward.started({**texts, "ct202": conf.mount_nodev(texts["ct202"]), "ct210": conf.devn_and_mounts(texts["ct210"])})
    lab.wait("ct200", "ct201", "ct202")
    devices.stale_node(lab, "ct200", UVM)
    devices.forbid_node(lab, "kpro6", UVM, mode="0660")
    inside = {"ct200": "node_stale", "ct201": "node_unmapped_owner", "ct202": "node_nodev"}
    try:
        assert_named(ward, {**inside, "ct210": "devn_with_mount"}, inside)
        assert_mended(ward, [*inside, "ct210"])
    finally:
        devices.forbid_node(lab, "kpro6", UVM, mode="0666")


SERVED = """\
[Service]
User=nobody
{}
ExecStart=sleep infinity
"""


def serve(ward, settings):
    """A unit on each guest, with this line among its settings."""

    def place(name):
        script = f"cat > /etc/systemd/system/{UNIT}; systemctl daemon-reload; systemctl restart {UNIT}"
        ward.lab.check(name, ["sh", "-c", script], stdin=SERVED.format(settings[name]))

    at_once(place, settings)


def test_services_that_take_cuda_away_from_themselves(ward):
    """Environment, limits and sandbox of the unit, with which the probe looks; in a shell everything works."""
    lab = ward.lab
    lab.wait()
    stubs = lab.check("ct210", ["sh", "-c", "dirname $(find /usr/local/cuda/ -path '*stubs/libcuda.so' | head -1)"])
    serve(
        ward,
        {
            "ct200": "Environment=CUDA_VISIBLE_DEVICES=",
            "ct201": "LimitNOFILE=16",
            "ct202": "LimitAS=8G",
            "ct210": f"Environment=LD_LIBRARY_PATH={stubs.strip()}",
        },
    )
    wanted = {
        "ct200": "cuda_visible_devices",
        "ct201": "limit_open_files",
        "ct202": "limit_address_space",
        "ct210": "libcuda_stub",
    }
    assert_named(ward, wanted, wanted, unit=UNIT)
    library = lab.check("ct210", ["sh", "-c", "readlink -e /usr/lib/*-linux-gnu/libcuda.so.1"]).strip()
    lab.check("ct210", ["mv", library, "/root/aside"])
    devices.hide_node(lab, "ct202", UVM)
    lab.check("ct202", ["chmod", "u-s", "/usr/bin/nvidia-modprobe"])
    serve(
        ward,
        {
            "ct200": "Environment=LD_LIBRARY_PATH=/usr/local/cuda/compat",
            "ct201": "Environment=CUDA_DEVICE_ORDER=PCI_BUS",
            "ct202": "PrivateDevices=yes",
            "ct210": "",
        },
    )
    wanted = {
        "ct200": "libcuda_compat",
        "ct201": "cuda_device_order",
        "ct202": "modprobe_not_setuid",
        "ct210": "libcuda_missing",
    }
    also = {"ct202": {"unit_sandbox"}, "ct210": {"two_libcudas"}}
    assert_named(ward, wanted, wanted, also=also, also_inside=also, unit=UNIT)
    lab.check("ct210", ["mv", "/root/aside", library])
    lab.check("ct202", ["sh", "-c", "chmod u+s /usr/bin/nvidia-modprobe && nvidia-modprobe -c 0 -u"])
    serve(ward, dict.fromkeys(wanted, ""))
    assert_well(ward, wanted, ways=("pct exec",), unit=UNIT)


def version(lab, node):
    return lab.check(node, ["cat", "/sys/module/nvidia/version"]).strip()


def test_drivers_and_libraries_that_do_not_go_together(ward):
    """What no playbook of ours changes is named, and well once it is done as it is told."""
    lab = ward.lab
    ward.started({"ct201": conf.no_mount_entries(ward.fresh("ct201")["ct201"])})
    lab.wait("ct201")
    driver.break_uvm(lab, "kpro7")
    driver.mismatch_libraries(lab, "ct200")
    devices.file_for_node(lab, "ct202", CTL)
    wanted = {"ct200": "library_version", "ct201": "node_missing", "ct202": "node_is_file", "ct210": "uvm_fatal"}
    assert_named(ward, wanted, wanted)
    healing, played = ward.heal("ct210")
    assert (healing.state, played) == ("stuck", [])  # it needs everything stopped first, which is not ours to do
    lab.check("kpro7", ["sh", "-c", "rmmod nvidia_uvm && nvidia-modprobe -u -c 0"])
    driver.mismatch_libraries(lab, "ct200", version(lab, "kpro6"))
    assert_mended(ward, ["ct201", "ct202"])
    assert_well(ward, ["ct200", "ct210"], ways=("ssh and node",))
    driver.unload_module(lab, "kpro6")
    devices.stale_node(lab, "kpro7", UVM)
    assert_named(ward, {"ct201": "uvm_not_loaded", "ct210": "node_wrong_number"}, {"ct201": "uvm_not_loaded"})
    assert_mended(ward, ["ct201", "ct210"])


def test_gpus_that_are_not_ready_for_anybody(ward):
    """Modes and fabric: set right on the node, as it is told."""
    lab = ward.lab
    driver.forbid_compute(lab, "kpro6")
    lab.check("kpro6", ["nvidia-smi", "-pm", "0"])
    driver.train_fabric(lab, "kpro7")
    lab.check("kpro7", ["nvidia-double", "version", "595.84"])  # on the disk, where the next boot will take it
    wanted = {"ct200": "compute_mode", "ct202": "compute_mode", "ct210": "fabric_training"}
    also = {"ct200": {"persistence_off"}, "ct210": {"module_outdated"}}
    assert_named(ward, wanted, wanted, also=also)
    lab.check("kpro6", ["nvidia-smi", "-pm", "1"])
    driver.forbid_compute(lab, "kpro6", undo=True)
    driver.train_fabric(lab, "kpro7", undo=True)
    lab.check("kpro7", ["nvidia-double", "version", version(lab, "kpro7")])
    assert_well(ward, wanted, ways=("local",))
    driver.lose_gpu(lab, "kpro7", 3)
    lab.check("kpro6", ["modprobe", "-r", "nvidia_uvm"])
    lab.check("kpro6", ["modprobe", "-r", "nvidia"])
    assert_said(ward, {"ct200": {"module_not_loaded"}, "ct210": {"gpu_lost"}})  # the GPU until its node starts anew
    lab.check("kpro6", ["modprobe", "-a", "nvidia", "nvidia_uvm"])
    assert_well(ward, ["ct200"], ways=("local",))


def test_a_reboot_that_renumbers_is_mended_live_and_for_good_and_can_be_undone(ward):
    lab = ward.lab
    devices.file_for_node(lab, "ct200", "/dev/nvidia5")
    assert_said(ward, {"ct200": {"node_is_file", "gpu_count_short"}})  # although cuInit = 0
    before = conf.rolled_back(ward.original["ct200"].replace("c 509:*", "c 511:*")) + "# kept\n"
    lab.conf(200).write_text(before)
    lab.check("kpro6", ["systemctl", "disable", "--now", "gpuctl-devices"])
    driver.renumber_uvm(lab, "kpro6", 511)
    # The other node loses a GPU, and all that makes device nodes at its boot.
    lab.conf(210).write_text(ward.original["ct210"])
    unmade = "systemctl disable --now gpuctl-devices; rm -f /etc/udev/rules.d/*nvidia*"
    lab.check("kpro7", ["sh", "-c", unmade])
    driver.remove_gpu(lab, "kpro7", 7)
    at_once(lambda node: reboot(lab, node), ["kpro6", "kpro7"])
    assert_named(ward, {"ct200": "lxc_rule_stale"}, {"ct200": "device_refused"})
    assert_said(ward, {"ct210": {"host_nodes_missing", "boot_order", "gpu_minor_changed"}}, WITH_NODE)
    with ThreadPoolExecutor(1) as aside:
        mending = aside.submit(assert_mended, ward, ["ct210"])
        mended_for_good_and_undone(ward, before)
    mending.result()


def mended_for_good_and_undone(ward, before):
    lab = ward.lab
    start = lab.check("ct200", ["cut", "-d", " ", "-f22", "/proc/1/stat"])
    code, out, _ = gpuctl(lab, "-t", "ct200", "--all")
    assert (code, "[proved; lxc_rule_stale]" in out) == (1, True), out
    assert "[likely, info; lxc_rolled_back]" in out, out
    assert f"apply:  gpuctl doctor -i {lab.inventory} -t ct200 --fix" in out
    code, _, err = gpuctl(lab, "-t", "ct200", "--fix")
    assert (code, "--yes says yes" in err) == (2, True)
    code, out, err = gpuctl(lab, "-t", "ct200", "--fix", "--check")
    assert (code, "+dev0: /dev/nvidia0,mode=0666" in err, "nothing was changed" in out) == (1, True, True)
    assert lab.conf(200).read_text() == before
    code, out, err = gpuctl(lab, "-t", "ct200", "--fix", "--yes")
    assert (code, "mended, as a second look shows" in out) == (0, True), out + err
    assert lab.check("ct200", ["cut", "-d", " ", "-f22", "/proc/1/stat"]) == start, "the guest was restarted"
    mended = lab.conf(200).read_text()
    assert mended.endswith("\n" + before[before.index("[") :])
    code, out, err = gpuctl(lab, "-t", "ct200", "--fix", "--yes")
    assert (code, "container.yml" in err) == (0, False), out + err
    driver.renumber_uvm(lab, "kpro6", 507)
    reboot(lab, "kpro6")
    with ThreadPoolExecutor(1) as aside:
        would = aside.submit(gpuctl, lab, "-t", "ct200", "--undo", "--check")
        assert_well(ward, ["ct200"], ways=("ssh and node",))
    code, out, _ = would.result()
    assert (code, "-dev0: /dev/nvidia0,mode=0666" in out) == (0, True), out
    assert lab.conf(200).read_text() == mended
    code, out, err = gpuctl(lab, "-t", "ct200", "--undo", "--yes")
    assert code == 0, out + err
    assert lab.conf(200).read_text() == before
    assert gpuctl(lab, "-t", "ct200", "--undo", "--yes")[1] == "ct200: nothing here was changed by gpuctl\n"


def test_machines_that_cannot_be_asked_are_told_and_delay_no_other(ward):
    lab = ward.lab
    keys = (lab.state / "ssh" / "known_hosts").read_bytes()
    network.change_host_key(lab, "ct201")
    machine.remove_python3(lab, "ct202")
    network.cut(lab, "kpro7")
    try:
        code, out, err = gpuctl(lab, "-t", "all")
    finally:
        network.cut(lab, "kpro7", undo=True)
        machine.remove_python3(lab, "ct202", undo=True)
        network.change_host_key(lab, "ct201", undo=True)
    assert code == 3, out + err
    assert "ct201" in err, err
    assert "host key" in err, err
    assert "ct202: no python3 there" in err, err
    assert "kpro7" in err, err
    assert (lab.state / "ssh" / "known_hosts").read_bytes() == keys
    assert out.startswith("ct200 on kpro6: CUDA starts"), out


def test_the_doctor_leaves_the_machines_as_they_were(ward):
    lab = ward.lab
    listing = ["sh", "-c", "ls -lR /dev/nvidia*; cat /proc/modules | head -50"]
    lab.run("ct200", ["rm", "-f", "/dev/nvidia-uvm-tools"])
    before = [lab.check(machine, listing) for machine in ("ct200", "kpro6")]
    ward.look("ssh and node", ["ct200"])
    ward.look("local", ["ct200"])
    assert [lab.check(machine, listing) for machine in ("ct200", "kpro6")] == before
