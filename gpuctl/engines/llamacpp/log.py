"""How a log of llama.cpp's llama-server reads (2024 to 2026): its stages, its slots, how it fails.

The line that names the reason comes first; 'failed to load model' and 'exiting due to model loading error' follow
from it.
"""

from __future__ import annotations

import re

from gpuctl.finding import Certainty, Finding, Layer
from gpuctl.logs.rule import Engine, Hit, Stage, Story, fact, mib, rule, warning

STAGES = (
    Stage("arguments", "build_info:", "flags accepted"),
    Stage("arguments", "build: ", "flags accepted"),
    Stage("loading", "loading model", "loading weights"),
    Stage("weights", "offloaded ", "weights loaded"),
    Stage("kv", "KV buffer size", "KV cache allocated"),
    Stage("pools", "compute buffer size", "compute buffers allocated"),
    Stage("captured", "warming up the model", "warming up"),
    Stage("capacity", "n_slots = ", "slots ready"),
    Stage("capacity", "initializing slots", "slots ready"),
    Stage("ready", "listening on http", "ready"),
    Stage("ready", "HTTP server is listening", "ready"),
    Stage("ready", "server is listening on", "ready"),
)


def _build(match: re.Match[str], story: Story) -> None:
    story.version = match["version"]


def _slots(match: re.Match[str], story: Story) -> None:
    story.capacity.max_running_requests = int(match["slots"])
    if match["context"]:
        story.capacity.context_tokens = int(match["context"])
        each = int(match["context"])
        story.capacity.kv_tokens = each if match["unified"] == "true" else each * int(match["slots"])


def _model(match: re.Match[str], story: Story) -> None:
    if match["device"] != "CPU" and not match["device"].endswith("_Host"):
        story.capacity.weights_bytes = max(story.capacity.weights_bytes or 0, mib(match["used"]))


def _kv(match: re.Match[str], story: Story) -> None:
    if match["device"] not in ("CPU", "Host"):
        story.capacity.kv_bytes = max(story.capacity.kv_bytes or 0, mib(match["used"]))


def _states(match: re.Match[str], story: Story) -> None:
    story.capacity.state_bytes = max(story.capacity.state_bytes or 0, mib(match["used"]))


FACTS = (
    fact("build_info:", r"build_info: (?P<version>\S+)", _build),
    fact("build: ", r"build: (?P<version>\d+)", _build),
    fact("n_slots = ",
         r"n_slots = (?P<slots>\d+)(?:, n_ctx_slot = (?P<context>\d+))?(?:, kv_unified = '(?P<unified>\w+)')?", _slots),
    fact("model buffer size", r"(?P<device>\w+) model buffer size = +(?P<used>[\d.]+) MiB", _model),
    fact("KV buffer size", r"(?P<device>\w+) KV buffer size = +(?P<used>[\d.]+) MiB", _kv),
    fact("RS buffer size", r"(?P<device>\w+) RS buffer size = +(?P<used>[\d.]+) MiB", _states),
)  # fmt: skip


def _buffer(hit: Hit, story: Story) -> Finding:
    wanted, device = hit["wanted"], hit["device"]
    return hit.rule.say(
        hit,
        summary=f"A buffer of {wanted} MiB does not fit on GPU {device}",
        advice="Fewer layers on the GPU (-ngl), another split (-ts), a smaller context (-c; it is divided among -np "
        "slots), or quantised KV (-ctk q8_0 -ctv q8_0). If the GPU has the room: cudaMalloc also fails when host "
        "memory is short.",
    )


def _serving(hit: Hit, story: Story) -> Finding:
    if not hit.ready:
        return hit.rule.say(
            hit,
            id="gpu-out-of-memory",
            summary="Out of GPU memory while starting",
            advice="Fewer layers on the GPU (-ngl), a smaller context (-c), or fewer slots (-np).",
        )
    return hit.rule.say(
        hit,
        summary="Out of GPU memory at a request: compute buffers were not allocated before (--no-warmup hides what "
        "they need), or the drafter shares the GPU. The process may stay without answering",
        advice="Leave the warm-up on, lower -c, -ub or -ngl, or put the drafter elsewhere (-devd). Watch with a "
        "request that generates, not with /health.",
    )


def _vocabulary(hit: Hit, story: Story) -> Finding:
    goes_on = story.ready or "type" in hit.line.text
    sizes = hit.match.groupdict(default="")
    detail = f" ({sizes['target']} and {sizes['draft']} tokens)" if sizes.get("target") else ""
    return hit.rule.say(
        hit,
        summary=f"Drafter and target have different vocabularies{detail}"
        + ("; the server goes on without speculation" if goes_on else ""),
        advice="Use a drafter of the same family: same tokenizer, same vocabulary.",
    )


RULES = (
    rule("buffer-allocation-failed", "cudaMalloc failed: out of memory",
         r"allocating (?P<wanted>[\d.]+) MiB on device (?P<device>\d+): cudaMalloc failed", specificity=92,
         explain=_buffer),
    rule("buffer-allocation-failed", "unable to allocate", r"unable to allocate (?P<device>\w+) buffer",
         "A buffer does not fit on {device}",
         "Fewer layers on the GPU (-ngl), a smaller context (-c), fewer slots (-np).", specificity=80),
    rule("gpu-oom-serving", "CUDA error: out of memory", r"CUDA error: out of memory", specificity=90,
         explain=_serving),
    rule("architecture-unknown", "unknown model architecture", r"unknown model architecture: '(?P<type>[^']+)'",
         "This llama.cpp does not know the architecture {type}", "Use a newer llama.cpp.", specificity=92,
         layer=Layer.MODEL),
    rule("weights-damaged", "invalid magic", r"invalid magic characters: '(?P<found>.{1,8})', expected 'GGUF'",
         "The model file is no GGUF file (it begins with '{found}'): damaged, or another format",
         "Stage the model again (gpuctl stage verifies it).", specificity=92, layer=Layer.MODEL),
    rule("weights-damaged", "tensor data", r"is not within the file bounds|data is not within",
         "The model file is shorter than it says: incomplete", "Stage the model again (gpuctl stage verifies it).",
         specificity=90, layer=Layer.MODEL),
    rule("model-missing", "failed to open GGUF file", r"failed to open GGUF file '(?P<path>[^']+)' \((?P<why>[^)]+)\)",
         "The model file {path} cannot be opened: {why}",
         "Check -m; after a reboot a model in /dev/shm is gone: gpuctl restore.", specificity=92, layer=Layer.MODEL),
    rule("unknown-flag", "error: invalid argument", r"error: invalid argument: (?P<flag>\S+)",
         "This llama-server has no flag {flag}",
         "`llama-server --help` lists the flags. The drafter is -md, --model-draft; --draft-max became "
         "--spec-draft-n-max.", specificity=95),
    rule("draft-vocabulary", "draft model vocab must match",
         r"target vocab size (?P<target>\d+) does not match draft vocab size (?P<draft>\d+)|draft model vocab must "
         r"match", specificity=90, explain=_vocabulary, layer=Layer.MODEL),
    warning("draft-vocabulary", "draft model vocab type must match", r"vocab type must match target model",
            explain=_vocabulary, layer=Layer.MODEL),
    rule("model-not-loaded", "error loading model", r"error loading model: (?P<why>.{1,200})",
         "The model could not be loaded: {why}", "The line says what is wrong with the file or what it needs.",
         specificity=45, layer=Layer.MODEL, certainty=Certainty.LIKELY),
    rule("flash-attention-needed", "V cache quantization requires flash_attn",
         r"V cache quantization requires flash_attn", "A quantised V cache needs flash attention", "Add -fa on.",
         specificity=92),
)  # fmt: skip

ENGINE = Engine(
    name="llamacpp",
    marks=("llama_", "llama-server", "ggml_", "srv  ", "load_tensors", "common_init", "slot   load_model", "gguf_"),
    start=("build_info:",),
    stages=STAGES,
    facts=FACTS,
    rules=RULES,
    envelope=(
        "failed to load model",
        "exiting due to model loading error",
        "exiting due to HTTP server error",
        "encountered an error while trying to fit params",
    ),
    fatal=(),
    benign=(
        "requires ctx_other to be set",
        "no implementations specified for speculative decoding",
        "security: no API key is set",
    ),
    dead=("exiting due to model loading error", "exiting due to HTTP server error"),
    stopped=("waiting for main loop exit", "received second interrupt", "main loop exited"),
    loading={"loading": "The weights are being read"},
)
