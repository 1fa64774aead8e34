"""How long a report takes: 5,000 cells to HTML in under five seconds, the start of the interpreter included."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

import pytest
import runfolders

CODE = "import sys; from gpuctl.report import load_run, render; render(load_run(sys.argv[1]), sys.argv[2])"


def seconds(folder, format, cache):
    """Processor seconds of a whole run: what the clock shows on a machine with nothing else to do."""
    # Byte code is cached, as wherever gpuctl is installed.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPYCACHEPREFIX": str(cache), "OPENBLAS_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", CODE, folder, format], check=True, env=environment)
    wall = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"\n{folder.name} to {format}: {used:.2f} s of processor time, {wall:.2f} s by the clock")
    return used


@pytest.fixture(scope="module")
def huge(tmp_path_factory):
    """A run folder of 5,000 cells, and a cache of byte code that is warm."""
    folder = tmp_path_factory.mktemp("perf")
    seconds(runfolders.small(folder / "small"), "html", folder / "cache")
    return runfolders.huge(folder / "huge"), folder / "cache"


def test_five_thousand_cells_to_html_in_under_five_seconds(huge):
    took = min(seconds(huge[0], "html", huge[1]) for _ in range(3))
    assert took < 5


def test_five_thousand_cells_to_the_terminal_in_under_two_seconds(huge):
    took = min(seconds(huge[0], "terminal", huge[1]) for _ in range(3))
    assert took < 2
