"""What an SGLang command line comes to: flags with the defaults that SGLang itself would choose (0.5.10 to 0.5.23)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuctl.engines.sglang.pools import Rules
from gpuctl.facts.model import ModelFacts
from gpuctl.flags import Arguments, Number

MIB = 1 << 20
_ELEMENT = {
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "fp4_e2m1": 0.5625,  # a scale of a byte for each 16 numbers, as the next two
    "nvfp4": 0.5625,
    "fp4_mx_block16": 0.5625,
    "mxfp8": 1 + 1 / 32,
    "bfloat16": 2.0,
    "bf16": 2.0,
    "float16": 2.0,
    "auto": 2.0,
}
_STATE = {"float32": 4, "float16": 2, "bfloat16": 2}
_UNCHUNKED = 16384  # --max-prefill-tokens, which bounds a step where --chunked-prefill-size is switched off

# Flags whose value is one of several words, with those that are read.
WORDS: Mapping[tuple[str, ...], Iterable[str]] = {
    ("--kv-cache-dtype",): _ELEMENT,
    ("--mamba-ssm-dtype",): _STATE,
    ("--mamba-radix-cache-strategy", "--mamba-scheduler-strategy"): (
        "auto", "no_buffer", "extra_buffer", "extra_buffer_lazy",
    ),
}  # fmt: skip

# Every flag whose value is read as a number, as srt/server_args.py reads it.
NUMBERS = (
    Number(("--tp-size", "--tensor-parallel-size", "--tp")),
    Number(("--pp-size", "--pipeline-parallel-size")),
    Number(("--dp-size", "--data-parallel-size")),
    Number(("--nnodes",)),
    Number(("--mem-fraction-static",), least=0, most=1, whole=False),
    Number(("--mamba-full-memory-ratio",), least=0, whole=False),
    Number(("--context-length",)),
    Number(("--max-running-requests",), elsewhere=("0",)),
    Number(("--max-total-tokens",)),
    Number(("--max-mamba-cache-size",)),
    Number(("--page-size",)),
    Number(("--chunked-prefill-size",), least=-1),  # without chunks
    Number(("--cuda-graph-bs", "--cuda-graph-bs-decode"), several=True),
    Number(("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"), least=0),
    Number(("--cuda-graph-max-bs-prefill", "--piecewise-cuda-graph-max-tokens"), least=0),
    Number(("--speculative-num-draft-tokens",)),
    Number(("--speculative-num-steps",)),
    Number(("--speculative-eagle-topk",)),
    Number(("--speculative-dflash-block-size",)),
    Number(("--speculative-ddtree-budget",)),
)


@dataclass(frozen=True)
class Settings:
    tp: int
    pp: int
    attention_tp: int  # GPUs that share the attention heads
    fraction: float
    fraction_given: bool
    asked: int | None  # requests at once, of one worker
    context: int
    radix: bool
    ratio: int  # state slots of a running request
    state_element: int  # bytes of a number of the recurrent state
    share: float
    slots_given: int | None
    kv_element: float
    page: int
    tokens_given: int | None
    chunk: int  # tokens of a prefill step
    decode_batch: int  # the largest captured; 0: no graphs
    prefill_sizes: int  # how many are captured
    algorithm: str  # "" without speculation
    drafted: int
    replays: bool
    notes: tuple[str, ...] = ()


def settings(
    given: Arguments,
    target: ModelFacts,
    draft: ModelFacts | None,
    rules: Rules,
    gpu_mib: float,
    env: Mapping[str, str] | None = None,
) -> Settings:
    """The settings of a command line on a GPU of `gpu_mib` MiB (as nvidia-smi counts)."""
    tp = given.whole("--tp-size", "--tensor-parallel-size", "--tp") or 1
    pp = given.whole("--pp-size", "--pipeline-parallel-size") or 1
    dp = given.whole("--dp-size", "--data-parallel-size") or 1
    attends = given.on("--enable-dp-attention")
    algorithm, drafted, notes = speculation(given, target, draft)
    asked = given.whole("--max-running-requests")
    if algorithm and asked is None:
        asked = 48  # SGLang resets it so, with a log line
    if asked is not None and (attends or rules.regime == "A"):
        asked //= dp
    chunk = given.whole("--chunked-prefill-size")
    chunk = _chunk(gpu_mib, rules) if chunk is None else chunk if chunk > 0 else _UNCHUNKED
    context = given.whole("--context-length") or target.context or 4096
    tokens = given.whole("--max-total-tokens")
    batch = _decode_batch(given, gpu_mib, tp, asked, rules)
    sizes = _prefill_sizes(given, target, chunk, context if given.whole("--context-length") else None, tokens)
    fraction = given.number("--mem-fraction-static")
    strategy = given.text("--mamba-radix-cache-strategy", "--mamba-scheduler-strategy") or "auto"
    page = given.whole("--page-size") or 1
    overlap = not given.on("--disable-overlap-schedule") and not (
        rules.regime == "A" and algorithm and not _overlaps(given, algorithm, env or {})
    )
    radix = not given.on("--disable-radix-cache")
    dtype = given.text("--mamba-ssm-dtype") or (target.recurrent.dtype if target.recurrent else "float32")
    return Settings(
        tp=tp,
        pp=pp,
        attention_tp=max(1, tp // dp) if attends else tp,
        fraction=fraction
        if fraction is not None
        else _fraction(gpu_mib, chunk, tp * pp, batch, sizes, algorithm, target, rules),
        fraction_given=fraction is not None,
        asked=asked,
        context=context,
        radix=radix,
        ratio=_ratio(strategy, radix, overlap, page, rules, (env or {}).get("SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK", "")),
        state_element=_STATE.get(dtype, 4),
        share=given.number("--mamba-full-memory-ratio") or 0.9,
        slots_given=given.whole("--max-mamba-cache-size"),
        kv_element=_ELEMENT.get(given.text("--kv-cache-dtype") or "auto", 2.0),
        page=page,
        tokens_given=tokens,
        chunk=chunk,
        decode_batch=batch,
        prefill_sizes=sizes,
        algorithm=algorithm,
        drafted=drafted,
        replays=given.on("--enable-linear-replayssm-spec"),
        notes=notes,
    )


def speculation(given: Arguments, target: ModelFacts, draft: ModelFacts | None) -> tuple[str, int, tuple[str, ...]]:
    """(algorithm, tokens verified a step, notes); ("", 0, ()) without speculation."""
    algorithm = (given.text("--speculative-algorithm", "--speculative-algo") or "").upper()
    if not algorithm or algorithm == "NONE":
        return "", 0, ()
    tokens = given.whole("--speculative-num-draft-tokens")
    if algorithm in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "FROZEN_KV_MTP"):
        steps, topk = given.whole("--speculative-num-steps"), given.whole("--speculative-eagle-topk")
        if steps is None:
            steps, topk, tokens = (
                (5, 4, 8) if target.architecture == "LlamaForCausalLM" and algorithm != "STANDALONE" else (3, 1, 4)
            )
        if topk in (1, None):
            tokens = steps + 1
        return algorithm, tokens or steps + 1, ()
    if algorithm in ("DFLASH", "DSPARK"):
        block = given.whole("--speculative-dflash-block-size") or (draft.draft_block if draft is not None else None)
        return algorithm, tokens or block or 16, ()
    if algorithm == "NGRAM":
        return algorithm, tokens or 12, ()
    budget = given.whole("--speculative-ddtree-budget")
    if budget is not None:
        return algorithm, budget + 1, ()
    note = () if tokens else (f"how many tokens {algorithm} verifies a step is not known: 16 are assumed",)
    return algorithm, tokens or 16, note


def _overlaps(given: Arguments, algorithm: str, env: Mapping[str, str]) -> bool:
    """Whether the schedule overlaps under speculation to 0.5.12: only EAGLE's kin, without trees, and asked to."""
    asked = env.get("SGLANG_ENABLE_SPEC_V2", "").lower() in ("1", "true")
    eagle = algorithm in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
    return asked and eagle and given.whole("--speculative-eagle-topk") in (None, 1)


def _ratio(strategy: str, radix: bool, overlap: bool, page: int, rules: Rules, skip: str) -> int:
    if not radix:
        return 1
    if strategy == "auto":
        strategy = "extra_buffer" if rules.auto_extra_buffer and (overlap or page > 1) else "no_buffer"
    if strategy == "no_buffer":
        return 3
    base = 2 if rules.regime == "C" and skip.lower() in ("1", "true") else 3
    return base + (2 if strategy == "extra_buffer" and overlap else 1)


def _chunk(gpu_mib: float, rules: Rules) -> int:
    if gpu_mib < 20 * 1024:
        return 2048
    if gpu_mib < 35 * 1024:
        return 4096 if rules.regime == "C" else 2048
    if gpu_mib < 60 * 1024:
        return 4096
    return 8192 if gpu_mib < 160 * 1024 else 16384


def _decode_batch(given: Arguments, gpu_mib: float, tp: int, asked: int | None, rules: Rules) -> int:
    if given.on("--disable-cuda-graph") or given.text("--cuda-graph-backend-decode") == "disabled":
        return 0
    listed = given.many("--cuda-graph-bs", "--cuda-graph-bs-decode")
    sizes = [int(text) for text in listed if text.isdecimal()]
    if sizes:
        return max(sizes)
    wanted = given.whole("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode")
    if wanted is not None:
        return wanted
    few = tp < 4
    if gpu_mib < 20 * 1024:
        batch = 8
    elif gpu_mib < 35 * 1024:
        batch = (48 if few else 160) if rules.regime == "C" else (24 if few else 80)
    elif gpu_mib < 60 * 1024:
        batch = 32 if few else 160
    else:
        batch = 256 if few and gpu_mib < 160 * 1024 else 512
    return min(batch, asked) if rules.regime == "C" and asked else batch


def _prefill_sizes(given: Arguments, target: ModelFacts, chunk: int, context: int | None, tokens: int | None) -> int:
    off = given.on("--disable-cuda-graph", "--disable-prefill-cuda-graph") or any(
        given.on(name) for name in ("--disable-prefill-cuda-graph", "--disable-piecewise-cuda-graph")
    )
    if off or given.text("--cuda-graph-backend-prefill") == "disabled":
        return 0
    most = given.whole("--cuda-graph-max-bs-prefill", "--piecewise-cuda-graph-max-tokens")
    if most is None:
        most = 2048 if target.latent is not None else chunk
        most = min(most, tokens) if tokens is not None else most
    if context is not None:
        most = min(most, context)
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, most + 1, 512))
    return sum(1 for start, end, step in steps for size in range(start, end, step) if size <= most)


def _fraction(
    gpu_mib: float, chunk: int, ranks: int, batch: int, sizes: int, algorithm: str, target: ModelFacts, rules: Rules
) -> float:
    """What SGLang chooses without --mem-fraction-static (server_args.py, later arg_groups/memory_hook.py)."""
    if gpu_mib <= 0:
        return 0.88
    reserved = 512 + max(chunk, 2048) * 1.5 + ranks / 8 * 1024 + batch * 2
    if sizes:
        reserved += sizes * 8 if target.latent is None else 1.5 * 1024
    if gpu_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    if rules.regime == "A" and algorithm and algorithm != "NGRAM":
        reserved += (6 if algorithm == "STANDALONE" else 4) * 1024
    fraction = round((gpu_mib - reserved) / gpu_mib, 3)
    if target.vision_hidden is not None:
        # SGLang reads the tower's depth under a name that Qwen's do not have, so 24 layers are assumed.
        size = 24 * target.vision_hidden**2 / (24 * 1024**2)
        fraction *= 0.95 * max(0.8, min(1.05, 1.0 - 0.1 * (size - 1.0)))
    return fraction
