"""How SGLang divides what the weights leave: recurrent states, buffers for verifying drafts, KV cache. To the token.

Three generations of it exist, told apart by the text of the installed source, since forks lie about their version:

A (to 0.5.12)      the verify buffers are reserved for the requests *asked for*, then the rest is divided
B (0.5.13-0.5.16)  states and verify buffers are solved together
C (from 0.5.18)    as B, with one padding slot more everywhere

Sources: srt/model_executor/model_runner_kv_cache_mixin.py (to 0.5.15), srt/mem_cache/kv_cache_configurator.py (since).
SGLang computes in GiB as floating-point numbers and truncates to bytes at the end; so does this, to come out the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Rules:
    """What one version of SGLang does."""

    regime: str  # A | B | C
    basis: str  # how it was found out
    counts_draft: bool  # the drafter's weights are loaded, and so counted, before the pools are sized
    refuses_weights: bool  # says so when the weights leave nothing, instead of going on with negative numbers
    halves_tokens: bool  # the requests asked for are bounded by tokens // 2, not by an estimate
    draft_kv: bool  # the KV cache of EAGLE's draft layers is counted (DFLASH's always was)
    reserves_images: bool = False  # memory for images is taken out of the budget
    auto_extra_buffer: bool = True  # strategy "auto" means extra_buffer where the schedule overlaps


_A = Rules("A", "", False, False, False, False, auto_extra_buffer=False)
_B13 = Rules("B", "", False, False, False, False, auto_extra_buffer=False)
_B = Rules("B", "", True, True, True, True)
_C = Rules("C", "", True, True, True, True, reserves_images=True)
FILES = ("model_runner_kv_cache_mixin.py", "kv_cache_configurator.py")


def rules_of(texts: Iterable[str]) -> Rules | None:
    """The rules of an installed SGLang from the text of the two files that may hold them; None if they do not."""
    text = "\n".join(texts)
    if "mamba_full_memory_ratio" not in text and "_profile_available_bytes" not in text:
        return None
    joint = re.search(r"1\s*\+\s*D\s*/\s*ratio", text) is not None
    padded = re.search(r"per_req\s*\*\s*\(1\s*\+\s*D\)", text) is not None
    regime = "C" if padded else "B" if joint else "A"
    counted = "draft weights are now counted" in text
    return Rules(
        regime,
        "read from the installed source",
        counts_draft=counted,
        refuses_weights="leave no GPU memory for the KV cache" in text,
        halves_tokens=re.search(r"requested_per_worker\s*,\s*token_capacity\s*//\s*2", text) is not None,
        draft_kv=counted,
        reserves_images="mm_runtime_reservation_gb" in text,
        auto_extra_buffer=counted,
    )


def rules_of_version(version: str) -> Rules:
    """The rules that a release has by its number: a fallback, wrong for forks that keep the number."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    number = tuple(int(part or 0) for part in found.groups()) if found else None
    if number is None:
        rules, basis = _C, "the version is not known: rules of the newest releases"
    else:
        basis = f"by the version {version}, which a fork may keep"
        rules = _A if number < (0, 5, 13) else _B13 if number < (0, 5, 14) else _B if number < (0, 5, 17) else _C
    return Rules(**{**rules.__dict__, "basis": basis})


@dataclass(frozen=True)
class Inputs:
    """What the division depends on. Sizes are of one GPU."""

    slot_bytes: int = 0  # of one recurrent state; 0: the model has none
    cell_bytes: int = 1  # of KV cache for one token, the drafter's included
    drafted: int = 0  # D: tokens verified a step; 0: no speculation
    asked: int | None = None  # --max-running-requests, of one data-parallel worker
    share: float = 0.9  # --mamba-full-memory-ratio
    ratio: int = 1  # state slots a running request takes
    radix: bool = True
    slots_given: int | None = None  # --max-mamba-cache-size
    page: int = 1
    tokens_given: int | None = None  # --max-total-tokens
    context: int = 1
    replays: bool = False  # --enable-linear-replayssm-spec: no buffers for verifying (C)


@dataclass(frozen=True)
class Pools:
    """What comes out. `error`: the id of what SGLang refuses with, "" if it goes on."""

    rest_bytes: float  # what the weights left of the budget
    slots: int | None
    verify_bytes: float  # reserved in the budget for verifying
    state_bytes: float  # reserved in the budget for states
    kv_bytes: int
    tokens: int
    requests: int
    error: str = ""
    message: str = ""


def budget_gib(before: float, after: float, fraction: float, images: float = 0.0) -> float:
    """What is left for pools, in GiB, from free memory before loading and after all weights."""
    return after - before * (1 - fraction) - images


def divide(rules: Rules, rest: float, given: Inputs, *, before: float = 0.0, after: float = 0.0,
           fraction: float = 0.0) -> Pools:  # fmt: skip
    """Divides `rest` GiB as SGLang does. The other three only fill in its messages."""
    left, slots, verify, states = rest, None, 0.0, 0.0
    if given.slot_bytes:
        left, slots, verify, states = _states(rules, rest, given)
        if rules.regime != "A" and slots <= 0:
            return Pools(
                rest * GIB, slots, verify * GIB, states * GIB, 0, 0, 0, "state-cache-no-memory",
                "Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed "
                f"max_mamba_cache_size={slots} (total_rest_memory={left:.2f} GB, "
                f"mamba_cache_per_req={given.slot_bytes / (1 << 20):.2f} MB).",
            )  # fmt: skip
        left -= states
    if rules.refuses_weights and left <= 0:
        least = 1 - after / before if before else 0.0
        return Pools(
            rest * GIB, slots, verify * GIB, states * GIB, 0, 0, 0, "weights-exceed-budget",
            f"Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static={fraction:g}. Raise "
            f"--mem-fraction-static above {math.ceil(least * 1000) / 1000:.3f}",
        )  # fmt: skip
    kv = int(left * GIB)
    tokens = kv // given.cell_bytes // given.page * given.page
    if given.tokens_given is not None:
        tokens = min(tokens, given.tokens_given) // given.page * given.page
    if tokens <= 0:
        return Pools(
            rest * GIB, slots, verify * GIB, states * GIB, kv, tokens, 0, "weights-exceed-budget",
            "Not enough memory. Please try to increase --mem-fraction-static.",
        )  # fmt: skip
    return _requests(rules, given, Pools(rest * GIB, slots, verify * GIB, states * GIB, kv, tokens, 0))


def _states(rules: Rules, rest: float, given: Inputs) -> tuple[float, int, float, float]:
    """(rest without the verify buffers in GiB, slots, verify buffers in GiB, states in GiB)."""
    per, drafted, ratio = given.slot_bytes, given.drafted, given.ratio
    asked = given.asked or 0
    padding = 1 if rules.regime == "C" else 0
    verifies = bool(drafted) and not (given.replays and rules.regime == "C")
    verify = 0.0
    if rules.regime == "A" and drafted:
        verify = per * asked * drafted / GIB
        rest -= verify
    budget = rest * given.share / (1 + given.share) * GIB
    if given.slots_given is not None:
        slots = given.slots_given
        counted = min(asked, slots // ratio)
    elif not given.radix and given.asked is not None:
        slots = counted = max(1, asked) if padding else asked
    elif verifies and rules.regime != "A":
        slots = int((budget - per * padding * (1 + drafted)) // (per * (1 + drafted / ratio)))
        counted = min(max(1, asked) if padding else asked, slots // ratio)
    else:
        slots = int((budget - per * padding) // per)
        counted = 0
    if verifies and rules.regime != "A":
        verify = per * (counted + padding) * drafted / GIB
        rest -= verify
    return rest, slots, verify, (slots + padding) * per / GIB


def _requests(rules: Rules, given: Inputs, pools: Pools) -> Pools:
    tokens, slots = pools.tokens, pools.slots
    estimate = max(min(int(tokens / given.context * 512), 4096), 2048)
    if given.asked is None:
        requests = min(estimate, tokens // 2)
    else:
        requests = min(given.asked, tokens // 2 if rules.halves_tokens else estimate)
    error = message = ""
    if given.slot_bytes and slots is not None:
        by_states = slots // given.ratio
        requests = min(requests, by_states)
        if requests <= 0:
            error = "state-slots-starved"
            message = (
                "Hybrid (mamba/linear-attention) state cache is too small to serve any requests. "
                f"max_mamba_cache_size={slots}, mamba_ratio={given.ratio}, resulting max_num_reqs={requests}."
                if rules.regime != "A"
                else "max_running_request is zero"
            )
    if requests <= 0 and not error:
        zero = given.asked == 0
        error = "max-running-requests-zero" if zero else "kv-cache-below-one-request"
        message = "max_running_request is zero"
    return Pools(
        pools.rest_bytes, slots, pools.verify_bytes, pools.state_bytes, pools.kv_bytes, tokens, requests, error, message
    )
