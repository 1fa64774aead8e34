"""What gpuctl itself costs: how long `--help` takes, and what `bench` adds to a server beyond its start and its requests.

    overhead.py [--rounds 5] [--write]

The whole of a bench is timed from outside. Taken off are the engine's own starts (`ready_s`) and every moment in which
a request was under way, warm-ups and prompt lengths included. What is left, by server, is launches, probing, waiting, files and stopping.
`--write` puts the result into docs/overhead.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "overhead.md"
HELP_AIM_MS, SERVER_AIM_S = 150.0, 3.0


def help_ms(rounds: int) -> list[float]:
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        subprocess.run([str(Path(sys.executable).with_name("gpuctl")), "--help"], capture_output=True, check=True)
        times.append((time.perf_counter() - began) * 1000)
    return times[1:]  # the first reads the disk


def bench(folder: Path) -> tuple[float, float, float, int, int]:
    """(whole, starts, requests in seconds, servers, cells) of the demo, measured afresh."""
    (folder / "runs" / "demo" / "events.jsonl").unlink(missing_ok=True)
    began = time.perf_counter()
    command = [sys.executable, "-m", "gpuctl", "bench", "demo", "--fresh", "-i", str(ROOT / "inventory/local")]
    subprocess.run(command, cwd=folder, capture_output=True, check=True)
    whole = time.perf_counter() - began
    run = folder / "runs" / "demo"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    ready = [event["ready_s"] for event in events if event["event"] == "server_ready"]
    cells = list(run.glob("cells/demo/*/*/*.json"))
    requests = 0.0
    for cell in cells:
        record = json.loads(cell.read_text())
        requests += sum(rep["wall_s"] for rep in record["reps"]) + record["generator"]["warm_up_s"]
    return whole, sum(ready), requests, len(ready), len(cells)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    helps = help_ms(max(options.rounds, 3) * 4)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            whole, starts, requests, servers, cells = bench(Path(folder))
            rows.append((whole, starts, requests, (whole - starts - requests) / servers, servers, cells))
    server = statistics.median(row[3] for row in rows)
    lines = [
        "# What gpuctl itself costs",
        "",
        f"Made by `make perf` on {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC: {os.cpu_count()} cores, Linux "
        f"{platform.release()}, Python {platform.python_version()}.",
        "",
        f"`gpuctl --help`: median {statistics.median(helps):.0f} ms, slowest {max(helps):.0f} ms of {len(helps)} "
        f"(aim: under {HELP_AIM_MS:.0f}).",
        "",
        "`gpuctl bench demo --fresh`, seconds. Beyond is what is left of the whole when the engine's own starts and all",
        "requests (repetitions, warm-ups, prompt lengths) are taken off, for each server:",
        "",
        "| whole | starts | requests | servers | cells | beyond, a server |",
        "|---:|---:|---:|---:|---:|---:|",
        *(f"| {w:.2f} | {s:.2f} | {r:.2f} | {n} | {c} | {b:.2f} |" for w, s, r, b, n, c in rows),
        "",
        f"Median {server:.2f} s a server of {rows[0][5] // rows[0][4]} cells (aim: under {SERVER_AIM_S:.0f}).",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        DOCUMENT.write_text(text, encoding="utf-8")
    return 0 if statistics.median(helps) < HELP_AIM_MS and server < SERVER_AIM_S else 1


if __name__ == "__main__":
    sys.exit(main())
