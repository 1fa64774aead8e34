"""The report as one JSON document, schema gpuctl.report/1 (docs/report.md): everything the other faces are made of."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from gpuctl.document.outline import Report
from gpuctl.records import MEASURED, Record, State
from gpuctl.results import provenance
from gpuctl.results.comparison import Comparison
from gpuctl.results.intervals import Interval, improvement
from gpuctl.results.run import Run, Server, headline, metric

SUFFIX = "json"
SCHEMA = "gpuctl.report/1"


def render(report: Report) -> bytes:
    document = _document(report)
    try:
        text = json.dumps(document, indent=1, allow_nan=False)
    except (TypeError, ValueError):
        text = json.dumps(_proper(document), indent=1)
    return f"{text}\n".encode()


def _proper(value: Any) -> Any:
    """Only what JSON has: what a record read with a number that is none (NaN) becomes its name."""
    if isinstance(value, Mapping):
        return {str(key): _proper(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_proper(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _document(report: Report) -> dict[str, Any]:
    run = report.run
    fingerprints = {record.fingerprint_id: record.fingerprint for record in run.records if record.fingerprint}
    return {
        "schema": SCHEMA,
        "verdict": _verdict(run),
        "name": run.name,
        "unfinished_since": run.unfinished,
        "commands": [provenance.public(command) for command in run.commands],
        "counts": {state.value: run.count(state) for state in State},
        "phases": [
            {
                "name": phase,
                "title": run.title(phase),
                "baseline": run.baseline_of(phase),
                "foreign": phase in run.foreign,
                "servers": [_server(server) for server in run.servers[phase]],
            }
            for phase in run.phases
        ],
        "cells": [_cell(run, record) for record in run.records],
        "fingerprints": {id: provenance.published(parts) for id, parts in fingerprints.items()},
        "interruptions": [
            {"what": stop.what, "start": stop.start, "end": stop.end or None, "healed": list(stop.healed)}
            for stop in report.interruptions
        ],
        "comparisons": [_comparison(comparison) for comparison in report.comparisons],
        "left_out": [{"path": left.path, "why": left.why} for left in run.left_out],
    }


def _verdict(run: Run) -> str:
    if run.count(State.FAILED, State.SKIPPED):
        return "failed"
    return "pending" if run.unfinished is not None or not run.records else "ok"


def _server(server: Server) -> dict[str, Any]:
    return {
        "name": server.name,
        "method": server.method,
        "engine": server.engine,
        "model": server.model,
        "tp": server.tp,
        "budget": server.budget,
        "argv": provenance.public(server.argv),
    }


def _cell(run: Run, record: Record) -> dict[str, Any]:
    failure = record.failure
    return {
        "cell": record.cell._asdict(),
        "state": record.state.value,
        "parameters": dict(record.parameters),
        "metrics": {
            name: {"mean": e.mean, "sd": e.sd, "ci95": e.ci95, "n": e.n, "unit": e.unit}
            for name, e in record.metrics.items()
        },
        "speedup": _speedup(run, record),
        "failure": None
        if failure is None
        else {
            "kind": failure.kind,
            "summary": failure.summary,
            "evidence": list(failure.evidence),
            "advice": failure.advice,
            "finding": failure.finding,
        },
        "notes": list(record.notes),
        "started": record.started,
        "ended": record.ended,
        "fingerprint_id": record.fingerprint_id,
        "boot": dict(record.boot),
    }


def _speedup(run: Run, record: Record) -> dict[str, Any] | None:
    """Of the figure that stands for the cell, over the phase's baseline."""
    base = run.baseline_cell(record.cell)
    found = headline(record) if record.state in MEASURED else None
    if base is None or found is None or found[0] not in base.metrics:
        return None
    name, e = found
    factor = improvement(e, base.metrics[name], metric(name, e.unit).better)
    return None if factor is None else {"metric": name, "baseline": base.cell.server, **_interval(factor)}


def _interval(interval: Interval) -> dict[str, Any]:
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def _comparison(comparison: Comparison) -> dict[str, Any]:
    def pair(new: Record, old: Record) -> Mapping[str, Any]:
        return {"new": new.cell._asdict(), "old": old.cell._asdict()}

    return {
        "new": comparison.new,
        "old": comparison.old,
        "noise_percent": comparison.noise_percent,
        "differences": [
            {
                **pair(d.new, d.old),
                "metric": d.metric,
                "change_percent": _interval(d.change),
                "verdict": d.verdict.value,
            }
            for d in comparison.differences
        ],
        "broken": [pair(new, old) for new, old in comparison.broken],
        "mended": [pair(new, old) for new, old in comparison.mended],
        "not_comparable": [{"cell": cell._asdict(), "why": why} for cell, why in comparison.not_comparable],
        "only_new": [cell._asdict() for cell in comparison.only_new],
        "only_old": [cell._asdict() for cell in comparison.only_old],
        "conditions": [{"where": c.where, "words": list(c.words), "cells": c.cells} for c in comparison.conditions],
    }
