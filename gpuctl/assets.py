"""playbooks/, templates/ and inventory/: in the checkout, or in the wheel (where hatch puts them into _assets)."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def asset(name: str) -> Path:
    """The folder of that name. An editable install has no _assets: then the checkout's is meant."""
    packed = _HERE / "_assets" / name
    return packed if packed.is_dir() else _HERE.parent / name
