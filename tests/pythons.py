"""Other versions of Python on this machine: what runs on a user's box is for 3.9 and newer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def python(version: str) -> str | None:
    """A Python of that version (as 3.9), None without."""
    for path in (
        shutil.which(f"python{version}"),
        *Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"),
    ):
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return str(path)
    return None
