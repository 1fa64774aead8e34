"""What the numbers hold for: the parts of the fingerprints that all cells share, and those that differ. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from gpuctl.records import Record

# Parts that describe what is measured and how. They are given elsewhere in a report, cell by cell.
MEASUREMENT = ("workload", "load_agent", "load", "generator")
_OWN = (*MEASUREMENT, "argv", "environment", "env", "unit")

# `token` at the end of a word: tokens are counted and a tokenizer is a file (--speculative-num-draft-tokens 16).
_SECRET_NAME = re.compile(r"(token(?![a-z])|secret|passw|api[-_]?key|credential|private[-_]?key)", re.IGNORECASE)
HIDDEN = "(hidden)"


def flat(value: Any, name: str = "", *, secrets: bool = False) -> dict[str, str]:
    """A nested mapping as `part.part` -> text. A list is one value, its items separated by commas.

    What is named as a secret is hidden, unless `secrets` (to be compared, never to be shown).
    """
    if isinstance(value, Mapping):
        found: dict[str, str] = {}
        for key, part in value.items():
            found.update(flat(part, f"{name}.{key}" if name else str(key), secrets=secrets))
        return found
    if isinstance(value, list | tuple):
        if any(isinstance(item, Mapping) for item in value):
            found = {}
            for i, item in enumerate(value):
                found.update(flat(item, f"{name}[{i}]", secrets=secrets))
            return found
        value = ", ".join(str(item) for item in value)
    elif isinstance(value, bool):
        value = "yes" if value else "no"
    elif value is None:
        value = "none" if name == "draft" else "not known"
    return {name: str(value) if secrets or not _SECRET_NAME.search(name) else HIDDEN}


def public(argv: Sequence[str]) -> list[str]:
    """An argument vector as it may be published: what follows a flag named as a secret is hidden."""
    shown: list[str] = []
    hide = False
    for word in argv:
        head, equals, _ = word.partition("=")
        secret = bool(_SECRET_NAME.search(head))
        if hide and not word.startswith("--"):
            shown.append(HIDDEN)
        elif secret and equals:
            shown.append(f"{head}={HIDDEN}")
        else:
            shown.append(word)
        hide = secret and not equals and word.startswith("-")
    return shown


def sealed(value: Mapping[str, str]) -> dict[str, str]:
    """An environment as it may be kept: of what is named as a secret its digest, so that a change is still seen."""
    return {name: _digest(text) if _SECRET_NAME.search(name) else text for name, text in value.items()}


def sealed_argv(argv: Sequence[str]) -> list[str]:
    """An argument vector as it may be kept, as `sealed`."""
    return [
        word
        if shown == word
        else f"{shown.removesuffix(HIDDEN)}{_digest(word.removeprefix(shown.removesuffix(HIDDEN)))}"
        for word, shown in zip(argv, public(argv), strict=True)
    ]


def _digest(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def published(value: Any, name: str = "") -> Any:
    """A fingerprint as it may be published: values named as secrets hidden, argument vectors as `public` has them."""
    if name and _SECRET_NAME.search(name) and not isinstance(value, Mapping):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: published(part, str(key)) for key, part in value.items()}
    if _is_argv(value):
        return public(value)
    if isinstance(value, list | tuple):
        return [published(item) for item in value]
    return value


def shared(records: Iterable[Record]) -> dict[str, str]:
    """The parts of the fingerprint that are the same for all the records, by dotted name."""
    by_id: dict[str, Mapping[str, Any]] = {}
    for record in records:
        if record.fingerprint:
            by_id.setdefault(record.fingerprint_id, record.fingerprint)
    if not by_id:
        return {}
    first, *others = by_id.values()
    common: dict[str, str] = {}
    for key, value in first.items():
        if key in _OWN:
            continue
        parts = flat(value, key)
        for other in others:
            if key not in other:
                parts = {}
            elif other[key] != value:
                told = flat(other[key], key)
                parts = {name: text for name, text in parts.items() if told.get(name) == text}
        common.update(parts)
    return common


def environment(record: Record) -> dict[str, str]:
    """The environment the server ran with, secrets hidden."""
    for key in ("environment", "env"):
        value = record.fingerprint.get(key)
        if isinstance(value, Mapping):
            return flat(value)
    return {}


def words(before: Mapping[str, Any], after: Mapping[str, Any], ignore: Iterable[str] = ()) -> list[str]:
    """What differs between two fingerprints, in words: `driver 580.1 -> 595.7`, `argv: --tp 1 -> --tp 4`."""
    skip = frozenset(ignore)
    said: list[str] = []
    for key in dict.fromkeys([*before, *after]):
        if key in skip or before.get(key) == after.get(key):
            continue
        old, new = before.get(key), after.get(key)
        if _is_argv(old) and _is_argv(new):
            said.extend(_argv_words(key, old, new))
            continue
        a = flat(old, key, secrets=True) if key in before else {}
        b = flat(new, key, secrets=True) if key in after else {}
        said += [_change(name, a.get(name), b.get(name)) for name in {**a, **b} if a.get(name) != b.get(name)]
    return said


def _change(name: str, old: str | None, new: str | None) -> str:
    if _SECRET_NAME.search(name):
        return f"{name} differs {HIDDEN}"
    if old is None:
        return f"{name} {_short(str(new))} (was not there)"
    if new is None:
        return f"{name} {_short(old)} (no longer there)"
    if len(old) > 60 or len(new) > 60:  # a digest is known by its head, a long text by where it differs
        start = next((i for i, (x, y) in enumerate(zip(old, new, strict=False)) if x != y), min(len(old), len(new)))
        start = max(0, start - 12)
        return f"{name} {_cut(old, start)} -> {_cut(new, start)}"
    return f"{name} {old} -> {new}"


def _cut(text: str, start: int) -> str:
    piece = text[start : start + 40]
    return ("…" if start else "") + piece + ("…" if start + 40 < len(text) else "")


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"


def _is_argv(value: Any) -> TypeGuard[Sequence[str]]:
    return isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)


def _flags(argv: Sequence[str]) -> dict[str, str]:
    """An argument vector as flag -> value; words that belong to no flag are named by their place."""
    found: dict[str, str] = {}
    i = 0
    place = 0
    while i < len(argv):
        word = argv[i]
        i += 1
        if not word.startswith("-") or word == "-":
            found[f"word {place}"] = word
            place += 1
            continue
        head, equals, tail = word.partition("=")
        values = [tail] if equals else []
        while not equals and i < len(argv) and not argv[i].startswith("--"):
            values.append(argv[i])
            i += 1
        key = head
        while key in found:
            key += " (again)"
        found[key] = " ".join(values)
    return found


def _argv_words(key: str, old: Sequence[str], new: Sequence[str]) -> list[str]:
    a, b = _flags(old), _flags(new)
    said = []
    for flag in dict.fromkeys([*a, *b]):
        if a.get(flag) == b.get(flag):
            continue
        if _SECRET_NAME.search(flag):
            said.append(f"{key}: {flag} differs {HIDDEN}")
        elif flag not in b:
            said.append(f"{key}: without {_with(flag, a[flag])}")
        elif flag not in a:
            said.append(f"{key}: with {_with(flag, b[flag])}")
        elif flag.startswith("word "):
            said.append(f"{key}: {_short(a[flag])} -> {_short(b[flag])}")
        else:
            said.append(f"{key}: {flag} {_short(a[flag])} -> {_short(b[flag])}")
    if not said:
        said.append(f"{key}: the same flags in another order")
    return said


def _with(flag: str, value: str) -> str:
    return f"{flag} {_short(value)}".strip() if not flag.startswith("word ") else _short(value)
