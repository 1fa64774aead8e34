"""What happened during a run, from its events: when it ran, what interrupted it, how it went on. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuctl.results.provenance import public


@dataclass(frozen=True)
class Interruption:
    """Something stopped the measuring. `end`: when it was over, empty when it was not, as far as events say.

    `back`: when a machine that went away was there again; what is between that and `end` is healing.
    """

    what: str
    start: str
    end: str = ""
    healed: tuple[str, ...] = ()  # what was done about it, as the events say it
    back: str = ""


_ROUTINE = frozenset({"cell_started", "cell_done"})  # cells have their own tables
_WORDS = {
    "run_started": "run started",
    "run_finished": "run finished",
    "server_started": "server started",
    "server_ready": "server ready",
    "server_stopped": "server stopped",
    "server_died": "server died",
    "machine_away": "machine went away",
    "machine_back": "machine came back",
    "healed": "healed",
    "tended": "looked after",
}
_SUBJECTS = ("server", "box", "finding", "unit", "phase")  # what an event is about: said first, without its name
_OVER = frozenset({"server_started", "server_ready", "run_finished"})


def described(event: Mapping[str, Any]) -> str:
    """An event in words: its name, and its particulars in the order they were written."""
    name = str(event.get("event", "?"))
    if name == "healed" and event.get("saw"):
        after = "gone after it" if event.get("gone") else "still there after it"
        return (
            f"healed: {event.get('box') or '?'}: {_short(event['saw'])} (by {_short(event.get('did', '?'))}; {after})"
        )
    words = _WORDS.get(name, name.replace("_", " "))
    about = next((str(event[key]) for key in _SUBJECTS if event.get(key)), "")
    details = [
        f"{key.replace('_', ' ')} {_command(value) if key == 'command' else _short(value)}"
        for key, value in event.items()
        if key not in ("t", "event", "schema", "boot", *_SUBJECTS) and value not in (None, "", [], {})
    ]
    said = ", ".join(details)
    if about and said:
        said = f"{about} ({said})"
    return f"{words}: {said or about}" if said or about else words


def shown(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The events without the routine of single cells."""
    return [event for event in events if event.get("event") not in _ROUTINE]


def interruptions(events: Sequence[Mapping[str, Any]]) -> list[Interruption]:
    """What stopped the run, and when it was over.

    A machine that went away is back with `machine_back`; what was healed after that belongs to it. That a server
    died is over when the next one starts. A run that was started again without having
    finished was interrupted at its last event.
    """
    found: list[Interruption] = []
    for i, event in enumerate(events):
        name, t = event.get("event"), str(event.get("t", ""))
        if name == "machine_away":
            later = events[i + 1 :]
            back = next((n for n, e in enumerate(later) if e.get("event") == "machine_back"), None)
            healed: list[str] = []
            end = there = ""
            if back is not None:
                end = there = str(later[back].get("t", ""))
                for e in later[back + 1 :]:
                    if e.get("event") == "healed":
                        healed.append(described(e))
                        end = str(e.get("t", ""))
                    elif e.get("event") not in ("machine_back",):
                        break
            found.append(Interruption(described(event), t, end, tuple(healed), there))
        elif name == "server_died":
            over = next((e for e in events[i + 1 :] if e.get("event") in _OVER), None)
            found.append(Interruption(described(event), t, "" if over is None else str(over.get("t", ""))))
        elif name == "run_started" and i and _open(events[:i]):
            last = str(events[i - 1].get("t", ""))
            found.append(Interruption("gpuctl was interrupted", last, t))
    return sorted(found, key=lambda stop: stop.start)


def _open(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a run had been started and not finished by the end of these events."""
    last = [e.get("event") for e in events if e.get("event") in ("run_started", "run_finished")]
    return bool(last) and last[-1] == "run_started"


def _command(words: Any) -> str:
    """A command as it may be shown, and copied; what is none as everything else."""
    return shlex.join(public([str(word) for word in words])) if isinstance(words, list) else _short(words)


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_short(v)}" for key, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_short(v) for v in value)
    text = ("yes" if value else "no") if isinstance(value, bool) else str(value)
    return text if len(text) <= 200 else text[:199] + "…"
