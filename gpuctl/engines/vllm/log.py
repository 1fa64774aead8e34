"""How a log of vLLM reads (V1 engine, 0.9 to 0.33): its stages, what it says of its memory, how it fails.

The process that users started only reports that an engine core failed; the reason is the first exception of the core,
or of the first worker that died. Each line of a traceback carries the prefix of its process.
"""

from __future__ import annotations

import re

from gpuctl.finding import Certainty, Finding, Layer
from gpuctl.logs.rule import Engine, Hit, Stage, Story, fact, gib, rule, shortage, size

STAGES = (
    Stage("arguments", "non-default args", "flags accepted"),
    Stage("distributed", "Initializing a V1 LLM engine", "engine core started"),
    Stage("connected", "rank in world size", "GPUs connected"),
    Stage("loading", "Starting to load model", "loading weights"),
    Stage("weights", "Model loading took", "weights loaded"),
    Stage("pools", "Available KV cache memory", "memory profiled"),
    Stage("kv", "KV cache size:", "KV cache allocated"),
    Stage("captured", "Graph capturing finished", "CUDA graphs captured"),
    Stage("capacity", "init engine (profile", "engine ready"),
    Stage("listening", "Starting vLLM server on", "HTTP server starting"),
    Stage("listening", "Starting vLLM API server", "HTTP server starting"),
    Stage("ready", "Application startup complete", "ready"),
)

_ARGUMENT = re.compile(r"'(\w+)': ('(?:[^'\\]|\\.)*'|\{[^{}]*\}|[^,{}\[\]'\"]+)(?=[,}])")


def _arguments(match: re.Match[str], story: Story) -> None:
    for name, value in _ARGUMENT.findall(match.string, match.end()):
        story.arguments.setdefault(name, value.strip("'"))


def _engine(match: re.Match[str], story: Story) -> None:
    story.version = match["version"]
    found = re.search(r"max_seq_len=(\d+)", match.string)
    if found:
        story.capacity.context_tokens = int(found[1])


def _weights(match: re.Match[str], story: Story) -> None:
    story.capacity.weights_bytes = gib(match["used"])


def _available(match: re.Match[str], story: Story) -> None:
    story.capacity.kv_bytes = gib(match["free"])


def _tokens(match: re.Match[str], story: Story) -> None:
    story.capacity.kv_tokens = int(match["tokens"].replace(",", ""))


def _concurrency(match: re.Match[str], story: Story) -> None:
    story.capacity.context_tokens = int(match["context"].replace(",", ""))
    story.capacity.concurrency = float(match["times"])


def _graphs(match: re.Match[str], story: Story) -> None:
    story.capacity.graph_bytes = gib(match["used"])


def _accepted(match: re.Match[str], story: Story) -> None:
    story.capacity.accept_length = float(match["length"])


FACTS = (
    fact("non-default args", r"non-default args: ", _arguments),
    fact("Initializing a V1 LLM engine", r"engine \(v(?P<version>[^)]{1,60})\)", _engine),
    fact("Model loading took", r"took (?P<used>[\d.]+) Gi?B", _weights),
    fact("Available KV cache memory", r"memory: (?P<free>-?[\d.]+) GiB", _available),
    fact("KV cache size:", r"KV cache size: (?P<tokens>[\d,]+) tokens", _tokens),
    fact("Maximum concurrency for", r"for (?P<context>[\d,]+) tokens per request: (?P<times>[\d.]+)x", _concurrency),
    fact("Graph capturing finished", r"took (?P<used>[\d.]+) GiB", _graphs),
    fact("Mean acceptance length", r"Mean acceptance length: (?P<length>[\d.]+)", _accepted),
)


def _held(hit: Hit, story: Story) -> Finding:
    free, total = float(hit["free"]), float(hit["total"])
    held = f"{total - free:.1f} of {total:.1f} GiB"
    before = bool(story.previous)
    return hit.rule.say(
        hit,
        summary=f"The GPU is not free: {held} are held by another process; {hit['wanted']} GiB are wanted "
        f"(--gpu-memory-utilization {hit['fraction']})"
        + ("; the start before this one in the log may not have given its memory back yet" if before else ""),
        certainty=Certainty.PROVED,
        advice="Wait until nvidia-smi shows the memory free and stable, then start. If a process remains: `nvidia-smi "
        "--query-compute-apps=pid,used_memory --format=csv`, stop it by its pid.",
        separates="nvidia-smi: a living process, or memory that is still being given back",
    )


def _context(hit: Hit, story: Story) -> Finding:
    best = hit["best"]
    return hit.rule.say(
        hit,
        summary=f"One request of --max-model-len {hit['context']} needs {hit['need']} GiB of KV cache, {hit['free']} "
        "GiB are there",
        advice=(f"--max-model-len {best}" if best and best != "0" else "Lower --max-model-len")
        + "; or a higher --gpu-memory-utilization, --kv-cache-dtype fp8, more GPUs.",
    )


def out_of_memory(hit: Hit, story: Story) -> Finding:
    """CUDA out of memory, by what was being done then."""
    groups = hit.match.groupdict(default="")
    short = shortage(hit)
    fraction = story.number("gpu_memory_utilization")
    lower = f"Lower --gpu-memory-utilization{f' (now {fraction:g})' if fraction else ''}"
    if hit.ready:
        return hit.rule.say(
            hit,
            id="gpu-oom-serving",
            summary=f"Out of GPU memory while serving{short}",
            advice=f"{lower}, or --max-num-batched-tokens.",
        )
    if hit.stage in ("kv", "captured", "capacity"):
        return hit.rule.say(
            hit,
            id="graph-memory-estimate",
            summary=f"Out of GPU memory after profiling, while graphs were captured or the engine warmed up{short}. "
            "The estimate of what graphs need was too low (it changed in vLLM 0.21)",
            advice=f"{lower} by 0.02 to 0.05, lower --max-num-seqs, or set VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 "
            "if an older vLLM worked.",
        )
    others = groups.get("others")
    return hit.rule.say(
        hit,
        id="weights-exceed-gpu",
        summary=f"Out of GPU memory while weights were loaded or memory was profiled{short}"
        + (f"; another process holds {others}" if others else ""),
        advice="More GPUs (--tensor-parallel-size), quantised weights, or free the GPU first. If the same model "
        "fitted an older vLLM, its weights are expanded differently now.",
        certainty=Certainty.LIKELY,
    )


def _no_memory(hit: Hit, story: Story) -> Finding:
    weights = story.capacity.weights_bytes
    fraction = story.number("gpu_memory_utilization")
    have = f"weights take {size(weights)}; " if weights else ""
    kv = story.capacity.kv_bytes
    short = f"{size(-kv)} too little" if kv is not None and kv < 0 else "nothing is left for the KV cache"
    return hit.rule.say(
        hit,
        summary=f"No memory for the KV cache: {have}{short}",
        advice=f"Raise --gpu-memory-utilization{f' above {fraction:g}' if fraction else ''}, use more GPUs or "
        "quantised weights, or lower --max-num-batched-tokens (activations).",
    )


RULES = (
    rule("no-kv-cache-memory", "No available memory for the cache blocks", r"No available memory for the cache blocks",
         specificity=92, explain=_no_memory),
    rule("context-exceeds-kv-cache", "To serve at least one request with the model",
         r"max seq len \((?P<context>\d+)\), \(?(?P<need>[\d.]+) GiB KV cache is needed, which is larger than the "
         r"available KV cache memory \((?P<free>-?[\d.]+) GiB\)(?:.{0,120}?estimated maximum model length is "
         r"(?P<best>\d+))?", specificity=92, explain=_context),
    rule("gpu-memory-held", "on startup is less than desired GPU memory utilization",
         r"\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than desired GPU memory utilization "
         r"\((?P<fraction>[\d.]+), (?P<wanted>[\d.]+) GiB\)", specificity=92, explain=_held),
    rule("state-blocks-below-max-num-seqs", "exceeds available Mamba cache",
         r"max_num_seqs \((?P<asked>\d+)\) exceeds available Mamba cache blocks \((?P<blocks>\d+)\)",
         "--max-num-seqs {asked} needs as many recurrent-state blocks; there are {blocks}",
         "--max-num-seqs {blocks} (or fewer), or a higher --gpu-memory-utilization.", specificity=92),
    rule("gpu-out-of-memory", "CUDA out of memory",
         r"CUDA out of memory\. Tried to allocate (?P<wanted>[\d.]+ \w+)\.(?:.{0,120}?of which (?P<free>[\d.]+ "
         r"\w+) is free)?(?:.{0,160}?Process \d+ has (?P<others>[\d.]+ \w+) memory in use)?", specificity=70,
         explain=out_of_memory),
    rule("backend-not-valid", "is not valid for",
         r"Selected backend \S*?(?P<name>\w+) is not valid for this configuration\. Reason: \[(?P<why>.{1,200}?)\]",
         "The attention backend {name} cannot do this: {why}",
         "Leave the choice to vLLM, or name another: --attention-backend FLASH_ATTN, TRITON_ATTN or FLASHINFER.",
         specificity=90, layer=Layer.CUDA),
    rule("hybrid-page-size", "AssertionError", r"^AssertionError",
         "This vLLM cannot combine the layers of target and drafter in one KV cache (their page sizes do not unify)",
         "Use a newer vLLM, or another kind of speculation for this model.", specificity=85,
         within="unify_kv_cache_spec_page_size"),
    rule("draft-hidden-size", "AssertionError", r"^AssertionError.{0,120}hidden_size",
         "Drafter and target have different hidden sizes", "Use a drafter made for this target.", specificity=80,
         layer=Layer.MODEL),
    rule("draft-vocabulary", "AssertionError", r"AssertionError", "Drafter and target have different vocabularies",
         "Use a drafter made for this target.", specificity=80, within="vocab_size", layer=Layer.MODEL),
    rule("cuda-toolkit-too-old", "requires CUDA >=",
         r"Failed to get device capability: (?P<arch>SM [\d.x]+) requires CUDA >= (?P<need>[\d.]*\d)",
         "{arch} needs a CUDA toolkit of at least {need} for kernels compiled on the machine",
         "Install that toolkit and set CUDA_HOME, or the packages with kernels built ahead (flashinfer-jit-cache).",
         specificity=90, layer=Layer.CUDA),
)  # fmt: skip

ENGINE = Engine(
    name="vllm",
    marks=("vLLM", "vllm", "EngineCore", "WorkerProc"),
    start=("vLLM API server version", "Starting vLLM API server version"),
    stages=STAGES,
    facts=FACTS,
    rules=RULES,
    envelope=(
        "Engine core initialization failed",
        "EngineCore failed to start",
        "EngineCore encountered a fatal error",
        "WorkerProc failed to start",
        "WorkerProc hit an exception",
        "Failed core proc",
        "EngineDeadError",
        "WorkerProc initialization failed",
        "Engine process failed to start",
    ),
    fatal=(
        "EngineCore failed to start",
        "EngineCore encountered a fatal error",
        "WorkerProc failed to start",
        "WorkerProc hit an exception",
        "Exception in worker",
    ),
    benign=(
        "SymmMemCommunicator: Device capability",
        "destroy_process_group() was not called",
        "Custom allreduce is disabled",
        "Triton is installed but",
        "Failed to import Triton kernels",
        "is not supported on more than two PCIe-only GPUs",
        "Unable to detect current VLLM config",
    ),
    dead=("Engine core initialization failed", "EngineCore failed to start", "EngineDeadError"),
    stopped=("Shutting down FastAPI HTTP server", "Application shutdown complete"),
    loading={
        "distributed": "The GPUs do not find each other, or a GPU does not answer",
        "loading": "The weights are being read",
        "kv": "Graphs are captured, or kernels tuned (FlashInfer autotune)",
        "weights": "Memory is being profiled and kernels compiled",
    },
)
