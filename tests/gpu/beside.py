"""`gpuctl load` beside `sglang.bench_serving`, on the same server, turn by turn in one run.

    python -m tests.gpu.beside OUT [--servers beside-27b beside-tiny] [--streams 1 16] [--rounds 2]

Needs SGLang at /opt/sglang/bin/python3 and its models (inventory/). Both send the same number of requests, of the same
texts' kind and length, at the same concurrency. Who is right is asked of the server: its own histograms (/metrics) are read
before and after each turn. truth.py asks the same of a server that knows when it wrote. OUT gets beside.json and gpuctl's
raw stamps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
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
from tests.gpu.doctor import INVENTORY

PYTHON = "/opt/sglang/bin/python3"
TOKENS = 128
TOKENIZER = "/models/qwen3-tiny"  # bytes, as all of these models have
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

    def run(self, port: int, model: str, streams: int, texts: Sequence[str], tokens: int = TOKENS) -> Mapping[str, Any]:
        """Sends these texts to /v1/completions; what it wrote of it (`--output-details`)."""
        texts_file, file = self.out / "texts.jsonl", self.out / "bench_serving.jsonl"
        texts_file.write_text("".join(
            json.dumps({"conversations": [{"content": text}, {"content": "an answer"}]}) + "\n" for text in texts
        ))  # fmt: skip
        words = (
            f"--backend sglang-oai --host 127.0.0.1 --port {port} --model {model} --tokenizer {TOKENIZER} "
            f"--dataset-name custom --dataset-path {texts_file} --num-prompts {len(texts)} --max-concurrency {streams} "
            f"--sharegpt-output-len {tokens} --output-file {file} --output-details --disable-tqdm --warmup-requests 0"
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


def load(launch: Launch, streams: int, texts: Sequence[str], raw: Path) -> Mapping[str, Any]:
    """What `gpuctl load` sends, but for its question how the server says usage: that would be a request more."""
    job = {
        "url": launch.base_url, "api": "completions", "model": launch.model, "usage": "continuous", "concurrency": streams,
        "timeout_s": 100, "max_tokens": TOKENS, "body": {"temperature": 0, "ignore_eos": True},
        "requests": [{"id": str(i), "prompt": text} for i, text in enumerate(texts)],
    }  # fmt: skip
    result = send(Local(), job, python=sys.executable)
    raw.write_text("".join(json.dumps(row) + "\n" for row in result.requests))
    failed = [row["error"] for row in result.requests if row["error"]]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    return {**repetition(result.requests, result.summary).as_json(), "chunks": chunks(raw), "generator": result.summary}


HISTOGRAMS = {"ttft_ms": "time_to_first_token", "itl_ms": "inter_token_latency", "e2e_ms": "e2e_request_latency"}


def sums(base_url: str) -> dict[str, tuple[float, float]]:
    """Of each histogram that the server keeps of its own requests: (sum in ms, count)."""
    with urllib.request.urlopen(base_url + "/metrics", timeout=20) as answer:
        text = answer.read().decode()
    found = {}
    for name, its in HISTOGRAMS.items():
        parts = []
        for part in ("sum", "count"):
            lines = re.findall(rf"^sglang:{its}_seconds_{part}(?:{{[^}}]*}})? (\S+)", text, re.M)
            parts.append(sum(map(float, lines)))
        found[name] = (parts[0] * 1000, parts[1])
    return found


def by_the_server(
    before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    """The server's own means of what came between two looks; `requests` is how many it counted."""
    means = {}
    for name, (total, count) in after.items():
        many = count - before[name][1]
        if many > 0:
            means[name] = round((total - before[name][0]) / many, 4)
    return {**means, "requests": after["e2e_ms"][1] - before["e2e_ms"][1]}


def forget(base_url: str) -> None:
    request = urllib.request.Request(base_url + "/flush_cache", method="POST", data=b"")
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=20) as answer:
        answer.read()


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
    """Turn by turn, and back again, so that the server's drift falls on both; after a warm-up that is not counted.

    Each turn has new texts of the same kind, an empty prefix cache, and what the server itself counted of it beside it.
    """
    requests = max(8 if launch.name.endswith("27b") else 16, 8 * streams)
    warm = load(launch, streams, prompts(requests, seed=1), out / "warm.jsonl")
    prompt = round(warm["metrics"]["prompt_tokens"])
    turns: list[dict[str, Any]] = []
    order = ["gpuctl", "bench_serving", "bench_serving", "gpuctl"] * rounds
    for number, who in enumerate(order[: 2 * rounds]):
        texts = prompts(requests, seed=1000 * streams + number)
        forget(launch.base_url)
        time.sleep(0.2)
        before = sums(launch.base_url)
        if who == "gpuctl":
            run = load(launch, streams, texts, out / f"raw-{launch.name}-{streams}-{number}.jsonl")
            said = {name: run["metrics"].get(name) for name in METRICS}
            more = {"chunks": run["chunks"], "lag_ms": run["generator"].get("lag_ms"),
                    "time_per_token_ms": run["metrics"].get("time_per_token_ms")}  # fmt: skip
        else:
            run = serving.run(launch.server.port or 0, str(launch.model), streams, texts)
            said = {name: run.get(other) for name, other in METRICS.items()}
            more = {"chunks": {"gap_ms": _mean(run), "chunks": sum(len(itl) for itl in run.get("itls", ()))},
                    "tokens": {k: run.get(k) for k in ("total_output_tokens", "total_output_tokens_retokenized", "completed")}}  # fmt: skip
        time.sleep(0.3)  # the last request is counted a moment after it ended
        turns.append({"who": who, **said, "server": by_the_server(before, sums(launch.base_url)), **more})
    row: dict[str, Any] = {
        "server": launch.name, "streams": streams, "requests": requests, "prompt_tokens": prompt, "tokens": TOKENS, "turns": turns,
    }  # fmt: skip
    for name in METRICS:
        ours, theirs = (median(_of(turns, who, name)) for who in ("gpuctl", "bench_serving"))
        row[name] = {"gpuctl": round(ours, 4), "bench_serving": round(theirs, 4), "differ": round(theirs / ours - 1, 4)}
        if name in HISTOGRAMS:
            row[name]["more than the server says"] = {
                who: round(median(turn[name] - turn["server"][name] for turn in turns if turn["who"] == who), 4)
                for who in ("gpuctl", "bench_serving")
            }
    return row


def _of(turns: Sequence[Mapping[str, Any]], who: str, name: str) -> list[float]:
    return [turn[name] for turn in turns if turn["who"] == who]


def _mean(run: Mapping[str, Any]) -> float | None:
    gaps = [gap for itl in run.get("itls", ()) for gap in itl]
    return round(1000 * fmean(gaps), 4) if gaps else None


def say(row: Mapping[str, Any]) -> str:
    lines = [
        f"{row['server']}, {row['streams']} streams, {row['requests']} requests of {row['prompt_tokens']} + {row['tokens']} tokens:"
    ]
    for name in METRICS:
        one = row[name]
        beyond = one.get("more than the server says")
        lines.append(
            f"  {name:<13} gpuctl {one['gpuctl']:10.3f}  bench_serving {one['bench_serving']:10.3f}  {one['differ']:+7.2%}"
            + (
                f"   beyond the server's own: {beyond['gpuctl']:+.3f} and {beyond['bench_serving']:+.3f}"
                if beyond
                else ""
            )
        )
    lines += [
        f"    {turn['who']:<13} {turn['ttft_ms']:8.2f} {turn['tpot_ms']:7.3f} {turn['e2e_ms']:9.2f} {turn['output_tok_s']:9.1f}"
        f"; the server {turn['server']}"
        for turn in row["turns"]
    ]
    return "\n".join(lines)


def stop(processes: Sequence[subprocess.Popen[Any]]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--servers", nargs="*", default=["beside-27b", "beside-tiny", "beside-27b-ngram"])
    parser.add_argument("--streams", nargs="*", type=int, default=[1, 16])
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
            turns[launch.name].touch()  # each has the GPU and the processors to itself
            if not ready(launch, process):
                print(f"{launch.name} did not come up: see its log", flush=True)
                failed = True
                stop([process])
                continue
            print(f"{launch.name} is ready, {time.monotonic() - began:.0f} s after the start", flush=True)
            for streams in job.streams:
                if process.poll() is None:
                    row = compare(launch, streams, serving, job.out, job.rounds)
                    rows.append(row)
                    print(say(row), flush=True)
                    (job.out / "beside.json").write_text(json.dumps(rows, indent=1))
            stop([process])
    finally:
        serving.process.kill()
        stop([process for _, process in servers])
    print(f"{len(rows)} comparisons in {time.monotonic() - began:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
