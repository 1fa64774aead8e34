"""The real client of the Hugging Face hub, as it is installed here, put into a machine of the lab."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from pathlib import Path

PLACE = "usr/local/lib/python3.11/dist-packages"  # where Debian 12's own Python looks


def install(root: Path, place: str = PLACE) -> Path:
    """Copies huggingface_hub and what it needs below `root`; returns the folder."""
    folder = root / place
    for name in sorted(_needed("huggingface_hub")):
        for file in importlib.metadata.distribution(name).files or []:
            source, target = Path(str(file.locate())), folder / file
            if ".." in file.parts or not source.is_file() or source.suffix == ".pyc":
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    return folder


def _needed(name: str, seen: frozenset[str] = frozenset()) -> frozenset[str]:
    """The distribution and all it needs, as far as it is installed."""
    name = name.lower().replace("_", "-")
    try:
        wants = importlib.metadata.distribution(name).requires or []
    except importlib.metadata.PackageNotFoundError:
        return seen
    seen |= {name}
    for one in wants:
        found = re.match(r"[A-Za-z0-9._-]+", one)
        if found and "extra ==" not in one and found[0].lower().replace("_", "-") not in seen:
            seen |= _needed(found[0], seen)
    return seen
