"""What SGLang's own checks of its arguments will refuse, or quietly change, before it is started.

Sources: srt/server_args.py and srt/arg_groups/ of 0.5.10 to 0.5.23, and real refusals (tests/ground_truth/sglang).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpuctl.engines.sglang.pools import Rules
from gpuctl.facts.model import ModelFacts, divide
from gpuctl.finding import Certainty, Finding, Severity
from gpuctl.flags import Arguments, arguments, wrong
from gpuctl.memory import Question

# Names that a flag had, or has in other engines, and what it is called in SGLang.
RENAMED: Mapping[str, str] = {
    "--mamba-scheduler-strategy": "--mamba-radix-cache-strategy",
    "--mamba-radix-cache-strategy": "--mamba-scheduler-strategy",
    "--speculative-dflash-draft-window-size": "--speculative-draft-window-size",
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--cuda-graph-bs": "--cuda-graph-bs-decode",
    "--disable-cuda-graph": "--cuda-graph-backend-decode",
    "--disable-piecewise-cuda-graph": "--disable-prefill-cuda-graph",
}
FOREIGN: Mapping[str, str] = {
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--max-num-seqs": "--max-running-requests",
    "--max-model-len": "--context-length",
    "--enforce-eager": "--disable-cuda-graph",
    "--max-num-batched-tokens": "--chunked-prefill-size",
    "--block-size": "--page-size",
    "--no-enable-prefix-caching": "--disable-radix-cache",
    "--ctx-size": "--context-length",
    "--parallel": "--max-running-requests",
    "--model-draft": "--speculative-draft-model-path",
}
ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO", "FROZEN_KV_MTP", "NONE")
HELP = "--help"  # the key of the help text among what is known of the installed version
_NEEDS_DRAFT = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")


def check(question: Question, rules: Rules) -> Iterator[Finding]:
    """What is wrong with a command line, beyond what its `--help` shows."""
    given = arguments(question.argv)
    yield from _speculation(given, question.target, question.draft, rules, question.installed)
    yield from _states(given, question.target, rules)
    yield from _context(given, question)
    yield from _parallel(given, question)
    if given.whole("--max-running-requests") == 0:
        yield wrong(
            "max-running-requests-zero",
            "--max-running-requests is 0: the server would run no requests",
            "Leave it out, or give at least 1.",
        )


def _speculation(
    given: Arguments, target: ModelFacts, draft: ModelFacts | None, rules: Rules, installed: Mapping[str, str]
) -> Iterator[Finding]:
    steps = given.text("--speculative-num-steps")
    others = [n for n in ("--speculative-eagle-topk", "--speculative-num-draft-tokens") if given.text(n) is not None]
    algorithm = (given.text("--speculative-algorithm", "--speculative-algo") or "").upper()
    path = given.text("--speculative-draft-model-path", "--speculative-draft-model")
    if not algorithm:
        if path or steps or others:
            yield wrong(
                "speculation-off",
                "Flags of speculation are given without --speculative-algorithm: they do nothing",
                "Add --speculative-algorithm, or take them away.",
                severity=Severity.WARNING,
            )
        return
    if algorithm not in ALGORITHMS and not any(algorithm in text.upper() for text in installed.values()):
        asked = HELP in installed  # the help of the installed version was read, and does not speak of it
        yield wrong(
            "speculative-unknown",
            f"No release of SGLang knows the speculative algorithm {algorithm}"
            + (", and the installed one's --help does not name it" if asked else ""),
            "It exists in forks at most: make sure that the installed one registers it.",
            certainty=Certainty.PROVED if asked else Certainty.LIKELY,
            severity=Severity.CRITICAL if asked else Severity.WARNING,
        )
    if algorithm in _NEEDS_DRAFT:
        yield from _eagle(given, target, algorithm, path, steps, others)
    topk = given.whole("--speculative-eagle-topk") or (10 if algorithm == "NGRAM" else 1)
    page, backend = given.whole("--page-size") or 1, given.text("--attention-backend") or ""
    if topk > 1 and page > 1 and backend not in ("flashinfer", "fa3"):
        yield wrong(
            "speculative-page-size",
            f"A draft tree (top-k {topk}) does not work with --page-size {page} on this attention backend",
            "Leave --page-size at 1, or use --attention-backend flashinfer.",
        )
    if algorithm == "DFLASH":
        tokens, block = given.whole("--speculative-num-draft-tokens"), given.whole("--speculative-dflash-block-size")
        if path is None:
            yield wrong(
                "speculative-draft-missing",
                "DFLASH needs a draft model, and none is given",
                "Add --speculative-draft-model-path.",
            )
        if tokens is not None and block is not None and tokens != block:
            yield wrong(
                "speculative-tokens-differ",
                f"--speculative-num-draft-tokens {tokens} and --speculative-dflash-block-size {block} contradict each "
                "other",
                "Give one of them.",
            )
        made = draft.draft_block if draft is not None else None
        if made and (tokens or block or made) != made:
            yield wrong(
                "speculative-block-size",
                f"The drafter was made for blocks of {made} tokens, {tokens or block} are asked for",
                f"--speculative-num-draft-tokens {made}, or leave it out.",
                severity=Severity.WARNING,
                certainty=Certainty.LIKELY,
            )
    if given.whole("--max-running-requests") is None:
        yield wrong(
            "requests-reset",
            "SGLang sets --max-running-requests to 48 for speculation; on hybrid models the memory plan pays for all "
            "48",
            "Give --max-running-requests yourself.",
            severity=Severity.INFO,
        )


def _eagle(
    given: Arguments, target: ModelFacts, algorithm: str, path: str | None, steps: str | None, others: list[str]
) -> Iterator[Finding]:
    if steps is None and others:
        yield wrong(
            "speculative-three-or-none",
            f"{' and '.join(others)} without --speculative-num-steps: SGLang ends with an AssertionError that has no "
            "text",
            "Give all three of --speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens, "
            "or none.",
        )
    tokens, topk = given.whole("--speculative-num-draft-tokens"), given.whole("--speculative-eagle-topk")
    count = given.whole("--speculative-num-steps")
    if count is not None and topk == 1 and tokens is not None and tokens != count + 1:
        yield wrong(
            "speculative-tokens-forced",
            f"With --speculative-eagle-topk 1 SGLang makes the draft tokens {count + 1} (steps + 1), not {tokens}",
            f"--speculative-num-draft-tokens {count + 1}",
            severity=Severity.WARNING,
        )
    if path is None and (algorithm in ("EAGLE3", "STANDALONE") or not target.mtp_layers):
        yield wrong(
            "target-loaded-as-draft",
            f"{algorithm} without --speculative-draft-model-path: SGLang loads the target a second time as its own "
            "drafter and runs out of memory",
            "Add --speculative-draft-model-path.",
            certainty=Certainty.LIKELY,
        )


def _states(given: Arguments, target: ModelFacts, rules: Rules) -> Iterator[Finding]:
    strategy = given.text("--mamba-radix-cache-strategy", "--mamba-scheduler-strategy")
    radix_off = given.on("--disable-radix-cache")
    speculates = bool(given.text("--speculative-algorithm", "--speculative-algo"))
    if strategy and strategy.startswith("extra_buffer") and target.recurrent is None:
        yield wrong(
            "state-strategy-wrong-model",
            f"{strategy} is for models with recurrent states; {target.architecture} has none",
            "Leave the flag out.",
        )
    if target.recurrent is None:
        return
    if strategy and strategy.startswith("extra_buffer") and radix_off and rules.regime == "A":
        yield wrong(
            "state-strategy-without-radix",
            "extra_buffer and --disable-radix-cache exclude each other",
            "Take one of them away.",
        )
    if speculates and not radix_off and rules.regime == "A" and strategy in (None, "auto", "no_buffer"):
        yield wrong(
            "state-strategy-speculation",
            "This SGLang refuses speculation with the prefix cache on a hybrid model unless "
            "--mamba-scheduler-strategy is extra_buffer",
            "--mamba-scheduler-strategy extra_buffer with SGLANG_ENABLE_SPEC_V2=1, or --disable-radix-cache. (A fork "
            "may allow it.)",
            severity=Severity.WARNING,
            certainty=Certainty.LIKELY,
        )
    if strategy == "extra_buffer_lazy" and speculates:
        yield wrong(
            "state-strategy-speculation", "extra_buffer_lazy does not work with speculation", "Use extra_buffer."
        )


def _context(given: Arguments, question: Question) -> Iterator[Finding]:
    asked, made = given.whole("--context-length"), question.target.context
    allowed = question.env.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "").lower() in ("1", "true")
    if asked is not None and made is not None and asked > made and not allowed:
        yield wrong(
            "context-exceeds-model",
            f"--context-length {asked} is more than the model's {made} tokens",
            f"--context-length {made}, or SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1.",
        )
    draft = question.draft
    if draft is not None and draft.context is not None and made is not None and not allowed:
        window = min(asked or made, made)
        if draft.context < window and given.text("--speculative-algorithm"):
            yield wrong(
                "context-exceeds-model",
                f"The drafter's context of {draft.context} tokens is less than the window of {window}",
                f"--context-length {draft.context}, or SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1.",
                certainty=Certainty.LIKELY,
            )


def _parallel(given: Arguments, question: Question) -> Iterator[Finding]:
    size = given.whole("--tp-size", "--tensor-parallel-size", "--tp") or 1
    ranks = size * (given.whole("--pp-size", "--pipeline-parallel-size") or 1)
    nodes = given.whole("--nnodes") or 1
    if question.gpus is not None and ranks > question.gpus * nodes:
        yield wrong(
            "gpu-index",
            f"{ranks} GPUs are asked for, {question.gpus * nodes} are there",
            f"--tp-size {question.gpus}, or check CUDA_VISIBLE_DEVICES.",
        )
    divided = divide(question.target, size)
    if not divided.possible:
        yield wrong(
            "tp-not-divisible",
            f"The model cannot be divided among {size} GPUs: {divided.findings[0]}",
            f"--tp-size {_possible(question.target, size)}.",
            certainty=Certainty.LIKELY,
        )


def _possible(target: ModelFacts, wanted: int) -> str:
    sizes = [str(size) for size in (1, 2, 4, 8, 16) if divide(target, size).possible and size <= max(8, wanted)]
    return " or ".join(sizes)
