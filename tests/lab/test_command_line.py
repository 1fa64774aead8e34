"""The lab's command line: says what there is, and one clear line when it cannot."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from tests.lab.__main__ import main
from tests.lab.faults.commands import faults
from tests.lab.lab import REPOSITORY


def lab(*words, **environment):
    return subprocess.run(
        [sys.executable, "-m", "tests.lab", *words], cwd=REPOSITORY, capture_output=True, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_help_lists_every_fault_and_each_has_help_of_its_own():
    listed = CliRunner().invoke(main, ["fault", "--help"]).output
    for name in faults():
        assert f"\n  {name} " in listed
        said = CliRunner().invoke(main, ["fault", name, "--help"])
        assert said.exit_code == 0
        assert len(said.output.splitlines()) > 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "not-there", "status"], "lab: the lab 'not-there' is not up: `make lab`\n"),
        (["-n", "not-there", "ssh-config"], "lab: the lab 'not-there' is not up: `make lab`\n"),
        (["-n", "../etc", "up"], "lab: '../etc' is no name for a lab: lower-case letters, digits and dashes, at most"),
        (["-n", "not-there", "fault", "cut", "ct200"], "lab: the lab 'not-there' is not up: `python -m tests.lab up`"),
        (["fault", "cut", "ct999"], "lab: the lab has no machine 'ct999': it has kpro6, kpro7, ct200, ct201, ct202"),
        (["frobnicate"], "Usage: python -m tests.lab"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(words, said):
    done = lab(*words)
    assert done.returncode == 2
    assert done.stderr.startswith(said)
    assert "Traceback" not in done.stderr
