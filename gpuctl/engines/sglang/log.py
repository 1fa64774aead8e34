"""How a log of SGLang reads (0.5.10 to 0.5.23): its stages, what it says of its memory, how it fails.

Nearly every failure after the command line ends in signal 9: the main process kills its own tree. The reason is the
exception that follows `Scheduler hit an exception`; the lines after it are always the same. What memory failures
really mean is in shortage.py.
"""

from __future__ import annotations

import re

from gpuctl.engines.sglang import shortage
from gpuctl.finding import Certainty, Finding, Layer
from gpuctl.logs.rule import Engine, Hit, Stage, Story, fact, gib, rule, warning
from gpuctl.memory import at_once

STAGES = (
    Stage("arguments", "server_args=ServerArgs(", "flags accepted"),
    Stage("distributed", "Init torch distributed begin", "processes started"),
    Stage("connected", "Init torch distributed ends", "GPUs connected"),
    Stage("loading", "Load weight begin", "loading weights"),
    Stage("weights", "Load weight end", "weights loaded"),
    Stage("states", "Mamba Cache is allocated", "recurrent states allocated"),
    Stage("kv", "KV Cache is allocated", "KV cache allocated"),
    Stage("kv", "KV Cache VA upper bound", "KV cache allocated"),
    Stage("pools", "Memory pool end", "memory pools allocated"),
    Stage("graphs", "raph begin", "capturing CUDA graphs"),
    Stage("captured", "raph end", "CUDA graphs captured"),
    Stage("capacity", "max_total_num_tokens=", "scheduler ready"),
    Stage("listening", "Application startup complete", "HTTP server started"),
    Stage("ready", "The server is fired up and ready to roll", "ready"),
)

_ARGUMENT = re.compile(r"(\w+)=('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^,()\[\]{}'\"]+)(?=[,)])")


def _arguments(match: re.Match[str], story: Story) -> None:
    for name, value in _ARGUMENT.findall(match.string, match.end()):
        story.arguments.setdefault(name, value.strip("'\""))
    story.version = story.flag("version") or story.version


def _before(match: re.Match[str], story: Story) -> None:
    story.notes.setdefault("context", match["used"])


def _loading(match: re.Match[str], story: Story) -> None:
    if story.capacity.free_before_bytes is None:
        # Free before NCCL starts is what SGLang budgets from: what loading begins with, and what starting took.
        story.capacity.free_before_bytes = gib(match["free"]) + gib(story.notes.get("context", "0"))


def _loaded(match: re.Match[str], story: Story) -> None:
    known = story.capacity
    if known.weights_bytes is None:
        known.weights_bytes = gib(match["used"]) if match["used"] else None
    elif match["used"]:
        known.draft_weights_bytes = gib(match["used"])
    known.free_after_weights_bytes = gib(match["free"])


def _states(match: re.Match[str], story: Story) -> None:
    known = story.capacity
    known.state_slots = int(match["slots"])
    known.state_bytes = gib(match["conv"]) + gib(match["ssm"])
    if match["verify"]:
        known.verify_bytes = gib(match["verify"]) + gib(match["window"] or 0)


def _kv(match: re.Match[str], story: Story) -> None:
    known = story.capacity
    if known.kv_tokens is None:  # the first is the target's; the drafter's follows
        known.kv_tokens = int(match["tokens"])
        known.kv_bytes = gib(match["k"]) + gib(match["v"]) if match["k"] else gib(match["kv"] or 0)


def _pools(match: re.Match[str], story: Story) -> None:
    story.capacity.free_after_pools_bytes = gib(match["free"])


def _graphs(match: re.Match[str], story: Story) -> None:
    story.capacity.graph_bytes = (story.capacity.graph_bytes or 0) + gib(match["used"])


def _limits(match: re.Match[str], story: Story) -> None:
    known = story.capacity
    known.kv_tokens = int(match["tokens"])
    known.max_running_requests = int(match["requests"])
    known.context_tokens = int(match["context"])
    if match["free"]:
        known.free_when_ready_bytes = gib(match["free"])


def _asked(match: re.Match[str], story: Story) -> None:
    story.capacity.requested_running_requests = int(match["asked"])
    story.capacity.max_running_requests = int(match["got"])


def _accepted(match: re.Match[str], story: Story) -> None:
    story.capacity.accept_length = float(match["length"])
    story.notes["accepted"] = str(int(story.notes.get("accepted", "0")) + 1)
    if match["length"] not in ("1.00", "0.00"):
        story.notes["accepts"] = "yes"


FACTS = (
    fact("server_args=ServerArgs(", r"server_args=ServerArgs\(", _arguments),
    fact("Init torch distributed ends", r"mem usage=(?P<used>[\d.]+) GB", _before),
    fact("Load weight begin", r"avail mem=(?P<free>[\d.]+) GB", _loading),
    fact("Load weight end", r"avail mem=(?P<free>[\d.]+) GB(?:, mem usage=(?P<used>[\d.]+) GB)?", _loaded),
    fact(
        "Mamba Cache is allocated",
        r"max_mamba_cache_size: (?P<slots>\d+), conv_state size: (?P<conv>[\d.]+) ?GB, ssm_state size: "
        r"(?P<ssm>[\d.]+) ?GB(?:,? intermediate_ssm_state_cache size: (?P<verify>[\d.]+) ?GB)?(?:,? "
        r"intermediate_conv_window_cache size: (?P<window>[\d.]+) ?GB)?",
        _states,
    ),
    fact(
        "KV Cache ",
        r"#tokens: (?P<tokens>\d+), (?:K size: (?P<k>[\d.]+) GB, V size: (?P<v>[\d.]+) GB|KV size: (?P<kv>[\d.]+) GB)",
        _kv,
    ),
    fact("Memory pool end", r"avail mem=(?P<free>[\d.]+) GB", _pools),
    fact("raph end", r"mem usage=(?P<used>[\d.]+) GB", _graphs),
    fact(
        "max_total_num_tokens=",
        r"max_total_num_tokens=(?P<tokens>\d+),.{0,120}? max_running_requests=(?P<requests>\d+), "
        r"context_len=(?P<context>\d+)(?:, available_gpu_mem=(?P<free>[\d.]+) GB)?",
        _limits,
    ),
    fact(
        "was reduced from the requested",
        r"max_running_requests was reduced from the requested (?P<asked>\d+) to (?P<got>\d+)",
        _asked,
    ),
    fact("accept len: ", r"Decode batch.{0,200}? accept len: (?P<length>\d+\.\d+)", _accepted),
)


def _three_or_none(hit: Hit, story: Story) -> Finding | None:
    raised = hit.line.raised
    if raised is None or raised.message:
        return None
    return hit.rule.say(hit)


def _no_acceptance(hit: Hit, story: Story) -> Finding | None:
    if story.notes.get("accepts") or int(story.notes.get("accepted", "0")) < 3:
        return None
    algorithm = story.flag("speculative_algorithm") or "speculation"
    return hit.rule.say(
        hit,
        summary=f"The drafter's tokens are never accepted (accept len 1.00, {algorithm}): speculation costs and gives "
        "nothing",
        advice="Check that the draft model belongs to this target, and that an EAGLE-3 drafter runs with "
        "--speculative-algorithm EAGLE3 (EAGLE takes it without an error).",
    )


def _track_index(hit: Hit, story: Story) -> Finding:
    if hit.ready:
        return hit.rule.say(hit)
    return hit.rule.say(
        hit,
        id="speculative-start-race",
        summary="Speculation on a hybrid model crashed at its first verify step, during warm-up: a race of SGLang "
        "0.5.13 that ends about one start in five",
        advice="Start again (at most twice), or use a newer SGLang; --mamba-scheduler-strategy no_buffer avoids the "
        "code.",
    )


def _capped(hit: Hit, story: Story) -> Finding:
    asked = hit["asked"] or f"{story.number('max_running_requests') or 0:g}"
    return hit.rule.say(
        hit,
        summary=f"The server runs {at_once(int(hit['got']))}, {asked} were asked for: memory for no more",
        advice="Measurements above that concurrency are queueing, not serving. More: a higher "
        "--mamba-full-memory-ratio (hybrid models) or --mem-fraction-static, --mamba-ssm-dtype bfloat16, fewer draft "
        "tokens, more GPUs.",
    )


def _killed(hit: Hit, story: Story) -> Finding:
    code = int(hit["code"])
    who = f"rank {hit['who']}" if hit["who"].isdigit() else hit["who"]
    if code == -9:
        return hit.rule.say(
            hit,
            certainty=Certainty.LIKELY,
            summary=f"The process {who} was ended from outside with SIGKILL: it printed no exception. The kernel's "
            "OOM killer does that, and so does a person",
            separates="`journalctl -k -g 'Out of memory'` on the host: a line with this pid proves the OOM killer",
            advice="Look there first. If it is the OOM killer: less in host memory (tmpfs, ranks loading at once) or "
            "more of it.",
        )
    return hit.rule.say(
        hit,
        id="scheduler-crashed",
        certainty=Certainty.LIKELY,
        summary=f"The process {who} ended with exit status {code} and printed no exception"
        + (f" (signal {-code}: a crash in native code)" if code in (-11, -6, -7, -4) else ""),
        advice="Its own lines before this one, and `dmesg`, say more; PYTHONFAULTHANDLER=1 prints the stack at a "
        "crash.",
    )


_LOWER_CONTEXT = (
    "Lower --context-length to {limit}, or set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 if the model is \
meant to go beyond."
)

RULES = (
    # Memory
    rule("state-slots-starved", "max_running_request", r"max_running_requests? is zero",
         specificity=90, explain=shortage.no_requests),
    rule("state-slots-starved", "state cache is too small",
         r"state cache is too small to serve any requests. max_mamba_cache_size=(?P<slots>-?\d+), "
         r"mamba_ratio=(?P<ratio>\d+)", specificity=90, explain=shortage.no_requests),
    rule("state-cache-no-memory", "Not enough GPU memory for hybrid",
         r"Computed max_mamba_cache_size=(?P<slots>-?\d+) \(total_rest_memory=(?P<rest>-?[\d.]+) GB, "
         r"mamba_cache_per_req=(?P<state>[\d.]+) MB\)",
         specificity=90, explain=shortage.no_memory_for_states),
    rule("weights-exceed-budget", "leave no GPU memory for the KV cache",
         r"--mem-fraction-static=(?P<given>[\d.]+)\. Raise --mem-fraction-static above (?P<above>[\d.]+)"
         r"(?: \(minimum viable = 1 - available/pre = (?P<viable>[\d.]+)\))?",
         specificity=90, explain=shortage.no_memory_for_kv),
    rule("weights-exceed-budget", "Not enough memory. Please try to increase", r"increase --mem-fraction-static",
         specificity=85, explain=shortage.no_memory_for_kv),
    rule("negative-kv-pool", "is larger than the profiled value -",
         r"max_total_tokens=(?P<asked>\d+) is larger than the profiled value (?P<pool>-\d+)",
         "The KV cache came out negative ({pool} tokens): the weights exceed the memory budget, and "
         "--max-total-tokens hides it",
         "Raise --mem-fraction-static (or leave it out), use more GPUs or quantised weights. --max-total-tokens "
         "cannot help.", specificity=88),
    warning("requests-capped", "is capped to",
            r"max_running_requests is capped to (?P<got>\d+) by the mamba state cache(?P<asked>)", explain=_capped),
    warning("requests-capped", "was reduced from the requested",
            r"max_running_requests was reduced from the requested (?P<asked>\d+) to (?P<got>\d+)", explain=_capped),
    rule("state-slots-exhausted", "Can not alloc mamba cache", r"Can not alloc mamba cache",
         "The recurrent-state slots ran out while serving: concurrent long prompts need one more than is planned for",
         "Use --mamba-scheduler-strategy extra_buffer (not extra_buffer_lazy), more slots (--max-mamba-cache-size "
         "or a higher --mamba-full-memory-ratio), fewer running requests, or a newer SGLang.", specificity=85),
    rule("gpu-out-of-memory", "CUDA out of memory",
         r"CUDA out of memory\. Tried to allocate (?P<wanted>[\d.]+ \w+)\.(?:.{0,120}?of which (?P<free>[\d.]+ "
         r"\w+) is free)?", specificity=70, explain=shortage.out_of_memory),
    rule("swa-pool-too-small", "SWA pool", r"SWA pool \((?P<tokens>\d+) tokens\) cannot hold even one request",
         "The sliding-window part of the KV cache has {tokens} tokens: no request fits",
         "Raise --swa-full-tokens-ratio, or the whole KV budget (--mem-fraction-static).", specificity=88),
    warning("prompt-exceeds-kv-cache", "exceeds the maximum allowed length",
            r"Input length \((?P<prompt>\d+) tokens\) exceeds the maximum allowed length \((?P<limit>\d+) tokens\)",
            "Prompts of {prompt} tokens are refused: the KV cache holds {limit} tokens, less than the context window",
            "Compare max_total_num_tokens with context_len in the start-up log: more KV memory "
            "(--mem-fraction-static, --kv-cache-dtype fp8_e4m3) or shorter prompts."),
    rule("context-exceeded", "is longer than the model's context length",
         r"input \((?P<prompt>\d+) tokens\) is longer than the model's context length \((?P<limit>\d+) tokens\)",
         "Prompts of {prompt} tokens are refused: the context window is {limit} tokens",
         "Raise --context-length (the model may allow more) or shorten the prompts.", specificity=30),
    # Flags
    rule("speculative-three-or-none", "AssertionError", r"^AssertionError$",
         "--speculative-eagle-topk or --speculative-num-draft-tokens is given without --speculative-num-steps",
         "Give all three of --speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens, "
         "or none (then SGLang chooses, for example 3, 1, 4).", specificity=92, within="speculative",
         explain=_three_or_none),
    rule("context-exceeds-model", "User-specified context_length",
         r"User-specified context_length \((?P<given>\d+)\) is greater than the derived context_length "
         r"\((?P<limit>\d+)\)", "--context-length {given} is more than the model's {limit} tokens", _LOWER_CONTEXT,
         specificity=90),
    rule("context-exceeds-model", "context_length (",
         r"Target model's context_length \((?P<given>\d+)\) is greater than the derived context_length "
         r"\((?P<limit>\d+)\)", "The drafter's context of {limit} tokens is less than the target's {given}",
         _LOWER_CONTEXT, specificity=90),
    rule("tp-not-divisible", "AssertionError", r"^AssertionError(?:: .*)?$",
         "A dimension of the model is not divisible by --tp-size",
         "Use a --tp-size that divides the attention heads (and is a multiple or a divisor of the KV heads).",
         specificity=80, within="tp_size == 0"),
    rule("speculative-unknown", "Unknown speculative algorithm", r"Unknown speculative algorithm name: (?P<name>\w+)",
         "This SGLang does not know the speculative algorithm {name}",
         "`--help` of the installed SGLang lists what --speculative-algorithm takes; DDTREE exists in forks only.",
         specificity=90),
    rule("speculative-draft-missing", "requires setting --speculative-draft-model-path",
         r"(?P<name>\w+) speculative decoding requires setting --speculative-draft-model-path",
         "{name} speculation needs a draft model, and none is given", "Add --speculative-draft-model-path.",
         specificity=90),
    rule("speculative-tokens-differ", "speculative_dflash_block_size",
         r"speculative_num_draft_tokens=(?P<tokens>\d+), speculative_dflash_block_size=(?P<block>\d+)",
         "--speculative-num-draft-tokens {tokens} and --speculative-dflash-block-size {block} contradict each other",
         "Give one of the two only, equal to the drafter's block_size.", specificity=90),
    rule("speculative-page-size", "is unstable and produces incorrect results",
         r"speculative_eagle_topk\((?P<topk>\d+)\) > 1 with page_size\((?P<page>\d+)\) > 1",
         "A draft tree (top-k {topk}) does not work with --page-size {page} on this attention backend",
         "Leave --page-size at 1, or use --speculative-eagle-topk 1, or --attention-backend flashinfer.",
         specificity=90),
    rule("state-strategy-wrong-model", "needs a model with mamba state", r"extra_buffer needs a model with mamba state",
         "--mamba-radix-cache-strategy extra_buffer is for models with recurrent states; this one has none",
         "Leave the flag out.", specificity=90),
    rule("state-strategy-wrong-model", "'NoneType' object is not subscriptable", r"TypeError",
         "--mamba-scheduler-strategy extra_buffer is for models with recurrent states; this one has none",
         "Leave the flag out.", specificity=85, within="mamba"),
    rule("state-strategy-speculation", "is not compatible with radix cache when using --mamba-scheduler-strategy",
         r"Speculative decoding for (?P<name>\w+) is not compatible with radix cache when using --mamba-scheduler-\w+",
         "This SGLang refuses speculation with the prefix cache on a model with recurrent states ({name})",
         "--mamba-scheduler-strategy extra_buffer with SGLANG_ENABLE_SPEC_V2=1 in the environment; or "
         "--disable-radix-cache.", specificity=90),
    rule("state-track-index-none", "'NoneType' object cannot be interpreted as an integer", r"TypeError",
         "Speculation with --mamba-scheduler-strategy extra_buffer crashes on a request that has no state slot yet: a "
         "fault of SGLang 0.5.13 and 0.5.14",
         "Use a newer SGLang, or --mamba-scheduler-strategy no_buffer, or no speculation.", specificity=88,
         within="mamba", explain=_track_index),
    rule("unexpected-keyword", "got an unexpected keyword argument",
         r"TypeError: .{0,80}?ServerArgs\S*\(?\)? got an unexpected keyword argument '(?P<name>\w+)'",
         "This SGLang's ServerArgs has no `{name}`: it was renamed or removed",
         "Compare with `python -m sglang.launch_server --help` of the installed version.", specificity=85),
    # Kernels
    rule("backend-not-for-hybrid", "are supported on Blackwell GPUs for hybrid GDN",
         r"Only \{?(?P<allowed>[^}]{1,80})\}? backends are supported on Blackwell GPUs for hybrid GDN models\."
         r".{0,40}?attention_backend=(?P<given>\w+)?",
         "The attention backend {given} does not work for hybrid models on Blackwell GPUs",
         "--attention-backend triton (allowed: {allowed}).", specificity=90),
    rule("backend-unsupported-gpu", "TllmGenFmhaRunner", r"TllmGenFmhaRunner.{0,200}?Unsupported architecture|"
         r"Unsupported architecture.{0,200}?TllmGenFmhaRunner",
         "The trtllm attention kernels do not support this GPU (SM120 among others)",
         "--attention-backend triton (or flashinfer).", specificity=90, layer=Layer.CUDA),
    rule("fa3-missing", "Can not import FA3", r"Can not import FA3 in sgl_kernel",
         "The FlashAttention-3 kernels are not in the installed sgl-kernel",
         "Install the sglang-kernel that SGLang pins, or --attention-backend triton.", specificity=88,
         layer=Layer.CUDA),
    rule("kernel-library", "Could not load any common_ops library", r"Could not load any common_ops library",
         "sgl-kernel could not be loaded; the reason is the library named below it",
         "Look at the lines 'Attempt' or 'ImportError' that follow.", specificity=55, layer=Layer.CUDA),
    rule("deepgemm-unsupported", "'ImportError' object has no attribute", r"has no attribute 'get_num_sms'",
         "DeepGEMM does not work on this GPU", "Set SGLANG_ENABLE_JIT_DEEPGEMM=0.", specificity=90, layer=Layer.CUDA),
    rule("custom-all-reduce-graphs", "invalid argument",
         r"Capture cuda graph failed.{0,200}?invalid argument|invalid argument", specificity=80,
         within="register_graph_buffers",
         summary="Custom all-reduce could not share its buffers between the GPUs while capturing graphs",
         advice="--disable-custom-all-reduce", layer=Layer.CUDA),
    rule("graph-capture-oom", "Capture cuda graph failed", r"Capture cuda graph failed: .{0,40}out of memory",
         "Out of GPU memory while CUDA graphs were captured",
         "Lower --mem-fraction-static by 0.02 to 0.05, or the largest graph batch (--cuda-graph-max-bs, since 0.5.14 "
         "--cuda-graph-max-bs-decode).", specificity=75),
    rule("graph-capture-failed", "Capture cuda graph failed", r"Capture cuda graph failed: (?P<why>.{1,200})",
         "CUDA graph capture failed: {why}",
         "The error it names is the cause; --disable-cuda-graph tells whether it also fails without graphs.",
         specificity=40, certainty=Certainty.LIKELY, layer=Layer.CUDA),
    # Ranks
    rule("ranks-unbalanced", "The memory capacity is unbalanced",
         r"pre_model_load_memory=(?P<least>[\d.]+), local_gpu_memory=(?P<here>[\d.]+)",
         "Another process holds memory on one of the GPUs: {least} GB free there, {here} GB on this one",
         "Find it with `nvidia-smi --query-compute-apps=pid,used_memory --format=csv`, stop it by its pid, and "
         "wait until the memory is free.", specificity=85),
    rule("rank-missing", "finish the model loading",
         r"rank (?P<rank>\d+) could finish the model loading, but there are other ranks that didn't finish loading",
         "Rank {rank} waited for other ranks that never finished loading: one of them died or reads too slowly",
         "Look for the first exception of another rank, and at `journalctl -k` for the kernel's OOM killer; a slow "
         "disk needs longer (--dist-timeout).", specificity=25, certainty=Certainty.LIKELY),
    warning("custom-all-reduce-off", "Setup Custom allreduce failed",
            r"Setup Custom allreduce failed with (?P<why>.{1,120})", "Custom all-reduce is not used: {why}",
            "Harmless. --disable-custom-all-reduce silences it; without P2P between the GPUs all-reduce goes "
            "through host memory.", layer=Layer.CUDA),
    rule("scheduler-killed", "crashed with exit code",
         r"Subprocess (?P<who>\w+) \(pid=\d+\) crashed with exit code (?P<code>-?\d+)", specificity=52,
         explain=_killed),
    rule("scheduler-killed", "scheduler died during initialization",
         r"Rank (?P<who>\d+) scheduler died during initialization \(exit code: (?P<code>-?\d+)\)",
         specificity=50, explain=_killed),
    rule("watchdog", "watchdog timeout", r"(?P<who>\w+) watchdog timeout \(self\.watchdog_timeout=(?P<seconds>[\d.]+)",
         "A forward pass did not end within {seconds} s and the watchdog stopped the server",
         "The stacks above it show where it hung: all-reduce (P2P between GPUs), a kernel, or compilation "
         "(--watchdog-timeout allows longer).", specificity=50, certainty=Certainty.LIKELY),
    warning("kv-cache-full", "KV cache pool is full", r"KV cache pool is full\. Retract requests",
            "The KV cache ran full while serving: requests were taken back and computed again",
            "Fewer requests at once, shorter outputs, or more KV memory."),
    # Models
    rule("draft-hidden-size", "Sizes of tensors must match",
         r"Sizes of tensors must match except in dimension \d+\. Expected size (?P<target>\d+) but got size "
         r"(?P<draft>\d+)", "The drafter does not fit the target: hidden size {draft} where {target} is needed",
         "Use the draft model made for this target.", specificity=80, layer=Layer.MODEL),
    rule("quantisation-unsupported", "has no attribute 'num_bits'", r"'NoneType' object has no attribute 'num_bits'",
         "This SGLang does not support the checkpoint's compressed-tensors format (weight-only NVFP4)",
         "Use a newer SGLang or another quantisation.", specificity=85, layer=Layer.MODEL),
    rule("quantisation-unsupported", "W4A16Sparse24", r"ImportError.{0,200}W4A16Sparse24|W4A16Sparse24",
         "This SGLang does not support the checkpoint's weight-only NVFP4; the sparse scheme that it names is "
         "beside the point", "Use a newer SGLang or another quantisation.", specificity=85, layer=Layer.MODEL),
    rule("quantisation-unsupported", "Current platform does not support w4a4 nvfp4", r"does not support w4a4 nvfp4",
         "NVFP4 weights with NVFP4 activations need a Blackwell GPU", "Use another quantisation on this GPU.",
         specificity=88, layer=Layer.MODEL),
    rule("quantisation-unsupported", "Unsupported FusedMoe scheme", r"Unsupported FusedMoe scheme: (?P<scheme>.{1,80})",
         "This SGLang does not support the quantisation of the checkpoint's experts ({scheme})",
         "Use a newer SGLang or another quantisation.", specificity=88, layer=Layer.MODEL),
    rule("weights-missing", "Cannot find any model weights with",
         r"Cannot find any model weights with `(?P<path>[^`]+)`", "There are no weight files in {path}",
         "Stage the model again (gpuctl stage): the folder has a configuration but no *.safetensors.", specificity=90,
         layer=Layer.MODEL),
    warning("drafts-never-accepted", "accept len: 1.00", r"accept len: 1\.00", explain=_no_acceptance),
)  # fmt: skip

ENGINE = Engine(
    name="sglang",
    marks=(
        "server_args=ServerArgs(",
        "Load weight begin",
        "Scheduler hit an exception",
        "sglang",
        "Init torch distributed",
    ),
    start=("server_args=ServerArgs(",),
    stages=STAGES,
    facts=FACTS,
    rules=RULES,
    envelope=(
        "Received sigquit from a child process",
        "SIGQUIT received",
        "kill_process_tree called",
        "scheduler died during initialization",
        "Initialization failed. Please see the error messages above",
        "Initialization failed. warmup error",
        "Health check failed",
        "Sleeping 5 seconds before crash diagnostics",
        "No live scheduler processes found",
        "crashed with exit code",
    ),
    fatal=("hit an exception",),
    benign=(
        "Ignore import error when loading",
        "Failed to load generation config",
        "Fail to set RLIMIT",
        "Custom allreduce is disabled",
        "destroy_process_group() was not called",
        "torchcodec is not installed",
        "SymmMemCommunicator: Device capability",
        "is deprecated and will be removed",
        "Possible solutions:",
        "Possible suggestions:",
    ),
    dead=(
        "Received sigquit from a child process",
        "SIGQUIT received",
        "kill_process_tree called",
        "crashed with exit code",
    ),
    stopped=("SIGTERM received", "Gracefully exiting"),
    loading={
        "distributed": "The GPUs do not find each other, or a GPU does not answer",
        "loading": "The weights are being read, or a rank waits for another",
        "graphs": "Kernels are being compiled or graphs captured",
        "captured": "The server warms up",
        "listening": "The server warms up",
    },
)
