"""What was really short when SGLang refused to start for lack of memory: its own numbers, read again.

SGLang names the quantity that came out at or below zero, which is often not the one that is too large. The log holds
enough to tell: free memory before (`pre`) and after (`free`) the weights, the fraction f, and the flags. `rest = free -
pre * (1 - f)` is what the pools may take; a negative rest means the weights do not fit the budget, whatever the
message names. Arithmetic of the pools: docs/memory.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpuctl.finding import Certainty, Finding
from gpuctl.logs.rule import GIB, Hit, Story, shortage, size
from gpuctl.memory import at_once


@dataclass(frozen=True)
class Budget:
    """Memory of one GPU in bytes, as the log tells it."""

    before: int  # free before anything was loaded
    after: int  # free after all weights
    fraction: float  # --mem-fraction-static

    @property
    def rest(self) -> float:
        """What is left for pools: negative when the weights alone exceed the budget."""
        return self.after - self.before * (1 - self.fraction)

    @property
    def least(self) -> float:
        """The fraction at which nothing is left for pools, rounded up to 3 places."""
        return math.ceil(round((1 - self.after / self.before) * 1000, 6)) / 1000

    def __str__(self) -> str:
        return (
            f"{size(self.before)} free before loading, {size(self.after)} after the weights, --mem-fraction-static "
            f"{self.fraction:g} keeps {size(self.before * (1 - self.fraction))} unused: {size(self.rest)} for pools"
        )


def budget(story: Story) -> Budget | None:
    """The budget of a log that shows all three of its terms."""
    known = story.capacity
    fraction = story.number("mem_fraction_static")
    if not known.free_before_bytes or known.free_after_weights_bytes is None or fraction is None:
        return None
    return Budget(known.free_before_bytes, known.free_after_weights_bytes, fraction)


def slots_per_request(story: Story) -> int | None:
    """State slots that one running request takes, from the flags (0.5.11 to 0.5.23); None if the log lacks them."""
    if not story.arguments:
        return None
    if story.flag("disable_radix_cache") == "True":
        return 1
    strategy = story.flag("mamba_radix_cache_strategy") or story.flag("mamba_scheduler_strategy") or "no_buffer"
    if strategy == "extra_buffer_lazy":
        return 4
    if strategy == "extra_buffer":
        return 4 if story.flag("disable_overlap_schedule") == "True" else 5
    return 3


def draft_tokens(story: Story) -> int:
    """Tokens verified a step; 0 without speculation."""
    if story.flag("speculative_algorithm") is None:
        return 0
    return int(story.number("speculative_num_draft_tokens") or 0)


def no_requests(hit: Hit, story: Story) -> Finding:
    """`max_running_request is zero`, and its clearer successor for hybrid models."""
    known, asked = story.capacity, story.number("max_running_requests")
    if asked == 0:
        return hit.rule.say(
            hit,
            id="max-running-requests-zero",
            summary="--max-running-requests is 0: the server was told to run no requests",
            advice="Leave the flag out, or give at least 1: --max-running-requests 8",
        )
    slots = known.state_slots
    if "slots" in hit.match.groupdict():
        slots = int(hit["slots"])
    ratio = int(hit["ratio"]) if "ratio" in hit.match.groupdict() else slots_per_request(story)
    if slots is not None:
        return _starved(hit, story, slots, ratio)
    if known.kv_tokens is not None and known.kv_tokens < 2:
        limit = story.number("max_total_tokens")
        cause = f", set by --max-total-tokens {limit:g}" if limit is not None else ""
        return hit.rule.say(
            hit,
            id="kv-cache-below-one-request",
            summary=f"the KV cache has {known.kv_tokens} token{cause}: no request fits (SGLang allows tokens // 2)",
            advice="Leave --max-total-tokens out, or give at least the context of one request."
            if limit is not None
            else "Raise --mem-fraction-static, or take fewer or smaller weights.",
        )
    return hit.rule.say(
        hit,
        id="max-running-requests-zero",
        certainty=Certainty.POSSIBLE,
        summary="SGLang computed that it can run no request at all; the log does not show which limit gave zero",
        separates="the lines 'Mamba Cache is allocated' and 'KV Cache is allocated' of the same start",
        advice="Look for 'max_mamba_cache_size' in the full log: fewer state slots than one request needs is the "
        "usual cause with speculation (lower --max-running-requests or --speculative-num-draft-tokens).",
    )


def _starved(hit: Hit, story: Story, slots: int, ratio: int | None) -> Finding:
    known, drafted = story.capacity, draft_tokens(story)
    asked = int(story.number("max_running_requests") or 0)
    need = f"{ratio}" if ratio else "3 to 5"
    why = f"{slots} recurrent-state slots, one request needs {need}: {slots} // {ratio or 3} = 0 requests"
    advice, evidence = [], []
    state = state_bytes(story, slots)
    if drafted and asked > 1:
        why += (
            f"; the verify buffers reserved for --max-running-requests {asked} x {drafted} draft tokens took the rest"
        )
        if state:
            why += f" ({asked} x {drafted} x {size(state)} = {size(asked * drafted * state)})"
            evidence.append(f"one state takes {size(state)} (from the sizes in 'Mamba Cache is allocated')")
        fewer = fits_with(story, slots, ratio or 3, state)
        advice.append(
            f"--max-running-requests {fewer[0]} (leaves about {fewer[1]} slots, {at_once(fewer[2])})"
            if fewer
            else f"lower --max-running-requests from {asked}"
        )
        advice.append(f"or lower --speculative-num-draft-tokens from {drafted}")
    advice.append(
        "or --mamba-ssm-dtype bfloat16 (halves a state), a higher --mem-fraction-static, more GPUs (--tp-size)"
    )
    if known.kv_tokens:
        evidence.append(
            f"the KV cache of {known.kv_tokens:,} tokens is not the limit: SGLang never divides it by the context here"
        )
    return hit.rule.say(
        hit,
        id="state-slots-starved",
        summary=f"No request can run: {why}",
        evidence=evidence,
        advice="; ".join(advice) + ".",
    )


def state_bytes(story: Story, slots: int) -> int | None:
    """Bytes of one recurrent state, from the sizes that the log prints (rounded there to 0.01 GiB)."""
    printed = story.capacity.state_bytes
    if not printed or slots < 0:
        return None
    # The buffer for verifying holds (requests + 1) * D states: for no requests, D of them. Its size is rounded least.
    drafted, verify = draft_tokens(story), story.capacity.verify_bytes
    if drafted and verify:
        return verify // drafted
    return printed // (slots + 1)


def fits_with(story: Story, slots: int, ratio: int, state: int | None) -> tuple[int, int, int] | None:
    """(requests to ask for, slots then, requests that then run): so that most run, for 0.5.12 and older.

    Only there are the verify buffers reserved for the requests *asked for*. None when the log has too few numbers.
    """
    known, drafted = story.capacity, draft_tokens(story)
    asked = int(story.number("max_running_requests") or 0)
    if not (state and drafted and known.kv_bytes is not None) or asked < 2:
        return None
    left = known.kv_bytes + slots * state  # what was divided between states and KV cache
    share = story.number("mamba_full_memory_ratio") or 0.9
    portion = share / (1 + share)
    if not (slots * state <= left * portion < (slots + 1) * state * 1.05):  # the log contradicts the flag: measure it
        portion = (slots + 0.5) * state / left if left > 0 else portion
    best: tuple[int, int, int] | None = None
    for fewer in range(asked - 1, 0, -1):
        then = int((left + (asked - fewer) * drafted * state) * portion // state)
        runs = min(fewer, then // ratio)
        if runs >= 1 and (best is None or runs > best[2]):
            best = fewer, then, runs
    return best


def no_memory_for_states(hit: Hit, story: Story) -> Finding:
    """`Not enough GPU memory for hybrid ... state cache`: the states, or rather the weights."""
    known = budget(story)
    state = float(hit["state"]) * (1 << 20)
    if known is not None and known.rest <= 0:
        return _weights(hit, known, why="SGLang names the state cache; its numbers are negative because")
    drafted, asked = draft_tokens(story), story.number("max_running_requests")
    left = float(hit["rest"]) * GIB
    if known is None and left <= 0 and not drafted:
        return hit.rule.say(
            hit,
            id="weights-exceed-budget",
            certainty=Certainty.LIKELY,
            summary=f"The weights exceed the memory budget by {size(-left)}: the pools have less than nothing",
            advice="Raise --mem-fraction-static, use more GPUs (--tp-size), or quantised weights.",
        )
    room = size(known.rest) if known is not None else "what is left"
    what = f"one state takes {size(state)}"
    if drafted:
        what += f", and each running request {drafted} more for verifying ({size(drafted * state)})"
    return hit.rule.say(
        hit,
        summary=f"The weights fit, but {room} for pools does not hold the recurrent states: {what}",
        evidence=(str(known),) if known else (),
        advice=(
            f"Lower --max-running-requests{f' from {asked:g}' if asked else ''} or "
            f"--speculative-num-draft-tokens{f' from {drafted}' if drafted else ''}; or raise --mem-fraction-static; "
            "or --mamba-ssm-dtype bfloat16."
            if drafted
            else "Raise --mem-fraction-static or --mamba-full-memory-ratio, or --mamba-ssm-dtype bfloat16."
        ),
    )


def no_memory_for_kv(hit: Hit, story: Story) -> Finding:
    """`Loaded weights leave no GPU memory for the KV cache`: true only when the weights exceed the budget."""
    known = budget(story)
    if known is not None and (taken := _taken_meanwhile(hit, known)) is not None:
        return taken
    if known is None or known.rest <= 0.02 * GIB:
        return _weights(hit, known, why="")
    drafted, asked = draft_tokens(story), int(story.number("max_running_requests") or 0)
    took = []
    if asked and story.flag("disable_radix_cache") == "True":
        took.append(f"{asked} recurrent states (--disable-radix-cache: one for each of --max-running-requests {asked})")
    if asked and drafted:
        took.append(f"{asked} x {drafted} states for verifying drafts")
    return hit.rule.say(
        hit,
        id="verify-buffers-exceed-budget" if drafted else "state-cache-no-memory",
        summary=(
            f"SGLang blames the weights; they fit, with {size(known.rest)} left. "
            + (f"What takes it: {', and '.join(took)}" if took else "The recurrent states take it all")
        ),
        evidence=(str(known), f"its advice is void: the flag is {known.fraction:g} and already above {known.least:g}"),
        advice=(
            f"Lower --max-running-requests from {asked}"
            + (f" or --speculative-num-draft-tokens from {drafted}" if drafted else "")
            + (
                "; or drop --disable-radix-cache: then the pools are solved together and fewer requests run instead"
                if story.flag("disable_radix_cache") == "True"
                else ""
            )
            + "; or --mamba-ssm-dtype bfloat16; or a higher --mem-fraction-static."
        ),
    )


def _taken_meanwhile(hit: Hit, known: Budget) -> Finding | None:
    """SGLang's own `pre`, out of its `minimum viable`, is what was free at first. Less before loading: taken since."""
    viable = float(hit.match.groupdict().get("viable") or 1)
    if viable >= 1:
        return None
    first = known.after / (1 - viable)
    gone = first - known.before
    if gone < GIB + first * 0.0001 / (1 - viable):  # it is printed with four digits
        return None
    return hit.rule.say(
        hit,
        id="memory-taken-meanwhile",
        summary=f"{size(gone)} of GPU memory were taken by another process while this server started: "
        f"{size(first)} were free at first, {size(known.before)} when it began to load",
        evidence=(f"1 - available/pre = {viable:g} with {size(known.after)} available: pre is {size(first)}",),
        advice="One server after another: start this one when the other is ready (or gone; nvidia-smi shows who holds "
        "memory). Two on one GPU: the second's --mem-fraction-static is of what the first left free.",
    )


def _weights(hit: Hit, known: Budget | None, why: str) -> Finding:
    if known is None:
        viable = hit.match.groupdict().get("above") or ""
        return hit.rule.say(
            hit,
            id="weights-exceed-budget",
            summary="The weights leave nothing of the memory budget for the KV cache",
            advice=f"Raise --mem-fraction-static{f' above {viable}' if viable else ''}, use more GPUs (--tp-size), or "
            "quantised weights.",
        )
    weights = known.before - known.after
    summary = (
        f"The weights take {size(weights)}, the budget is {size(known.before * known.fraction)} (--mem-fraction-static "
        f"{known.fraction:g} of {size(known.before)}): {size(-known.rest)} too little"
    )
    return hit.rule.say(
        hit,
        id="weights-exceed-budget",
        summary=f"{summary}. {why} of that" if why else summary,
        evidence=(str(known),),
        advice=(
            f"--mem-fraction-static must be above {known.least:g} for the weights alone; leave it out to let SGLang "
            "choose. Or use more GPUs (--tp-size) or quantised weights."
        ),
    )


def out_of_memory(hit: Hit, story: Story) -> Finding:
    """CUDA out of memory, by what was being done then."""
    short, known = shortage(hit), story.capacity
    fraction = story.number("mem_fraction_static")
    now = f" (now {fraction:g})" if fraction is not None else ""
    lower = f"Lower --mem-fraction-static{now}"
    loads = story.counts.get("loading", 0)
    if loads > 1 and _own_draft(story) and "ready" not in story.stages:
        return hit.rule.say(
            hit,
            id="target-loaded-as-draft",
            summary="The target model was loaded a second time as its own drafter, and the memory plan did not count "
            "it",
            advice="Give --speculative-draft-model-path a draft model. For a model with built-in MTP layers under an "
            "older SGLang set SGLANG_ENABLE_SPEC_V2=True.",
        )
    if hit.ready:
        return hit.rule.say(
            hit,
            id="gpu-oom-serving",
            summary=f"Out of GPU memory while serving{short}. "
            + (
                f"Only {size(known.free_when_ready_bytes)} was left when the server said that it was ready"
                if known.free_when_ready_bytes is not None
                else "The pools left too little for activations"
            ),
            advice=f"{lower}, or --chunked-prefill-size: activations of a long prompt need room beside the pools.",
        )
    if hit.stage in ("pools", "graphs"):
        earlier = [a for cause, a in story.previous if cause == "weights-exceed-budget"]
        if earlier:
            before = earlier[-1].get("mem_fraction_static", "?")
            return hit.rule.say(
                hit,
                id="no-feasible-fraction",
                summary=f"No --mem-fraction-static works here: {before} is too small for the weights, "
                f"{fraction if fraction is not None else '?'} leaves too little for CUDA graphs",
                advice="Take less elsewhere: --cuda-graph-max-bs, --context-length, --chunked-prefill-size, "
                "--max-running-requests; or more GPUs.",
            )
        return hit.rule.say(
            hit,
            id="graph-capture-oom",
            summary=f"Out of GPU memory after the pools were allocated, for CUDA graphs and buffers{short}",
            advice=f"{lower} (0.02 to 0.05 less), or the largest graph batch (--cuda-graph-max-bs, since 0.5.14 "
            "--cuda-graph-max-bs-decode).",
        )
    if hit.stage in ("weights", "states", "kv"):
        return hit.rule.say(
            hit,
            id="pools-exceed-gpu",
            summary=f"Out of GPU memory while the pools were allocated{short}. The budget "
            "leaves no room for what is allocated beside it",
            advice=f"{lower}: buffers beside the pools (one row more each, request table, intermediate states, "
            "graphs) must fit what it leaves unused.",
        )
    if hit.stage in ("distributed", "connected", "loading"):
        return hit.rule.say(
            hit,
            id="weights-exceed-gpu",
            summary=f"Out of GPU memory while the weights were loading{short}",
            advice="More GPUs (--tp-size), quantised weights, or free the GPU first: nvidia-smi shows who holds "
            "memory.",
        )
    return hit.rule.say(hit, summary=f"Out of GPU memory{short}", advice=f"{lower}.")


def _own_draft(story: Story) -> bool:
    """Whether speculation with a draft model runs without one being named."""
    algorithm = (story.flag("speculative_algorithm") or "").upper()
    return algorithm in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE") and (
        story.flag("speculative_draft_model_path") in (None, story.flag("model_path"))
    )
