"""Logs of real servers (tests/ground_truth): each must get its true reason, also where the server's own is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuctl.diagnosis import Diagnosis, diagnose

ROOT = Path(__file__).parent / "ground_truth"

# case: (the cause, what its words must hold)
SGLANG = {
    # SGLang says that the weights leave nothing; they fit with 16.46 GiB to spare, 8 x 16 verify states do not.
    "fail-27b-96gb-noradix-mrr8": ("verify-buffers-exceed-budget", "they fit, with 16.46 GiB left"),
    # SGLang says that the state cache is too small; the weights alone exceed the budget.
    "fail-27b-fraction-too-small": ("weights-exceed-budget", "must be above 0.368"),
    "fail-hybrid-fraction-tiny": ("weights-exceed-budget", "must be above 0.004"),
    "fail-hybrid-mamba-memory": ("weights-exceed-budget", "must be above 0.004"),
    "fail-fraction-tiny": ("weights-exceed-budget", "must be above 0.003"),
    "fail-27b-runtime-oom": ("gpu-oom-serving", "Only 532.5 MiB was left"),
    "fail-bad-choice": ("bad-choice", "flash3"),
    "fail-context-too-long": ("context-exceeds-model", "--context-length to 32768"),
    "fail-dflash-blocksize": ("speculative-tokens-differ", "16 and --speculative-dflash-block-size 8"),
    "fail-dflash-no-draft": ("speculative-draft-missing", "DFLASH"),
    "fail-eagle3-deepgemm-absent": ("module-missing", "deep_gemm"),
    "fail-fa3-kernel-absent": ("fa3-missing", "--attention-backend triton"),
    "fail-jit-build-sources-absent": ("jit-sources-missing", "norm.cu"),
    "fail-kvpool-oom": ("pools-exceed-gpu", "8.67 GiB wanted, 8.28 GiB free"),
    "fail-missing-weights": ("weights-missing", "/models/qwen3-tiny"),
    # The same words of SGLang, two reasons.
    "fail-mrr-zero-flag": ("max-running-requests-zero", "--max-running-requests is 0"),
    "fail-mrr-zero-tokens": ("kv-cache-below-one-request", "--max-total-tokens 1"),
    "fail-ngram-page": ("speculative-page-size", "--page-size 16"),
    "fail-no-model": ("model-missing", "/models/no-such-model"),
    "fail-port-in-use": ("port-in-use", "30340"),
    # Ended by SIGKILL from outside; not called the kernel's OOM killer, which nothing shows.
    "fail-scheduler-killed": ("scheduler-killed", "printed no exception"),
    "fail-spec-unknown": ("speculative-unknown", "DDTREE"),
    "fail-tp2-one-gpu": ("gpu-index", "does not exist"),
    "fail-unknown-flag": ("unknown-flag", "--max-running-request-count"),
}  # fmt: skip

# case: what it can hold: KV tokens, recurrent-state slots, requests at once
CAPACITY = {
    "ok-27b-96gb-mrr8": (125539, 12, 2),
    "ok-27b-96gb-noradix-mrr4": (82585, 4, 4),
    "ok-27b-default": (570742, 217, 43),
    "ok-27b-dflash-mrr4": (206465, 22, 4),
    "ok-dense-default": (4106767, None, 4096),
    "ok-dense-dflash": (2542541, None, 16),
    "ok-dense-eagle3": (2824587, None, 16),
    "ok-dense-maxtokens": (4096, None, 2048),
    "ok-dense-ngram": (3180864, None, 16),
    "ok-dense-nograph": (2267683, None, 64),
    "ok-hybrid-default": (8677722, 4968, 993),
    "ok-hybrid-ngram": (7200052, 1048, 16),
}


def diagnosed(case: str) -> Diagnosis:
    folder = ROOT / "sglang" / case
    ended = json.loads((folder / "argv.json").read_text())
    status = ended["exit_code"] if ended["exit_code"] is not None else ended.get("exit_code_after_stop")
    with (folder / "server.log").open("rb") as log:
        return diagnose(log, exit_status=status)


@pytest.mark.parametrize("case", SGLANG)
def test_a_server_that_failed_gets_its_true_reason(case: str) -> None:
    found = diagnosed(case)
    id, says = SGLANG[case]
    first = found.causes[0]
    assert (first.id, found.verdict, found.engine) == (id, "failed", "sglang")
    assert says in f"{first.summary} {first.advice}"


@pytest.mark.parametrize("case", CAPACITY)
def test_a_server_that_served_has_no_cause_and_its_capacity_is_read(case: str) -> None:
    found = diagnosed(case)
    assert found.causes == ()
    assert found.ready
    held = found.capacity
    assert (held.kv_tokens, held.state_slots, held.max_running_requests) == CAPACITY[case]


def test_what_a_real_log_says_of_memory_is_read_in_bytes() -> None:
    held = diagnosed("ok-27b-96gb-mrr8").capacity
    gib = 1 << 30
    assert held.free_before_bytes == pytest.approx(94.67 * gib)
    assert held.weights_bytes == pytest.approx(51.05 * gib)
    assert held.draft_weights_bytes == pytest.approx(3.38 * gib)
    assert held.free_after_weights_bytes == pytest.approx(40.13 * gib)
    assert held.state_bytes == pytest.approx(1.87 * gib)
    assert held.verify_bytes == pytest.approx(6.80 * gib)
    assert held.kv_bytes == pytest.approx(7.66 * gib)
    assert held.free_when_ready_bytes == pytest.approx(21.00 * gib)
    assert (held.requested_running_requests, held.context_tokens) == (8, 32768)


def test_fewer_requests_than_asked_is_a_warning_and_no_cause() -> None:
    assert [w.id for w in diagnosed("ok-27b-96gb-mrr8").warnings] == ["requests-capped"]


def test_every_case_is_tested() -> None:
    cases = {path.parent.name for path in (ROOT / "sglang").glob("*/server.log")}
    assert cases == {*SGLANG, *CAPACITY}


@pytest.mark.parametrize(
    ("log", "exit_status", "cause", "warning", "verdict"),
    [
        ("serves", 0, None, None, "stopped"),
        ("architecture-unknown", 1, "architecture-unknown", None, "failed"),
        ("not-a-gguf", 1, "weights-damaged", None, "failed"),
        ("missing-file", 1, "model-missing", None, "failed"),
        ("port-in-use", 1, "port-in-use", None, "failed"),
        ("draft-vocabulary", 0, None, "draft-vocabulary", "stopped"),
    ],
)
def test_llama_cpp_says_it_in_its_own_words(
    log: str, exit_status: int, cause: str | None, warning: str | None, verdict: str
) -> None:
    found = diagnose([(ROOT / "llamacpp" / f"{log}.log").read_bytes()], exit_status=exit_status)
    assert (found.engine, found.verdict) == ("llamacpp", verdict)
    assert [f.id for f in found.causes][:1] == ([cause] if cause else [])
    assert [f.id for f in found.warnings] == ([warning] if warning else [])
