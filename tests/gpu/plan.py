"""What `gpuctl plan` says a server will hold, said before it is started, beside what the server then says.

    python -m tests.gpu.plan OUT [--gpu N]          needs SGLang at /opt/sglang/bin/python3 and models at /models

The predictions lie in OUT/predicted.json before the first server touches the GPU. Configurations are none of those of
tests/ground_truth/sglang; some must fail. Exit status 1 when one came out otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpuctl import diagnosis
from gpuctl.engines.sglang.memory import plan
from gpuctl.engines.sglang.pools import FILES
from gpuctl.facts.model_config import read
from gpuctl.memory import Gpu, Question, Verdict

MODELS = Path(os.environ.get("MODELS", "/models"))
PYTHON = "/opt/sglang/bin/python3"
SITE = Path(os.environ.get("SGLANG_SITE", "/opt/site"))
H200 = 143771 << 20  # bytes, as the driver says
FLAGS = ("--load-format dummy --attention-backend triton --sampling-backend pytorch --grammar-backend none "
         "--enable-metrics --random-seed 42 --host 127.0.0.1").split()  # fmt: skip
HYBRID = ("--mm-attention-backend", "triton_attn", "--disable-prefill-cuda-graph")
NGRAM = "--speculative-algorithm NGRAM --speculative-num-draft-tokens"

# name -> (model, flags)
CASES: Mapping[str, tuple[str, str]] = {
    "tiny-page-64": ("qwen3-tiny", "--mem-fraction-static 0.6 --page-size 64 --cuda-graph-max-bs-decode 8"),
    "tiny-fp8-kv": ("qwen3-tiny", "--mem-fraction-static 0.5 --kv-cache-dtype fp8_e5m2 --cuda-graph-max-bs-decode 8"),
    "tiny-16k-mrr-64": (
        "qwen3-tiny",
        "--context-length 16384 --max-running-requests 64 --chunked-prefill-size 4096 --cuda-graph-max-bs-decode 64",
    ),
    "tiny-tokens-100000": ("qwen3-tiny", "--max-total-tokens 100000 --page-size 16 --cuda-graph-max-bs-decode 8"),
    "tiny-ngram-12-mrr-24": (
        "qwen3-tiny",
        f"{NGRAM} 12 --max-running-requests 24 --mem-fraction-static 0.4 --cuda-graph-max-bs-decode 8",
    ),
    "tiny-eagle3-tree": (
        "qwen3-tiny",
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path /models/eagle3-tiny --speculative-num-steps 3 "
        "--speculative-eagle-topk 4 --speculative-num-draft-tokens 8 --max-running-requests 8 --mem-fraction-static 0.5 "
        "--cuda-graph-max-bs-decode 8",
    ),
    "tiny-dflash-mrr-8": (
        "qwen3-tiny",
        "--speculative-algorithm DFLASH --speculative-draft-model-path /models/dflash-tiny --max-running-requests 8 "
        "--mem-fraction-static 0.3 --cuda-graph-max-bs-decode 8",
    ),
    "hybrid-tiny-ratio-0.3": (
        "hybrid-tiny", "--mamba-full-memory-ratio 0.3 --mem-fraction-static 0.4 --cuda-graph-max-bs-decode 8"
    ),
    "hybrid-tiny-40-states": (
        "hybrid-tiny", "--max-mamba-cache-size 40 --mem-fraction-static 0.4 --cuda-graph-max-bs-decode 8"
    ),
    "hybrid-tiny-no-radix-mrr-24": (
        "hybrid-tiny",
        "--disable-radix-cache --max-running-requests 24 --mem-fraction-static 0.3 --cuda-graph-max-bs-decode 8",
    ),
    "hybrid-tiny-ngram-no-radix": (
        "hybrid-tiny",
        f"--disable-radix-cache {NGRAM} 4 --max-running-requests 12 --mem-fraction-static 0.3 --cuda-graph-max-bs-decode 8",
    ),
    "27b-ngram-mrr-8": (
        "hybrid-27b",
        f"{NGRAM} 8 --max-running-requests 8 --context-length 32768 --cuda-graph-max-bs-decode 8",
    ),
    "27b-fp8-kv-64k": (
        "hybrid-27b",
        "--kv-cache-dtype fp8_e5m2 --max-running-requests 16 --context-length 65536 --mem-fraction-static 0.7 "
        "--cuda-graph-max-bs-decode 16",
    ),
    # these must not start
    "27b-fraction-0.36": ("hybrid-27b", "--mem-fraction-static 0.36 --context-length 32768 --cuda-graph-max-bs-decode 8"),
    "27b-ngram-no-radix-mrr-60": (
        "hybrid-27b",
        f"--disable-radix-cache {NGRAM} 16 --max-running-requests 60 --context-length 32768 --cuda-graph-max-bs-decode 8",
    ),
    "tiny-fraction-0.002": ("qwen3-tiny", "--mem-fraction-static 0.002 --cuda-graph-max-bs-decode 8"),
    "tiny-context-40000": ("qwen3-tiny", "--context-length 40000"),
    "tiny-tokens-differ": (
        "qwen3-tiny",
        "--speculative-algorithm DFLASH --speculative-draft-model-path /models/dflash-tiny "
        "--speculative-num-draft-tokens 8 --speculative-dflash-block-size 4",
    ),
}  # fmt: skip


def argv(name: str, port: int) -> list[str]:
    model, flags = CASES[name]
    words = ["--model-path", f"/models/{model}", "--port", str(port), *FLAGS, *flags.split()]
    return [*words, *HYBRID] if model.startswith("hybrid") else words


def config(model: str) -> Any:
    return json.loads((MODELS / model / "config.json").read_text())


def predict(name: str, installed: Mapping[str, str], config: Callable[[str], Any] = config) -> dict[str, Any]:
    """`config` gives a model's config.json."""
    model, flags = CASES[name]
    draft = re.search(r"draft-model-path /models/(\S+)", flags)

    def facts(which: str) -> Any:
        return read(config(which))

    found = plan(
        Question(
            ["python3", "-m", "sglang.launch_server", *argv(name, 30000)],
            facts(model),
            Gpu(H200),
            draft=facts(draft[1]) if draft else None,
            gpus=1,
            installed=installed,
            version="0.5.16",
        )
    )
    refused = next((finding for finding in found.findings if finding.severity.value == "critical"), None)
    starts = found.verdict is not Verdict.IMPOSSIBLE and refused is None
    return {
        "case": name, "starts": starts, "kv_tokens": found.kv_tokens, "slots": found.state_slots, "requests": found.requests,
        "cause": "" if starts else (refused.id if refused else found.cause), "summary": refused.summary if refused else found.summary,
        "verdict": found.verdict.value,
    }  # fmt: skip


def installed() -> dict[str, str]:
    return {file.name: file.read_text() for name in FILES for file in SITE.glob(f"sglang/srt/**/{name}")}


def start(name: str, port: int, out: Path, gpu: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "HELD": str(out / f"{name}.turn"), "CUDA_VISIBLE_DEVICES": gpu, "HF_HUB_OFFLINE": "1"}
    with (out / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [PYTHON, str(Path(__file__).with_name("held.py")), *argv(name, port)],
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env, start_new_session=True,
        )  # fmt: skip


def await_outcome(process: subprocess.Popen[bytes], log: Path, patience_s: float) -> str:
    """What the log has when the server's pools are known, or it has ended."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        text = log.read_text(errors="replace")
        if "max_total_num_tokens=" in text and "max_running_requests=" in text.split("max_total_num_tokens=")[-1]:
            return text
        if process.poll() is not None:
            return log.read_text(errors="replace")
        time.sleep(0.1)
    return log.read_text(errors="replace")


def end(process: subprocess.Popen[bytes]) -> int | None:
    ended = process.poll()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    return ended


def used_mib(gpu: str) -> int:
    asked = ["nvidia-smi", "-i", gpu, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)


def actual(name: str, text: str, exit_status: int | None) -> dict[str, Any]:
    found = diagnosis.diagnose([text.encode()], engine="sglang", exit_status=exit_status)
    known = found.capacity
    cause = found.causes[0] if found.causes else None
    return {
        "starts": "max_total_num_tokens=" in text, "kv_tokens": known.kv_tokens if known else None,
        "slots": known.state_slots if known else None, "requests": known.max_running_requests if known else None,
        "cause": cause.id if cause else "", "summary": cause.summary if cause else "", "exit": exit_status,
        "before_gib": _gib(known.free_before_bytes) if known else None,
        "after_gib": _gib(known.free_after_weights_bytes) if known else None,
    }  # fmt: skip


def _gib(count: int | None) -> float | None:
    return None if count is None else round(count / (1 << 30), 2)


def agrees(said: Mapping[str, Any], seen: Mapping[str, Any]) -> bool:
    """The same outcome; tokens within 0.5 %, slots and requests within one; the same cause of a failure."""
    if said["starts"] != seen["starts"]:
        return False
    if not said["starts"]:
        return bool(said["cause"] == seen["cause"])
    near = abs(said["kv_tokens"] - seen["kv_tokens"]) <= 0.005 * seen["kv_tokens"]
    slots = seen["slots"] is None or abs((said["slots"] or 0) - seen["slots"]) <= max(1, 0.005 * seen["slots"])
    return near and slots and abs(said["requests"] - seen["requests"]) <= max(1, 0.005 * seen["requests"])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--within", type=float, default=240, help="seconds for all of it")
    parser.add_argument("--gate", type=Path, help="the GPU is not touched before this file is there")
    job = parser.parse_args()
    job.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    known = installed()
    said = {name: predict(name, known) for name in job.only}
    (job.out / "predicted.json").write_text(json.dumps(said, indent=1))
    print(f"predicted {len(said)}, rules from {sorted(known) or 'the version'}", flush=True)
    servers = {name: start(name, 31000 + 10 * n, job.out, job.gpu) for n, name in enumerate(job.only)}
    rows, wrong = [], 0
    while job.gate is not None and not job.gate.exists():
        time.sleep(0.1)
    began = time.monotonic()
    try:
        for name, process in servers.items():
            (job.out / f"{name}.turn").touch()
            left = job.within - (time.monotonic() - began)
            if left < 5:
                print(f"not run for want of time: {name}", flush=True)
                continue
            text = await_outcome(process, job.out / f"{name}.log", min(90, left))
            seen = actual(name, text, end(process))
            for _ in range(100):
                if used_mib(job.gpu) < 200:
                    break
                time.sleep(0.1)
            right = agrees(said[name], seen)
            wrong += not right
            rows.append({"case": name, "predicted": said[name], "actual": seen, "right": right})
            print(
                f"{'ok   ' if right else 'WRONG'} {name:<30} predicted {_short(said[name])}  actual {_short(seen)}",
                flush=True,
            )
    finally:
        for process in servers.values():
            if process.poll() is None:
                end(process)
    (job.out / "plan.json").write_text(json.dumps(rows, indent=1))
    print(f"{len(rows)} configurations, {wrong} otherwise than predicted, {time.monotonic() - began:.0f} s")
    return int(bool(wrong) or len(rows) < len(said))


def _short(of: Mapping[str, Any]) -> str:
    if not of["starts"]:
        return f"fails: {of['cause'] or of['summary']}"
    return f"{of['kv_tokens']} tokens, {of['slots']} slots, {of['requests']} requests"


if __name__ == "__main__":
    sys.exit(main())
