"""The lab for tests. `tests/conftest.py` brings these fixtures to all of them.

    @pytest.mark.lab
    def test_something(lab):
        lab.check("ct200", ["systemctl", "start", "gpuctl-x"])

`lab` is one for the whole session: leave it as you found it. `lab_to_break` is new for each module. With
GPUCTL_LAB=NAME in the environment both are the lab of that name, which is brought up if it is not, and left up: for
work on one test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.lab.lab import Lab
from tests.lab.layout import NoLab

_reason: list[str] = []  # why this session has no lab


def obtain(suffix: str = "") -> Iterator[Lab]:
    """A lab that is up, and goes when the caller is done. Skips without one; in CI that is a failure."""
    named = os.environ.get("GPUCTL_LAB")
    lab = Lab(named or f"test-{os.getpid()}{suffix}")
    try:
        if not (named and lab.alive()):
            lab.up(stay=bool(named))
    except NoLab as error:
        _reason[:] = [str(error)]
        if os.environ.get("CI"):
            pytest.fail(f"the lab could not be had, and in CI that is a failure: {error}", pytrace=False)
        pytest.skip(f"no lab: {error}")
    yield lab
    if not named:
        lab.down()


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    yield from obtain()


@pytest.fixture(scope="module")
def lab_to_break() -> Iterator[Lab]:
    yield from obtain("-broken")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first lab test of a fresh machine waits until the lab's file systems are built."""
    for item in items:
        if item.get_closest_marker("lab") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says loudly what was not tested."""
    if _reason:
        terminalreporter.section("WITHOUT THE LAB", sep="!", red=True, bold=True)
        terminalreporter.line(f"The tests that need it were skipped: {_reason[0]}")
        terminalreporter.line(
            "Nothing of what they show has been shown: reboots, real device rules, restore. docs/lab.md"
        )
