"""Reads run folders and writes what was measured: `load_run`, `render`, `formats`.

Reading is tolerant: a file that is half-written, foreign or damaged is named in `Run.left_out` and does not stop
anything. What cannot be read at all raises `NotARun`, with one line for the person.
"""

from __future__ import annotations

import gc
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from gpuctl import plugins
from gpuctl.document.outline import report
from gpuctl.records import MEASURED, NotARecord, Record, State, from_json
from gpuctl.results import imported
from gpuctl.results.comparison import NOISE_PERCENT, Comparison, compare, compare_phases, compare_servers
from gpuctl.results.imported import Imported
from gpuctl.results.run import LeftOut, Run, derived, with_foreign
from gpuctl.store import read

LARGEST_CELL_BYTES = 64 << 20  # a record is kilobytes; what is larger is something else


class NotARun(ValueError):
    """There is no campaign where one was expected; the message is one line, for the person."""


class NotAResult(ValueError):
    """A file to be imported is none that a known tool writes; the message is one line."""


class NoSuchFormat(ValueError):
    """A format that no face has; the message lists those there are."""


def formats() -> list[str]:
    """The formats a report can have: a module of gpuctl.reports each."""
    return list(plugins.names("reports"))


def render(run: Run, format: str, comparisons: Sequence[Comparison] = ()) -> bytes:
    """The report of a run as a file of that format. Raises NoSuchFormat."""
    rendered: bytes = _face(format).render(report(run, comparisons))
    return rendered


def _face(format: str) -> ModuleType:
    if format not in formats():
        raise NoSuchFormat(f"no report format {format!r}; there are {', '.join(formats())}")
    return plugins.get("reports", format)


def files(run: Run, format: str, name: str, comparisons: Sequence[Comparison] = ()) -> dict[str, bytes]:
    """The report as files to be written: `name` itself, and what it refers to, by path beside it. As `render`."""
    face = _face(format)
    made = report(run, comparisons)
    several: dict[str, bytes] = face.files(made, name) if hasattr(face, "files") else {name: face.render(made)}
    return several


def format_of(name: str) -> str | None:
    """The format that a file name stands for by its suffix; None when it stands for none."""
    suffix = name.rpartition(".")[2].lower()
    return next((format for format in formats() if suffix == plugins.get("reports", format).SUFFIX), None)


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection while a run is read and written, nor of that run afterwards: for a program about to end.

    Nothing in thousands of records is garbage, and to look for it among them costs a third of the time.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # what there is now is never looked at again, not by the end of the program either
        if was:
            gc.enable()


def compare_with(
    run: Run, other: str, *, runs: str | Path = "runs", noise_percent: float = NOISE_PERCENT
) -> list[Comparison]:
    """The run against another run (a folder, or a name under `runs`), another phase, or a server. Raises NotARun.

    A phase is compared with every other phase that we measured (same method, same point); a server, named alone or as
    PHASE/SERVER, with the others of its phase.
    """
    if other in run.phases:
        others = [phase for phase in run.phases if phase != other and phase not in run.foreign]
        if not others:
            raise NotARun(f"nothing to compare with {other!r}: {run.name} has no other phase that gpuctl measured")
        return [compare_phases(run, phase, other, noise_percent=noise_percent) for phase in others]
    phase, _, name = other.rpartition("/")
    among = [
        server
        for servers in run.servers.values()
        for server in servers
        if server.name == other or (server.phase, server.name) == (phase, name)
    ]
    if among:
        return [compare_servers(run, s.phase, s.name, noise_percent=noise_percent) for s in among]
    folder = next((path for path in (Path(other), Path(runs) / other) if path.exists()), None)
    if folder is None:
        servers = [server.name for phase in run.phases for server in run.servers[phase]]
        raise NotARun(
            f"nothing to compare with: {other!r} is no run folder, and {run.name} has no phase or server of that name "
            f"(it has {', '.join([*run.phases, *servers][:12]) or 'none'})"
        )
    return [compare(run, load_run(folder), noise_percent=noise_percent)]


def with_imported(run: Run | None, files: Sequence[str | Path]) -> Run:
    """The run with the result files of other tools; without a run, those alone. Raises NotAResult.

    Result files of one tool belong together: the same load measured twice is a cell with two repetitions.
    """
    found: dict[str, list[Imported]] = {}
    for file in files:
        for tool, runs in _imported(Path(file)):
            found.setdefault(tool, []).extend(runs)
    records = [record for tool, runs in found.items() for record in imported.records(tool, runs)]
    return with_foreign(run if run is not None else Run(", ".join(found) or "nothing"), records)


def _imported(file: Path) -> Iterator[tuple[str, list[Imported]]]:
    """Each JSON document of a file (there may be several, one after the other) by the tool that wrote it."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise NotAResult(f"{file} is not UTF-8") from error
    except OSError as error:
        raise NotAResult(f"{file} cannot be read: {error.strerror or error}") from error
    readers = [plugins.get("foreign", name) for name in plugins.names("foreign")]
    decoder = json.JSONDecoder()
    position = len(text) - len(text.lstrip())
    while position < len(text):
        line = text.count("\n", 0, position) + 1
        try:
            document, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise NotAResult(f"{file}, line {line}: {_why(error)}") from error
        reader = next((reader for reader in readers if reader.recognise(document)), None)
        if reader is None:
            tools = ", ".join(reader.TOOL for reader in readers)
            raise NotAResult(f"{file}, line {line}: no result of {tools}")
        yield reader.TOOL, reader.runs(document)
        position = len(text) - len(text[position:].lstrip())
    if not text.strip():
        raise NotAResult(f"{file} is empty")


# --- reading -------------------------------------------------------------------------------------


def load_run(folder: str | Path, *, baseline: str | None = None) -> Run:
    """A run folder as a Run. Raises NotARun."""
    folder = Path(folder)
    try:
        if not folder.is_dir():
            why = "is a file, not a run folder" if folder.exists() else "does not exist"
            raise NotARun(f"{folder} {why}")
        if not any((folder / name).exists() for name in ("cells", "campaign.json", "events.jsonl")):
            raise NotARun(f"{folder} is no run folder: it has neither cells/, campaign.json nor events.jsonl")
        left_out: list[LeftOut] = []
        campaign = _campaign(folder, left_out)
        events = _events(folder, left_out)
        records = _cells(folder, left_out)
    except OSError as error:
        raise NotARun(f"{folder} cannot be read: {error.strerror or error}") from error
    name = campaign.get("name")
    return Run(
        name=name if isinstance(name, str) and name else folder.resolve().name,
        records=tuple(derived(record) for record in records),
        campaign=campaign,
        events=tuple(events),
        left_out=tuple(left_out),
        baseline=baseline,
    )


def _campaign(folder: Path, left_out: list[LeftOut]) -> Mapping[str, Any]:
    file = folder / "campaign.json"
    if not file.exists():
        return {}
    try:
        campaign = json.loads(read(file))
    except (OSError, ValueError, RecursionError) as error:
        left_out.append(LeftOut("campaign.json", _why(error)))
        return {}
    if not isinstance(campaign, dict):
        left_out.append(LeftOut("campaign.json", "is not a JSON object"))
        return {}
    return campaign


def _events(folder: Path, left_out: list[LeftOut]) -> list[Mapping[str, Any]]:
    file = folder / "events.jsonl"
    if not file.exists():
        return []
    try:
        lines = read(file).split(b"\n")
    except OSError as error:
        left_out.append(LeftOut("events.jsonl", _why(error)))
        return []
    events: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
            if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                raise ValueError("is no event")
        except (ValueError, RecursionError) as error:
            why = "ends in the middle of a line" if number == len(lines) else _why(error)
            left_out.append(LeftOut(f"events.jsonl, line {number}", why))
            continue
        events.append(event)
    return events


def _cells(folder: Path, left_out: list[LeftOut]) -> list[Record]:
    """The records under cells/, in the order they were measured."""
    found: dict[Any, tuple[Record, str]] = {}
    cells = folder / "cells"
    if not cells.is_dir():
        return []
    for entry in sorted(_files(folder, cells, left_out), key=lambda entry: entry.path.split("/")):
        name = f"cells{entry.path[len(str(cells)) :]}"
        if not entry.name.endswith(".json"):
            file = Path(entry.path)
            if _beside_a_cell(file):
                continue  # the raw stamps of a cell
            half = file.name.startswith(".") or file.suffix in (".tmp", ".part", ".partial")
            left_out.append(LeftOut(name, "is half-written" if half else "is no cell"))
            continue
        try:
            record = _record(entry)
        except (OSError, ValueError, RecursionError) as error:
            left_out.append(LeftOut(name, _why(error)))
            continue
        other = found.get(record.cell)
        if other is not None:
            # Two files say they are this cell: the later one counts, as everywhere.
            earlier = other[1] if other[0].ended <= record.ended else name
            left_out.append(LeftOut(earlier, f"is an older record of {record.cell}"))
            if earlier == name:
                continue
        found[record.cell] = (record, name)
    return sorted((record for record, _ in found.values()), key=lambda record: (record.started, record.cell))


def _beside_a_cell(file: Path) -> bool:
    stem = file.name
    while "." in stem.lstrip("."):
        stem = stem.rpartition(".")[0]
        if file.with_name(f"{stem}.json").exists():
            return not file.name.endswith((".tmp", ".part", ".partial"))
    return False


def _files(run: Path, folder: Path, left_out: list[LeftOut]) -> Iterator[os.DirEntry[str]]:
    """Everything below a folder that is no folder. One that cannot be looked into is left out."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _files(run, Path(entry.path), left_out)
                else:
                    yield entry
    except OSError as error:
        left_out.append(LeftOut(folder.relative_to(run).as_posix(), _why(error)))


def _record(file: os.DirEntry[str]) -> Record:
    if not file.is_file():
        raise ValueError("is no regular file")
    with open(file.path, "rb", buffering=0) as opened:  # noqa: PTH123 - thousands of files, and a Path for none
        if os.fstat(opened.fileno()).st_size > LARGEST_CELL_BYTES:
            raise ValueError(f"is larger than {LARGEST_CELL_BYTES >> 20} MiB")
        data = opened.readall()
    if not data.strip():
        raise ValueError("is empty")
    record = from_json(json.loads(data))
    _sound(record)
    return record


def _sound(record: Record) -> None:
    """Refuses what a record must never be: a failure with numbers, a measurement without, numbers that are none."""
    if not all(isinstance(part, str) and part for part in record.cell):
        raise NotARecord("its cell has no proper name")
    for field, wanted in (("started", str), ("ended", str), ("fingerprint_id", str)):
        if not isinstance(getattr(record, field), wanted):
            raise NotARecord(f"{field} is no text")
    for field in ("fingerprint", "parameters", "boot", "server", "generator"):
        if not isinstance(getattr(record, field), dict):
            raise NotARecord(f"{field} is no object")
    if not all(isinstance(note, str) for note in record.notes):
        raise NotARecord("a note is no text")
    if not all(isinstance(rep, dict) for rep in record.reps):
        raise NotARecord("a repetition is no object")
    failure = record.failure
    if failure is not None:
        texts = (failure.kind, failure.summary, failure.advice, *failure.evidence)
        if not all(isinstance(text, str) for text in texts):
            raise NotARecord("its failure is not told in texts")
    if record.state in MEASURED and not record.metrics:
        raise NotARecord(f"says {record.state} and has no numbers")
    if record.state not in MEASURED and record.metrics:
        raise NotARecord(f"says {record.state} and has numbers")
    if record.state is State.FAILED and record.failure is None:
        raise NotARecord("says failed and gives no cause")
    for name, e in record.metrics.items():
        if not (_is_number(e.mean) and isinstance(e.n, int) and e.n >= 1 and isinstance(e.unit, str)):
            raise NotARecord(f"{name} is not a number")
        for spread in (e.sd, e.ci95):
            if spread is not None and not _is_number(spread):
                raise NotARecord(f"{name} is not a number")
            if spread is not None and spread < 0:
                raise NotARecord(f"{name} has a negative spread")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _why(error: BaseException) -> str:
    if isinstance(error, NotARecord):
        return str(error)
    if isinstance(error, json.JSONDecodeError):
        return f"is not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return "is not UTF-8"
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    return str(error)
