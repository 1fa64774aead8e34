"""`gpuctl load` beside `sglang.bench_serving`, on the same server, turn by turn in one run.

    python -m tests.gpu.beside OUT [--servers tiny-auto tiny-ngram] [--streams 1 8 32]

Needs SGLang at /opt/sglang/bin/python3 and its models (inventory/). Both send the same number of requests, of the same
length, at the same concurrency. OUT gets beside.json and gpuctl's raw stamps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from gpuctl import config, plugins
from gpuctl.engines import Launch, environment
from gpuctl.load import load as send
from gpuctl.load import prompts
from gpuctl.metrics import repetition
from gpuctl.transport import Local
from tests.gpu.doctor import INVENTORY, REPOSITORY

PYTHON = "/opt/sglang/bin/python3"
TOKENS = 128
SERVING = """
import json, sys, traceback
from sglang.benchmark import serving
for line in sys.stdin:
    sys.argv = ["bench_serving", *json.loads(line)]
    try:
        serving.cli_main()
        said = "done"
    except BaseException as error:
        said = f"failed {error!r}"
        traceback.print_exc()
    print(f"\\n\\x04{said}", flush=True)
"""
# bench_serving's name of each metric that both have
METRICS = {"ttft_ms": "mean_ttft_ms", "tpot_ms": "mean_tpot_ms", "e2e_ms": "mean_e2e_latency_ms", "itl_ms": "mean_itl_ms",
           "output_tok_s": "output_throughput"}  # fmt: skip


def start(name: str, out: Path, turn: Path) -> tuple[Launch, subprocess.Popen[bytes]]:
    known = config.load(INVENTORY, engines=plugins.names("engines"), workloads=_workloads())
    server = known.server(name)
    launch = Launch(name, server, known.models[str(server.model)].path)
    engine = plugins.get("engines", server.engine)
    words = [PYTHON, str(Path(__file__).with_name("held.py")), *engine.argv(launch)[3:]]  # all but python -m sglang...
    with (out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            words, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, **environment(engine, launch), "HELD": str(turn)},
        )  # fmt: skip
    return launch, process


def _workloads() -> dict[str, Any]:
    return {name: plugins.get("workloads", name).Parameters for name in plugins.names("workloads")}


def ready(launch: Launch, process: subprocess.Popen[bytes], patience_s: float = 150) -> bool:
    until = time.monotonic() + patience_s
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(launch.base_url + "/health_generate", timeout=20) as answer:
                if answer.status == 200:
                    return True
        time.sleep(0.3)
    return False


class Serving:
    """bench_serving in one process, so that it imports what it needs once."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.process = subprocess.Popen(
            [PYTHON, "-W", "ignore", "-c", SERVING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=(out / "bench_serving.stderr").open("w"), cwd="/tmp", env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip

    def run(self, launch: Launch, streams: int, requests: int, prompt: int, seed: int) -> Mapping[str, Any]:
        file = self.out / f"bench_serving-{launch.name}-{streams}-{seed}.jsonl"
        words = (
            f"--backend sglang-oai --host 127.0.0.1 --port {launch.server.port} --model {launch.model} --dataset-name random "
            f"--dataset-path /models/sharegpt.json --num-prompts {requests} --max-concurrency {streams} --random-input-len {prompt} "
            f"--random-output-len {TOKENS} --random-range-ratio 1.0 --seed {seed} --output-file {file} --output-details "
            "--disable-tqdm --flush-cache --warmup-requests 1"
        ).split()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        with (self.out / "bench_serving.txt").open("a") as said:
            for line in self.process.stdout:
                said.write(line)
                if line.startswith("\x04"):
                    if "failed" in line:
                        raise RuntimeError(line)
                    break
        whole: dict[str, Any] = json.loads(file.read_text().splitlines()[-1])
        file.unlink()
        return whole


def load(
    launch: Launch, streams: int, requests: int, seed: int, out: Path, usage: str | None = None
) -> Mapping[str, Any]:
    """`gpuctl load`; with `usage` the same job, but asking for the usage in that way."""
    raw = out / f"raw-{launch.name}-{streams}-{seed}.jsonl"
    if usage is not None:
        job = {
            "url": launch.base_url, "api": "completions", "model": launch.model, "usage": usage, "concurrency": streams, "seed": seed,
            "timeout_s": 100, "max_tokens": TOKENS, "body": {"temperature": 0},
            "requests": [{"id": str(i), "prompt": text} for i, text in enumerate(prompts(requests, seed=seed))],
        }  # fmt: skip
        result = send(Local(), job, python=sys.executable)
        return {**repetition(result.requests, result.summary).as_json(), "chunks": {}, "generator": result.summary}
    argv = [sys.executable, "-m", "gpuctl", "load", launch.base_url, "--concurrency", str(streams), "--requests", str(requests),
            "--max-tokens", str(TOKENS), "--seed", str(seed), "--json", "--raw", str(raw)]  # fmt: skip
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr + done.stdout[-500:])
    document: dict[str, Any] = json.loads(done.stdout)
    return {**document, "chunks": chunks(raw)}


def chunks(raw: Path) -> dict[str, float]:
    """Of the raw stamps: tokens a chunk, mean gap between chunks, and the gap a token: what an ITL can mean."""
    gaps, tokens, counted = [], 0, 0
    for line in raw.read_text().splitlines():
        row = json.loads(line)
        stamps = row["t_chunks"]
        gaps += [after - before for before, after in pairwise(stamps)]
        if row.get("tokens") and len(stamps) > 1:
            tokens += row["tokens"][-1] - row["tokens"][0]
            counted += len(stamps) - 1
    return {
        "gap_ms": round(1000 * fmean(gaps), 4) if gaps else 0.0,
        "tokens_a_chunk": round(tokens / counted, 3) if counted else 0.0,
        "gap_a_token_ms": round(1000 * sum(gaps) / tokens, 4) if tokens else 0.0,
    }


def compare(launch: Launch, streams: int, serving: Serving, out: Path, rounds: int) -> dict[str, Any]:
    """Turn by turn, and back again, so that the server's drift falls on all; after a warm-up that is not counted."""
    requests = max(16, 8 * streams)
    warm = load(launch, streams, requests, 99, out)
    prompt = round(warm["metrics"]["prompt_tokens"])
    ours: list[Mapping[str, Any]] = []
    final: list[Mapping[str, Any]] = []
    theirs: list[Mapping[str, Any]] = []
    for number in range(rounds):
        turns = [
            lambda n=number: ours.append(load(launch, streams, requests, n, out)),
            lambda n=number: theirs.append(serving.run(launch, streams, requests, prompt, n)),
            lambda n=number: final.append(load(launch, streams, requests, 50 + n, out, usage="final")),
        ]
        for turn in turns if number % 2 == 0 else turns[::-1]:
            turn()
    row: dict[str, Any] = {
        "server": launch.name,
        "streams": streams,
        "requests": requests,
        "prompt_tokens": prompt,
        "tokens": TOKENS,
    }
    for name, other in METRICS.items():
        values = {
            "gpuctl": [run["metrics"].get(name) for run in ours],
            "usage at the end": [run["metrics"].get(name) for run in final],
            "bench_serving": [run.get(other) for run in theirs],
        }
        if all(value is not None for each in values.values() for value in each):
            its = median(values["bench_serving"])
            against = {who: round(its / median(values[who]) - 1, 4) for who in ("gpuctl", "usage at the end")}
            row[name] = {**values, "bench_serving_against": against}
    row["time_per_token_ms"] = [run["metrics"].get("time_per_token_ms") for run in ours]
    row["chunks"] = [run["chunks"] for run in ours]
    row["acceptance_length"] = [run["metrics"].get("acceptance_length") for run in ours]
    row["completion_tokens"] = [run["metrics"].get("completion_tokens") for run in ours]
    row["their_tokens"] = [
        {k: run.get(k) for k in ("total_output_tokens", "total_output_tokens_retokenized", "completed")}
        for run in theirs
    ]
    row["their_chunks"] = [
        {"gap_ms": _mean(run), "chunks": sum(len(itl) for itl in run.get("itls", ()))} for run in theirs
    ]
    row["lag_ms"] = [run["generator"].get("lag_ms") for run in ours]
    return row


def _mean(run: Mapping[str, Any]) -> float | None:
    gaps = [gap for itl in run.get("itls", ()) for gap in itl]
    return round(1000 * fmean(gaps), 4) if gaps else None


def say(row: Mapping[str, Any]) -> str:
    lines = [
        f"{row['server']}, {row['streams']} streams, {row['requests']} requests of {row['prompt_tokens']} + {row['tokens']} tokens:"
    ]
    for name in METRICS:
        if name in row:
            values = ", ".join(
                f"{who} {median(row[name][who]):.3f}" for who in ("gpuctl", "usage at the end", "bench_serving")
            )
            lines.append(f"  {name}: {values}; bench_serving against them {row[name]['bench_serving_against']}")
    return "\n".join([*lines, f"  chunks: ours {row['chunks'][0]}, theirs {row['their_chunks'][0]}"])


def stop(processes: Sequence[subprocess.Popen[Any]]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--servers", nargs="*", default=["tiny-auto", "tiny-ngram"])
    parser.add_argument("--streams", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--gate", type=Path, help="the GPU is not touched before this file is there")
    job = parser.parse_args()
    job.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    turns = {name: job.out / f"{name}.turn" for name in job.servers}
    servers = [start(name, job.out, turns[name]) for name in job.servers]  # they import side by side
    rows: list[dict[str, Any]] = []
    serving = Serving(job.out)
    while job.gate is not None and not job.gate.exists():
        time.sleep(0.1)
    failed = False
    try:
        for launch, process in servers:
            turns[launch.name].touch()  # and take their memory one after another
            if not ready(launch, process):
                print(f"{launch.name} did not come up: see its log", flush=True)
                failed = True
                continue
            print(f"{launch.name} is ready, {time.monotonic() - began:.0f} s after the start", flush=True)
        for launch, process in servers:
            for streams in job.streams if process.poll() is None else ():
                row = compare(launch, streams, serving, job.out, job.rounds)
                rows.append(row)
                print(say(row), flush=True)
                (job.out / "beside.json").write_text(json.dumps(rows, indent=1))
    finally:
        serving.process.kill()
        stop([process for _, process in servers])
    print(f"{len(rows)} comparisons in {time.monotonic() - began:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
