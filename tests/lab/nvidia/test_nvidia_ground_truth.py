"""The double answers as a real driver did, fault by fault: every row of tests/ground_truth/nvidia."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.lab.nvidia.machine import Machine

TRUTH = Path(__file__).parents[2] / "ground_truth/nvidia"
pytestmark = pytest.mark.usefixtures("root_rights")


def rows(name):
    return [json.loads(line) for line in (TRUTH / name).read_text().splitlines()]


def recorded(name):
    return [row for row in rows(name) if "case" in row]


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    return {n: Machine.measured(tmp_path_factory.mktemp(f"gpus{n}"), n) for n in (1, 2)}


class Answers:
    """All answers of one kind, asked for at once when the first is wanted."""

    def __init__(self, machines):
        self.machines, self.known = machines, {}

    def __call__(self, cases, gpus, case):
        key = (id(cases), gpus)
        if key not in self.known:
            self.known[key] = [{"trouble": "all cases of this kind together failed; see the first"}] * len(cases)
            self.known[key] = self.machines[gpus].replay(cases, gpus)
        answer = self.known[key][cases.index(case)]
        assert "trouble" not in answer, answer["trouble"]
        return answer


@pytest.fixture(scope="module")
def answers(machines):
    return Answers(machines)


ONE, TWO, NODES, SMI = recorded("one-gpu.jsonl"), recorded("two-gpus.jsonl"), rows("nodes.jsonl"), rows("smi.jsonl")
VISIBLE = json.loads((TRUTH / "visible.json").read_text())
LIMITS = json.loads((TRUTH / "limits.json").read_text())


def name(case):
    return case["case"].replace("/", "|")


@pytest.mark.parametrize("case", ONE, ids=name)
def test_one_gpu(answers, case):
    assert {"case": case["case"], **answers(ONE, 1, case)} == case


@pytest.mark.parametrize("case", TWO, ids=name)
def test_two_gpus(answers, case):
    answer = {"case": case["case"], **answers(TWO, 2, case)}
    if "dlopen" in case:
        answer["dlopen"] = [answer["dlopen"]]
        case = {**case, "cuDriverGetVersion": None, "dlopen": [d.rpartition("/")[2] for d in case["dlopen"]]}
        case.pop("cuDriverGetVersion")
    assert answer == case


@pytest.mark.parametrize("case", NODES, ids=name)
def test_what_nvml_counts_and_what_becomes_of_the_nodes(answers, case):
    answer = answers(NODES, 2, case)
    for key in ("nvml", "count", "handles", "cuInit", "devices", "after"):
        assert answer[key] == case[key], key
    if case["as"] != "nobody":  # whose nvidia-caps were closed to it, which the recording process was not
        assert answer["descriptors"] == case["descriptors"]
    for command in ("smi -L", "smi"):
        if command in case:
            assert answer[command]["rc"] == case[command]["rc"]
            assert steady(answer[command]["out"]).strip("\n") == steady(case[command]["out"]).strip("\n")


@pytest.mark.parametrize("case", VISIBLE["rows"], ids=lambda row: repr(row["CUDA_VISIBLE_DEVICES"]))
def test_cuda_visible_devices(machines, answers, case):
    cases = visible_cases(machines)
    answer = answers(cases, 2, cases[VISIBLE["rows"].index(case)])
    assert (answer["cuInit"], answer["devices"]) == (case["cuInit"], case["devices"])


_visible: list[dict[str, str]] = []


def visible_cases(machines):
    """The rows with the UUIDs the double's GPUs have."""
    if not _visible:
        own = re.findall(r"UUID: (GPU-\S+)\)", machines[2].replay([{"argv": ["-L"], "as": "root"}], 2)[0]["out"])
        pairs = list(zip(VISIBLE["gpus"].values(), own, strict=True))
        for row in VISIBLE["rows"]:
            words = []
            for word in row["CUDA_VISIBLE_DEVICES"].split(","):
                for theirs, ours in pairs:
                    for part, own_part in ((theirs, ours), (theirs[4:], ours[4:]), (theirs.lower(), ours.lower())):
                        bare = word.removeprefix("MIG-")
                        if len(bare) > 7 and part.startswith(bare):
                            word = word.replace(bare, own_part[: len(bare)])
                            break
                words.append(word)
            _visible.append({"CUDA_VISIBLE_DEVICES": ",".join(words)})
    return _visible


OPEN_FILES = [{"limit": ["RLIMIT_NOFILE", int(n)]} for n in LIMITS["RLIMIT_NOFILE"]]
SPACE = [{"limit": ["RLIMIT_AS", int(n) << 30]} for n in LIMITS["RLIMIT_AS GiB"]]


@pytest.mark.parametrize("n", range(len(OPEN_FILES)), ids=lambda n: str(OPEN_FILES[n]["limit"][1]))
def test_too_few_descriptors(answers, n):
    answer = answers(OPEN_FILES, 2, OPEN_FILES[n])
    assert [answer["cuInit"], answer["count"]] == list(LIMITS["RLIMIT_NOFILE"].values())[n]


@pytest.mark.parametrize("n", range(len(SPACE)), ids=lambda n: str(SPACE[n]["limit"][1] >> 30))
def test_too_little_address_space(answers, n):
    answer = answers(SPACE, 2, SPACE[n])
    assert [answer["cuInit"], answer["count"]] == list(LIMITS["RLIMIT_AS GiB"].values())[n]


# ---- nvidia-smi ----


def steady(text):
    """Without what differs from moment to moment and from board to board."""
    text = re.sub(r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}", "TIME", text)
    text = re.sub(r"GPU-[0-9a-f-]{36}", "UUID", text)
    text = re.sub(r"\d+C( +P\d+) +\d+W", r"C\1 W", text)
    return re.sub(r"\n+", "\n", text)


COMPARED = [case for case in SMI if case["argv"][:2] not in (["topo", "-c"], ["topo", "-n"], ["topo", "-p"])]


@pytest.mark.parametrize("case", COMPARED, ids=lambda case: " ".join(case["argv"])[:50].replace("/", "|"))
def test_nvidia_smi(answers, case):
    answer = answers(COMPARED, 2, case)
    theirs, ours = steady(case["out"]), steady(answer["out"])
    if case["argv"][0] == "-q":
        theirs, ours = (re.sub(r" : .*", "", text) for text in (theirs, ours))
    if case["argv"][0] == "topo":
        # Theirs have NVLink, and other CPUs.
        theirs, ours = theirs.replace("NV18", "PHB").replace("\tOK", "\tNS"), ours.replace("\tOK", "\tNS")
        theirs, ours = (re.sub(r"\t[\d,-]+\t(\d)\t\tN/A", r"\t\1\t\tN/A", text) for text in (theirs, ours))
    if "serial" in case["argv"][0]:
        differ = {
            "serial",
            "temperature.gpu",
            "temperature.memory",
            "power.draw [W]",
            "fabric.state",
            "pcie.link.gen.hostmax",
        }
        theirs, ours = (columns(text, differ) for text in (theirs, ours))
    assert (answer["rc"], ours) == (case["rc"], theirs)


def columns(text, without):
    header, *lines = (line.split(", ") for line in text.splitlines())
    return [[cell for name, cell in zip(header, line, strict=True) if name not in without] for line in (header, *lines)]


def test_nvidia_smi_q_has_every_field_in_its_place(machines):
    (answer,) = machines[1].replay([{"argv": ["-q"], "as": "root"}], 1)

    def names(text):
        return [line.partition(" : ")[0].rstrip() for line in text.splitlines() if line.strip()]

    assert names(answer["out"]) == names((TRUTH / "smi-q.txt").read_text())


def test_proc_has_the_files_and_the_fields(machines):
    machine = machines[1]
    machine.run(["true"])
    proc = machine.root / "var/lib/nvidia-double/kernel/proc/driver"
    ours = {"/proc/driver/" + str(p.relative_to(proc)) for p in proc.rglob("*") if p.is_file()}
    assert ours == set((TRUTH / "proc-files.txt").read_text().split())

    def fields(text):
        return [line.partition(":")[0] for line in text.splitlines()]

    assert fields((proc / "nvidia/params").read_text()) == fields((TRUTH / "params.txt").read_text())
    information = proc / "nvidia/gpus/0000:00:06.0/information"
    assert fields(information.read_text()) == fields((TRUTH / "information.txt").read_text())
    first = (TRUTH / "version.txt").read_text().splitlines()[0]
    assert (proc / "nvidia/version").read_text().splitlines()[0] == first


def test_a_guest_sees_its_own_processes_only(machines):
    """As recorded in smi-while-held.txt: memory is seen by all, a process by those who share or hold its namespace."""
    code = r"""
import ctypes, subprocess
os.environ["LD_LIBRARY_PATH"] = libraries
smi = [os.path.join(libraries, "../../bin/nvidia-smi")]
pid = os.fork()
if pid == 0:
    os.setsid()
    cuda = ctypes.CDLL(libraries + "/libcuda.so.1")
    context, memory = ctypes.c_void_p(), ctypes.c_uint64()
    cuda.cuInit(0)
    print(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 1), flush=True)
    cuda.cuCtxSetCurrent(context)
    print(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 30)), flush=True)
    import time; time.sleep(60)
import time
query = ["--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
used = ["--query-gpu=memory.used", "--format=csv,noheader", "-i", "1"]
for _ in range(100):
    if subprocess.check_output(smi + query): break
    time.sleep(0.05)
time.sleep(0.2)
print(subprocess.check_output(smi + query, text=True).replace(str(pid), "PID"), end="")
print(repr(subprocess.check_output(["unshare", "-p", "-f", "--mount-proc", *smi, *query], text=True)))
print(subprocess.check_output(smi + used, text=True), end="")
os.kill(pid, 9); os.waitpid(pid, 0); time.sleep(0.2)
print(subprocess.check_output(smi + used, text=True), end="", flush=True)
"""
    out = machines[2].python(f"libraries = {str(machines[2].libraries)!r}\n" + code)
    assert out.splitlines() == ["0", "0", "PID, 1542 MiB", "''", "1551 MiB", "0 MiB"]


def test_the_rows_are_all_there():
    assert (len(ONE), len(TWO), len(NODES), len(VISIBLE["rows"])) == (29, 44, 26, 33)
    assert os.path.getsize(TRUTH / "smi-q.txt") > 10_000
