"""On a machine that cannot hold a lab: tests say loudly what they did not show, and in CI that is a failure."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.lab import REPOSITORY
from tests.lab.requirements import COMPANIONS, PROGRAMS, missing

needs_root = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root to be elsewhere")


@pytest.fixture
def elsewhere(tmp_path):
    """Runs a command where the machine is not a Debian; in a mount namespace of its own."""
    release = tmp_path / "os-release"
    release.write_text("ID=fedora\n")
    script = 'mount --bind "$1" /etc/os-release && shift && exec "$@"'

    def run(*command, **environment):
        plain = {name: value for name, value in os.environ.items() if name not in ("CI", "GPUCTL_LAB")}
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", script, "sh", str(release), sys.executable, *command],
            cwd=REPOSITORY, env={**plain, **environment}, capture_output=True, text=True,
        )  # fmt: skip

    return run


ONE = "tests/lab/test_lab.py::test_ansible_reads_the_inventory_that_the_lab_wrote"


@needs_root
def test_up_says_why_in_one_line(elsewhere):
    done = elsewhere("-m", "tests.lab", "-n", "nowhere", "up")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lab: the lab needs Debian: ")
    assert len(done.stderr.splitlines()) == 1
    assert not Path("/run/gpuctl-lab/nowhere").exists()


@needs_root
def test_tests_that_need_it_are_skipped_and_that_is_said_loudly(elsewhere):
    done = elsewhere("-m", "pytest", "-q", ONE)
    assert done.returncode == 0
    assert "!! WITHOUT THE LAB !!" in done.stdout
    assert "The tests that need it were skipped: the lab needs Debian" in done.stdout


@needs_root
def test_in_ci_a_lab_that_could_not_be_had_is_a_failure(elsewhere):
    done = elsewhere("-m", "pytest", "-q", ONE, CI="true")
    assert done.returncode == 1
    assert "the lab could not be had, and in CI that is a failure: the lab needs Debian" in done.stdout


def test_packages_of_programs_that_are_not_there_are_installed_and_only_those(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert set(missing()) == {*PROGRAMS.values(), *COMPANIONS["gcc"]}
    for program in PROGRAMS:
        (tmp_path / program).touch(mode=0o755)
    assert missing() == []
