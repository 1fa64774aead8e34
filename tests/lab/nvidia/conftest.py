"""Fixtures of the tests of the NVIDIA double."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def root_rights():
    """The double makes device nodes and namespaces: root only. In CI that there is none is a failure."""
    if os.geteuid() != 0:
        if os.environ.get("CI"):
            pytest.fail("the tests of the NVIDIA double need root, and in CI that there is none is a failure")
        pytest.skip("needs root: the NVIDIA double makes device nodes")
