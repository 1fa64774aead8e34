"""`gpuctl doctor` on a real GPU: on the healthy machine, timed, and in each fault of faults.py.

    python -m tests.gpu.doctor OUT [--jobs N] [--only GLOB...]

OUT gets answers.jsonl (one row a fault: what was expected, what doctor said, what the driver answered) and the snapshots.
Exit status 1 when a wrong cause was named, or the healthy machine was not well within two seconds.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu.faults import Fault, every, gpus_here

REPOSITORY = Path(__file__).parents[2]
INVENTORY = Path(__file__).parent / "inventory"
WITHIN_S = 2.0
PATIENCE_S = 100


def doctor(*options: str) -> list[str]:
    return [sys.executable, "-m", "gpuctl", "-i", str(INVENTORY), "doctor", "--json", "--all", *options]


def healthy(times: int) -> dict[str, Any]:
    """Seconds of each run, and what the last one said."""
    seconds, done = [], None
    for _ in range(times):
        began = time.monotonic()
        done = subprocess.run(doctor(), cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        seconds.append(round(time.monotonic() - began, 3))
    assert done is not None
    return {"seconds": seconds, "rc": done.returncode, "document": _document(done), "stderr": done.stderr[-2000:]}


def ask(fault: Fault, out: Path) -> dict[str, Any]:
    """Doctor in one fault: a row."""
    save = out / f"{fault.file}.json"
    argv = [sys.executable, "-m", "tests.gpu.faults", fault.name, "--", *doctor("--save", str(save), *fault.options)]
    began = time.monotonic()
    row: dict[str, Any] = {"fault": fault.name, "expected": list(fault.causes), "may": list(fault.may)}
    try:
        done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return {**row, "right": False, "said": [], "trouble": f"no answer in {PATIENCE_S} s"}
    document = _document(done)
    row |= {"rc": done.returncode, "s": round(time.monotonic() - began, 2)}
    if document is None:
        return {**row, "right": False, "said": [], "trouble": done.stderr[-3000:] or done.stdout[-500:]}
    found = [*document.get("findings", ()), *document.get("consequences", ())]
    said = [finding["id"] for finding in found if finding["severity"] != "info"]
    row |= {"verdict": document["verdict"], "said": said, "headline": document.get("headline")}
    row |= {"summaries": [finding["summary"] for finding in found], "unknown": document.get("unknowns")}
    row |= answers(save)
    row["right"] = right(fault, said, document["verdict"])
    return row


def right(fault: Fault, said: list[str], verdict: str) -> bool:
    if not fault.causes:
        return set(said) <= set(fault.may) and (bool(said) or verdict == "well")
    return set(fault.causes) <= set(said) <= {*fault.causes, *fault.may} and said[0] == fault.causes[0]


def answers(save: Path) -> dict[str, Any]:
    """What the driver itself answered, out of the snapshot."""
    try:
        snapshot = json.loads(save.read_text())
    except (OSError, ValueError):
        return {}
    snapshot = (
        (snapshot.get("snapshots") or snapshot.get("machines") or [snapshot])[0] if isinstance(snapshot, dict) else {}
    )
    cuda, nvml = snapshot.get("cuda") or {}, snapshot.get("nvml") or {}
    return {
        "opens": {path: each for path, each in (snapshot.get("open") or {}).items() if set(each.values()) != {"OK"}},
        "cuda": {who: {k: v for k, v in view.items() if k not in ("gpus", "guard", "mapped", "ms")} for who, view in cuda.items()},
        "nvml": {who: {k: view.get(k) for k in ("nvmlInit", "dlopen", "count", "error", "died") if k in view} for who, view in nvml.items()},
        "unanswered": snapshot.get("unanswered"),
        "probe_ms": (snapshot.get("probe") or {}).get("ms"),
    }  # fmt: skip


def _document(done: subprocess.CompletedProcess[str]) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return None
    return document


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--only", nargs="*", default=["*"])
    parser.add_argument("--healthy", type=int, default=5)
    job = parser.parse_args()
    job.out.mkdir(parents=True, exist_ok=True)
    well = healthy(job.healthy)
    said = [finding["id"] for finding in (well["document"] or {}).get("findings", ())]
    quick = max(well["seconds"][1:] or well["seconds"]) < WITHIN_S
    print(f"healthy: rc {well['rc']}, findings {said}, seconds {well['seconds']}", flush=True)
    if well["document"] is None:
        print(well["stderr"])
    (job.out / "healthy.json").write_text(json.dumps(well, indent=1))
    gpus = gpus_here()
    wanted = [
        f
        for f in every()
        if f.gpus <= gpus <= f.at_most and any(fnmatch.fnmatch(f.name, pattern) for pattern in job.only)
    ]
    wrong = 0
    with ThreadPoolExecutor(job.jobs) as pool, (job.out / "answers.jsonl").open("w") as file:
        for row in pool.map(lambda fault: ask(fault, job.out), wanted):
            file.write(json.dumps(row) + "\n")
            file.flush()
            wrong += not row["right"]
            mark = "ok   " if row["right"] else "WRONG"
            code = [view.get("cuInit", view.get("dlopen", view.get("error"))) for view in row.get("cuda", {}).values()]
            print(f"{mark} {row['fault']:<72} cuInit {code} said {row['said']} ({row.get('verdict')})", flush=True)
            if not row["right"]:
                print(
                    f"      expected {row['expected'] or 'well'}, may {row['may']}; {row.get('headline')}; {row.get('trouble', '')}"
                )
                print(f"      {row.get('summaries')}; unknown {row.get('unknown')}; unanswered {row.get('unanswered')}")
    print(f"{len(wanted)} faults, {wrong} wrong; healthy within {WITHIN_S:g} s: {quick}")
    return int(bool(wrong) or bool(said) or well["rc"] != 0 or not quick)


if __name__ == "__main__":
    sys.exit(main())
