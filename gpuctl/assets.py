"""Where playbooks/, templates/ and inventory/ are: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent


def asset(*parts: str) -> Path:
    """The path of a file or folder that ships with gpuctl, as `asset("playbooks", "tune.yml")`."""
    checkout = _PACKAGE.parent
    # Site-packages may have a folder of such a name from somebody else; only a checkout has our project file.
    top = checkout if (checkout / "pyproject.toml").is_file() else _PACKAGE / "_assets"
    return top.joinpath(*parts)
