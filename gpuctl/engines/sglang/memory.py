"""The memory plan of an SGLang server: what one GPU's memory is divided into, before anything is started.

The pools are computed exactly as SGLang does (pools.py) from two numbers, free memory before loading and after all
weights. Before a start these are estimated: constants below, measured with SGLang 0.5.16 on an H200 (docs/memory.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpuctl.engines.sglang import arguments as rules_for_flags
from gpuctl.engines.sglang.pools import (
    FILES,
    GIB,
    Inputs,
    Pools,
    Rules,
    budget_gib,
    divide,
    rules_of,
    rules_of_version,
)
from gpuctl.engines.sglang.settings import NUMBERS as NUMBERS
from gpuctl.engines.sglang.settings import WORDS as WORDS
from gpuctl.engines.sglang.settings import Settings, settings
from gpuctl.facts.model import ModelFacts
from gpuctl.finding import Finding, Severity
from gpuctl.flags import arguments
from gpuctl.memory import Change, Fit, Plan, Question, Term, Verdict, at_once, fits, size

DRIVER = 620  # MiB that the driver keeps of what it calls the total (615 on an H200, about 630 on an RTX PRO 6000)
CONTEXT = 0.605  # GiB that the CUDA context takes before SGLang measures what is free
CONNECT = 0.14  # GiB between that and the weights: process groups, allocator
CONNECT_MANY = 1.0  # with several GPUs: NCCL's buffers as well. Not measured; an estimate
RESIDUE = 0.0018  # of the target's weights: what loading leaves behind
DRAFT_RESIDUE = 0.07  # of the drafter's: copies of its projections
GRAPH_BASE = 0.2  # GiB that capturing takes whatever is captured


@dataclass(frozen=True)
class Outcome:
    """One evaluation: the pools, and what the GPU then really holds."""

    chosen: Settings
    before: float  # GiB free before loading
    after: float  # GiB free after all weights
    pools: Pools
    states: int  # bytes really allocated, padding included
    verify: int
    kv: int
    table: int  # of requests by tokens
    graphs: int
    left: int  # free after pools and graphs
    activations: int  # what the largest prefill step needs
    cause: str  # "" when it starts and survives a long prompt
    message: str = ""


def plan(question: Question) -> Plan:
    """What the server will hold, and whether it can work."""
    rules = rules_of(question.installed.get(name, "") for name in FILES) or rules_of_version(question.version)
    given = arguments(question.argv)
    target = question.target
    gpu_mib = question.gpu.total_bytes / (1 << 20)
    chosen = settings(given, target, question.draft, rules, gpu_mib, question.env)
    found = tuple(rules_for_flags.check(question, rules))
    outcome = evaluate(question, chosen, rules)
    basis = f"SGLang, rules {rules.regime} ({rules.basis})"
    return _plan(question, outcome, rules, basis, found)


def doubt(question: Question) -> int:
    """Bytes that a plan made before a start may be wrong by on one GPU: more where NCCL's share is an estimate."""
    many = (arguments(question.argv).whole("--tp-size", "--tensor-parallel-size", "--tp") or 1) > 1
    return (1 << 30) if many else 1 << 28


def evaluate(question: Question, chosen: Settings, rules: Rules) -> Outcome:
    """The arithmetic for one choice of settings."""
    target, draft = question.target, _draft(question, chosen)
    before, after = _free(question, chosen, rules)
    inputs = _inputs(target, draft, chosen, rules)
    images = 100 / 1024 if rules.reserves_images and target.multimodal else 0.0  # SGLANG_VLM_CACHE_SIZE_MB
    rest = budget_gib(before, after, chosen.fraction, images)
    pools = divide(rules, rest, inputs, before=before, after=after, fraction=chosen.fraction)
    states = verify = 0
    runs = max(pools.requests, 0)
    if target.recurrent is not None and pools.slots is not None:
        states = (max(pools.slots, 0) + 1) * inputs.slot_bytes
        if inputs.drafted and not (inputs.replays and rules.regime == "C"):
            ssm = target.recurrent.ssm_bytes(chosen.attention_tp, chosen.state_element)
            conv = target.recurrent.conv_bytes(chosen.attention_tp) // max(target.recurrent.kernel - 1, 1)
            window = conv * (inputs.drafted + target.recurrent.kernel - 2)
            each = inputs.slot_bytes * inputs.drafted if rules.regime == "A" else ssm * inputs.drafted + window
            verify = (runs + 1) * each
    kv = max(pools.tokens + chosen.page, 0) * inputs.cell_bytes
    table = (runs + 1) * (chosen.context + 4 + inputs.drafted) * 4
    graphs = _graphs(chosen)
    free = round(after * GIB)
    if not rules.counts_draft and draft is not None:
        free -= _draft_bytes(question, chosen)
    left = free - states - verify - kv - table - graphs
    activations = _activations(target, chosen)
    cause, message = _cause(pools, rules, left, graphs, activations, question, chosen)
    return Outcome(chosen, before, after, pools, states, verify, kv, table, graphs, left, activations, cause, message)


def _draft(question: Question, chosen: Settings) -> ModelFacts | None:
    return question.draft if chosen.algorithm and chosen.algorithm != "NGRAM" else None


def _draft_bytes(question: Question, chosen: Settings) -> int:
    """Weights of the drafter on one GPU: its own, or the target's layers for multi-token prediction."""
    if not chosen.algorithm or chosen.algorithm == "NGRAM":
        return 0
    if question.draft is not None:
        return round(question.draft.weight_bytes(chosen.tp) * (1 + DRAFT_RESIDUE))
    if chosen.algorithm in ("EAGLE", "NEXTN") and question.target.mtp_layers:
        return question.target.computed_bytes(chosen.tp, question.target.mtp_parts)
    return 0


def _free(question: Question, chosen: Settings, rules: Rules) -> tuple[float, float]:
    """GiB free before loading and after all weights: measured, or estimated."""
    gpu = question.gpu
    free = gpu.free_bytes if gpu.free_bytes is not None else gpu.total_bytes - DRIVER * (1 << 20)
    before = question.before_bytes / GIB if question.before_bytes is not None else free / GIB - CONTEXT
    if question.after_bytes is not None:
        return before, question.after_bytes / GIB
    weights = question.target.weight_bytes(chosen.tp) / GIB / chosen.pp
    after = before - (CONNECT_MANY if chosen.tp > 1 else CONNECT) - weights * (1 + RESIDUE)
    if rules.counts_draft:
        after -= _draft_bytes(question, chosen) / GIB
    return before, after


def _inputs(target: ModelFacts, draft: ModelFacts | None, chosen: Settings, rules: Rules) -> Inputs:
    cell = target.kv_token_bytes(chosen.attention_tp, chosen.kv_element)
    if target.sliding_layers:
        # SGLang gives layers with a sliding window 0.8 of the tokens of the others.
        each = target.kv_layer_bytes(chosen.attention_tp, chosen.kv_element)
        cell += round(0.8 * target.sliding_layers * each)
    layers = max(target.attention_layers + target.sliding_layers, 1)
    if draft is not None and (
        chosen.algorithm in ("DFLASH", "DSPARK") or draft.draft_block
    ):  # DDTREE uses the same drafter
        cell = -(-cell * (layers + draft.layers) // layers)
    elif chosen.algorithm in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE") and rules.draft_kv:
        extra = draft.layers if draft is not None else target.mtp_layers
        cell = int(cell * (1 + extra / layers))
    return Inputs(
        slot_bytes=target.recurrent.slot_bytes(chosen.attention_tp, chosen.state_element) if target.recurrent else 0,
        cell_bytes=max(cell, 1),
        drafted=chosen.drafted,
        asked=chosen.asked,
        share=chosen.share,
        ratio=chosen.ratio,
        radix=chosen.radix,
        slots_given=chosen.slots_given,
        page=chosen.page,
        tokens_given=chosen.tokens_given,
        context=chosen.context,
        replays=chosen.replays,
    )


def _graphs(chosen: Settings) -> int:
    """What CUDA graphs take, by SGLang's own rule of thumb: 2 MiB a decode batch, 8 MiB a prefill size."""
    if not chosen.decode_batch and not chosen.prefill_sizes:
        return 0
    batch = min(chosen.decode_batch, chosen.asked) if chosen.asked else chosen.decode_batch
    return round(GRAPH_BASE * GIB) + (batch * 2 + chosen.prefill_sizes * 8) * (1 << 20)


def _activations(target: ModelFacts, chosen: Settings) -> int:
    """What one prefill step needs at its widest: the feed-forward part, in two bytes a number."""
    wide = max(target.intermediate if target.dense else 0, target.experts_active * (target.expert_width or 0))
    return chosen.chunk * 2 * (3 * wide // chosen.tp + 2 * target.hidden)


def _cause(
    pools: Pools, rules: Rules, left: int, graphs: int, activations: int, question: Question, chosen: Settings
) -> tuple[str, str]:
    if pools.error == "weights-exceed-budget" and pools.rest_bytes > 0:
        return ("verify-buffers-exceed-budget" if pools.verify_bytes else "state-cache-no-memory"), pools.message
    if pools.error == "state-cache-no-memory" and pools.rest_bytes <= 0:
        return "weights-exceed-budget", pools.message
    if pools.error:
        return pools.error, pools.message
    if left + graphs < 0:
        return "pools-exceed-gpu", "CUDA out of memory"
    if left < 0:
        return "graph-capture-oom", "CUDA out of memory"
    if left < activations:
        return "gpu-oom-serving", "CUDA out of memory"
    return "", ""


# Words


def _plan(question: Question, outcome: Outcome, rules: Rules, basis: str, found: tuple[Finding, ...]) -> Plan:
    pools, chosen = outcome.pools, outcome.chosen
    runs = max(pools.requests, 0) if not outcome.cause or outcome.cause == "gpu-oom-serving" else 0
    window = chosen.context
    lengths = tuple(question.contexts) or (window,)
    by_states = pools.slots // chosen.ratio if pools.slots is not None else None
    fitting = fits(runs, max(pools.tokens, 0), lengths, window, by_states, chosen.page)
    wanted = question.requests
    limit = _limit(outcome, by_states)
    short = [fit for fit in fitting if question.contexts and fit.requests < wanted]
    refused = next((f for f in found if f.severity is Severity.CRITICAL), None)
    cause, message = outcome.cause, outcome.message
    if refused is not None:
        verdict, summary, cause, message = Verdict.IMPOSSIBLE, refused.summary, refused.id, ""
    elif outcome.cause:
        verdict, summary = Verdict.IMPOSSIBLE, explain(question, outcome, rules)
    elif runs < wanted or short:
        verdict, summary = Verdict.LIMITED, _limited(question, outcome, runs, short, limit)
    else:
        verdict, summary = Verdict.FITS, _well(outcome, runs)
    if refused is not None:
        change: Change | None = Change("", refused.advice)
    else:
        change = None if verdict is Verdict.FITS else _change(question, outcome, rules)
    return Plan(
        engine="sglang",
        rules=basis,
        verdict=verdict,
        summary=summary,
        cause=cause,
        message=message,
        terms=tuple(_terms(question, outcome, rules)),
        kv_tokens=max(pools.tokens, 0),
        state_slots=pools.slots,
        requests=runs,
        context=window,
        fits=fitting,
        limit=limit,
        change=change,
        findings=found,
        notes=tuple(_notes(question, outcome)),
        measured=question.before_bytes is not None and question.after_bytes is not None,
    )


def _limit(outcome: Outcome, by_states: int | None) -> str:
    pools, chosen = outcome.pools, outcome.chosen
    if outcome.cause:
        return {
            "weights-exceed-budget": "weights",
            "state-cache-no-memory": "states",
            "state-slots-starved": "states",
            "verify-buffers-exceed-budget": "verify",
            "kv-cache-below-one-request": "kv",
            "max-running-requests-zero": "requests",
        }.get(outcome.cause, "reserve")
    if by_states is not None and pools.requests == by_states and (chosen.asked or 1 << 30) > by_states:
        return "states"
    if chosen.asked is not None and pools.requests == chosen.asked:
        return "requests"
    return "kv" if pools.requests == pools.tokens // 2 else "requests"


def explain(question: Question, outcome: Outcome, rules: Rules) -> str:
    """Why it cannot work, with the numbers."""
    pools, chosen, cause = outcome.pools, outcome.chosen, outcome.cause
    per = size(_slot(question, chosen))
    rest, fraction = size(pools.rest_bytes), f"--mem-fraction-static {chosen.fraction:g}"
    weights = size((outcome.before - outcome.after) * GIB)
    if cause == "weights-exceed-budget":
        budget = size(outcome.before * chosen.fraction * GIB)
        return f"The weights take {weights}, {fraction} allows {budget}: {size(-pools.rest_bytes)} too little"
    if cause == "state-slots-starved":
        return (
            f"No request can run: {pools.slots} recurrent-state slots, one request needs {chosen.ratio}: "
            f"{pools.slots} // {chosen.ratio} = 0. " + _starving(question, outcome, rules, per)
        )
    if cause == "verify-buffers-exceed-budget":
        return (
            f"The weights leave {rest}, but the buffers for verifying take {size(pools.verify_bytes)}: {chosen.asked} "
            f"requests x {chosen.drafted} draft tokens x {per} of recurrent state"
        )
    if cause == "state-cache-no-memory":
        more = f" and {chosen.drafted} more to verify drafts" if chosen.drafted else ""
        return f"The weights leave {rest}; not one recurrent state of {per}{more} comes out of its share"
    if cause == "kv-cache-below-one-request":
        given = f" (--max-total-tokens {chosen.tokens_given})" if chosen.tokens_given is not None else ""
        return f"The KV cache holds {pools.tokens} tokens{given}: no request fits"
    if cause == "max-running-requests-zero":
        return "--max-running-requests is 0: the server is told to run no requests"
    if cause == "pools-exceed-gpu":
        over = size(-(outcome.left + outcome.graphs))
        return f"{fraction} leaves too little beside the pools: with their padding they exceed the GPU by {over}"
    if cause == "graph-capture-oom":
        return (
            f"{fraction} leaves {size(outcome.left + outcome.graphs)} beside the pools; CUDA graphs need about "
            f"{size(outcome.graphs)}"
        )
    return (
        f"{fraction} leaves {size(outcome.left)} when the server is ready; a prefill step of {chosen.chunk} tokens "
        f"needs about {size(outcome.activations)}: it starts, and dies at the first long prompt"
    )


def _starving(question: Question, outcome: Outcome, rules: Rules, per: str) -> str:
    pools, chosen = outcome.pools, outcome.chosen
    if rules.regime == "A" and chosen.drafted:
        return (
            f"The buffers for verifying, reserved for {chosen.asked} requests x {chosen.drafted} draft tokens x {per} "
            f"= {size(pools.verify_bytes)}, take most of the {size(pools.rest_bytes)} that the weights leave"
        )
    return f"The weights leave {size(pools.rest_bytes)}; a state takes {per}" + (
        f", each running request {chosen.drafted} more to verify drafts" if chosen.drafted else ""
    )


def _limited(question: Question, outcome: Outcome, runs: int, short: list[Fit], limit: str) -> str:
    names = {"states": "recurrent states", "kv": "KV cache", "requests": "--max-running-requests"}
    beyond = [fit for fit in short if fit.limit == "window"]
    if beyond:
        return f"Requests of {beyond[0].context} tokens exceed the window of {outcome.chosen.context}: they are refused"
    if runs < question.requests:
        return (
            f"It starts, and runs {at_once(runs)} of {question.requests} wanted: the limit is {names.get(limit, limit)}"
        )
    worst = min(short, key=lambda fit: fit.requests)
    return f"It starts; of {worst.context}-token requests {worst.requests} fit at once, {question.requests} are wanted"


def _well(outcome: Outcome, runs: int) -> str:
    slots = f", {outcome.pools.slots:,} recurrent-state slots" if outcome.pools.slots is not None else ""
    return f"{outcome.pools.tokens:,} tokens of KV cache{slots}, {at_once(runs)}"


def _slot(question: Question, chosen: Settings) -> int:
    state = question.target.recurrent
    return state.slot_bytes(chosen.attention_tp, chosen.state_element) if state else 0


def _terms(question: Question, outcome: Outcome, rules: Rules) -> Iterator[Term]:
    chosen, target, gpu = outcome.chosen, question.target, question.gpu
    pools = outcome.pools
    if question.before_bytes is None and gpu.free_bytes is not None:
        yield Term("held", "held by others, and the driver", gpu.total_bytes - gpu.free_bytes)
        yield Term("context", "CUDA context", round(CONTEXT * GIB))
    else:
        yield Term("context", "not available", round(gpu.total_bytes - outcome.before * GIB))
    drafter = _draft_bytes(question, chosen)
    counted = drafter if rules.counts_draft else 0
    weights = round((outcome.before - outcome.after) * GIB) - counted
    gpus = f" on each of {chosen.tp} GPUs" if chosen.tp > 1 else ""
    yield Term("weights", "weights", weights, f"{target.parameters / 1e9:.1f} billion parameters{gpus}")
    if drafter:
        yield Term("drafter", "drafter", drafter)
    if outcome.states:
        per = _slot(question, chosen)
        yield Term("states", "recurrent states", outcome.states, f"({max(pools.slots or 0, 0)} + 1) x {size(per)}")
    if outcome.verify:
        runs = max(pools.requests, 0)
        yield Term("verify", "verify buffers", outcome.verify, f"({runs} + 1) requests x {chosen.drafted} draft tokens")
    if pools.tokens > 0:
        yield Term(
            "kv", "KV cache", outcome.kv, f"{pools.tokens:,} tokens x {outcome.kv // (pools.tokens + chosen.page):,} B"
        )
    yield Term("table", "request table", outcome.table)
    if outcome.graphs:
        yield Term("graphs", "CUDA graphs (estimate)", outcome.graphs)
    yield Term("free", "left for activations", outcome.left, f"--mem-fraction-static {chosen.fraction:g}")


def _notes(question: Question, outcome: Outcome) -> Iterator[str]:
    chosen = outcome.chosen
    yield from question.target.notes
    yield from chosen.notes
    if not chosen.fraction_given:
        yield f"--mem-fraction-static is absent: SGLang chooses {chosen.fraction:.4g}"
    if chosen.tp > 1 and question.after_bytes is None:
        yield "what NCCL takes on several GPUs is an estimate"
    if question.target.sliding_layers:
        yield "layers with a sliding window share the KV cache by an approximate rule"
    if question.gpu.free_bytes is None and question.before_bytes is None:
        yield "what is free on the GPU was not asked: nothing else is assumed to use it"


# What to change


def _change(question: Question, outcome: Outcome, rules: Rules) -> Change | None:
    """The first change, from the smallest to the largest, that gives what is wanted; else the one that gives most."""
    best: tuple[int, Change] | None = None
    now = outcome.pools.requests if not outcome.cause else 0
    for flag, to, was, cost, changed in _changes(question, outcome, rules):
        tried = evaluate(question, changed, rules)
        if tried.cause:
            continue
        runs = min(
            [
                tried.pools.requests,
                *(
                    f.requests
                    for f in fits(tried.pools.requests, tried.pools.tokens, question.contexts, changed.context)
                ),
            ]
        )
        gives = f"{at_once(tried.pools.requests)}, {tried.pools.tokens:,} tokens of KV cache"
        change = Change(flag, to, was, gives, cost)
        if runs >= question.requests:
            return change
        if runs > now and (best is None or runs > best[0]):
            best = runs, change
    return best[1] if best else None


_Tried = tuple[str, str, str, str, Settings]


def _changes(question: Question, outcome: Outcome, rules: Rules) -> Iterator[_Tried]:
    chosen, cause = outcome.chosen, outcome.cause
    if chosen.asked is not None and chosen.asked > 1 and outcome.pools.requests < chosen.asked:
        for fewer in range(chosen.asked - 1, 0, -1) if chosen.asked <= 256 else (128, 64, 32, 16, 8, 4, 2, 1):
            yield (
                "--max-running-requests",
                str(fewer),
                str(chosen.asked),
                "fewer requests at once than asked",
                replace(chosen, asked=fewer),
            )
    if chosen.asked == 0:
        yield "--max-running-requests", "8", "0", "", replace(chosen, asked=8)
    if chosen.asked is not None and 0 < chosen.asked < question.requests:
        yield (
            "--max-running-requests",
            str(question.requests),
            str(chosen.asked),
            "more memory for requests",
            replace(chosen, asked=question.requests),
        )
    if cause in ("pools-exceed-gpu", "graph-capture-oom", "gpu-oom-serving", "weights-exceed-budget") or not cause:
        yield from _fractions(chosen, cause)
    if cause == "kv-cache-below-one-request" and chosen.tokens_given is not None:
        yield "", "without --max-total-tokens", str(chosen.tokens_given), "", replace(chosen, tokens_given=None)
    if not chosen.radix and question.target.recurrent is not None and rules.regime != "A":
        radix = replace(chosen, radix=True, ratio=5 if rules.auto_extra_buffer else 3)
        yield "", "without --disable-radix-cache", "", "the pools are solved together, fewer requests run", radix
    if question.target.recurrent is not None and chosen.state_element == 4:
        yield (
            "--mamba-ssm-dtype",
            "bfloat16",
            "float32",
            "recurrent states in half the precision",
            replace(chosen, state_element=2),
        )
    if question.target.recurrent is not None and chosen.radix and rules.regime != "A":
        for share in (1.5, 2.0, 3.0, 5.0, 8.0):
            if share > chosen.share:
                yield (
                    "--mamba-full-memory-ratio",
                    f"{share:g}",
                    f"{chosen.share:g}",
                    "less KV cache",
                    replace(chosen, share=share),
                )
    for drafted in (8, 4, 2):
        if drafted < chosen.drafted:
            yield (
                "--speculative-num-draft-tokens",
                str(drafted),
                str(chosen.drafted),
                "shorter drafts",
                replace(chosen, drafted=drafted),
            )
    if cause:
        yield from _fractions(chosen, "weights-exceed-budget")
    for tp in (2, 4, 8):
        if tp > chosen.tp and (question.gpus is None or tp <= question.gpus):
            yield (
                "--tp-size",
                str(tp),
                str(chosen.tp),
                "more GPUs",
                replace(chosen, tp=tp, attention_tp=chosen.attention_tp * tp // chosen.tp),
            )


def _fractions(chosen: Settings, cause: str) -> Iterator[_Tried]:
    down = cause in ("pools-exceed-gpu", "graph-capture-oom", "gpu-oom-serving")
    now = round(chosen.fraction, 3)
    grid = [round(0.98 - 0.02 * step, 2) for step in range(45)]
    tried = [f for f in grid if f < now] if down else [f for f in reversed(grid) if f > now]
    for fraction in tried:
        cost = "less for the pools" if down else "less beside the pools for activations and graphs"
        yield ("--mem-fraction-static", f"{fraction:g}", f"{now:g}", cost, replace(chosen, fraction=fraction))
