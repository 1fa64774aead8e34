"""What Python, its packages, the command line and the model's files say in the log of any engine."""

from __future__ import annotations

from gpuctl.finding import Certainty, Finding, Layer
from gpuctl.logs.rule import Hit, Story, rule

_HELP = (
    "Compare with `--help` of the installed version: flags are renamed between versions, and other engines have others."
)
_SNAPSHOT = "Stage the model again (gpuctl stage), with tokenizer, remote code and drafter, or allow the network once."


def _unknown_flag(hit: Hit, story: Story) -> Finding:
    flags = " ".join(word for word in hit["flags"].split() if word.startswith("-")) or hit["flags"]
    hint = next((text for flag, text in RENAMED.items() if flag in hit["flags"].replace("=", " ").split()), "")
    return hit.rule.say(
        hit,
        summary=f"The installed {story.engine or 'engine'} has no flag {flags}",
        advice=f"{hint} {_HELP}".strip(),
    )


RENAMED = {
    "--mamba-scheduler-strategy": "SGLang renamed it to --mamba-radix-cache-strategy.",
    "--speculative-dflash-draft-window-size": "SGLang renamed it to --speculative-draft-window-size.",
    "--tensor-parallel-size": "SGLang and vLLM both know it: look for a typing error before it.",
    "--gpu-memory-utilization": "That is vLLM's; SGLang has --mem-fraction-static.",
    "--max-num-seqs": "That is vLLM's; SGLang has --max-running-requests.",
    "--max-model-len": "That is vLLM's; SGLang has --context-length.",
    "--mem-fraction-static": "That is SGLang's; vLLM has --gpu-memory-utilization.",
    "--max-running-requests": "That is SGLang's; vLLM has --max-num-seqs.",
    "--context-length": "That is SGLang's; vLLM has --max-model-len.",
    "--draft-model": "llama.cpp never had it: -md, --model-draft.",
}


def _module(hit: Hit, story: Story) -> Finding:
    name = hit["name"]
    known = {
        "deep_gemm": "SGLang loads DeepGEMM for speculation and FP8: pip install sgl-deep-gemm (its pinned version), "
        "or set SGLANG_ENABLE_JIT_DEEPGEMM=0.",
    }
    usual = (
        "Install it in the server's environment, at the version the engine pins: `pip check` lists what does not fit."
    )
    return hit.rule.say(hit, advice=known.get(name, usual))


RULES = (
    # The command line
    rule("unknown-flag", "unrecognized arguments", r"error: unrecognized arguments: (?P<flags>.{1,300})",
         specificity=95, explain=_unknown_flag),
    rule("ambiguous-flag", "ambiguous option",
         r"error: ambiguous option: (?P<flag>\S+) could match (?P<options>.{1,300})",
         "{flag} is a prefix of several flags of the installed version: {options}",
         "Write one of them out; the flag was split since the version it was written for.", specificity=95),
    rule("bad-choice", "invalid choice", r"argument (?P<flag>[^:]{1,80}): invalid choice: (?P<value>'?[^\s()]{1,60}'?) "
         r"\(choose from (?P<choices>.{1,600}?)\)?$",
         "{flag} cannot be {value} in the installed version", "It takes: {choices}", specificity=95),
    rule("bad-argument", "error: argument ", r"error: argument (?P<flag>[^:]{1,80}): (?P<why>.{1,200})",
         "{flag}: {why}", _HELP, specificity=85),
    rule("bad-argument", "the following arguments are required",
         r"the following arguments are required: (?P<flags>.{1,200})", "Required flags are missing: {flags}", _HELP,
         specificity=90),
    rule("tp-not-divisible", "must be divisible by tensor parallel size",
         r"[Tt]otal number of attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size "
         r"\((?P<size>\d+)\)", "{heads} attention heads cannot be divided among {size} GPUs",
         "Use a tensor-parallel size that divides {heads}.", specificity=95),
    rule("tp-not-divisible", "must be divisible by tensor parallel size",
         r"(?P<what>.{1,80}) must be divisible by tensor parallel size",
         "This model cannot be divided that way: {what} must be divisible by the tensor-parallel size",
         "Use a smaller tensor-parallel size.", specificity=85),
    rule("tp-not-divisible", "is not divisible by",
         r"^(?:\w+(?:Error|Exception): )?.{0,80}?(?P<size>\d+) is not divisible by (?P<by>\d+)",
         "A dimension of the model ({size}) is not divisible by {by}: the tensor-parallel size, or a block of the "
         "quantisation", "Use a tensor-parallel size that divides it into whole blocks.", specificity=85),
    rule("tp-not-divisible", "is not divisible by weight quantization",
         r"(?P<what>.{1,160}) is not divisible by weight quantization",
         "The part of a weight that one GPU gets is not a whole number of quantisation blocks",
         "Use a smaller tensor-parallel size.", specificity=90),
    # The model's files
    rule("architecture-unknown", "does not recognize this architecture", r"model type `?'?(?P<type>[\w.-]+)'?`?",
         "The installed transformers does not know the model type {type}",
         "Upgrade transformers to what the engine pins, or the engine.", specificity=92, layer=Layer.MODEL),
    rule("model-missing", "Repo id must be in the form", r"Repo id must be in the form .{0,60}: '(?P<path>[^']+)'",
         "There is no model at {path} (a path that does not exist is taken for a name on the Hub)",
         "Check the path; after a reboot a model in /dev/shm is gone: gpuctl restore.", specificity=90,
         layer=Layer.MODEL),
    rule("model-missing", "is not a local folder and is not a valid model identifier",
         r"(?P<path>\S+) is not a local folder and is not a valid model identifier",
         "There is no model {path}, neither as a folder nor on the Hub", "Check the path or name.",
         specificity=88, layer=Layer.MODEL),
    rule("snapshot-incomplete", "LocalEntryNotFoundError", r"LocalEntryNotFoundError",
         "A file of the model is not in the cache and the network is switched off (HF_HUB_OFFLINE)", _SNAPSHOT,
         specificity=90, layer=Layer.MODEL),
    rule("snapshot-incomplete", "Cannot find the requested files in the",
         r"Cannot find the requested files in the (?:disk|local) cache",
         "A file of the model is not in the cache and the network is switched off (HF_HUB_OFFLINE)", _SNAPSHOT,
         specificity=88, layer=Layer.MODEL),
    rule("snapshot-incomplete", "outgoing traffic has been disabled", r"outgoing traffic has been disabled",
         "A file of the model is not in the cache and the network is switched off (HF_HUB_OFFLINE)", _SNAPSHOT,
         specificity=87, layer=Layer.MODEL),
    rule("tokenizer-missing", "Can't load tokenizer for", r"Can't load tokenizer for '(?P<path>[^']+)'",
         "The tokenizer files are missing in {path}",
         f"{_SNAPSHOT} A local folder of the same name as a model on the Hub hides it.", specificity=88,
         layer=Layer.MODEL),
    rule("weights-damaged", "Error while deserializing header", r"Error while deserializing header: (?P<why>.{1,60})",
         "A weight file is damaged or incomplete: {why}", "Stage the model again (gpuctl stage verifies it).",
         specificity=90, layer=Layer.MODEL),
    rule("quantisation-unsupported", "No compressed-tensors compatible scheme",
         r"compatible scheme was found(?: for (?P<layer>.{1,80}?),)?",
         "The installed compressed-tensors or engine is too old for the checkpoint's quantisation (NVFP4 needs a "
         "newer one)", "Upgrade both to the engine's pins: `pip check`.", specificity=90, layer=Layer.MODEL),
    rule("package-mismatch", "cannot import name",
         r"cannot import name '(?P<name>freeze_module_quantization|\w*nvfp4\w*)'",
         "The installed compressed-tensors does not fit the engine: it has no `{name}`",
         "Install the version that the engine pins: `pip check`, then pip install 'compressed-tensors==...'.",
         specificity=88, layer=Layer.MODEL),
    rule("package-mismatch", "nvfp4_pack_quantized",
         r"TypeError: .{0,120}nvfp4_pack_quantized|nvfp4_pack_quantized.{0,120}(?:argument|TypeError)",
         "The installed compressed-tensors does not fit the engine: another signature of nvfp4_pack_quantized",
         "Install the version that the engine pins: `pip check`, then pip install 'compressed-tensors==...'.",
         specificity=88, layer=Layer.MODEL),
    rule("import-failed", "cannot import name",
         r"ImportError: cannot import name '(?P<name>\w+)' from '(?P<module>[\w.]+)'",
         "`{name}` is not in the installed {module}: two packages of the server do not fit together",
         "Install the versions that the engine pins (`pip check`).", specificity=58, certainty=Certainty.LIKELY),
    rule("module-missing", "No module named", r"ModuleNotFoundError: No module named '(?P<name>[\w.]+)'",
         "The Python package `{name}` is not installed in the server's environment", specificity=70, explain=_module),
    rule("draft-embedding-missing", "embed_tokens.weight", r"KeyError: '(?:\w+\.)*embed_tokens\.weight'",
         "The drafter's checkpoint lacks `embed_tokens.weight`: its configuration does not belong to this kind of "
         "speculation", "Use a drafter made for this target and this method.", specificity=88, layer=Layer.MODEL),
    rule("mtp-weights-missing", "weights missing from checkpoint",
         r"MTP speculative decoding layer (?P<layer>\d+) weights missing from checkpoint",
         "The checkpoint has no MTP layer {layer}: it was dropped when the model was quantised",
         "Use a checkpoint with MTP layers, or another kind of speculation.", specificity=92, layer=Layer.MODEL),
    rule("draft-vocabulary", "vocab", r"AssertionError.{0,80}vocab_size|draft.{0,40}vocab.{0,20}must match",
         "Drafter and target have different vocabularies", "Use a drafter made for this target.",
         specificity=70, layer=Layer.MODEL),
)  # fmt: skip
