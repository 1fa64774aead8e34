"""The memory plan of llama-server: weights, KV cache and states of its slots, compute buffers; on GPUs and off. Pure.

`-c` is the context of all slots together, and each of `-np` slots gets its part of it unless the KV cache is unified;
of hybrid models each slot has a recurrent state. Sources: llama.cpp's src/llama-kv-cache.cpp,
llama-memory-recurrent.cpp and tools/server/README.md. Compute buffers are an estimate: docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpuctl.facts.model import ModelFacts
from gpuctl.finding import Finding, Severity
from gpuctl.flags import Arguments, Number, arguments, wrong
from gpuctl.memory import Change, Fit, Plan, Question, Term, Verdict, at_once, size

GIB, MIB = 1 << 30, 1 << 20
BATCH = 2048  # --batch-size without the flag
CONTEXT = 0.5  # GiB of a CUDA context. Not measured; an estimate
# bytes of a number (ggml's block formats)
ELEMENT = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32,
           "q4_0": 18 / 32, "iq4_nl": 18 / 32}  # fmt: skip
FOREIGN = {
    "--tp-size": "--tensor-split",
    "--max-model-len": "--ctx-size",
    "--context-length": "--ctx-size",
    "--max-num-seqs": "--parallel",
    "--max-running-requests": "--parallel",
    "--draft-model": "--model-draft",
    "--speculative-draft-model-path": "--model-draft",
    "--kv-cache-dtype": "--cache-type-k",
}
# Every flag whose value is read as a number (common/arg.cpp; stoi() would take 32k for 32, which nobody means).
NUMBERS = (
    Number(("--ctx-size", "-c"), least=0),  # 0: the model's
    Number(("--parallel", "-np"), also=("-1",)),  # as many as it chooses
    Number(("--ubatch-size", "-ub"), least=0),  # 0: as --batch-size
    Number(("--gpu-layers", "--n-gpu-layers", "-ngl"), least=0, also=("-1", "-2", "auto", "all")),
    Number(("--spec-draft-n-max", "--draft-max", "--draft", "--draft-n"), least=0),
)
# Flags whose value is one of several words, with those that are read.
WORDS = {
    ("--cache-type-k", "-ctk"): tuple(ELEMENT),
    ("--cache-type-v", "-ctv"): tuple(ELEMENT),
    ("--split-mode", "-sm"): ("none", "layer", "row", "tensor"),
    ("--fit", "-fit"): ("on", "off"),
}
RENAMED = {"--draft-max": "--spec-draft-n-max", "--draft-min": "--spec-draft-n-min", "--draft": "--spec-draft-n-max"}


@dataclass(frozen=True)
class Settings:
    context: int  # of all slots together
    slots: int
    unified: bool  # one KV cache for all slots
    key: float
    value: float
    micro: int  # -ub: tokens of a compute step
    layers: int | None  # on GPUs; None: all
    gpus: int
    fit: bool  # the server shrinks the context by itself

    @property
    def window(self) -> int:
        return self.context if self.unified else self.context // max(self.slots, 1)


@dataclass(frozen=True)
class Outcome:
    chosen: Settings
    weights: int
    drafter: int
    kv: int
    states: int
    compute: int
    left: int
    cause: str


def settings(given: Arguments, question: Question) -> Settings:
    made = question.target.context or 4096
    slots = given.whole("--parallel", "-np")
    automatic = slots is None or slots < 0
    layers = given.text("--gpu-layers", "--n-gpu-layers", "-ngl")
    processor = question.gpus == 0
    return Settings(
        context=given.whole("--ctx-size", "-c") or made,
        slots=(1 if automatic and "llama_server" in " ".join(question.argv[:4]) else 4 if automatic else slots) or 1,
        unified=given.on("--kv-unified", "-kvu") or (automatic and not given.on("--no-kv-unified")),
        key=ELEMENT.get(given.text("--cache-type-k", "-ctk") or "f16", 2.0),
        value=ELEMENT.get(given.text("--cache-type-v", "-ctv") or "f16", 2.0),
        micro=512 if (micro := given.whole("--ubatch-size", "-ub")) is None else micro or BATCH,
        layers=0 if processor else int(layers) if layers is not None and layers.isdecimal() else None,
        gpus=1 if given.text("--split-mode", "-sm") == "none" else max(question.gpus or 1, 1),
        fit=given.text("--fit", "-fit") not in ("off",) and not processor,
    )


def doubt(question: Question) -> int:
    """Bytes that a plan made before a start may be wrong by on one GPU: compute buffers are not measured."""
    return GIB


def evaluate(question: Question, chosen: Settings) -> Outcome:
    target = question.target
    part = 1.0
    if chosen.layers is not None and chosen.layers > 0:
        part = min(1.0, chosen.layers / (target.layers + 1))
    share = part / chosen.gpus
    weights = round(_bytes(target) * share)
    drafter = round(_bytes(question.draft) / chosen.gpus) if question.draft is not None else 0
    kv = round(_kv(target, chosen) * share)
    if question.draft is not None:
        kv += round(_kv(question.draft, chosen) / chosen.gpus)
    state = target.recurrent
    states = round(chosen.slots * (state.conv_bytes(1, 4) + state.ssm_bytes(1, 4)) * share) if state is not None else 0
    compute = chosen.micro * 4 * (target.vocab + 2 * target.intermediate + 6 * target.hidden)
    free = question.gpu.free_bytes if question.gpu.free_bytes is not None else question.gpu.total_bytes
    context = 0 if question.gpus == 0 else round(CONTEXT * GIB)
    left = free - context - weights - drafter - kv - states - compute
    return Outcome(chosen, weights, drafter, kv, states, compute, left, "buffer-allocation-failed" if left < 0 else "")


def _slots(chosen: Settings) -> str:
    return f"{chosen.slots} slot{'' if chosen.slots == 1 else 's'}"


def _bytes(model: ModelFacts) -> int:
    return model.stored_bytes or model.computed_bytes()


def _kv(model: ModelFacts, chosen: Settings) -> float:
    """Bytes of the KV cache of all slots; its cells come in multiples of 256."""
    cells = -(-chosen.context // 256) * 256
    if model.latent is not None:
        return cells * model.attention_layers * model.latent * chosen.key
    layer = model.kv_heads * (model.head_dim * chosen.key + model.value_dim * chosen.value)
    seen = min(cells, chosen.slots * (model.window or cells) + chosen.micro) if model.sliding_layers else 0
    return layer * (cells * model.attention_layers + seen * model.sliding_layers)


def plan(question: Question) -> Plan:
    """What the server will hold, and whether it can work. `question.gpus` 0: the machine's memory, without a GPU."""
    given = arguments(question.argv)
    chosen = settings(given, question)
    outcome = evaluate(question, chosen)
    found = tuple(_check(given, question, chosen))
    lengths = tuple(question.contexts) or (chosen.window,)
    fits = tuple(fitting(chosen, tokens) for tokens in sorted(set(lengths)))
    refused = next((f for f in found if f.severity is Severity.CRITICAL), None)
    short = [fit for fit in fits if question.contexts and fit.requests < question.requests]
    where = "the machine's memory" if question.gpus == 0 else "the GPU"
    needed = outcome.weights + outcome.drafter + outcome.kv + outcome.states + outcome.compute
    cause, message, change = outcome.cause, "", None
    if refused is not None:
        verdict, summary, cause = Verdict.IMPOSSIBLE, refused.summary, refused.id
        change = Change("", refused.advice)
    elif outcome.cause and chosen.fit:
        verdict, cause = Verdict.LIMITED, ""
        summary = f"{size(needed)} are needed, {size(-outcome.left)} more than {where} has: --fit shrinks the context"
    elif outcome.cause:
        verdict, message = Verdict.IMPOSSIBLE, "unable to allocate buffer"
        summary = f"{size(needed)} are needed, {size(-outcome.left)} more than is free in {where}"
    elif any(fit.limit == "window" for fit in short):
        verdict = Verdict.LIMITED
        summary = f"Requests of {short[0].context} tokens exceed a slot's window of {chosen.window}: they are refused"
    elif chosen.slots < question.requests or short:
        verdict = Verdict.LIMITED
        summary = f"It runs {at_once(chosen.slots)} of {question.requests} wanted (--parallel)"
    else:
        verdict = Verdict.FITS
        how = f"{_slots(chosen)} of {chosen.window:,} tokens" if not chosen.unified or chosen.slots == 1 else (
            f"{_slots(chosen)} that share {chosen.context:,} tokens")  # fmt: skip
        summary = f"{how}, {size(needed)} in {where}"
    if refused is None and verdict is not Verdict.FITS:
        change = _change(question, outcome)
    return Plan(
        engine="llamacpp",
        rules="llama.cpp's slots",
        verdict=verdict,
        summary=summary,
        cause=cause,
        message=message,
        terms=tuple(_terms(question, outcome)),
        kv_tokens=chosen.context,
        state_slots=chosen.slots if question.target.recurrent is not None else None,
        requests=0 if cause else chosen.slots,
        context=chosen.window,
        fits=fits,
        limit="memory" if outcome.cause else "requests",
        change=change,
        findings=found,
        notes=(*question.target.notes, "compute buffers of llama.cpp are an estimate"),
    )


def fitting(chosen: Settings, tokens: int) -> Fit:
    """How many requests of one length run at once."""
    if tokens > chosen.window:
        return Fit(tokens, 0, "window")
    if chosen.unified and tokens * chosen.slots > chosen.context:
        return Fit(tokens, chosen.context // tokens, "KV cache")
    return Fit(tokens, chosen.slots, "requests")


def _terms(question: Question, outcome: Outcome) -> Iterator[Term]:
    gpu, chosen = question.gpu, outcome.chosen
    held = gpu.total_bytes - gpu.free_bytes if gpu.free_bytes is not None else 0
    if question.gpus != 0:
        held += round(CONTEXT * GIB)
    if held:
        yield Term("context", "not available", held)
    gpus = f"on each of {chosen.gpus} GPUs" if chosen.gpus > 1 else ""
    yield Term("weights", "weights", outcome.weights, gpus)
    if outcome.drafter:
        yield Term("drafter", "drafter", outcome.drafter)
    if outcome.states:
        yield Term("states", "recurrent states", outcome.states, _slots(chosen))
    yield Term("kv", "KV cache", outcome.kv, f"{chosen.context:,} tokens" +
               ("" if chosen.unified else f" in {_slots(chosen)} of {chosen.window:,}"))  # fmt: skip
    yield Term("activations", "compute buffers (estimate)", outcome.compute, f"{chosen.micro} tokens a step")
    yield Term("free", "left", outcome.left)


def _change(question: Question, outcome: Outcome) -> Change | None:
    chosen = outcome.chosen
    longest = max(question.contexts, default=0)
    tried: list[tuple[str, str, str, str, Settings]] = []
    if chosen.slots < question.requests:
        tried.append(("--parallel", str(question.requests), str(chosen.slots), "shorter slots",
                      replace(chosen, slots=question.requests)))  # fmt: skip
    slots = max(chosen.slots, question.requests)
    if longest > chosen.window:
        wider = -(-longest * (1 if chosen.unified else slots) // 256) * 256
        tried.append(("--ctx-size", str(wider), str(chosen.context), "more KV cache",
                      replace(chosen, context=wider)))  # fmt: skip
    if outcome.cause:
        tried += [
            ("--ctx-size", str(chosen.context // part), str(chosen.context), "shorter requests",
             replace(chosen, context=chosen.context // part))
            for part in (2, 4, 8, 16)
        ]  # fmt: skip
        tried.append(("--cache-type-k q8_0 --cache-type-v", "q8_0", "f16", "KV cache in half the precision",
                      replace(chosen, key=34 / 32, value=34 / 32)))  # fmt: skip
        tried += [
            ("--gpu-layers", str(layers), "all", "the other layers run on the processor, slowly",
             replace(chosen, layers=layers))
            for layers in range(question.target.layers - 1, 0, -1)
            if question.gpus
        ]  # fmt: skip
    for flag, to, was, cost, changed in tried:
        if evaluate(question, changed).cause:
            continue
        if longest > changed.window or (question.requests > changed.slots and not outcome.cause):
            continue
        return Change(flag, to, was, f"{_slots(changed)} of {changed.window:,} tokens", cost)
    return None


def _check(given: Arguments, question: Question, chosen: Settings) -> Iterator[Finding]:
    made = question.target.context
    if made is not None and chosen.window > made:
        yield wrong(
            "context-exceeds-model",
            f"A slot's window of {chosen.window} tokens is more than the {made} that the model was made for",
            f"--ctx-size {made * (1 if chosen.unified else chosen.slots)}",
            severity=Severity.WARNING,
        )
    if given.on("--no-warmup"):
        yield wrong(
            "warm-up-off",
            "--no-warmup: whether the compute buffers fit shows at the first request only",
            "Leave the warm-up on.",
            severity=Severity.INFO,
        )
