"""`gpuctl diagnose LOG`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

import click

from gpuctl.cli import FINDINGS, UNKNOWN, WELL
from gpuctl.cli._console import document, out, say
from gpuctl.cli._options import json_option, options

if TYPE_CHECKING:
    from gpuctl.diagnosis import Diagnosis


@click.command("diagnose", short_help="what a server's log says went wrong")
@click.argument("log", type=click.File("rb"))
@click.option("--engine", metavar="ENGINE", help="sglang, vllm or llamacpp. [default: recognised by itself]")
@click.option(
    "--exit-status", type=int, metavar="N", help="Of the server, where you know it (137 and -9 are the same)."
)
@options(json_option)
def command(log: BinaryIO, engine: str | None, exit_status: int | None, as_json: bool) -> int:
    """Reads LOG (- for stdin) and says how far the server came, what it can hold, and why it ended.

    A file, `journalctl -u UNIT`, or `journalctl -o json`; gigabytes in constant memory.
    """
    from gpuctl.diagnosis import diagnose, engines

    if engine is not None and engine not in engines():
        raise click.BadParameter(f"no engine {engine!r}; there are {', '.join(sorted(engines()))}")
    found = diagnose(_pieces(log), engine=engine, exit_status=exit_status)
    if as_json:
        document({"schema": "gpuctl.diagnose/1", **found.as_json()})
    elif found.engine is None and not found.causes:
        say(f"gpuctl: {log.name}: no engine's words in it; --engine names one")
        return UNKNOWN
    else:
        for line in _lines(found):
            out(line)
    return FINDINGS if found.causes else WELL


def _pieces(log: BinaryIO) -> Iterator[bytes]:
    while piece := log.read(1 << 20):
        yield piece


def _lines(found: Diagnosis) -> Iterator[str]:
    title = f"{found.engine or 'unknown engine'} {found.version}".strip()
    came = f"came as far as: {found.stage_title}" if found.stage_title else "said nothing of its start"
    yield f"{title}: {found.verdict}; {came}" + (f"; {found.starts} starts in this log" if found.starts > 1 else "")
    for number, cause in enumerate(found.causes):
        yield f"  {'cause' if number == 0 else 'also possible'}: {cause.summary}  ({cause.certainty.value}, {cause.id})"
        for line in cause.evidence:
            yield f"    | {line}"
        for line in cause.advice.splitlines():
            yield f"    do: {line}"
        if cause.separates:
            yield f"    to tell: {cause.separates}"
    for warning in found.warnings:
        yield f"  warning: {warning.summary}"
    for head, words in (("it can hold", _HOLDS), ("memory of a GPU", _MEMORY)):
        known = [(text, getattr(found.capacity, name)) for name, text in words.items()]
        told = [text.format(_amount(value, words is _MEMORY)) for text, value in known if value is not None]
        if told:
            yield f"  {head}: {', '.join(told)}"


# Capacity's fields, in words.
_HOLDS = {
    "kv_tokens": "{} tokens in the KV cache",
    "state_slots": "{} recurrent states",
    "max_running_requests": "{} requests at once",
    "requested_running_requests": "of {} that were asked for",
    "context_tokens": "a context of {} tokens",
    "concurrency": "{} requests of full context",
    "accept_length": "{} tokens a step are accepted of what is speculated",
}
_MEMORY = {
    "free_before_bytes": "{} free before loading",
    "weights_bytes": "{} for weights",
    "draft_weights_bytes": "{} for the drafter's weights",
    "free_after_weights_bytes": "{} free after loading",
    "kv_bytes": "{} for the KV cache",
    "state_bytes": "{} for recurrent states",
    "verify_bytes": "{} for states that are verified",
    "graph_bytes": "{} for CUDA graphs",
    "free_after_pools_bytes": "{} free beside the pools",
    "free_when_ready_bytes": "{} free when ready",
}


def _amount(value: float, of_bytes: bool) -> str:
    from gpuctl.logs.rule import size

    return size(value) if of_bytes else f"{value:,}"
