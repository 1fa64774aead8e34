"""Options and fixtures every test may use."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.lab.fixture import (  # noqa: F401 - pytest finds them here
    lab,
    lab_to_break,
    pytest_collection_modifyitems,
    pytest_terminal_summary,
)

# A busy machine is no failure of a property; and what CI tries it tries again, so that a red run can be repeated.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

# A shell gives its background jobs SIGINT ignored, and children inherit it: here Ctrl-C is tried.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what came out now")


@pytest.fixture
def golden(request):
    """`golden(name, text)`: the text equals tests/golden/<name>; with --update-golden it is written there."""

    def compare(name: str, text: str) -> None:
        file = GOLDEN / name
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert file.exists(), f"{file} is missing: run `make golden` and read what it wrote"
        assert text == file.read_text(encoding="utf-8")

    return compare
