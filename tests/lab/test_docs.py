"""docs/lab.md is true: the commands of the rehearsal, run one after the other, print what it shows below them."""

import re
import subprocess
import sys

import pytest

from tests.lab.faults.commands import faults
from tests.lab.lab import REPOSITORY

TEXT = (REPOSITORY / "docs" / "lab.md").read_text()
STEP = re.compile(r"^\$ ((?:s|l) .*)\n((?:(?!\$ |```).*\n)*)", re.M)


@pytest.mark.lab
def test_the_rehearsal_goes_as_it_is_written(lab_to_break):
    words = f"""
    l() {{ {sys.executable} -m tests.lab -n {lab_to_break.name} "$@"; }}
    s() {{ ssh -F {lab_to_break.ssh_config} "$@" </dev/null; }}
    """
    steps = STEP.findall(TEXT)
    assert len(steps) > 10
    for command, shown in steps:
        done = subprocess.run(
            ["bash", "-c", words + command], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
        )
        wanted = re.escape(shown).replace(r"\.\.\.", "(?:.|\n)*")
        assert re.fullmatch(wanted, done.stdout), (command, shown, done.stdout, done.stderr)


def test_every_fault_is_in_the_table_and_no_other():
    table = TEXT[TEXT.index("## Ways to break it") : TEXT.index("## In tests")]
    named = set(re.findall(r"`([a-z][a-z0-9-]+)`", table)) - {"down", "up"}
    assert named == set(faults())
