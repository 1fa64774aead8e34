"""One cell: warm up, repeat, and make a record that is a true number or a cause."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuctl import metrics
from gpuctl.cells import Cell
from gpuctl.load import LoadError, Result
from gpuctl.records import Estimate, Failure, State, estimate
from gpuctl.serving import Up, bearer
from gpuctl.supervision import SupervisionError, Supervisor
from gpuctl.transport import TransportError

# runs jobs of agent/load.py beside the server, one after another
Load = Callable[[Sequence[Mapping[str, Any]]], list[Result]]
# what the server's GPUs drew and held during a repetition, given its request lines
Gauge = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, float]]

WARM_UP_TOKENS = 32
LENGTH_TOLERANCE = 0.02  # of the prompt tokens that were asked for: a context of 82k measured as 128k is a wrong number
UNSTABLE = 0.05  # coefficient of variation above which repetitions do not agree


@dataclass(frozen=True)
class Measured:
    """What became of a cell; `raw` are the request lines of all repetitions."""

    state: State
    metrics: Mapping[str, Estimate]
    reps: tuple[Mapping[str, Any], ...]
    failure: Failure | None
    generator: Mapping[str, Any]
    notes: tuple[str, ...]
    raw: tuple[Mapping[str, Any], ...]


class CellFailed(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.summary)
        self.failure = failure


def measure(
    cell: Cell,
    up: Up,
    supervisor: Supervisor,
    load: Load,
    *,
    gauge: Gauge = lambda _rows: {},
    api_key: str | None = None,
    unstable_above: float = UNSTABLE,
) -> Measured:
    """Measures a cell. Never raises for what the server does: that is the record's failure."""
    reps: list[Mapping[str, Any]] = []
    raw: list[Mapping[str, Any]] = []
    summaries: list[Mapping[str, Any]] = []
    before: list[Result] = []  # what was sent before anything counted
    notes: list[str] = []
    # Somebody else's server keeps its prefix cache from one run of ours to the next: it is asked new texts each time.
    first = 0 if up.state is not None else 1 + secrets.randbelow(1 << 40)
    try:
        words = _words_for(cell, up, load, api_key, first, before)
        (warm,) = load([_job(cell, up, first - 1, words, api_key, warm_up=True)])
        before.append(warm)
        _check(warm, cell, warm_up=True)
        _flush(up, supervisor, api_key, notes)
        for rep, result in enumerate(load([_job(cell, up, first + rep, words, api_key) for rep in range(cell.reps)])):
            raw += [{"rep": rep, **line} for line in result.requests]
            _check(result, cell)
            repetition = metrics.repetition(result.requests, result.summary)
            of_gpus = metrics.of_gpus(gauge(result.requests), repetition.metrics)
            reps.append({"n": rep, **repetition.as_json(), "metrics": {**repetition.metrics, **of_gpus}})
            notes += [note for note in repetition.notes if note not in notes]
            summaries.append(result.summary)
    except CellFailed as error:
        failure = up.died(wait_s=1.0) if error.failure.kind == "request_failed" else None
        return Measured(State.FAILED, {}, tuple(reps), failure or error.failure, {}, tuple(notes), tuple(raw))
    except (LoadError, SupervisionError, TransportError) as error:
        failure = up.died(wait_s=1.0) or Failure("measuring_failed", str(error))
        return Measured(State.FAILED, {}, tuple(reps), failure, {}, tuple(notes), tuple(raw))
    if failure := up.died():
        return Measured(State.FAILED, {}, tuple(reps), failure, {}, tuple(notes), tuple(raw))
    estimates = {
        name: estimate([rep["metrics"][name] for rep in reps], metrics.METRICS[name].unit)
        for name in reps[0]["metrics"]
        if all(rep["metrics"].get(name) is not None for rep in reps)
    }
    state = _judge(cell, up, estimates, unstable_above, notes)
    return Measured(state, estimates, tuple(reps), None, _generator(summaries, before), tuple(notes), tuple(raw))


def _judge(cell: Cell, up: Up, estimates: Mapping[str, Estimate], unstable_above: float, notes: list[str]) -> State:
    at_once = up.identity.requests_at_once
    if at_once is not None and at_once < cell.point.concurrency:
        runs = f"{at_once} request{'s' * (at_once != 1)} at once"
        notes.append(f"the server runs {runs}, {cell.point.concurrency} were sent")
        return State.CAPACITY_LIMITED
    for name in ("output_tok_s", "decode_tok_s"):
        value = estimates.get(name)
        if value and value.sd is not None and value.n >= 3 and value.sd > unstable_above * value.mean:
            notes.append(f"{name}: repetitions differ by {value.sd / value.mean:.1%} (more than {unstable_above:.0%})")
            return State.UNSTABLE
    return State.OK


def _generator(summaries: Sequence[Mapping[str, Any]], before: Sequence[Result]) -> dict[str, Any]:
    """The worst of what the load generator said of itself over the repetitions."""
    lags = [summary.get("lag_ms") or {} for summary in summaries]
    kept = [summary["load_kept"] for summary in summaries if summary.get("load_kept") is not None]
    return {
        "version": summaries[0].get("version") if summaries else None,
        "lag_ms": {
            key: max(lag[key] for lag in lags) for key in (lags[0] if lags else {}) if all(key in x for x in lags)
        },
        "load_kept": min(kept) if kept else None,
        "ceiling_reads_s": min((s["ceiling_reads_s"] for s in summaries if s.get("ceiling_reads_s")), default=None),
        "warm_up_s": round(sum(result.summary["wall_s"] for result in before), 4),
        "stamps": sorted({str(summary.get("stamps")) for summary in summaries}),
    }


def _job(cell: Cell, up: Up, rep: int, words: int, api_key: str | None, *, warm_up: bool = False) -> dict[str, Any]:
    point = cell.point
    requests = cell.requests(point, rep, words)
    if warm_up:
        tokens = min(WARM_UP_TOKENS, point.max_tokens)
        requests = [{**request, "max_tokens": tokens} for request in requests[: point.concurrency]]
    return {
        "url": up.launch.base_url,
        "api": "chat" if point.chat else "completions",
        "model": up.model_id,
        "api_key": api_key,
        "requests": requests,
        "concurrency": point.concurrency,
        "body": dict(up.engine.FIXED_LENGTH if point.exact_length else up.engine.ANY_LENGTH),
        "usage": "continuous",
    }


def _check(result: Result, cell: Cell, *, warm_up: bool = False) -> None:
    """Raises CellFailed unless every request was answered, at its length."""
    point = cell.point
    failed = [line for line in result.requests if line.get("error")]
    if failed:
        error = failed[0]["error"]
        status = failed[0].get("status")
        kind = "http_error" if error["kind"] == "http_error" else "request_failed"
        what = f"{len(failed)} of {len(result.requests)} requests failed: {error['message']}"
        raise CellFailed(
            Failure(kind, what, tuple(f"HTTP {status}: {line['error']['message']}" for line in failed[:3]))
        )
    if not result.requests:
        raise CellFailed(Failure("request_failed", "the load generator sent nothing"))
    for line in result.requests:
        usage = line.get("usage") or {}
        written = metrics.believable(usage.get("completion_tokens"))
        if written is None:
            raise CellFailed(_no_usage("it wrote", "completion_tokens", usage))
        if point.exact_length and not warm_up and written != point.max_tokens:
            what = f"asked for {point.max_tokens} tokens, got {written} (finish_reason {line.get('finish_reason')!r})"
            raise CellFailed(
                Failure("wrong_length", what, advice="the server does not honour ignore_eos, or its window")
            )
        if point.prompt_tokens:
            sent = metrics.believable(usage.get("prompt_tokens"))
            if not sent:
                raise CellFailed(_no_usage("the prompt has", "prompt_tokens", usage))
            off = abs(sent - point.prompt_tokens) / point.prompt_tokens
            if off > LENGTH_TOLERANCE and not warm_up:
                what = f"the prompt should have {point.prompt_tokens} tokens and has {sent}"
                raise CellFailed(Failure("wrong_length", what))


def _no_usage(what: str, key: str, usage: Mapping[str, Any]) -> Failure:
    said = (
        f"usage.{key} is {usage[key]!r}" if key in usage else f"usage.{key} is missing" if usage else "usage is missing"
    )
    return Failure("no_usage", f"the server does not say how many tokens {what} ({said})"[:300])


def _words_for(cell: Cell, up: Up, load: Load, api_key: str | None, first: int, sent: list[Result]) -> int:
    """How many words give the wanted prompt tokens with this server's tokenizer: asked, not guessed."""
    wanted = cell.point.prompt_tokens
    if not wanted:
        return 0
    words = max(8, min(wanted // 16, 1000))  # few at first: a tokenizer may give a token a byte
    for _ in range(5):
        job = _job(cell, up, first - 2 - words, words, api_key)
        job["requests"] = [{**job["requests"][0], "max_tokens": 1}]
        (result,) = load([job])
        sent.append(result)
        _check(result, cell, warm_up=True)
        tokens = result.requests[0]["usage"]["prompt_tokens"]
        if abs(tokens - wanted) <= max(1, LENGTH_TOLERANCE / 4 * wanted):
            return words
        words = max(1, round(words * wanted / tokens))
    return words


def _flush(up: Up, supervisor: Supervisor, api_key: str | None, notes: list[str]) -> None:
    if up.engine.FLUSH is None:
        return
    method, path = up.engine.FLUSH
    wanted = {"method": method, "url": up.launch.base_url + path, "headers": bearer(api_key), "timeout_s": 30}
    for _ in range(3):
        (answer,) = supervisor.ask([wanted])
        if answer.get("status") == 200:
            return
    notes.append(
        f"the prefix cache could not be emptied: {path} answered {answer.get('status') or answer.get('error')}"
    )
