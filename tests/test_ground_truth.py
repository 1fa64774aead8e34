"""Every row measured on a real driver: the right cause from its raw answers, and nothing said of a healthy one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gpuctl.box import Box, Snapshot, Wanted
from gpuctl.doctor import diagnose
from gpuctl.finding import Severity

HERE = Path(__file__).parent / "ground_truth"
STALE = 508  # registered by nothing when the rows were measured


def rows():
    for machine in ("h200", "h200-x2"):
        first, *lines = [json.loads(line) for line in (HERE / f"{machine}.jsonl").read_text().splitlines()]
        for row in lines:
            if "case" in row:
                yield pytest.param(machine, first, row, id=f"{machine}: {row['case']}")


def facts(machine):
    """Outputs of the healthy machine by command."""
    text = (HERE / f"{machine}.facts.txt").read_text()
    parts = re.split(r"(?m)^=== (.*)$", text)
    return {command.strip(): output.lstrip("\n") for command, output in zip(parts[1::2], parts[2::2], strict=True)}


def snapshot(machine, healthy, row):
    """What the probe would have brought back from the machine in this state."""
    case = row["case"]
    commands = facts(machine)
    root = not re.search(r"non-root|user 65534", case)
    nodes = {
        path: {"mode": 0o20666, "uid": 0, "gid": 0, "rdev": f"{a}:{b}"} for path, (a, b) in healthy["nodes"].items()
    }
    for path in nodes:
        if "caps" in path:
            nodes[path]["mode"] = 0o20400 if path.endswith("1") else 0o20444
    missing = {"error": "ENOENT"}
    if case.startswith("node hidden by a regular file"):
        nodes[case.split(": ")[1]] = {"mode": 0o100644, "uid": 0, "gid": 0, "size": 0}
    elif "all nodes missing" in case:
        nodes = dict.fromkeys(nodes, missing)
    elif re.search(r"(uvm node|nvidia-uvm|nvidiactl|nvidia0) missing", case):
        name = {"uvm node": "nvidia-uvm"}.get(
            found := re.search(r"(uvm node|nvidia-uvm|nvidiactl|nvidia0) missing", case)[1], found
        )
        nodes[f"/dev/{name}"] = missing
    elif "stale major" in case:
        nodes["/dev/nvidia-uvm"]["rdev"] = f"{STALE}:0"
    elif case.startswith("nodes 0600"):
        for path in row["opens"]:
            nodes[path]["mode"] = 0o20600
    who = "root" if root else "user"
    answers = {key: value for key, value in row.items() if key in ("cuInit",)}
    for key in ("cuDriverGetVersion", "cuDeviceGetCount"):
        if key in row:
            rc, value = row[key]
            answers[key] = value if rc == 0 else {"rc": rc}
    answers["dlopen"] = "OK"
    answers["mapped"] = ["/usr/local/nvidia/lib64/libcuda.so.580.159.04"]
    if "dlopen" in row:
        answers["dlopen"] = row["dlopen"][0]
        answers["mapped"] = []
    if "stub first" in case:
        answers["mapped"] = ["/usr/local/cuda-13/targets/x86_64-linux/lib/stubs/libcuda.so"]
    if "cuda-compat first" in case:
        answers["mapped"] = ["/usr/local/cuda-13.0/compat/libcuda.so.580.95.05"]
    document = {
        "schema": "gpuctl.snapshot/1",
        "machine": machine,
        "role": "machine",
        "probe": {"euid": 0, "version": 1},
        "files": {
            "/proc/devices": "Character devices:\n" + "\n".join(healthy["proc_devices"]) + "\n\nBlock devices:\n",
            "/proc/driver/nvidia/version": commands["cat /proc/driver/nvidia/version"],
            "/proc/driver/nvidia/params": commands["cat /proc/driver/nvidia/params"],
            "/proc/driver/nvidia/gpus/*/information": commands[
                "sh -c cat /proc/driver/nvidia/gpus/*/information"
            ].replace("GPU-00000000-", "GPU-dc5b3ea6-"),  # the UUIDs of the record are masked
            "/proc/self/uid_map": "0 0 4294967295\n",
            "/run/systemd/container": {"error": "ENOENT"},
        },
        "nodes": nodes,
        "open": {path: {who: word.replace("ok", "OK")} for path, word in row["opens"].items()},
        "cuda": {who: answers},
        "nvml": {who: {"nvmlInit": row["nvml"], "dlopen": "OK"}},
        "service": {"env": {}} | ({} if root else {"user": "nobody", "uid": 65534, "groups": [65534]}),
        "kernel_log": {"lines": [], "of": 0},
    }
    if "/proc/devices hidden" in case:
        document["files"]["/proc/devices"] = ""
    if "/proc/driver/nvidia hidden" in case:
        for path in list(document["files"]):
            if path.startswith("/proc/driver/nvidia"):
                document["files"][path] = missing
    if "user namespace" in case:
        document["files"]["/proc/self/uid_map"] = "0 0 1\n"
    if found := re.search(r"CUDA_VISIBLE_DEVICES(?:=(\S+)| empty)", case):
        document["service"]["env"]["CUDA_VISIBLE_DEVICES"] = found[1] or ""
    if "LD_LIBRARY_PATH" in case and answers["mapped"]:
        document["service"]["env"]["LD_LIBRARY_PATH"] = answers["mapped"][0].rpartition("/")[0]
    if found := re.search(r"RLIMIT_(\w+) (\d+(?: [GK]iB)?)", case):
        document["limits"] = {found[1].lower(): found[2]}
    return Snapshot(document)


# Row -> what must be said. Only causes: the ids of findings that are not mere remarks, the leading one first.
EXPECTED = {
    r"denies /dev/nvidia-uvm \(": ["device_refused"],
    r"denies /dev/nvidiactl": ["device_refused"],
    r"denies all of major 195": ["device_refused"],
    r"h200: .*denies /dev/nvidia0": ["device_refused"],
    r"h200-x2: .*denies (/dev/)?nvidia[01] ": ["device_refused", "gpu_count_short"],
    r"regular file: /dev/nvidia-uvm$": ["node_is_file"],
    r"regular file: /dev/nvidiactl$": ["node_is_file"],
    r"h200: .*regular file: /dev/nvidia0$": ["node_is_file"],
    r"h200-x2: .*regular file: /dev/nvidia[01]$": ["node_is_file", "gpu_count_short"],
    r"nvidia0 missing": ["host_nodes_missing", "gpu_count_short"],
    r"missing": ["host_nodes_missing"],
    r"stale major": ["node_wrong_number"],
    r"CUDA_VISIBLE_DEVICES( empty|=9|=-1|=GPU-0)": ["cuda_visible_devices"],
    r"stub first": ["libcuda_stub"],
    r"cuda-compat first": ["libcuda_compat"],
    r"empty libcuda": ["libcuda_missing"],
    r"RLIMIT_AS": ["limit_address_space"],
    r"RLIMIT_NOFILE": ["limit_open_files"],
    r"nodes 0600 root, non-root": ["node_mode"],
}


@pytest.mark.parametrize(("machine", "healthy", "row"), list(rows()))
def test_a_measured_row_gives_its_cause(machine, healthy, row):
    name = f"{machine}: {row['case']}"
    wanted = [ids for pattern, ids in EXPECTED.items() if re.search(pattern, name)]
    wanted = wanted[0] if wanted else []
    diagnosis = diagnose(Box(snapshot(machine, healthy, row), None, Wanted()))
    said = [f.id for f in diagnosis.all if f.severity is not Severity.INFO]
    assert sorted(said) == sorted(wanted), [f"{f.id} {f.severity}: {f.summary}" for f in diagnosis.all]
    if wanted:
        assert said[0] == wanted[0]
    failed = row.get("cuInit") != 0
    assert any(f.severity is Severity.CRITICAL for f in diagnosis.all) == (failed or "gpu_count_short" in wanted)
    if not wanted:
        assert diagnosis.verdict == "well"


def test_the_tables_are_whole():
    assert len(list(rows())) == 29 + 44
