"""The report as PDF: its LaTeX, compiled by the LaTeX that is installed.

Runs latexmk, or pdflatex or lualatex as often as references need. The document cannot run programs (no shell escape)
nor write outside its own temporary folder. The same run gives the same bytes: dates come from the measurements.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from gpuctl.document.outline import Report
from gpuctl.reports import latex

SUFFIX = "pdf"
TIMEOUT_S = 300
_PASSES = 4  # longtable settles its columns in three

_INSTALL = (
    "Debian and Ubuntu: apt install latexmk lmodern texlive-latex-recommended texlive-pictures; "
    "Fedora: dnf install latexmk texlive-collection-latexrecommended texlive-pgfplots texlive-lm; "
    "macOS: brew install --cask mactex-no-gui; or --format latex, and compile it elsewhere"
)
_ELSEWHERE = "--format latex gives the document, to be compiled elsewhere"


class CannotCompile(RuntimeError):
    """There is no LaTeX, it lacks a package, or it does not end; the message is one line and says what to do."""


def check() -> None:
    """Raises CannotCompile when there is no LaTeX here."""
    _commands()


def render(report: Report) -> bytes:
    """Raises CannotCompile."""
    return compile(latex.render(report), _epoch(report))


def compile(source: bytes, epoch: int = 0) -> bytes:
    """A LaTeX document as PDF. `epoch`, in seconds since 1970, is when it says it was made. Raises CannotCompile."""
    commands = _commands()
    with tempfile.TemporaryDirectory(prefix="gpuctl-latex-") as name:
        folder = Path(name)
        (folder / "report.tex").write_bytes(source)
        environment = {
            **os.environ,
            "SOURCE_DATE_EPOCH": str(epoch),
            "FORCE_SOURCE_DATE": "1",
            "openout_any": "p",
            "openin_any": "p",
            "shell_escape": "f",
            "max_print_line": "1000",
        }
        for command in commands:
            _run(command, folder, environment)
        result = folder / "report.pdf"
        if not result.exists():
            raise CannotCompile(f"{commands[0][0]} made no PDF; {_ELSEWHERE}")
        return result.read_bytes()


def _commands() -> list[list[str]]:
    """What to run, in this order, with the LaTeX there is."""
    options = ["-interaction=nonstopmode", "-halt-on-error", "-file-line-error", "-no-shell-escape"]
    engine = next((engine for engine in ("pdflatex", "lualatex", "xelatex") if shutil.which(engine)), None)
    if engine is None:
        raise CannotCompile(f"a PDF needs LaTeX, and there is none here. {_INSTALL}")
    if shutil.which("latexmk"):
        kind = {"pdflatex": "-pdf", "lualatex": "-lualatex", "xelatex": "-xelatex"}[engine]
        # -norc: the person's own latexmkrc may do anything with the document
        return [["latexmk", "-norc", kind, "-e", f"$max_repeat={_PASSES + 1}", *options, "report.tex"]]
    return [[engine, *options, "report.tex"]] * _PASSES


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise CannotCompile(
            f"{command[0]} was still not done after {TIMEOUT_S} s; --format latex gives the document"
        ) from None
    except OSError as error:
        raise CannotCompile(f"{command[0]}: {error.strerror or error}") from error
    if done.returncode:
        log = folder / "report.log"
        text = (
            log.read_text(encoding="utf-8", errors="replace")
            if log.exists()
            else done.stdout.decode("utf-8", "replace")
        )
        raise CannotCompile(explained(text, command[0]))


def explained(log: str, program: str) -> str:
    """The first error of a LaTeX log in one line, with what to do."""
    missing = re.search(r"File `([^']+)' not found", log)
    if missing:
        return f"this LaTeX has no {missing[1]}. {_INSTALL}"
    error = re.search(r"^(?:! |\S+?:\d+: )(.+)$", log, re.MULTILINE)
    return (
        f"{program} fails: {error[1].strip() if error else 'its log has no error'}; --format latex gives the document"
    )


def _epoch(report: Report) -> int:
    """When the last cell was measured."""
    latest = 0
    for record in report.run.records:
        try:
            ended = datetime.fromisoformat(record.ended)
        except ValueError:
            continue
        ended = ended if ended.tzinfo is not None else ended.replace(tzinfo=UTC)
        latest = max(latest, int(ended.timestamp()))
    return latest
