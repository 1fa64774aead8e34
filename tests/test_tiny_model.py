"""The embedded model is the same file everywhere."""

from __future__ import annotations

import hashlib

from gpuctl.tiny_model import write


def test_its_bytes_are_the_same_on_every_machine(tmp_path):
    write(tmp_path / "a" / "tiny.gguf")
    assert (
        hashlib.sha256((tmp_path / "a" / "tiny.gguf").read_bytes()).hexdigest()
        == "19dd3effa6b4fd2873d5dffd8bc3fa7a0ce0dc3628a88c3aa307b0a252e5671a"
    )
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["tiny.gguf"]
