"""Makes run folders as `gpuctl bench` leaves them: a small campaign in every state, a strange one, a huge one.

The numbers have the shape of the example campaign and are drawn from a seeded generator, so that the same call
gives the same bytes.
"""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpuctl.records import CellId, Failure, Record, State, estimate

START = datetime(2026, 11, 30, 4, 0, tzinfo=UTC)
UNITS = {
    "decode_tok_s": "tok/s",
    "output_tok_s": "tok/s",
    "prefill_tok_s": "tok/s",
    "ttft_ms": "ms",
    "time_per_token_ms": "ms",
    "tpot_ms": "ms",
    "e2e_ms": "ms",
    "acceptance_length": "tokens",
    "prompt_tokens": "tokens",
    "completion_tokens": "tokens",
    "load_kept": "",
    "gpu_power_w": "W",
    "gpu_memory_bytes": "bytes",
}


def iso(t):
    return t.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Folder:
    """A run folder being written: `cell` and `event` move a clock of its own."""

    def __init__(self, path, name="example", seed=1):
        self.path = Path(path)
        self.now = START
        self.random = random.Random(seed)
        self.campaign = {"schema": "gpuctl.campaign/1", "name": name, "phases": {}, "servers": {}}
        self.fingerprint = {
            "model": "5f1c0e77a9b04d1e",
            "engine": {"name": "sglang", "sglang": "0.5.16", "commit": "3c1f2ab"},
            "machine": {
                "driver": "595.71.05",
                "cuda": "13.2",
                "gpus": {"name": "NVIDIA RTX PRO 6000 Blackwell", "count": 8, "power_limit_w": 600},
                "tuning": {"max_read_request_bytes": 4096, "numa_balancing": False},
            },
            "environment": {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", "HF_TOKEN": "hf_secret"},
            "load_agent": "9f2c11d04ab7",
        }
        self.boot = {"boot_id": "6b1f6c0e-5f1d-4b39-9a53-0f2f3e6b1c55", "pid1_start": 183745}
        self.events = []

    def phase(self, name, title, servers, baseline=None):
        self.campaign["phases"][name] = {"title": title, "servers": list(servers), "baseline": baseline}
        for server, argv in servers.items():
            self.campaign["servers"][server] = {"engine": "sglang", "argv": argv, "model": "Qwen3.6-27B"}

    def event(self, event, after=1.0, **more):
        self.now += timedelta(seconds=after)
        self.events.append({"t": iso(self.now), "event": event, **more})

    def record(
        self,
        phase,
        server,
        workload,
        point,
        parameters,
        means=None,
        *,
        state=State.OK,
        reps=3,
        failure=None,
        noise=0.004,
        notes=(),
        foreign_fingerprint=None,
    ):
        start = self.now
        self.now += timedelta(seconds=20)
        values = [
            {name: mean * (1 + self.random.gauss(0, noise)) for name, mean in (means or {}).items()}
            for _ in range(reps)
        ]
        fingerprint = {
            **self.fingerprint,
            "argv": self.campaign["servers"].get(server, {}).get("argv", []),
            "workload": {"name": workload, **parameters},
            **(foreign_fingerprint or {}),
        }
        return Record(
            cell=CellId(phase, server, workload, point),
            state=state,
            started=iso(start),
            ended=iso(self.now),
            parameters=parameters,
            fingerprint=fingerprint,
            fingerprint_id=f"{hash_of(fingerprint):012x}",
            boot=self.boot,
            generator={"version": "1", "lag_ms": {"p50": 0.02, "p99": 0.18, "max": 0.4}, "load_kept": 1.0},
            metrics={name: estimate([v[name] for v in values], UNITS.get(name, "")) for name in (means or {})},
            reps=tuple({"n": n, "metrics": v, "requests": 1, "failed": 0} for n, v in enumerate(values)),
            failure=failure,
            notes=notes,
        )

    def cell(self, *args, **kwargs):
        record = self.record(*args, **kwargs)
        self.save(record)
        self.event("cell_done", 0.1, cell=str(record.cell), state=record.state.value)
        return record

    def save(self, record, file=None):
        file = (
            file
            or self.path
            / "cells"
            / record.cell.phase
            / record.cell.server
            / record.cell.workload
            / f"{record.cell.point}.json"
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record.as_json(), indent=1))

    def close(self):
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "campaign.json").write_text(json.dumps(self.campaign, indent=1))
        (self.path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in self.events))
        return self.path


def hash_of(value):
    import hashlib

    return int(hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12], 16)


PROMPTS = {"fib": 1.0, "qsort": 0.69, "arith": 0.77, "json": 0.84, "haiku": 0.52}


def argv(tp, *more):
    return [
        "python",
        "-m",
        "sglang.launch_server",
        "--model-path",
        "/dev/shm/qwen3.6-27b",
        "--tp-size",
        str(tp),
        "--attention-backend",
        "triton",
        "--max-running-requests",
        "8",
        *more,
    ]


def dflash(*more):
    return ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "/models/qwen3.6-27b-dflash", *more]


def example(path, *, faster=1.0, driver=None, finished=True, seed=1):
    """The example campaign's shape: three phases, a reboot in the middle, a server that cannot run, every state."""
    f = Folder(path, "Qwen3.6-27B on kpro6", seed)
    if driver:
        f.fingerprint["machine"]["driver"] = driver
    tree = {
        f"ddtree-b{n}": ("--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", str(n))
        for n in (12, 15, 16, 32, 64)
    }
    f.campaign["command"] = ["gpuctl", "bench", "tp1", "tp4", "tp8", "-i", "inventory/kpro6", "-t", "ct200"]
    f.campaign["inventory"] = "inventory/kpro6"
    for tp in (1, 4, 8):
        servers = {f"tp{tp}-auto": argv(tp), f"tp{tp}-linear": argv(tp, *dflash())}
        for method, flags in tree.items():
            if tp == 1 or method == "ddtree-b15":
                servers[f"tp{tp}-{method}"] = argv(tp, *flags)
        title = {1: "TP1 — single GPU", 4: "TP4 — four GPUs of one node", 8: "TP8 — eight GPUs, two NUMA nodes"}[tp]
        f.phase(f"tp{tp}", title, servers, baseline=f"tp{tp}-auto")
    f.event("run_started", phases=["tp1", "tp4", "tp8"])
    base = {1: 26.4, 4: 71.0, 8: 58.0}
    best = {
        "linear": 140.6,
        "ddtree-b12": 0,
        "ddtree-b15": 143.4,
        "ddtree-b16": 141.9,
        "ddtree-b32": 118.2,
        "ddtree-b64": 87.5,
    }
    for tp in (1, 4, 8):
        phase = f"tp{tp}"
        for server in f.campaign["phases"][phase]["servers"]:
            method = server.removeprefix(f"{phase}-")
            f.event("server_started", 3, server=server)
            if method == "ddtree-b12":
                died(f, phase, server)
                continue
            f.event("server_ready", 62, server=server, seconds=62.0)
            ratio = best[method] / 26.4 if method in best else 1.0
            for length in (256, 1024, 2048):
                if length > 256 and method not in ("auto", "linear", "ddtree-b15"):
                    continue
                for prompt, share in PROMPTS.items():
                    speed = (
                        base[tp]
                        * (1 + (ratio - 1) * share)
                        * (1.0 if method == "auto" else faster)
                        * (1 - length / 60000)
                    )
                    means = decode_means(speed, length, ratio * share if method != "auto" else None)
                    unstable = (tp, method, length, prompt) == (4, "linear", 1024, "haiku")
                    f.cell(
                        phase,
                        server,
                        "decode",
                        f"{prompt}-{length}",
                        {"prompt": prompt, "max_tokens": length, "concurrency": 1},
                        means,
                        state=State.UNSTABLE if unstable else State.OK,
                        noise=0.08 if unstable else 0.004,
                    )
                    if (tp, server, prompt, length) == (4, "tp4-linear", "qsort", 256):
                        reboot(f)
            if tp > 1:
                concurrency(f, phase, server, base[tp], ratio, method)
            context(f, phase, server, base[tp], ratio, tp)
            if method in ("auto", "linear"):
                f.cell(
                    phase,
                    server,
                    "agentic",
                    "four-turns",
                    {"turns": 4, "concurrency": 1},
                    {"output_tok_s": base[tp] * ratio * 0.55, "ttft_ms": 410.0, "e2e_ms": 38000.0 / ratio},
                )
    if finished:
        f.event("run_finished", 1)
    return f.close()


def small(path, *, faster=1.0, seed=1, driver=None):
    """One phase of two servers: short prompts, a sweep of concurrency, one failure."""
    f = Folder(path, "small", seed)
    if driver:
        f.fingerprint["machine"]["driver"] = driver
    f.phase("tp1", "TP1 — single GPU", {"tp1-auto": argv(1), "tp1-linear": argv(1, *dflash())}, baseline="tp1-auto")
    command = ["gpuctl", "bench", "tp1", "-i", "inventory/kpro6", "-t", "ct200", "--only", "tp1-*"]
    f.event("run_started", phase="tp1", target="ct200", command=command)
    for server, speed in (("tp1-auto", 26.4), ("tp1-linear", 140.6 * faster)):
        f.event("server_started", 3, server=server)
        for prompt, share in (("fib", 1.0), ("qsort", 0.7)):
            means = decode_means(speed * share, 256, 5.3 * share if speed > 30 else None)
            parameters = {"prompt": prompt, "max_tokens": 256, "concurrency": 1}
            f.cell("tp1", server, "decode", f"{prompt}-256", parameters, means)
        concurrency(f, "tp1", server, 26.4, speed / 26.4, server.removeprefix("tp1-"))
    died(f, "tp1", "tp1-ddtree-b12")
    f.event("run_finished", 1)
    return f.close()


def decode_means(speed, length, acceptance):
    means = {
        "ttft_ms": 61.0,
        "time_per_token_ms": 1000 / speed,
        "tpot_ms": 1000 / speed,
        "e2e_ms": 61.0 + 1000 * (length - 1) / speed,
        "decode_tok_s": speed,
        "output_tok_s": length / (0.061 + (length - 1) / speed),
        "prompt_tokens": 38.0,
        "completion_tokens": float(length),
        "load_kept": 1.0,
        "gpu_power_w": 412.0,
        "gpu_memory_bytes": 91.0 * 2**30,
    }
    if acceptance is not None:
        means["acceptance_length"] = max(1.0, acceptance * 1.08)
    return means


def died(f, phase, server):
    f.event("server_died", 9, server=server, signal="SIGILL")
    failure = Failure(
        "server_died",
        "the scheduler ended with SIGILL (illegal instruction) before the first token",
        ("Scheduler hit an exception: CUDA error: an illegal instruction was encountered", "exit code: -4"),
        "use a budget of 15 or more: b8 and b12 have no valid kernel on SM120",
        -4,
        "SIGILL",
    )
    for prompt in PROMPTS:
        f.cell(
            phase,
            server,
            "decode",
            f"{prompt}-256",
            {"prompt": prompt, "max_tokens": 256, "concurrency": 1},
            state=State.FAILED,
            failure=failure,
        )


def reboot(f):
    f.event("machine_away", 4, box="ct200", why="no answer for 30 s")
    f.event("machine_back", 214, box="ct200", boot="new node boot_id")
    f.boot = {"boot_id": "0d7be1a9-42c2-4d13-8a14-6a5f0b0f7c31", "pid1_start": 2210}
    f.event("healed", 12, finding="lxc_device_rules", what="nvidia-uvm 509 -> 511 allowed, guest restarted")
    f.event("healed", 71, finding="model_missing", what="52 GB staged into /dev/shm")
    f.event("server_started", 2, server="tp4-linear")
    f.event("server_ready", 60, server="tp4-linear")


def concurrency(f, phase, server, base, ratio, method):
    for c in (1, 2, 4, 8, 16):
        limited = c == 16
        shown = min(c, 8)
        per_request = base * ratio * (1 - 0.055 * (shown - 1)) * (0.86 if method != "auto" and c > 4 else 1)
        f.cell(
            phase,
            server,
            "concurrency",
            f"c{c}",
            {"concurrency": c, "max_tokens": 256},
            {
                "output_tok_s": per_request * shown * 0.97,
                "decode_tok_s": per_request,
                "ttft_ms": 60 + 21.0 * c,
                "time_per_token_ms": 1000 / per_request,
                "gpu_power_w": 300 + 16.0 * shown,
                "load_kept": 1.0,
            },
            state=State.CAPACITY_LIMITED if limited else State.OK,
            notes=("ran 8 of 16 at once (max_running_requests 8)",) if limited else (),
        )


def context(f, phase, server, base, ratio, tp):
    for tokens in (3000, 30000, 100000):
        if tp == 1 and tokens == 100000:
            failure = Failure(
                "http_error",
                "HTTP 400: the input (100000 tokens) is longer than the context length (32768 tokens)",
                advice="give --context-length 131072, which needs --tp-size 4 on this card",
            )
            f.cell(
                phase,
                server,
                "context",
                "100000",
                {"context": 100000, "max_tokens": 256},
                state=State.FAILED,
                failure=failure,
            )
            continue
        prefill = 5200.0 * tp**0.8 / (1 + tokens / 120000)
        f.cell(
            phase,
            server,
            "context",
            str(tokens),
            {"context": tokens, "max_tokens": 256},
            {
                "ttft_ms": tokens / prefill * 1000,
                "prefill_tok_s": prefill,
                "decode_tok_s": base * ratio / (1 + tokens / 160000),
            },
        )


STRANGE = (
    '=HYPERLINK("http://x","y")',
    "a|b`c`*d*_e_",
    "<script>alert(1)</script>&amp;",
    "100%_{x}\\~^#$",
    "日本語 é \u202egnp.exe\u202c",
    "-1+1",
    "@cmd",
    "tab\there",
    "line\nbreak",
    "\u001b[31mred",
    "\ud800 alone",
    "{{7*7}} ${x}",
)


def strange(path):
    """Names that every format has to survive. Files have harmless names; the records inside do not."""
    f = Folder(path, "<b>strange</b> & \\undefined{x} \u202e")
    f.event("run_started")
    for i, name in enumerate(STRANGE):
        record = f.record(
            "p<h>&1%", name, "decode", "fib-256", {"prompt": name, "max_tokens": 256}, {"decode_tok_s": 20.0 + i}
        )
        f.save(record, f.path / "cells" / "p" / f"s{i}" / "decode" / "fib-256.json")
    failure = Failure("server_died", STRANGE[3], (STRANGE[1], STRANGE[2]), STRANGE[0])
    record = f.record("p<h>&1%", STRANGE[3], "strange_workload", "x", {}, state=State.FAILED, failure=failure)
    f.save(record, f.path / "cells" / "p" / "s3" / "strange_workload" / "x.json")
    f.campaign["command"] = ["gpuctl", "bench", "it's", "$(rm -rf /)"]
    return f.close()


def huge(path, cells=5000):
    """Many servers with many points."""
    f = Folder(path, "huge")
    f.event("run_started")
    count = 0
    for phase in ("tp1", "tp2", "tp4", "tp8"):
        names = {f"{phase}-{'auto' if i == 0 else f'method{i}'}": argv(1, "--x", str(i)) for i in range(25)}
        f.phase(phase, phase.upper(), names, baseline=f"{phase}-auto")
        for i, server in enumerate(names):
            for p in range(50):
                if count == cells:
                    break
                count += 1
                if p < 30:
                    length = (256, 1024, 2048)[p // 10]
                    f.cell(
                        phase,
                        server,
                        "decode",
                        f"prompt{p % 10}-{length}",
                        {"prompt": f"prompt{p % 10}", "max_tokens": length},
                        decode_means(26.0 + i, length, 2.0),
                    )
                elif p < 40:
                    f.cell(
                        phase,
                        server,
                        "concurrency",
                        f"c{2 ** (p - 30)}",
                        {"concurrency": 2 ** (p - 30)},
                        {
                            "output_tok_s": 26.0 * (p - 29) + i,
                            "decode_tok_s": 26.0,
                            "ttft_ms": 60.0,
                            "time_per_token_ms": 38.0,
                        },
                    )
                else:
                    tokens = 3000 * (p - 39)
                    f.cell(
                        phase,
                        server,
                        "context",
                        str(tokens),
                        {"context": tokens},
                        {"ttft_ms": tokens / 5.0, "prefill_tok_s": 5000.0, "decode_tok_s": 25.0},
                    )
    f.event("run_finished")
    return f.close()
