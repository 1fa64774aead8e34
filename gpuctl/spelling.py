"""What a mistyped name was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], *, alike: float = 0.6) -> str | None:
    """The known name most like it; None where none is. `alike`: from 0, anything, to 1, the same."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=alike)), None)


def hint(name: str, known: Iterable[str], *, most: int = 12) -> str:
    """The end of a message about an unknown name: the nearest one as a question, or what there is (`most` of it)."""
    known = list(known)
    near = nearest(name, known)
    if near is not None:
        return f"did you mean {near!r}?"
    if not known:
        return "there are none"
    return f"there are: {', '.join(known[:most])}{' ...' if len(known) > most else ''}"
