"""The memory plan of a vLLM server (V1 engine): what `--gpu-memory-utilization` of a GPU is divided into. Pure.

vLLM measures what a dummy step of `max_num_batched_tokens` takes and gives all that is left to one pool of equal blocks
(v1/worker/gpu_worker.py, v1/core/kv_cache_utils.py). Layers are put into groups of equally many; a block of a group
holds a page of each of its layers. On hybrid models the blocks are made so long that a page holds a recurrent state,
and every running request takes a block of each group of recurrent layers (platforms/interface.py). What the dummy step
takes is an estimate here, as are CUDA graphs: docs/memory.md.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gpuctl.facts.model import ModelFacts, divide
from gpuctl.finding import Certainty, Finding, Severity
from gpuctl.flags import Arguments, Number, arguments, wrong
from gpuctl.memory import Change, Fit, Plan, Question, Term, Verdict, at_once, size

GIB, MIB = 1 << 30, 1 << 20
DRIVER = 620  # MiB that the driver keeps of what it calls the total
CONTEXT = 0.605  # GiB of the CUDA context; it is there before vLLM looks, and not in its budget
BESIDE = 0.3  # GiB that come while loading and are not PyTorch's: workspaces of attention. Not measured; an estimate
BESIDE_MANY = 1.2  # with several GPUs: NCCL's buffers as well. Not measured; an estimate
GRAPHS = 0.6  # GiB of CUDA graphs, which newer releases take off the budget. Not measured; an estimate
BLOCK = 16
SOURCES = ("cache.py",)
AUTOMATIC = ("-1", "auto")  # --max-model-len: as long as fits


@dataclass(frozen=True)
class Settings:
    tp: int
    pp: int
    utilization: float
    utilization_given: bool
    window: int
    seqs: int  # --max-num-seqs
    batched: int  # --max-num-batched-tokens
    element: float  # bytes of a number of the KV cache
    block: int
    eager: bool
    drafted: int  # speculative tokens
    draft_tp: int


@dataclass(frozen=True)
class Pool:
    """Equal blocks: how many, how large, and what a request takes."""

    blocks: int
    block_bytes: int
    block_tokens: int
    groups: tuple[tuple[str, int], ...]  # (full | sliding | states, how many groups)
    window: int  # of sliding layers

    def of_request(self, tokens: int, settings: Settings) -> int:
        """Blocks that one request of so many tokens takes."""
        whole = -(-tokens // self.block_tokens)
        taken = 0
        for kind, groups in self.groups:
            if kind == "states":
                taken += groups * (1 + settings.drafted)
            elif kind == "sliding":
                seen = min(self.window - 1 + settings.batched, tokens)
                taken += groups * min(whole, -(-seen // self.block_tokens) + 1)
            else:
                taken += groups * whole
        return taken


@dataclass(frozen=True)
class Outcome:
    chosen: Settings
    requested: int  # bytes that it may use
    weights: int
    drafter: int
    beside: int
    peak: int
    graphs: int
    available: int  # for the pool
    pool: Pool
    requests: int  # of the whole window at once
    cause: str
    message: str


def settings(given: Arguments, question: Question) -> tuple[Settings, tuple[str, ...]]:
    """The settings of a command line with vLLM's defaults, and notes on what is assumed."""
    notes: list[str] = []
    total = question.gpu.total_bytes - DRIVER * MIB
    large = total >= 70 * GIB and "a100" not in question.gpu.name.lower()
    stated = re.search(
        r"gpu_memory_utilization:\s*float\s*=\s*Field\(default=([\d.]+)", "\n".join(question.installed.values())
    )
    utilization = given.number("--gpu-memory-utilization")
    if utilization is None:
        notes.append(
            f"--gpu-memory-utilization is absent: {stated[1] if stated else '0.9 is assumed'}"
            + ("" if stated else " (0.92 in the newest releases)")
        )
    parts = read(question.argv)
    drafted = parts.whole("--speculative-config.num_speculative_tokens") or 0
    draft_tp = parts.whole("--speculative-config.draft_tensor_parallel_size") or 0
    tp = given.whole("--tensor-parallel-size", "-tp") or 1
    dtype = given.text("--kv-cache-dtype") or "auto"
    made = question.target.context or 4096
    return Settings(
        tp=tp,
        pp=given.whole("--pipeline-parallel-size", "-pp") or 1,
        utilization=utilization if utilization is not None else float(stated[1]) if stated else 0.9,
        utilization_given=utilization is not None,
        window=length(given.text("--max-model-len")) or made,
        seqs=given.whole("--max-num-seqs") or (1024 if large else 256),
        batched=length(given.text("--max-num-batched-tokens")) or (8192 if large else 2048),
        element=1.0 if dtype.startswith("fp8") else 2.0,
        block=given.whole("--block-size") or BLOCK,
        eager=given.on("--enforce-eager") and not given.on("--no-enforce-eager"),
        drafted=drafted,
        draft_tp=draft_tp or tp,
    ), tuple(notes)


def speculative(given: Arguments) -> dict[str, object]:
    """--speculative-config, whole or in parts (--speculative-config.method eagle3)."""
    found: dict[str, object] = {}
    try:
        whole = json.loads(given.text("--speculative-config", "-sc") or "{}")
        if isinstance(whole, dict):
            found.update(whole)
    except ValueError:
        pass
    for name, values in given.values.items():
        head, dot, key = name.partition(".")
        if dot and head.replace("_", "-") == "--speculative-config" and values:
            found[key.replace("-", "_")] = values[0]
    return found


def length(text: str | None) -> int | None:
    """A number of tokens as vLLM reads it: 32768, 32k and 25.6k (thousand), 32K (1,024); None where it says none."""
    match = re.fullmatch(r"(\d+)(\.\d+)?([kKmMgGtT]?)", (text or "").strip())
    if match is None or (match[2] and not match[3].islower()):
        return None
    unit = {"": 1, "k": 1000, "m": 10**6, "g": 10**9, "t": 10**12, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30,
            "T": 1 << 40}[match[3]]  # fmt: skip
    return int(float(match[1] + match[2]) * unit) if match[2] else int(match[1]) * unit


# Every value that is read as a number, as engine/arg_utils.py and config/*.py read it.
NUMBERS = (
    Number(("--tensor-parallel-size", "-tp")),
    Number(("--pipeline-parallel-size", "-pp")),
    Number(("--data-parallel-size", "-dp")),
    Number(("--nnodes", "-n")),
    Number(("--gpu-memory-utilization",), least=0, most=1, whole=False),
    Number(("--max-model-len",), also=AUTOMATIC, read=length),
    Number(("--max-num-batched-tokens",), read=length),
    Number(("--max-num-seqs",)),
    Number(("--block-size",)),
    Number(("--speculative-config.num_speculative_tokens",)),
    Number(("--speculative-config.draft_tensor_parallel_size",)),
)

# Flags whose value is one of several words, with those that are read.
WORDS = {
    ("--kv-cache-dtype",): (
        "auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla",
    ),
}  # fmt: skip


def read(argv: Sequence[str]) -> Arguments:
    """The command line by flag, what --speculative-config says among them."""
    given = arguments(argv)
    parts = {f"--speculative-config.{key}": (str(value),) for key, value in speculative(given).items()}
    return Arguments({**given.values, **parts})


def plan(question: Question) -> Plan:
    """What the server will hold, and whether it can work."""
    given = arguments(question.argv)
    chosen, notes = settings(given, question)
    outcome = evaluate(question, chosen)
    if outcome.cause == "context-exceeds-kv-cache" and given.text("--max-model-len") in AUTOMATIC and longest(outcome):
        chosen = replace(chosen, window=longest(outcome))
        outcome = evaluate(question, chosen)
    return _plan(question, outcome, tuple(_check(given, question, chosen)), notes)


def doubt(question: Question) -> int:
    """Bytes that a plan made before a start may be wrong by on one GPU: steps and graphs are not measured."""
    return 4 * GIB


def evaluate(question: Question, chosen: Settings) -> Outcome:
    target, draft = question.target, question.draft if chosen.drafted else None
    total = question.gpu.total_bytes - DRIVER * MIB
    free = question.gpu.free_bytes
    requested = math.ceil(total * chosen.utilization)
    weights = round(target.weight_bytes(chosen.tp) / chosen.pp)
    drafter = draft.weight_bytes(chosen.draft_tp) if draft is not None else 0
    if chosen.drafted and draft is None and target.mtp_layers:
        drafter = target.computed_bytes(chosen.tp, target.mtp_parts)
    beside = round((BESIDE_MANY if chosen.tp * chosen.pp > 1 else BESIDE) * GIB)
    peak = _peak(target, chosen)
    graphs = 0 if chosen.eager else round(GRAPHS * GIB)
    available = requested - weights - drafter - beside - peak - graphs
    pool = _pool(target, draft, chosen, available)
    one = pool.of_request(chosen.window, chosen)
    requests = min(pool.blocks // one if one else chosen.seqs, chosen.seqs)
    cause, message = "", ""
    if free is not None and free - CONTEXT * GIB < requested:
        cause = "gpu-memory-held"
        message = "Free memory on device on startup is less than desired GPU memory utilization"
    elif weights + drafter > total:
        cause, message = "weights-exceed-gpu", "CUDA out of memory"
    elif available <= 0 or pool.blocks <= 0:
        cause, message = "no-kv-cache-memory", "No available memory for the cache blocks."
    elif one > pool.blocks:
        cause = "context-exceeds-kv-cache"
        message = (
            f"To serve at least one request with the model's max seq len ({chosen.window}), more KV cache is needed"
        )
    elif any(kind == "states" for kind, _ in pool.groups) and chosen.seqs > pool.blocks and not chosen.eager:
        cause = "state-blocks-below-max-num-seqs"
        message = f"max_num_seqs ({chosen.seqs}) exceeds available Mamba cache blocks ({pool.blocks})"
    return Outcome(chosen, requested, weights, drafter, beside, peak, graphs, available, pool, requests, cause, message)


def _peak(target: ModelFacts, chosen: Settings) -> int:
    """What the dummy step takes: the widest layer in two bytes a number, and the logits of its requests in six."""
    wide = max(target.intermediate if target.dense else 0, target.experts_active * (target.expert_width or 0))
    return (
        chosen.batched * 2 * (3 * wide // chosen.tp + 4 * target.hidden)
        + min(chosen.seqs, chosen.batched) * 6 * target.vocab
    )


def _pool(target: ModelFacts, draft: ModelFacts | None, chosen: Settings, available: int) -> Pool:
    layer = target.kv_layer_bytes(chosen.tp, chosen.element)
    if target.latent is not None:
        layer = target.kv_token_bytes(1, chosen.element) / max(target.attention_layers, 1)
    full = target.attention_layers + (draft.attention_layers + draft.sliding_layers if draft is not None else 0)
    full += target.mtp_layers if chosen.drafted and draft is None else 0
    counts = {"full": full, "sliding": target.sliding_layers, "states": 0}
    block = chosen.block
    if target.recurrent is not None:
        counts["states"] = target.recurrent.layers
        state = target.recurrent.slot_bytes(chosen.tp, 4 if target.recurrent.dtype == "float32" else 2)
        block = max(block, BLOCK * math.ceil(state / target.recurrent.layers / (BLOCK * layer))) if layer else block
    there = [count for count in counts.values() if count]
    if not there:
        return Pool(0, 1, block, (), 0)
    fewest, most = min(there), max(there)
    group = most if most < 1.5 * fewest else fewest
    groups = tuple((kind, -(-count // group)) for kind, count in counts.items() if count)
    size_of_block = math.ceil(block * layer * group / chosen.pp)
    return Pool(max(available, 0) // size_of_block, size_of_block, block, groups, target.window or 0)


# Words


def fitting(outcome: Outcome, tokens: int) -> Fit:
    """How many requests of one length run at once."""
    chosen, pool = outcome.chosen, outcome.pool
    if tokens > chosen.window:
        return Fit(tokens, 0, "window")
    by_blocks = pool.blocks // max(pool.of_request(tokens, chosen), 1)
    return Fit(tokens, min(by_blocks, chosen.seqs), "KV cache" if by_blocks < chosen.seqs else "requests")


def _plan(question: Question, outcome: Outcome, found: tuple[Finding, ...], notes: tuple[str, ...]) -> Plan:
    chosen, pool = outcome.chosen, outcome.pool
    lengths = tuple(question.contexts) or (chosen.window,)
    fits = tuple(fitting(outcome, tokens) for tokens in sorted(set(lengths)))
    runs = 0 if outcome.cause else min(chosen.seqs, pool.blocks // max(pool.of_request(1, chosen), 1))
    refused = next((f for f in found if f.severity is Severity.CRITICAL), None)
    short = [fit for fit in fits if question.contexts and fit.requests < question.requests]
    cause, message, change = outcome.cause, outcome.message, None
    if refused is not None:
        verdict, summary, cause, message = Verdict.IMPOSSIBLE, refused.summary, refused.id, ""
        change = Change("", refused.advice)
    elif outcome.cause:
        verdict, summary = Verdict.IMPOSSIBLE, _explain(outcome, question)
    elif chosen.seqs < question.requests or short:
        verdict, summary = Verdict.LIMITED, _limited(outcome, question, short)
    else:
        verdict = Verdict.FITS
        summary = (
            f"{_tokens(outcome):,} tokens in {pool.blocks:,} blocks of {pool.block_tokens}; {_whole(outcome)}, "
            f"{chosen.seqs} at most"
        )
    if refused is None and verdict is not Verdict.FITS:
        change = _change(question, outcome)
    slots = pool.blocks if any(kind == "states" for kind, _ in pool.groups) else None
    return Plan(
        engine="vllm",
        rules="vLLM, V1 engine" + (f" {question.version}" if question.version else ""),
        verdict=verdict,
        summary=summary,
        cause=cause,
        message=message,
        terms=tuple(_terms(question, outcome)),
        kv_tokens=_tokens(outcome),
        state_slots=slots,
        requests=runs,
        context=chosen.window,
        fits=fits,
        limit="kv" if outcome.requests < chosen.seqs else "requests",
        change=change,
        findings=found,
        notes=(*question.target.notes, *notes, "what a step and CUDA graphs take under vLLM is an estimate"),
    )


def _whole(outcome: Outcome) -> str:
    return at_once(outcome.requests).replace(" at once", " of the whole window at once")


def _tokens(outcome: Outcome) -> int:
    """What vLLM calls its KV cache size: as many whole windows as fit."""
    one = outcome.pool.of_request(outcome.chosen.window, outcome.chosen)
    return int(outcome.pool.blocks / one * outcome.chosen.window) if one else 0


def _explain(outcome: Outcome, question: Question) -> str:
    chosen, pool = outcome.chosen, outcome.pool
    allowed = f"--gpu-memory-utilization {chosen.utilization:g} allows {size(outcome.requested)}"
    if outcome.cause == "gpu-memory-held":
        free = (question.gpu.free_bytes or 0) - CONTEXT * GIB
        return f"{size(free)} of the GPU are free, and {allowed}: vLLM does not start while others hold the rest"
    if outcome.cause == "weights-exceed-gpu":
        return f"The weights take {size(outcome.weights + outcome.drafter)}, more than the GPU has"
    if outcome.cause == "no-kv-cache-memory":
        return (
            f"{allowed}; weights take {size(outcome.weights + outcome.drafter)}, a step and graphs about "
            f"{size(outcome.peak + outcome.graphs + outcome.beside)}: {size(-outcome.available)} too little"
        )
    if outcome.cause == "context-exceeds-kv-cache":
        one = pool.of_request(chosen.window, chosen) * pool.block_bytes
        return (
            f"One request of {chosen.window} tokens needs {size(one)} of KV cache, {size(outcome.available)} are left: "
            f"about {longest(outcome)} tokens fit"
        )
    return (
        f"--max-num-seqs {chosen.seqs}, and there are {pool.blocks} blocks: each running request needs one for its "
        "recurrent state"
    )


def longest(outcome: Outcome) -> int:
    """The longest request that fits alone."""
    low, high = 0, outcome.chosen.window
    while low < high:
        middle = (low + high + 1) // 2
        if outcome.pool.of_request(middle, outcome.chosen) <= outcome.pool.blocks:
            low = middle
        else:
            high = middle - 1
    return low


def _limited(outcome: Outcome, question: Question, short: list[Fit]) -> str:
    beyond = [fit for fit in short if fit.limit == "window"]
    if beyond:
        return f"Requests of {beyond[0].context} tokens exceed the window of {outcome.chosen.window}: they are refused"
    if outcome.chosen.seqs < question.requests:
        return f"It runs {at_once(outcome.chosen.seqs)} of {question.requests} wanted (--max-num-seqs)"
    worst = min(short, key=lambda fit: fit.requests)
    return f"It starts; of {worst.context}-token requests {worst.requests} fit at once, {question.requests} are wanted"


def _terms(question: Question, outcome: Outcome) -> Iterator[Term]:
    chosen, pool, gpu = outcome.chosen, outcome.pool, question.gpu
    free = gpu.free_bytes if gpu.free_bytes is not None else gpu.total_bytes - DRIVER * MIB
    yield Term("context", "not available", round(gpu.total_bytes - free + CONTEXT * GIB))
    gpus = f" on each of {chosen.tp} GPUs" if chosen.tp > 1 else ""
    yield Term(
        "weights", "weights", outcome.weights, f"{question.target.parameters / 1e9:.1f} billion parameters{gpus}"
    )
    if outcome.drafter:
        yield Term("drafter", "drafter", outcome.drafter)
    yield Term("activations", "a step, NCCL (estimate)", outcome.peak + outcome.beside,
               f"{chosen.batched:,} tokens, logits of {min(chosen.seqs, chosen.batched):,}")  # fmt: skip
    if outcome.graphs:
        yield Term("graphs", "CUDA graphs (estimate)", outcome.graphs)
    kv = pool.blocks * pool.block_bytes
    if kv > 0:
        held = "KV cache and states" if any(kind == "states" for kind, _ in pool.groups) else "KV cache"
        yield Term("kv", held, kv, f"{pool.blocks:,} blocks of {pool.block_tokens} tokens x {pool.block_bytes:,} B")
    used = outcome.weights + outcome.drafter + outcome.peak + outcome.beside + outcome.graphs + max(kv, 0)
    yield Term("free", "left", round(free - CONTEXT * GIB) - used, f"--gpu-memory-utilization {chosen.utilization:g}")


def _change(question: Question, outcome: Outcome) -> Change | None:
    """The first change, from the smallest to the largest, that gives what is wanted; else the one that gives most."""
    best: tuple[int, Change] | None = None
    for flag, to, was, cost, changed in _changes(question, outcome):
        tried = evaluate(question, changed)
        if tried.cause:
            continue
        runs = min([changed.seqs, *(fitting(tried, tokens).requests for tokens in question.contexts)])
        gives = f"{_whole(tried)}, {_tokens(tried):,} tokens of KV cache"
        change = Change(flag, to, was, gives, cost)
        if runs >= question.requests:
            return change
        if best is None or runs > best[0]:
            best = runs, change
    return best[1] if best else None


def _changes(question: Question, outcome: Outcome) -> Iterator[tuple[str, str, str, str, Settings]]:
    chosen, cause = outcome.chosen, outcome.cause
    if chosen.seqs < question.requests:
        yield ("--max-num-seqs", str(question.requests), str(chosen.seqs), "",
               replace(chosen, seqs=question.requests))  # fmt: skip
    if cause == "state-blocks-below-max-num-seqs" and outcome.pool.blocks > 0:
        fewer = outcome.pool.blocks
        yield "--max-num-seqs", str(fewer), str(chosen.seqs), "fewer requests", replace(chosen, seqs=fewer)
    if cause == "gpu-memory-held" and question.gpu.free_bytes is not None:
        total = question.gpu.total_bytes - DRIVER * MIB
        least = math.floor((question.gpu.free_bytes - CONTEXT * GIB) / total * 100) / 100
        if least > 0:
            yield ("--gpu-memory-utilization", f"{least:g}", f"{chosen.utilization:g}", "less KV cache",
                   replace(chosen, utilization=least))  # fmt: skip
    for more in (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95):
        if more > chosen.utilization:
            yield ("--gpu-memory-utilization", f"{more:g}", f"{chosen.utilization:g}", "less for whatever else runs",
                   replace(chosen, utilization=more))  # fmt: skip
    if cause == "context-exceeds-kv-cache" and longest(outcome) >= 256:
        shorter = longest(outcome) // 256 * 256
        yield "--max-model-len", str(shorter), str(chosen.window), "shorter requests", replace(chosen, window=shorter)
    if chosen.seqs > 64 and cause:
        yield "--max-num-seqs", "64", str(chosen.seqs), "fewer requests at once", replace(chosen, seqs=64)
    if chosen.element == 2.0:
        yield "--kv-cache-dtype", "fp8", "auto", "KV cache in half the precision", replace(chosen, element=1.0)
    for tp in (2, 4, 8):
        if tp > chosen.tp and (question.gpus is None or tp <= question.gpus) and divide(question.target, tp).possible:
            draft_tp = tp if chosen.draft_tp == chosen.tp else chosen.draft_tp
            yield ("--tensor-parallel-size", str(tp), str(chosen.tp), "more GPUs",
                   replace(chosen, tp=tp, draft_tp=draft_tp))  # fmt: skip


# Flags beyond what --help shows

RENAMED = {"--num-speculative-tokens": "--speculative-config", "--speculative-model": "--speculative-config"}
FOREIGN = {
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--max-running-requests": "--max-num-seqs",
    "--context-length": "--max-model-len",
    "--tp-size": "--tensor-parallel-size",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--disable-cuda-graph": "--enforce-eager",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--page-size": "--block-size",
    "--ctx-size": "--max-model-len",
    "--parallel": "--max-num-seqs",
}


def _check(given: Arguments, question: Question, chosen: Settings) -> Iterator[Finding]:
    target = question.target
    asked = length(given.text("--max-model-len"))
    if asked is not None and target.context is not None and asked > target.context:
        allowed = question.env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "").lower() in ("1", "true")
        if not allowed:
            yield wrong(
                "context-exceeds-model",
                f"--max-model-len {asked} is more than the model's {target.context} tokens",
                f"--max-model-len {target.context}, or VLLM_ALLOW_LONG_MAX_MODEL_LEN=1.",
            )
    ranks = chosen.tp * chosen.pp
    nodes = given.whole("--nnodes") or 1
    if question.gpus is not None and ranks > question.gpus * nodes:
        yield wrong(
            "gpu-index",
            f"{ranks} GPUs are asked for, {question.gpus * nodes} are there",
            f"--tensor-parallel-size {question.gpus}, or check CUDA_VISIBLE_DEVICES.",
        )
    divided = divide(target, chosen.tp)
    if not divided.possible:
        sizes = " or ".join(str(n) for n in (1, 2, 4, 8, 16) if divide(target, n).possible and n <= max(8, chosen.tp))
        yield wrong(
            "tp-not-divisible",
            f"The model cannot be divided among {chosen.tp} GPUs: {divided.findings[0]}",
            f"--tensor-parallel-size {sizes}.",
            certainty=Certainty.LIKELY,
        )
    config = speculative(given)
    whole = given.text("--speculative-config", "-sc")
    if whole is not None and not config:
        yield wrong("bad-argument", f"--speculative-config is no JSON object: {whole}", 'As in \'{"method":"mtp"}\'.')
    method = str(config.get("method") or "")
    if config and not chosen.drafted and method not in ("suffix",):
        yield wrong(
            "speculative-tokens-missing",
            "--speculative-config without num_speculative_tokens: vLLM takes the drafter's own number, or refuses",
            "Give num_speculative_tokens.",
            severity=Severity.WARNING,
            certainty=Certainty.LIKELY,
        )
    if method in ("eagle", "eagle3", "draft_model", "dflash") and not config.get("model") and question.draft is None:
        yield wrong("speculative-draft-missing", f"Speculation by {method} needs a draft model, and none is given",
                    "Give `draft:` in servers.yml, or model in --speculative-config.")  # fmt: skip
    if method == "mtp" and not target.mtp_layers:
        yield wrong(
            "mtp-weights-missing",
            "Speculation by mtp, and the model's configuration has no layers for it",
            "Take a checkpoint that kept them, or another method.",
            certainty=Certainty.LIKELY,
            severity=Severity.WARNING,
        )
