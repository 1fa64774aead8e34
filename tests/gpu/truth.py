"""Who is right: `gpuctl load` and `sglang.bench_serving` against a server that logs when it really wrote.

    python -m tests.gpu.truth OUT [--streams 1 16] [--intervals 2 14] [--rounds 4]

Needs SGLang at /opt/sglang/bin/python3, a tokenizer at /models and a C compiler; no GPU. The server is tests/perf/paced.c:
first chunk 40 ms after a request came, later ones on one beat, 128 in all. Both send the same texts, turn by turn.
OUT gets truth.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from gpuctl.load import load as send
from gpuctl.load import prompts
from gpuctl.metrics import repetition
from gpuctl.transport import Local
from tests.gpu.beside import TOKENS, Serving
from tests.perf import accuracy

TTFT_MS = 40.0


def turn(who: str, program: Path, streams: int, interval: float, rounds: int, serving: Serving) -> dict[str, Any]:
    texts = prompts(streams * rounds, seed=streams)
    accuracy.TTFT_MS, accuracy.INTERVAL_MS = TTFT_MS, interval
    with accuracy.paced(program, TOKENS, 1) as (port, truth):
        if who == "gpuctl":
            job = {
                "url": f"http://127.0.0.1:{port}", "api": "completions", "model": "paced", "usage": "continuous",
                "concurrency": streams, "max_tokens": TOKENS, "requests": [{"prompt": text} for text in texts],
            }  # fmt: skip
            result = send(Local(), job, python=sys.executable)
            metrics = repetition(result.requests, result.summary).metrics
            said = {name: metrics[name] for name in ("ttft_ms", "tpot_ms", "e2e_ms", "output_tok_s")}
        else:
            run = serving.run(port, "paced", streams, texts)
            said = {name: run[other] for name, other in (("ttft_ms", "mean_ttft_ms"), ("tpot_ms", "mean_tpot_ms"),
                    ("e2e_ms", "mean_e2e_latency_ms"), ("output_tok_s", "output_throughput"))}  # fmt: skip
    times = [(truth.read[number], written) for number, written in truth.written.items()]
    assert len(times) == len(texts), f"{len(times)} of {len(texts)} requests"
    wall = max(written[-1] for _, written in times) - min(came for came, _ in times)
    true = {
        "ttft_ms": 1000 * fmean(written[0] - came for came, written in times),
        "tpot_ms": 1000 * fmean((written[-1] - written[0]) / (len(written) - 1) for _, written in times),
        "e2e_ms": 1000 * fmean(written[-1] - came for came, written in times),
        "output_tok_s": sum(len(written) for _, written in times) / wall,
    }
    return {
        "who": who, "streams": streams, "interval_ms": interval, "requests": len(texts),
        "said": {name: round(value, 4) for name, value in said.items()},
        "true": {name: round(value, 4) for name, value in true.items()},
        "off": {name: round(value / true[name] - 1, 5) for name, value in said.items()},
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--streams", nargs="*", type=int, default=[1, 16])
    parser.add_argument("--intervals", nargs="*", type=float, default=[2, 14])
    parser.add_argument("--rounds", type=int, default=4)
    job = parser.parse_args(arguments)
    job.out.mkdir(parents=True, exist_ok=True)
    serving = Serving(job.out)
    rows = []
    print(f"load of the machine when it began: {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "paced"
        compiler = shutil.which("cc") or shutil.which("gcc") or "cc"
        subprocess.run(
            [compiler, "-O2", "-o", str(program), str(Path(accuracy.__file__).with_name("paced.c"))], check=True
        )
        try:
            turn("bench_serving", program, 1, 2, 2, serving)  # it warms up
            for interval in job.intervals:
                for streams in job.streams:
                    for who in ("gpuctl", "bench_serving", "bench_serving", "gpuctl"):
                        row = turn(who, program, streams, interval, max(job.rounds, 8 // streams), serving)
                        rows.append(row)
                        off = ", ".join(
                            f"{name} {row['said'][name] - row['true'][name]:+.3f} of {row['true'][name]:.3f} ({row['off'][name]:+.2%})"
                            for name in row["off"]
                        )
                        print(f"{interval:g} ms, {streams:2} streams, {who:<13} {off}", flush=True)
                        (job.out / "truth.json").write_text(json.dumps(rows, indent=1))
        finally:
            serving.process.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
