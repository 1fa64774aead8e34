"""The probe on this very machine: what it answers, and that it changes nothing."""

from __future__ import annotations

import ast
import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpuctl
from gpuctl import transport
from gpuctl.box import SCHEMA, Snapshot
from tests.patience import ends_within
from tests.pythons import python

PROBE = Path(gpuctl.__file__).parent / "agent" / "probe.py"

root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def probe(job, *, env=None, user=None, under=(), python=sys.executable):
    argv, stdin = transport.agent("probe", job, python=python)
    done = subprocess.run(
        [*under, *argv], input=stdin, capture_output=True, timeout=60, env={**os.environ, **(env or {})}, user=user
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_probe_is_python_3_9_with_the_standard_library_alone():
    tree = ast.parse(PROBE.read_text(), feature_version=(3, 9))
    child = next(
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "CHILD"
    )
    trees = [tree, ast.parse(child, feature_version=(3, 9))]
    modules = {
        alias.name.split(".")[0]
        for t in trees
        for node in ast.walk(t)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert modules <= sys.stdlib_module_names


@pytest.mark.skipif(python("3.9") is None, reason="no Python 3.9 here")
def test_the_probe_runs_on_python_3_9():
    answer = probe({}, python=python("3.9"))
    assert answer["probe"]["python"].startswith("3.9.")
    assert answer.keys() == probe({}).keys()


def test_an_empty_job_is_answered_in_under_two_seconds():
    with ends_within(2):
        answer = probe({})
    assert answer["schema"] == SCHEMA
    assert "unanswered" not in answer
    snapshot = Snapshot(answer)
    assert "Character devices:" in snapshot.file("/proc/devices")
    assert (
        snapshot.file("/proc/sys/kernel/random/boot_id").strip()
        == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    )


def test_a_machine_without_a_driver_says_so_with_errnos():
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has the driver")
    answer = probe({})
    assert answer["nodes"]["/dev/nvidia-uvm"] == {"error": "ENOENT"}
    assert answer["files"]["/proc/driver/nvidia/version"] == {"error": "ENOENT"}


@root
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs a Python that everybody may run")
def test_without_root_the_answers_are_refusals_and_nothing_breaks():
    everybodys = "/usr/bin/python3"
    answer = probe({}, user="nobody", python=everybodys)
    assert answer["probe"]["euid"] == pwd.getpwnam("nobody").pw_uid
    assert set(answer["cuda"]) == {"user"}
    refused = probe({"service": {"user": "root"}}, user="nobody", python=everybodys)
    assert refused["service"]["error"] == "not root: cannot become root"
    assert "cuda" not in refused


def test_an_unknown_service_user_is_an_answer():
    if os.geteuid() != 0:
        pytest.skip("needs root")
    answer = probe({"service": {"user": "no-such-user"}})
    assert "no user no-such-user" in answer["service"]["error"]


def test_a_service_that_is_not_there_is_not_looked_for_with_other_eyes():
    answer = probe({"service": {"unit": "no-such-unit.service"}})
    assert "no-such-unit.service" in answer["service"]["error"]
    assert "user" not in answer.get("cuda", {})


def test_secrets_of_the_environment_stay_on_the_machine():
    answer = probe(
        {"skip": ["cuda", "nvml"]}, env={"HF_TOKEN": "hf_abcdef", "MY_PASSWORD": "x7", "CUDA_VISIBLE_DEVICES": "1"}
    )
    assert answer["service"]["env"]["CUDA_VISIBLE_DEVICES"] == "1"
    assert "hf_abcdef" not in json.dumps(answer)
    assert "x7" not in json.dumps(answer["service"])


LIBCUDA = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGetCount(int *n) { *n = 0; return 0; }
int cuInit(unsigned f) {
  const char *how = getenv("LD_PROBE_TEST");
  if (how && !strcmp(how, "hang")) pause();
  if (how && !strcmp(how, "crash")) abort();
  /* what the real one does to mend a machine, by itself or through nvidia-modprobe */
  if (mknod("/dev/gpuctl-probe-made", S_IFCHR | 0666, makedev(1, 3)) == 0) return 1001;
  if (how && unlink(how) == 0) return 1002;
  if (how && chmod(how, 0600) == 0 ) return 1003;
  if (system("exec 2>/dev/null; rm -f /dev/gpuctl-probe-node; mknod /dev/gpuctl-probe-made c 1 3") == -1) return 1004;
  return 999;
}
"""


@pytest.fixture
def libcuda(tmp_path):
    source = tmp_path / "libcuda.c"
    source.write_text(LIBCUDA)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    return tmp_path


@pytest.fixture
def node():
    path = Path("/dev/gpuctl-probe-node")
    os.mknod(path, 0o20666, os.makedev(1, 3))
    path.chmod(0o666)
    yield path
    path.unlink(missing_ok=True)
    Path("/dev/gpuctl-probe-made").unlink(missing_ok=True)


@root
@compiler
@pytest.mark.parametrize("under", [(), ("setpriv", "--bounding-set", "-sys_admin")], ids=["mounting", "no mounting"])
def test_libcuda_as_root_cannot_make_remove_or_change_device_nodes(libcuda, node, under):
    before = node.stat()
    env = {"LD_LIBRARY_PATH": str(libcuda), "LD_PROBE_TEST": str(node)}
    answer = probe({}, env=env, under=under)["cuda"]["root"]
    assert answer["cuInit"] == 999, answer
    assert answer["cuDriverGetVersion"] == 13000
    assert str(libcuda / "libcuda.so.1") in answer["mapped"]
    assert not Path("/dev/gpuctl-probe-made").exists()
    after = node.stat()
    assert (after.st_ino, after.st_mode, after.st_rdev) == (before.st_ino, before.st_mode, before.st_rdev)
    assert any("/dev" in held or "landlock" in held for held in answer["guard"])


@root
@compiler
def test_a_cuinit_that_hangs_or_crashes_is_an_answer_and_leaves_nothing_running(libcuda):
    env = {"LD_LIBRARY_PATH": str(libcuda), "LD_PROBE_TEST": "hang"}
    answer = probe({"limits": {"cuda_s": 1}}, env=env)["cuda"]["root"]
    assert answer["hang"]["doing"] == "cuInit"
    assert answer["dlopen"] == "OK"
    crashed = probe({}, env={**env, "LD_PROBE_TEST": "crash"})["cuda"]["root"]
    assert crashed["died"]["rc"] == -6
    assert crashed["died"]["doing"] == "cuInit"


@root
def test_a_node_is_opened_as_root_and_as_the_service_user(tmp_path):
    path = Path("/dev/gpuctl-probe-open")
    os.mknod(path, 0o20600, os.makedev(1, 3))
    try:
        path.chmod(0o600)
        answer = probe({"service": {"user": "nobody"}, "nodes": [str(path)]})
    finally:
        path.unlink()
    assert answer["open"][str(path)] == {"root": "OK", "user": "EACCES"}
    assert answer["nodes"][str(path)]["rdev"] == "1:3"
