"""Sending load to a server: runs agent/load.py beside it and reads what it says.

`load` does one job (its keys: agent/load.py) through a transport. `measure` is `gpuctl load URL`: plain arguments in, a
JSON-able document out; `table` renders that document.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gpuctl.agent.load import VERSION, BadJob, endpoint
from gpuctl.metrics import METRICS, repetition
from gpuctl.transport import Transport, agent

__all__ = ["VERSION", "Interrupted", "LoadError", "NoServer", "Result", "UsageError", "load", "measure", "table"]

SCHEMA = "gpuctl.load/1"


class LoadError(Exception):
    """The job was not done. One line for a person."""


class UsageError(LoadError):
    """The job cannot be done as it was given: an address that is none, a number out of range."""


class NoServer(LoadError):
    """Nothing answers at the address."""


class Interrupted(LoadError):
    """The generator was told to stop (SIGTERM, SIGINT)."""


@dataclass(frozen=True)
class Result:
    requests: Sequence[Mapping[str, Any]]  # in the order in which they ended
    summary: Mapping[str, Any]


def load(
    transport: Transport,
    job: Mapping[str, Any],
    *,
    on_request: Callable[[Mapping[str, Any]], None] | None = None,
    on_start: Callable[[Mapping[str, Any]], None] | None = None,
    python: str = "python3",
    timeout: float | None = None,
) -> Result:
    """Does the job on the machine. `on_request` sees each request as it ends, `on_start` as it starts.

    An exception from either stops the generator and comes out. Requests that fail are rows with an error, not
    exceptions. `timeout` in seconds, for all of it. Raises UsageError, NoServer, LoadError, TransportError.
    """
    asked = {**job, "starts": True} if on_start else job
    (result,) = _done(transport, asked, 1, on_request, on_start, python, timeout)
    return result


def load_all(transport: Transport, jobs: Sequence[Mapping[str, Any]], *, python: str = "python3") -> list[Result]:
    """Does the jobs one after another in one go; after one with a failed request none is begun. Raises as `load`."""
    return _done(transport, {"jobs": list(jobs)}, len(jobs), None, None, python, None)


def _done(
    transport: Transport,
    asked: Mapping[str, Any],
    jobs: int,
    on_request: Callable[[Mapping[str, Any]], None] | None,
    on_start: Callable[[Mapping[str, Any]], None] | None,
    python: str,
    timeout: float | None,
) -> list[Result]:
    argv, stdin = agent("load", asked, python=python)
    results: list[Result] = []
    rows: list[Mapping[str, Any]] = []
    held = bytearray()

    def line(data: bytes) -> None:
        try:
            row = json.loads(data)
            kind = row["type"]
        except (ValueError, KeyError, TypeError):
            raise LoadError(f"{transport.name}: the load generator said {data[:200]!r}, which it never says") from None
        if kind == "request":
            rows.append(row)
            if on_request:
                on_request(row)
        elif kind == "start":
            if on_start:
                on_start(row)
        else:
            results.append(Result(tuple(rows), row))
            rows.clear()

    def take(data: bytes) -> None:
        held.extend(data)
        while (end := held.find(b"\n")) >= 0:
            one = bytes(held[:end])
            del held[: end + 1]
            line(one)

    done = transport.run(argv, stdin=stdin, timeout=timeout, on_stdout=take)
    if done.rc == 0 and results and (len(results) == jobs or _any_failed(results[-1])):
        return results
    rows = [row for result in results for row in result.requests] + rows
    said = done.stderr.decode("utf-8", "replace").strip()
    last = said.splitlines()[-1] if said else ""
    if done.rc == 2:
        raise UsageError(last)
    if done.rc == 3:
        raise NoServer(last)
    if done.rc == 4:
        raise Interrupted(f"{transport.name}: the load generator was stopped after {len(rows)} requests")
    if done.rc == 127:
        raise LoadError(f"{transport.name}: {python} is not there; the load generator needs Python 3.9 or newer")
    how = f"was killed by signal {-done.rc}" if done.rc < 0 else f"ended with {done.rc}"
    raise LoadError(f"{transport.name}: the load generator {how} after {len(rows)} requests: {last or 'no word'}")


_WORDS = (
    *(
        "river",
        "stone",
        "window",
        "paper",
        "green",
        "morning",
        "bridge",
        "seven",
        "garden",
        "silver",
        "letter",
        "quiet",
    ),
    *("mountain", "engine", "yellow", "harbour", "market", "winter", "candle", "forest", "number", "copper", "island"),
    *("signal", "summer", "valley", "thunder", "mirror", "orange", "castle"),
)


def _any_failed(result: Result) -> bool:
    return any(row.get("error") for row in result.requests)


def prompts(count: int, *, seed: int, words: int = 40) -> list[str]:
    """Prompts that no cache has seen: each begins with words of its own. The same for the same seed."""
    dice = random.Random(seed)  # noqa: S311
    return [
        f"{i} {' '.join(dice.choices(_WORDS, k=words))}. Go on with a long story about these words.\n"
        for i in range(count)
    ]


def measure(
    transport: Transport,
    url: str,
    *,
    concurrency: int | None = None,
    requests: int | None = None,
    max_tokens: int = 128,
    chat: bool = False,
    model: str | None = None,
    rate: float | None = None,
    api_key: str | None = None,
    seed: int = 0,
    timeout_s: float = 600,
    raw: Path | None = None,
    on_request: Callable[[Mapping[str, Any]], None] | None = None,
    python: str = "python3",
) -> dict[str, Any]:
    """`gpuctl load URL`: sends load once and says how the server did.

    Closed loop at `concurrency` (default 1), or open loop (Poisson) at `rate` requests a second; with both, at most
    `concurrency` at a time. `requests` defaults to four for each in flight, at least eight. `raw`: a file that gets one
    JSON line a request, as each ends. Returns a document with `schema`, `verdict` (ok | failed), `metrics`, ...
    Raises UsageError, NoServer, LoadError, TransportError, OSError (the raw file).
    """
    if concurrency is None and rate is None:
        concurrency = 1
    many = requests if requests is not None else max(8, 4 * (concurrency or 8))
    if many < 1:
        raise UsageError(f"{many} requests: at least one is needed")
    try:
        api = endpoint(url, "chat" if chat else None)[-1]
    except BadJob as error:
        raise UsageError(str(error)) from None
    job: dict[str, Any] = {
        "url": url,
        "api": api,
        "model": model,
        "api_key": api_key,
        "usage": "auto",
        "concurrency": concurrency,
        "rate": rate,
        "arrival": "poisson",
        "seed": seed,
        "timeout_s": timeout_s,
        "max_tokens": max_tokens,
        "body": {"temperature": 0},
        "requests": [{"id": str(i), "prompt": text} for i, text in enumerate(prompts(many, seed=seed))],
    }
    if raw is None:
        result = load(transport, job, on_request=on_request, python=python)
    else:
        with raw.open("a", encoding="utf-8") as file:  # what is in it stays until there is something new
            result = load(transport, job, on_request=_into(file, on_request), python=python)
    run = repetition(result.requests, result.summary)
    return {
        "schema": SCHEMA,
        "verdict": "failed" if run.failed else "ok",
        "url": url,
        "api": api,
        "model": result.summary.get("model"),
        "concurrency": concurrency,
        "rate": rate,
        "max_tokens": max_tokens,
        "target": transport.name,
        **run.as_json(),
        "failures": _failures(result.requests),
        "generator": dict(result.summary),
    }


def _into(file: IO[str], then: Callable[[Mapping[str, Any]], None] | None) -> Callable[[Mapping[str, Any]], None]:
    rows = 0

    def write(row: Mapping[str, Any]) -> None:
        nonlocal rows
        if rows == 0:
            file.truncate(0)
        rows += 1
        file.write(json.dumps(row) + "\n")
        file.flush()
        if then is not None:
            then(row)

    return write


def _failures(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each different failure once, with how often it happened."""
    seen: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["error"] is not None:
            key = (row["error"]["kind"], row["error"]["message"])
            seen[key] = seen.get(key, 0) + 1
    return [{"kind": kind, "message": message, "requests": n} for (kind, message), n in seen.items()]


_ROWS = (
    ("time to first token", ("ttft_ms", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms")),
    (
        "time per token",
        ("time_per_token_ms", "time_per_token_p50_ms", "time_per_token_p90_ms", "time_per_token_p99_ms"),
    ),
    ("TPOT, customary", ("tpot_ms", "tpot_p50_ms", "tpot_p90_ms", "tpot_p99_ms")),
    ("inter-token latency", ("itl_ms", "itl_p50_ms", "itl_p90_ms", "itl_p99_ms")),
    ("end to end", ("e2e_ms", "e2e_p50_ms", "e2e_p90_ms", "e2e_p99_ms")),
)
_LINES = (
    ("one stream", "decode_tok_s"),
    ("one user, waiting included", "request_tok_s"),
    ("all streams", "output_tok_s"),
    ("all streams, steady state", "steady_output_tok_s"),
    ("prompt read", "prefill_tok_s"),
    ("requests", "requests_s"),
    ("acceptance length", "acceptance_length"),
    ("tokens a prompt", "prompt_tokens"),
    ("of them cached", "cached_tokens"),
    ("tokens an answer", "completion_tokens"),
    ("load kept", "load_kept"),
)


def table(document: Mapping[str, Any]) -> str:
    """The document of `measure`, for a person. Pure."""
    metrics = document["metrics"]
    sources = document["sources"]
    if document["rate"] is not None:
        how = f"{document['rate']:g} requests/s (Poisson)"
        if document["concurrency"] is not None:
            how += f", at most {document['concurrency']} at a time"
    else:
        how = f"{document['concurrency']} at a time"
    good = document["requests"] - document["failed"]
    out = [
        f"{document['url']}  {document['model'] or 'model not named'}  {document['api']}",
        f"{good} of {document['requests']} requests succeeded, {how}, at most {document['max_tokens']} tokens each,"
        f" {document['wall_s']:.2f} s",
        "",
    ]
    shown = [(label, names) for label, names in _ROWS if names[0] in metrics]
    if shown:
        out.append(f"{'ms':<28}{'mean':>12}{'p50':>12}{'p90':>12}{'p99':>12}")
        out += [f"{label:<28}" + "".join(f"{metrics[name]:>12.2f}" for name in names) for label, names in shown]
        out.append("")
    for label, name in _LINES:
        if name in metrics and (good or name != "load_kept"):
            unit = METRICS[name].unit
            number = f"{metrics[name]:.1%}" if name == "load_kept" else f"{metrics[name]:,.2f}"
            source = f"(from {sources[name]})" if name in sources else ""
            words = (number.rjust(12), "" if unit == "tokens" else unit, source)
            out.append(f"{label:<28}" + " ".join(word for word in words if word))
    reasons = ", ".join(
        f"{'not said' if name == 'None' else name} {count}" for name, count in document["finish_reasons"].items()
    )
    for label, text in (("tokens counted by", sources.get("tokens", "")), ("answers ended by", reasons)):
        if text:
            out.append(f"{label:<28}  {text.replace('_', ' ')}")
    lag = document["generator"].get("lag_ms")
    if lag and good:
        out.append(
            f"{'generator':<28}  lag {lag['p50']:.3f} ms p50, {lag['p99']:.3f} p99, {lag['max']:.3f} max;"
            f" ceiling {document['generator'].get('ceiling_reads_s') or 0:,} reads/s"
        )
    out += [f"note: {note}" for note in document["notes"]]
    for failure in document["failures"]:
        out.append(f"failed: {failure['requests']} x {failure['kind']}: {failure['message']}")
        if failure["kind"] == "http_error" and str(failure["message"]).startswith("HTTP 404"):
            path = endpoint(document["url"], document["api"])[3]
            out.append(f"  there is no {path} at that address: is it the server's?")
    return "\n".join(out) + "\n"
