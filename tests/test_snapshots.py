"""Snapshot documents: what people type, paste and attach is read; a mistake is told with file, line and key."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gpuctl import doctor, snapshots
from gpuctl.box import Box, Unknown
from gpuctl.cli import gpuctl
from gpuctl.doctor import NotASnapshot
from gpuctl.facts import cuda, devices, env, kernel_log, libraries, nodes, nvidia, pci, place, proxmox, systemd
from gpuctl.finding import Certainty

REPOSITORY = Path(__file__).parents[1]


def read(text, name="report.yaml"):
    return snapshots.read(text, name)


def one(text, name="report.yaml"):
    (snapshot,) = read(text, name)
    return snapshot


NODE_LINES = [
    "crw-rw-rw- 1 root root 511,   0 Jan 12 10:11 /dev/nvidia-uvm",
    "crw-rw-rw-  1 root root  511,  0 Nov 29  2025 nvidia-uvm",
    "crw-rw-rw-. 1 0 0 511, 0 2025-01-12 10:11 /dev/nvidia-uvm",
    "crw-rw-rw-+ 1 root root 511, 0 12. Jan 10:11 /dev/nvidia-uvm",
]


@pytest.mark.parametrize("line", NODE_LINES)
@pytest.mark.parametrize("key", ["ls -l /dev/nvidia*", "sudo ls -la /dev/nvidia*", "nodes", "$ ls -l /dev/nvidia-uvm"])
def test_a_listing_gives_the_same_nodes_as_structured_ones(line, key):
    listed = one(f"{json.dumps(key)}: |\n  {line}\n")[nodes.NODES][nodes.UVM]
    typed = one("nodes: {/dev/nvidia-uvm: crw-rw-rw- root root 511:0}")[nodes.NODES][nodes.UVM]
    asked = one('{"nodes": {"/dev/nvidia-uvm": {"mode": 8630, "uid": 0, "gid": 0, "rdev": "511:0"}}}')[nodes.NODES][
        nodes.UVM
    ]
    for node in (listed, typed, asked):
        assert (node.kind, node.mode, node.major, node.minor) == ("char", 0o666, 511, 0)


@pytest.mark.parametrize(
    ("typed", "kind"),
    [("missing", "missing"), ("No such file or directory", "missing"), ("ENOENT", "missing"), ("regular file", "file"),
     ("-rw-r--r-- 1 root root 0", "file"), ("511:0", "char"), ("c 511, 0", "char"), ("{error: ENOENT}", "missing"),
     ("{rdev: 511:0, mode: '0666'}", "char"), ("{type: c, major: 511, minor: 0}", "char")],
)  # fmt: skip
def test_spellings_of_a_node(typed, kind):
    assert one(f"nodes:\n  /dev/nvidia-uvm: {typed}\n")[nodes.NODES][nodes.UVM].kind == kind


def test_a_whole_listing_says_what_is_missing_and_a_mapping_does_not():
    listed = one("ls -l /dev/nvidia*: |\n  crw-rw-rw- 1 root root 195, 0 Jan 1 00:00 /dev/nvidia0\n")
    assert listed[nodes.NODES][nodes.UVM].kind == "missing"
    typed = one("nodes: {nvidia0: 195:0}")
    assert typed[nodes.NODES].find(nodes.UVM) is None


def test_stat_prints_numbers_in_hexadecimal_or_decimal():
    for number in ("1ff,0", "511,0"):
        text = f"stat /dev/nvidia-uvm: |\n  File: /dev/nvidia-uvm\n  Size: 0  character special file\n  Device: 0,6 Device type: {number}\n"
        assert one(text)[nodes.NODES][nodes.UVM].major == 511


@pytest.mark.parametrize(
    "word", ["EPERM", "Operation not permitted", "1", "errno 1", "[Errno 1]", "-1 EPERM (Operation not permitted)"]
)
def test_spellings_of_a_refusal(word):
    assert one(f"open: {{/dev/nvidia-uvm: {json.dumps(word)}}}")[nodes.OPENS].of(nodes.UVM) == "EPERM"


def test_strace_and_shell_messages_count_as_opening():
    text = """
errors:
  - 'openat(AT_FDCWD, "/dev/nvidia-uvm", O_RDWR|O_CLOEXEC) = -1 EPERM (Operation not permitted)'
  - "bash: /dev/nvidiactl: Permission denied"
"""
    opens = one(text)[nodes.OPENS]
    assert opens.of("/dev/nvidia-uvm") == "EPERM"
    assert opens.of("/dev/nvidiactl") == "EACCES"


@pytest.mark.parametrize(
    ("text", "code"),
    [("cuInit: 999", 999), ("cuInit: CUDA_ERROR_UNKNOWN", 999), ("cuInit: 999 (unknown error)", 999), ("cuInit(0): 803", 803),
     ("cuda: 804", 804), ("cuda: {cuInit: 100}", 100), ("cuda: {user: {cuInit: 46}}", 46),
     ("errors: 'CUDA driver initialization failed, you might not have a CUDA gpu. Error 802: system not yet initialized'", 802),
     ("errors: [\"cuda driver library failed to get device context 999\", \"cuInit err: 999\"]", 999),
     ("errors: 'cuda init failure: 803'", 803),
     ("error: 'RuntimeError: No CUDA GPUs are available'", 100),
     ("log: 'CUDA error: forward compatibility was attempted on non supported HW'", 804),
     ("errors: torch.cuda says cudaErrorStubLibrary", 34),
     ("errors: 'ggml_cuda_init: failed to initialize CUDA: initialization error'", 3),
     ("error: 'The NVIDIA driver on your system is too old (found version 11040)'", 35)],
)  # fmt: skip
def test_spellings_of_an_error_code(text, code):
    assert one(text)[cuda.CUDA].cu_init == code


def test_numbers_are_never_read_as_times_or_truth_values():
    snapshot = one("nodes: {/dev/nvidia0: 195:0}\nCUDA_VISIBLE_DEVICES: no\n")
    assert snapshot[nodes.NODES]["/dev/nvidia0"].minor == 0
    assert snapshot[env.ENV]["CUDA_VISIBLE_DEVICES"] == "no"


SMI = {
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.": 9,
    "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 575.57": 18,
    "Failed to initialize NVML: Unknown Error": 999,
    "Failed to initialize NVML: Insufficient Permissions": 4,
    "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.": 12,
    "Unable to determine the device handle for GPU0000:0A:00.0: GPU is lost.  Reboot the system to recover this GPU": 15,
    "No devices were found": 0,
}


@pytest.mark.parametrize(("text", "code"), SMI.items())
def test_failures_of_nvidia_smi(text, code):
    view = one("nvidia-smi: |\n" + "".join(f"  {line}\n" for line in text.splitlines()))[nvidia.NVML]
    assert view.rc == code
    if code == 18:
        assert view.library_version == "575.57"
    if code == 0:
        assert view.count == 0


def test_three_outputs_of_nvidia_smi_are_the_same_gpus():
    from pathlib import Path

    facts = (Path(__file__).parent / "ground_truth" / "h200-x2.facts.txt").read_text()
    parts = facts.split("=== ")
    outputs = {part.splitlines()[0]: part.partition("\n")[2] for part in parts if part.startswith("nvidia-smi")}
    for command in ("nvidia-smi", "nvidia-smi -q", "nvidia-smi -L"):
        view = nvidia.parse_smi(outputs[command])
        assert len(view.gpus) == 2
        assert {gpu.name for gpu in view.gpus} == {"NVIDIA H200"}
    table, query = nvidia.parse_smi(outputs["nvidia-smi"]), nvidia.parse_smi(outputs["nvidia-smi -q"])
    assert [gpu.bus for gpu in table.gpus] == [gpu.bus for gpu in query.gpus] == ["0000:00:06.0", "0000:00:07.0"]
    assert all(gpu.compute_mode == 0 and gpu.persistence and gpu.mig is False for gpu in (*table.gpus, *query.gpus))
    assert table.driver_version == query.driver_version == "580.159.04"


def test_a_configuration_beside_a_guests_answers_is_its_nodes():
    guest, node = read("cuInit: 999\n200.conf: |\n  arch: amd64\npct list: ''\n")
    assert (guest.role, node.role) == ("guest", "node")
    assert proxmox.conf_of(Box(guest, node)).vmid == 200
    with pytest.raises(Unknown):
        guest[proxmox.CONFS]


def test_both_machines_in_one_file():
    guest, node = read("guest: {cuInit: 999}\nhost: {majors: {nvidia-uvm: 511}}\nerrors: [x]\n")
    assert guest[cuda.CUDA].cu_init == 999
    assert node[devices.UVM_MAJOR] == 511


def test_pct_exec_is_the_guests_answer():
    guest, node = read(
        "pct exec 200 -- ls -l /dev/nvidia*: |\n  crw-rw-rw- 1 root root 195, 0 Jan 1 00:00 /dev/nvidia0\npveversion: pve-manager/9.0.3\n"
    )
    assert nodes.UVM not in guest[nodes.NODES]
    assert node[proxmox.PVE_VERSION] == (9, 0, 3)
    assert guest.document["vmid"] == 200


PASTED = """\
root@ct200:~# nvidia-smi -L
GPU 0: NVIDIA GeForce RTX 3090 (UUID: GPU-dc5b3ea6-2254-97bd-23cf-2666f12aab1e)
root@ct200:~# ls -l /dev/nvidia*
crw-rw-rw- 1 root root 195,   0 Jan 12 10:11 /dev/nvidia0
crw-rw-rw- 1 root root 195, 255 Jan 12 10:11 /dev/nvidiactl
crw-rw-rw- 1 root root 511,   0 Jan 12 10:11 /dev/nvidia-uvm
root@ct200:~# python3 -c 'import torch; print(torch.cuda.is_available())'
UserWarning: CUDA initialization: CUDA unknown error - this may be due to an incorrectly set up environment
False
root@pve:~# cat /etc/pve/lxc/200.conf
arch: amd64
lxc.cgroup2.devices.allow: c 195:* rwm
lxc.cgroup2.devices.allow: c 509:* rwm
root@pve:~# grep nvidia /proc/devices
195 nvidia
511 nvidia-uvm
"""


def test_a_pasted_terminal_is_read_by_its_prompts():
    box = doctor.box_from(read(PASTED, "paste.txt"))
    diagnosis = doctor.diagnose(box)
    assert diagnosis.box == "ct200 on pve"
    assert [finding.id for finding in diagnosis.findings] == ["lxc_rule_stale"]


def test_loose_lines_are_messages():
    snapshot = one("GPU 3 is gone\nNVRM: Xid (PCI:0000:0a:00): 79, pid=1, GPU has fallen off the bus.\n", "dmesg.txt")
    assert snapshot[kernel_log.XIDS][0].number == 79


BUG_REPORT = """\
____________________________________________

Start of NVIDIA bug report log file.  Please include this file, along
with a detailed description of your problem, when reporting a graphics
driver bug via the NVIDIA Linux forum (see forums.developer.nvidia.com)
or by sending email to 'linux-bugs@nvidia.com'.

nvidia-bug-report.sh Version: 31831145

Date: Thu Oct 27 08:50:11 PM -03 2022
uname: Linux gpu7 6.8.12-4-pve #1 SMP PREEMPT_DYNAMIC Thu, 13 Oct 2022 18:58:49 +0000 x86_64 GNU/Linux
command line flags: -

____________________________________________

*** /proc/driver/nvidia/./version
*** ls: -r--r--r-- 1 root root 0 2022-10-27 20:48:33.974169298 -0300 /proc/driver/nvidia/./version
NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)

____________________________________________

*** /proc/driver/nvidia/./gpus/0000:01:00.0/information
*** ls: -r--r--r-- 1 root root 0 2022-10-27 20:48:33.974169298 -0300 /proc/driver/nvidia/./gpus/0000:01:00.0/information
Model: 		 NVIDIA GeForce RTX 3090
Bus Location: 	 0000:01:00.0
Device Minor: 	 0

____________________________________________

*** /proc/pci does not exist

____________________________________________

*** /dev/nvidia0
*** ls: crw-rw-rw- 1 root root 195, 0 2022-10-27 20:48:33.974169298 -0300 /dev/nvidia0

____________________________________________

/usr/bin/lspci -nn

01:00.0 VGA compatible controller [0300]: NVIDIA Corporation GA102 [GeForce RTX 3090] [10de:2204] (rev a1)

____________________________________________

/sbin/systemctl status nvidia-powerd.service
○ nvidia-powerd.service - nvidia-powerd service
     Loaded: loaded (/usr/lib/systemd/system/nvidia-powerd.service; disabled; preset: disabled)
     Active: inactive (dead)

____________________________________________

/usr/bin/nvidia-smi --query

Failed to initialize NVML: Driver/library version mismatch
NVML library version: 550.90

____________________________________________

dmesg:

[    5.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22
[   99.0] NVRM: API mismatch: the client has the version 550.90.07, but
[   99.0] NVRM: this kernel module has the version 550.54.14.
"""


def test_nvidias_bug_report_is_a_snapshot(tmp_path):
    path = tmp_path / "nvidia-bug-report.log.gz"
    path.write_bytes(gzip.compress(BUG_REPORT.encode()))
    (snapshot,) = doctor.read_snapshots(path)
    assert snapshot.name == "gpu7"
    assert snapshot[nvidia.MODULE_VERSION] == "550.54.14"
    assert snapshot[nvidia.DRIVER_GPUS][0].minor == 0
    assert snapshot[nvidia.NVML].rc == 18
    assert snapshot[pci.GPUS][0].address == "0000:01:00.0"
    assert snapshot[nodes.NODES]["/dev/nvidia0"].major == 195
    assert systemd.unit(snapshot, "nvidia-powerd.service")["ActiveState"] == "inactive"
    assert len(snapshot[kernel_log.LINES]) == 3
    assert snapshot.file_error("/proc/pci") == "ENOENT"


MISTAKES = {
    "comands:\n  nvidia-smi: x\n": "report.yaml line 1: comands: unknown key; did you mean commands?",
    "cuInti: 999\n": "report.yaml line 1: cuInti: unknown key; did you mean cuInit?",
    "cuInit: 999\nfrobnicate: 1\n": "report.yaml line 2: frobnicate: unknown key",
    "cuInit: lots\n": "report.yaml line 1: cuInit: 'lots' is no CUDA error",
    "a: 1\n b: 2\n": "report.yaml line 2: not YAML",
    "open: {/dev/nvidia0: sometimes}\n": "report.yaml line 1: open./dev/nvidia0: 'sometimes' is no answer of open",
    "nodes:\n  /dev/nvidia0: broken\n": "report.yaml line 2: nodes./dev/nvidia0: not understood: 'broken'",
    "cuInit: 1\ncuInit: 2\n": "report.yaml line 2: cuInit: a second time (first on line 1)",
    "role: fridge\n": "report.yaml line 1: role: 'fridge' is none of guest, node, machine",
    "vmid: ct\n": "report.yaml line 1: vmid: 'ct' is no container id",
    "majors: {nvidia-uvm: many}\n": "report.yaml line 1: majors.nvidia-uvm: 'many' is no major number",
    "device rules: ['c 511 rwm']\n": "report.yaml line 1: device rules: device rules: 'c 511 rwm': a colon must stand",
    "driver: new\n": "report.yaml line 1: driver: 'new' has no driver version",
    "schema: gpuctl.snapshot/2\n": "report.yaml line 1: schema: 'gpuctl.snapshot/2' is not gpuctl.snapshot/1",
    "files: x\n": "report.yaml line 1: files: a mapping is expected, not text",
    '{"schema": "gpuctl.snapshot/1"\n': "report.yaml: not JSON",
    "x: &x [*x]\n": "report.yaml line 1: x.0: an anchor that contains itself",
    "": "report.yaml: nothing to read",
    "nvidia-smi: {code: 1}\n": "report.yaml line 1: nvidia-smi: a command's answer is its output",
}


@pytest.mark.parametrize(("text", "message"), MISTAKES.items())
def test_a_mistake_is_one_line_with_file_line_and_key(text, message):
    with pytest.raises(NotASnapshot) as caught:
        read(text)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_told(tmp_path):
    for name, data, message in (
        ("there-is-none", None, "No such file"),
        ("cut.gz", gzip.compress(b"x" * 10_000)[:-20], "cut off"),
        ("binary", b"\x00\x01\x02", "binary"),
        ("odd.gz", b"\x1f\x8b\x08hello", ""),
    ):
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(NotASnapshot) as caught:
            doctor.read_snapshots(path)
        assert str(path) in str(caught.value)
        assert message in str(caught.value)
    with pytest.raises(NotASnapshot, match="a folder"):
        doctor.read_snapshots(tmp_path)


def test_a_configuration_in_a_file_of_its_own_is_the_nodes():
    node = read(
        "node: kpro6\n200.conf: |\n  lxc.cgroup2.devices.allow: c 509:* rwm\npveversion -v: 'pve-manager: 8.0.3'\n"
    )
    box = doctor.box_from([*read("role: guest\nvmid: 200\ncuInit: 999\n"), *node])
    assert box.guest[cuda.VIEWS]["root"].cu_init == 999
    assert (box.node.name, list(box.node[proxmox.CONFS])) == ("kpro6", [200])


def test_too_many_of_a_kind_are_refused():
    guest = one("cuInit: 0\nmachine: a\nrole: guest")
    with pytest.raises(NotASnapshot, match="one guest, these are 2: a"):
        doctor.box_from([guest, one("cuInit: 0\nmachine: b\nrole: guest")])


def test_what_somebody_adds_to_a_saved_snapshot_counts():
    saved = {"schema": "gpuctl.snapshot/1", "role": "guest", "probe": {"version": 1}, "cuda": {"root": {"cuInit": 0}}}
    text = json.dumps({**saved, "cuInit": 999, "200.conf": "lxc.cgroup2.devices.allow: c 195:* rwm\n"})
    (snapshot,) = read(text, "saved.json")
    assert snapshot[cuda.VIEWS]["root"].cu_init == 999
    assert 200 in snapshot[proxmox.CONFS]


def test_an_unknown_section_of_a_newer_probe_is_no_mistake():
    assert one('{"schema": "gpuctl.snapshot/1", "probe": {"version": 9}, "tomorrow": 1}').has("tomorrow")


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused_in_one_line(text):
    try:
        found = read(text)
    except NotASnapshot as refusal:
        assert "\n" not in str(refusal)
    else:
        doctor.diagnose(doctor.box_from(found))


KEYS = st.sampled_from(["nodes", "open", "cuda", "nvml", "files", "commands", "env", "errors", "dmesg", "libraries", "mapped", "units",
                        "packages", "pci", "limits", "device rules", "service", "guests", "majors", "conf", "driver", "role", "vmid",
                        "200.conf", "nvidia-smi", "ls -l /dev/nvidia*", "/proc/devices", "lspci -nnk", "guest", "node", "stat",
                        "kernel_log", "bpf", "ldconfig -p", "CUDA_VISIBLE_DEVICES", "cuInit", "unprivileged", "gpus"])  # fmt: skip
VALUES = st.recursive(
    st.one_of(st.none(), st.integers(-3, 1000), st.booleans(), st.text(max_size=20), st.sampled_from(
        ["EPERM", "195:0", "crw-rw-rw- root root 511:0", "/dev/nvidia0", "c 511:* rwm", "999", "580.95.05", "active"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(
        st.one_of(st.text(max_size=8), st.sampled_from(["/dev/nvidia0", "root", "user", "error", "200", "lines", "devices", "cuInit"])),
        inner, max_size=3)),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_any_shape_is_read_or_refused_and_no_check_breaks_on_it(document):
    try:
        found = read(json.dumps(document), "shape.json")
    except NotASnapshot:
        return
    diagnosis = doctor.diagnose(doctor.box_from(found))
    broken = [why for why in diagnosis.unknowns.values() if "check itself failed" in why]
    assert not broken
    doctor.render_text(diagnosis, everything=True)
    json.dumps(doctor.as_json(diagnosis))


def test_where_it_was_taken():
    assert one("unprivileged: 1")[place.PLACE].privileged is False
    assert one("uid_map: 0 100000 65536\nrole: guest")[place.PLACE].privileged is False
    assert one("/run/systemd/container: lxc\nuid_map: 0 0 4294967295")[place.PLACE].privileged is True
    itself = {"role": "guest", "namespaces": {"self": {"pid": "pid:[4026531836]", "cgroup": "cgroup:[4026531835]"}}}
    assert one(json.dumps(itself))[place.PLACE].container is None  # whatever the inventory calls it


def test_a_version_of_libcuda_is_enough():
    versions = one("libcuda: 570.124.04")[libraries.USERLAND]
    assert versions[0].number == "570.124.04"


def test_every_key_the_documentation_names_is_understood():
    from pathlib import Path

    text = (Path(__file__).parents[1] / "docs" / "snapshot.md").read_text()
    example = text.split("```yaml\n")[1].split("```")[0]
    diagnosis = doctor.diagnose(doctor.box_from(read(example)))
    assert [finding.id for finding in diagnosis.findings] == ["lxc_rule_stale"]


# -- what is no evidence --

NO_EVIDENCE = [
    "status: running", "pct status 200\nstatus: running", "# pct status 200\nstatus: running", "state: x",
    "link state: up", "Loaded state: active", "stat: this: that", "cannot access the page: try later", "Hello, world.",
    "statement: missing", "ls: everything: No such file or directory",
]  # fmt: skip


@pytest.mark.parametrize("text", NO_EVIDENCE)
def test_what_says_nothing_of_a_gpu_box_is_not_recognised(text, tmp_path):
    file = tmp_path / "status.txt"
    file.write_text(text + "\n")
    done = CliRunner().invoke(gpuctl, ["doctor", "--from", str(file)], standalone_mode=False)
    assert done.return_value == 3
    assert "nothing in it was recognised" in done.output
    assert "DEVICES" not in done.output


DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")])
PROSE = [line for file in DOCUMENTS for line in file.read_text().splitlines() if line.strip()]
WORDS = st.sampled_from(
    "status stat state link ls cannot access open node nodes missing device driver module nvidia nvidiactl /dev/nvidia0 loaded not "
    "running dkms failed error kernel lspci the of is CUDA GPU log 200 no such file x up active".split()
)
PHRASE = st.lists(WORDS, min_size=1, max_size=4).map(" ".join)
UNRELATED = st.one_of(st.sampled_from(PROSE), PHRASE, st.tuples(PHRASE, PHRASE).map(": ".join))


def proved(text):
    try:
        found = read(text, "notes.txt")
    except NotASnapshot:
        return []
    diagnosis = doctor.diagnose(doctor.box_from(found))
    return [finding.id for finding in diagnosis.all if finding.certainty is Certainty.PROVED]


@given(st.lists(UNRELATED, min_size=1, max_size=6).map("\n".join))
def test_prose_and_unrelated_keys_prove_nothing(text):
    assert not proved(text)


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_the_documentation_itself_is_no_broken_box(file):
    assert not proved(file.read_text())


# What reads these, and what stands there when it could not be read: nobody has seen that something is not there.
READ = ["ls -l /dev/nvidia*", "ls -l /dev", "nodes", "/proc/modules", "lsmod", "/proc/devices", "/proc/driver/nvidia/version",
        "/sys/module/nvidia/version", "/proc/driver/nvidia/params", "lspci -nnk", "dmesg", "nvidia-smi", "env"]  # fmt: skip
NOT_READ = ["", "hello", "status: running", "bash: cat: command not found", "sudo: a password is required", "see above", "Killed",
            "x: error while loading shared libraries: libx.so: cannot open shared object file: No such file or directory"]  # fmt: skip


@pytest.mark.parametrize("key", READ)
@pytest.mark.parametrize("answer", NOT_READ)
@pytest.mark.parametrize("more", [{}, {"cuInit": 999}], ids=["", "cuInit 999"])
def test_an_answer_that_was_not_read_proves_no_absence(key, answer, more):
    assert not proved(json.dumps({key: answer, **more}))


@pytest.mark.parametrize(
    ("paste", "absent"),
    [
        ("$ ls -l /dev/nvidia*\nls: cannot access '/dev/nvidia*': No such file or directory", True),
        ("$ ls -l /dev/nvidia*\nzsh: no matches found: /dev/nvidia*", True),
        ("$ ls -l /dev/nvidia*\nls: /dev/nvidia*: No such file or directory", True),
        ("ls -l /dev/nvidia*\ncrw-rw-rw- 1 root root 195, 255 Jan 1 00:00 /dev/nvidiactl", True),
        ("ls: cannot access '/dev/nvidia*': No such file or directory", True),
        ("crw-rw-rw- 1 root root 195, 255 Jan 1 00:00 /dev/nvidiactl", False),
        ("$ ls -l /dev/nvidiactl\ncrw-rw-rw- 1 root root 195, 255 Jan 1 00:00 /dev/nvidiactl", False),
    ],
)
def test_a_node_is_absent_where_the_listing_would_have_shown_it(paste, absent):
    node = one(paste, "paste.txt")[nodes.NODES].find(nodes.UVM)
    assert (node is not None and node.kind == "missing") is absent


@pytest.mark.parametrize(
    ("command", "output", "known"),
    [
        ("grep nvidia /proc/devices", "195 nvidia", True),
        ("grep 195 /proc/devices", "195 nvidia", False),
        ("head -3 /proc/devices", "Character devices:\n  1 mem", False),
        ("grep uvm /proc/modules", "nvidia_uvm 1 0 - Live 0x0", False),
        ("cat /etc/pve/lxc/200.conf | grep -v lxc", "arch: amd64", True),
        ("grep memory /etc/pve/lxc/200.conf", "memory: 1024", False),
        ("grep lxc /etc/pve/lxc/200.conf", "lxc.cgroup2.devices.allow: c 509:* rwm", True),
    ],
)
def test_part_of_a_file_stands_for_it_only_where_it_would_show_what_is_asked(command, output, known):
    (path,) = [word for word in command.split() if word.startswith("/")]
    snapshots_ = read(f"$ {command}\n{output}\n", "paste.txt")
    assert any(path in snapshot.mapping("files") for snapshot in snapshots_) is known


def test_a_module_that_grep_does_not_find_is_not_loaded():
    assert one("$ lsmod | grep nvidia\n$ whoami\nroot", "paste.txt")[nvidia.MODULE_LOADED] is False
