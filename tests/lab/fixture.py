"""The lab for tests. `tests/conftest.py` brings these fixtures to all of them.

    @pytest.mark.lab
    def test_something(lab):
        lab.check("ct200", ["systemctl", "start", "gpuctl-x"])

`lab` is one for the whole session: leave it as you found it. `lab_to_break` is the same one, to be left in any state:
after the module it is taken down and brought up anew. With GPUCTL_LAB=NAME in the environment both are the lab of
that name, which is brought up if it is not, and left up as it is: for work on one test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.lab.lab import Lab
from tests.lab.layout import NoLab

_reason: list[str] = []  # why this session has no lab


def named() -> str | None:
    return os.environ.get("GPUCTL_LAB")


def up(lab: Lab) -> None:
    """Skips without a lab; in CI that is a failure."""
    try:
        if not (named() and lab.alive()):
            lab.up(stay=bool(named()))
    except NoLab as error:
        _reason[:] = [str(error)]
        if os.environ.get("CI"):
            pytest.fail(f"the lab could not be had, and in CI that is a failure: {error}", pytrace=False)
        pytest.skip(f"no lab: {error}")


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    lab = Lab(named() or f"test-{os.getpid()}")
    up(lab)
    yield lab
    if not named():
        lab.down()


@pytest.fixture(scope="module")
def lab_to_break(lab: Lab) -> Iterator[Lab]:
    yield lab
    if not named():
        lab.down()
        up(lab)


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
