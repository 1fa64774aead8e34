"""Every known failure, as a short log with the diagnosis it must give. Format of the files: tests/logs/README.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuctl.diagnosis import Diagnosis, diagnose

LOGS = sorted((Path(__file__).parent / "logs").glob("*/*.txt"))


def read(path: Path) -> tuple[dict[str, list[str]], bytes]:
    """The header's keys with their values, and the log."""
    header, log = path.read_bytes().split(b"\n---\n", 1)
    wanted: dict[str, list[str]] = {}
    for line in header.decode().splitlines():
        key, _, value = line.removeprefix("# ").partition(":")
        wanted.setdefault(key, []).append(value.strip())
    return wanted, log


def diagnosed(wanted: dict[str, list[str]], log: bytes) -> Diagnosis:
    return diagnose(
        [log],
        engine=wanted.get("engine-given", [None])[0],
        exit_status=int(wanted["exit"][0]) if "exit" in wanted else None,
        running=True if "running" in wanted else None,
    )


def told(found: Diagnosis) -> str:
    return "\n".join(
        "\n".join((f.id, f.summary, f.advice, f.separates, *f.evidence)) for f in (*found.causes, *found.warnings)
    )


@pytest.mark.parametrize("path", LOGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_log_gives_the_diagnosis_written_in_its_header(path: Path) -> None:
    wanted, log = read(path)
    found = diagnosed(wanted, log)
    causes, warnings = [f.id for f in found.causes], [f.id for f in found.warnings]
    expected = wanted["expect"][0].split()
    assert expected == causes[:1] if len(expected) < 2 else expected == causes, told(found)
    if "warn" in wanted:
        assert sorted(wanted["warn"][0].split()) == sorted(warnings), told(found)
    for id in wanted.get("not", []):
        assert id not in causes
    for text in wanted.get("says", []):
        assert text in told(found)
    if "stage" in wanted:
        assert wanted["stage"][0] == found.stage
    if "verdict" in wanted:
        assert wanted["verdict"][0] == found.verdict
    if "certainty" in wanted:
        assert wanted["certainty"][0] == found.causes[0].certainty
    if "starts" in wanted:
        assert int(wanted["starts"][0]) == found.starts
    if "status" in wanted:
        assert int(wanted["status"][0]) == found.exit_status
    for pair in " ".join(wanted.get("capacity", [])).split():
        name, _, value = pair.partition("=")
        assert str(getattr(found.capacity, name)) == value
    if path.parent.name != "any" and "engine-given" not in wanted:
        assert found.engine in (path.parent.name, None)


# Found by what a log does not say, or written in JSON.
SILENT = ("f55-numactl", "f55-numactl-silent", "killed-in-silence", "journal-json")


@pytest.mark.parametrize("path", [p for p in LOGS if p.stem not in SILENT], ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_the_same_log_without_the_lines_that_say_so_does_not_get_that_diagnosis(path: Path) -> None:
    wanted, log = read(path)
    found = diagnosed(wanted, log)
    if not found.causes:
        return
    named, lines = found.causes[0].id, log.decode().splitlines(keepends=True)
    while found.causes and found.causes[0].id == named:
        said = [re.sub(r"^\[[^\]]*\] ", "", line.strip())[:60] for line in found.causes[0].evidence]
        kept = [line for line in lines if not any(words and words in line for words in said)]
        assert len(kept) < len(lines), said  # else it was said without a line that says so
        lines, found = kept, diagnosed(wanted, "".join(kept).encode())


def test_every_entry_of_the_corpus_has_a_log() -> None:
    have = {entry for path in LOGS for entry in read(path)[0].get("entry", [])}
    assert have == {f"F{number:02}" for number in range(1, 79)}
