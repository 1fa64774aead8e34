"""What the header of a GGUF file says of its model's size. Pure: what agent/capacity.py brought in, facts out.

Weights are counted in bytes as they lie in the file (its tensors have many formats), so a `Part` has as many "weights"
of one byte. Keys: ggml's docs/gguf.md and llama.cpp's src/llama-hparams.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuctl.facts.model import ModelFacts, Part, Recurrent
from gpuctl.facts.model_config import NotAModel


def read(header: Mapping[str, Any], size: int) -> ModelFacts:
    """The facts of a header; `size`: bytes of the file or files. Raises NotAModel."""
    metadata = header.get("metadata")
    tensors = header.get("tensors")
    if not isinstance(metadata, Mapping) or not isinstance(tensors, Mapping):
        raise NotAModel("no metadata of a GGUF file")
    kind = str(metadata.get("general.architecture") or "")

    def number(key: str) -> int | None:
        value = metadata.get(f"{kind}.{key}")
        if isinstance(value, list):
            value = max((v for v in value if isinstance(v, int | float)), default=None)
        return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    layers, hidden = number("block_count"), number("embedding_length")
    if not kind or not layers or not hidden:
        raise NotAModel("the GGUF header names no architecture, block_count or embedding_length")
    heads = number("attention.head_count") or 1
    each = metadata.get(f"{kind}.attention.head_count_kv")
    by_layer = [int(n) for n in each] if isinstance(each, list) and len(each) >= layers else None
    kv_heads = max(by_layer) if by_layer else number("attention.head_count_kv") or heads
    head_dim = number("attention.key_length") or hidden // heads
    rank = number("attention.kv_lora_rank")
    recurrent_layers = _recurrent_layers(number("full_attention_interval"), by_layer, layers, number)
    sliding = _sliding(metadata.get(f"{kind}.attention.sliding_window_pattern"), layers) if number(
        "attention.sliding_window"
    ) else 0  # fmt: skip
    counts = {name: int(tensors.get(name) or 0) for name in ("experts", "embedding", "head", "rest")}
    experts, active = number("expert_count") or 0, number("expert_used_count") or 0
    parts = [Part("weights", counts["rest"]), Part("head", counts["head"] or counts["embedding"])]
    if counts["head"]:
        parts.append(Part("embedding", counts["embedding"]))
    if counts["experts"]:
        parts.append(Part("experts", counts["experts"], active=active / experts if experts and active else 1.0))
    vocab = metadata.get("tokenizer.ggml.tokens")
    return ModelFacts(
        architecture=kind,
        model_type=kind,
        layers=layers,
        hidden=hidden,
        vocab=number("vocab_size") or (int(vocab["length"]) if isinstance(vocab, Mapping) else len(vocab or ())),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=number("attention.value_length") or head_dim,
        intermediate=number("feed_forward_length") or 4 * hidden,
        context=number("context_length"),
        dtype="uint8",
        attention_layers=layers - recurrent_layers - sliding,
        sliding_layers=sliding,
        window=number("attention.sliding_window"),
        latent=rank + (number("rope.dimension_count") or 0) if rank else None,
        recurrent=_recurrent(number, recurrent_layers),
        experts=experts,
        experts_active=active,
        expert_width=number("expert_feed_forward_length"),
        mtp_layers=number("nextn_predict_layers") or 0,
        parts=tuple(part for part in parts if part.count),
        stored_bytes=size,
    )


def _recurrent_layers(interval: int | None, by_layer: list[int] | None, layers: int, number: Any) -> int:
    if number("ssm.state_size") is None:
        return 0
    if interval:
        return sum(1 for layer in range(layers) if (layer + 1) % interval)
    return sum(1 for heads in by_layer[:layers] if heads == 0) if by_layer else layers


def _sliding(pattern: Any, layers: int) -> int:
    """Layers with a sliding window: listed, or all but every n-th."""
    if isinstance(pattern, list):
        return sum(1 for one in pattern[:layers] if one)
    step = int(pattern) if isinstance(pattern, int) and pattern > 1 else 0
    return sum(1 for layer in range(layers) if (layer + 1) % step) if step else 0


def _recurrent(number: Any, layers: int) -> Recurrent | None:
    """llama.cpp keeps (kernel - 1) x (inner + 2 x groups x state) and state x inner numbers a layer, of four bytes."""
    state, inner = number("ssm.state_size"), number("ssm.inner_size")
    if not layers or not state or not inner:
        return None
    channels = inner + 2 * (number("ssm.group_count") or 1) * state
    heads = number("ssm.time_step_rank") or 1
    return Recurrent(layers, channels, number("ssm.conv_kernel") or 4, heads, state, max(1, inner // heads))
