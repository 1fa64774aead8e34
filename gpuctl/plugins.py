"""A plug-in is one file (or package) whose name is its id, found by looking into the folder: no list to edit."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from types import ModuleType


@functools.cache
def names(package: str) -> tuple[str, ...]:
    """Ids of the plug-ins in gpuctl.<package>, without importing them."""
    folder = importlib.import_module(f"gpuctl.{package}")
    return tuple(
        sorted(found.name for found in pkgutil.iter_modules(folder.__path__) if not found.name.startswith("_"))
    )


def get(package: str, name: str) -> ModuleType:
    """The plug-in. Raises LookupError when there is none of that name."""
    if name not in names(package):
        raise LookupError(f"no {package.rstrip('s')} {name!r}; there are: {', '.join(names(package))}")
    return importlib.import_module(f"gpuctl.{package}.{name}")
