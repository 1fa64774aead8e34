"""What a model's config.json says of its size: layers, caches, recurrent states, parameters. Pure: dict in, facts out.

Everything is read from the keys of the configuration; no model is known by its name. Counts of parameters follow the
shapes of the weights that such keys describe (Transformers' modelling files), and are checked against public models in
the tests. What a configuration does not say, or says in a way not known here, is told in `notes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpuctl.facts.model import ModelFacts, Part, Quantisation, Recurrent

_INSIDE = ("text_config", "llm_config", "language_config", "thinker_config")


class NotAModel(ValueError):
    """The document is no model configuration; the message says what is missing."""


def read(config: Mapping[str, Any], *, stored_bytes: int | None = None) -> ModelFacts:
    """The facts of a config.json. Raises NotAModel.

    `stored_bytes`: metadata.total_size of model.safetensors.index.json, where there is one.
    """
    if not isinstance(config, Mapping):
        raise NotAModel("a model configuration is a JSON object")
    text = next((config[key] for key in _INSIDE if isinstance(config.get(key), Mapping)), config)
    for key in _INSIDE:  # one level further in: multimodal models around multimodal models
        if isinstance(text.get(key), Mapping):
            text = text[key]
    try:
        return _read(config, text, stored_bytes)
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        if isinstance(error, NotAModel):
            raise
        raise NotAModel(f"the configuration cannot be read: {type(error).__name__}: {error}") from error


def _read(config: Mapping[str, Any], text: Mapping[str, Any], stored_bytes: int | None) -> ModelFacts:
    hidden, layers = _int(text, "hidden_size", "d_model", "n_embd"), _int(text, "num_hidden_layers", "n_layer")
    if not hidden or not layers:
        raise NotAModel("no hidden_size or num_hidden_layers: not the configuration of a language model")
    if layers > _LAYERS:
        raise NotAModel(f"num_hidden_layers: {layers} layers, and no model has more than {_LAYERS}")
    heads = _int(text, "num_attention_heads", "n_head") or 1
    kv_heads = _int(text, "num_key_value_heads", "multi_query_group_num") or heads
    head_dim = _int(text, "head_dim", "attention_head_dim") or hidden // heads
    latent_rank = _int(text, "kv_lora_rank")
    rope = _int(text, "qk_rope_head_dim") or 0
    value_dim = _int(text, "v_head_dim") or head_dim
    if latent_rank:
        head_dim = (_int(text, "qk_nope_head_dim") or 0) + rope or head_dim
    kinds = _kinds(text, layers)
    recurrent = _recurrent(text, kinds.count("recurrent"), hidden)
    notes: list[str] = []
    if kinds.count("recurrent") and recurrent is None:
        notes.append("has layers with a recurrent state of a kind not known here: its size is not in the plan")
    window = _int(text, "sliding_window", "sliding_window_size")
    facts = ModelFacts(
        architecture=str((config.get("architectures") or text.get("architectures") or ["?"])[0]),
        model_type=str(text.get("model_type") or config.get("model_type") or ""),
        layers=layers,
        hidden=hidden,
        vocab=_int(text, "vocab_size", "padded_vocab_size") or _int(config, "vocab_size") or 0,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        intermediate=_int(text, "intermediate_size", "ffn_hidden_size", "n_inner") or 4 * hidden,
        context=_int(text, "max_position_embeddings", "seq_length", "n_positions", "model_max_length"),
        dtype=_dtype(config, text),
        attention_layers=kinds.count("attention"),
        sliding_layers=kinds.count("sliding"),
        window=window,
        latent=latent_rank + rope if latent_rank else None,
        indexer_dim=_int(text, "index_head_dim") if latent_rank else None,
        recurrent=recurrent,
        experts=_int(text, "n_routed_experts", "num_experts", "num_local_experts") or 0,
        experts_active=_int(text, "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk") or 0,
        vision_hidden=_vision_hidden(config),
        mtp_layers=_int(text, "num_nextn_predict_layers", "mtp_num_hidden_layers") or 0,
        draft_block=_int(config, "block_size") if isinstance(config.get("dflash_config"), Mapping) else None,
        quantisation=_quantisation(config, text),
        stored_bytes=stored_bytes,
    )
    parts = Parts(config, text, facts, kinds)
    if facts.quantisation is not None and facts.quantisation.bits == 0:
        notes.append(f"quantised by {facts.quantisation.method}, which does not say with how many bits")
    counted = parts.all()
    width = _int(text, "moe_intermediate_size", "expert_ffn_hidden_size") or facts.intermediate
    return replace(
        facts,
        parts=counted,
        mtp_parts=parts.mtp(),
        notes=tuple(notes),
        expert_width=width if facts.experts else None,
        dense=any(part.name == "feed forward" for part in counted),
    )


# Reading single things

_LAYERS = 10_000  # a damaged number is not to fill the memory


def _int(document: Mapping[str, Any], *keys: str) -> int | None:
    """The first of the keys that holds a number (of a list, the largest)."""
    for key in keys:
        value = document.get(key)
        if isinstance(value, list) and value and all(isinstance(item, int | float) for item in value):
            value = max(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value) or abs(value) >= 2**53:
            raise NotAModel(f"{key}: {value!r} is no size")
        return int(value)
    return None


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    for document in (text, config):
        for key in ("dtype", "torch_dtype"):
            value = document.get(key)
            if isinstance(value, str):
                return value.removeprefix("torch.")
    return "bfloat16"


def _kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    """For each layer what it keeps: attention | sliding | recurrent | none."""
    names = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(names, list) and names:
        return [_kind(str(name)) for name in names[:layers]] + ["attention"] * (layers - len(names))
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return [{"M": "recurrent", "*": "attention"}.get(letter, "none") for letter in pattern[:layers]]
    linear = text.get("linear_attn_config")
    if isinstance(linear, Mapping) and isinstance(linear.get("full_attn_layers"), list):
        full = {int(number) for number in linear["full_attn_layers"]}
        return ["attention" if number + 1 in full else "recurrent" for number in range(layers)]
    interval = _int(text, "full_attention_interval")
    if interval and (_int(text, "linear_num_value_heads") or 0):
        return ["attention" if (number + 1) % interval == 0 else "recurrent" for number in range(layers)]
    indices = text.get("attn_layer_indices")
    if isinstance(indices, list):
        full = {int(number) for number in indices}
        return ["attention" if number in full else "recurrent" for number in range(layers)]
    period = _int(text, "attn_layer_period")
    if period and _int(text, "mamba_d_state", "mamba_state_dim"):
        offset = _int(text, "attn_layer_offset") or 0
        return ["attention" if number % period == offset else "recurrent" for number in range(layers)]
    kinds = text.get("attn_type_list")
    if isinstance(kinds, list) and kinds:
        return ["attention" if kind == 1 else "recurrent" for kind in kinds[:layers]]
    period = _int(text, "sliding_window_pattern", "_sliding_window_pattern")
    if period and _int(text, "sliding_window") and period > 1:
        return ["attention" if (number + 1) % period == 0 else "sliding" for number in range(layers)]
    if text.get("use_sliding_window") and _int(text, "sliding_window"):
        first = _int(text, "max_window_layers") or 0
        return ["attention" if number < first else "sliding" for number in range(layers)]
    return ["attention"] * layers


def _kind(name: str) -> str:
    if name in ("linear_attention", "mamba", "mamba2", "recurrent", "kda", "gdn", "conv"):
        return "recurrent"
    if name in ("sliding_attention", "sliding_window", "chunked_attention"):
        return "sliding"
    return "none" if name in ("moe", "mlp") else "attention"


def _recurrent(text: Mapping[str, Any], layers: int, hidden: int) -> Recurrent | None:
    if not layers:
        return None
    dtype = str(text.get("mamba_ssm_dtype") or text.get("mamba_ssm_cache_dtype") or "float32")
    values = _int(text, "linear_num_value_heads")
    if values:  # gated delta net
        keys = _int(text, "linear_num_key_heads") or values
        key_dim, value_dim = _int(text, "linear_key_head_dim") or 128, _int(text, "linear_value_head_dim") or 128
        kernel = _int(text, "linear_conv_kernel_dim") or 4
        return Recurrent(layers, values * value_dim + 2 * keys * key_dim, kernel, values, key_dim, value_dim, dtype)
    linear = text.get("linear_attn_config")
    if isinstance(linear, Mapping) and _int(linear, "num_heads"):  # Kimi delta attention
        heads, dim = _int(linear, "num_heads") or 1, _int(linear, "head_dim") or 128
        return Recurrent(layers, 3 * heads * dim, _int(linear, "short_conv_kernel_size") or 4, heads, dim, dim, dtype)
    state = _int(text, "ssm_state_size", "mamba_d_state", "mamba_state_dim")
    heads2 = _int(text, "mamba_num_heads", "mamba_n_heads")
    if state and heads2:  # Mamba 2
        dim = _int(text, "mamba_head_dim", "mamba_d_head") or (_int(text, "mamba_expand") or 2) * hidden // heads2
        groups = _int(text, "n_groups", "mamba_n_groups") or 1
        kernel = _int(text, "conv_kernel", "mamba_d_conv") or 4
        return Recurrent(layers, heads2 * dim + 2 * groups * state, kernel, heads2, dim, state, dtype)
    return None


def _vision_hidden(config: Mapping[str, Any]) -> int | None:
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return None
    return _int(vision, "hidden_size", "embed_dim", "width", "vt_hidden_size") or 1024


def _quantisation(config: Mapping[str, Any], text: Mapping[str, Any]) -> Quantisation | None:
    found = config.get("quantization_config") or text.get("quantization_config") or config.get("compression_config")
    if not isinstance(found, Mapping):
        return None
    method = str(found.get("quant_method") or found.get("quant_algo") or "?").lower()
    ignored = tuple(
        str(name)
        for key in ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "llm_int8_skip_modules")
        for name in (found.get(key) or ())
    )
    if method == "fp8":
        block = found.get("weight_block_size")
        size = (int(block[0]), int(block[1])) if isinstance(block, list) and len(block) == 2 else None
        return Quantisation(method, 8, block=size, ignored=ignored)
    if method == "compressed-tensors":
        return _compressed(found, ignored)
    if method in ("gptq", "awq", "awq_marlin", "gptq_marlin", "auto-round", "autoround"):
        bits, group = _int(found, "bits", "w_bit") or 4, _int(found, "group_size", "q_group_size") or 128
        return Quantisation(method, bits, group if group > 0 else None, ignored=ignored, scale_bytes=2 + bits / 8)
    if method == "mxfp4":
        # Only the experts are quantised.
        return Quantisation(method, 4, 32, ignored=(*ignored, "re:.*attn.*", "re:.*mlp[.](?:gate|up|down).*"),
                            scale_bytes=1)  # fmt: skip
    algorithm = str(found.get("quant_algo") or method).upper()
    if "NVFP4" in algorithm or "FP4" in algorithm:
        return Quantisation(method, 4, _int(found, "group_size") or 16, ignored=ignored, scale_bytes=1)
    if "FP8" in algorithm or "INT8" in algorithm or found.get("load_in_8bit"):
        return Quantisation(method, 8, ignored=ignored)
    if found.get("load_in_4bit"):
        return Quantisation(method, 4, 64, ignored=ignored)
    return Quantisation(method, _int(found, "bits", "num_bits") or 0, _int(found, "group_size"), ignored=ignored)


def _compressed(found: Mapping[str, Any], ignored: tuple[str, ...]) -> Quantisation:
    groups = found.get("config_groups")
    first: Any = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping):
        return Quantisation("compressed-tensors", 0, ignored=ignored)
    bits = _int(weights, "num_bits") or 8
    group = _int(weights, "group_size")
    block = weights.get("block_structure")
    size = (int(block[0]), int(block[1])) if isinstance(block, list) and len(block) == 2 else None
    floating = str(weights.get("type")) == "float"
    return Quantisation(
        "compressed-tensors", bits, group if group and group > 0 else None, size, ignored,
        scale_bytes=1.0 if floating and bits == 4 else 2.0,
    )  # fmt: skip


class Parts:
    """Counts the weights that a configuration describes, by kind."""

    def __init__(
        self, config: Mapping[str, Any], text: Mapping[str, Any], facts: ModelFacts, kinds: Sequence[str]
    ) -> None:
        self.config, self.text, self.facts, self.kinds = config, text, facts, kinds
        self.draft = "dflash_config" in config or "draft_vocab_size" in config or "target_hidden_size" in config
        self.pattern = text.get("hybrid_override_pattern")

    def all(self) -> tuple[Part, ...]:
        return self._merged([*self._ends(), *self._layers(), *self._vision(), *self._drafting()])

    def mtp(self) -> tuple[Part, ...]:
        """A whole layer with attention for each, and what joins the last hidden state to the next token."""
        facts = self.facts
        if not facts.mtp_layers:
            return ()
        parts = [*self._attention(), *self._feed_forward(facts.layers - 1), Part("norms", 5 * facts.hidden, "none")]
        parts.append(Part("joining", 2 * facts.hidden * facts.hidden, "none", quantised=False))
        return self._merged(replace(part, count=part.count * facts.mtp_layers) for part in parts)

    def _merged(self, parts: Iterable[Part]) -> tuple[Part, ...]:
        """Parts of the same kind added up, each told apart by whether quantisation leaves it as it is."""
        stored = self.facts.quantisation
        added: dict[Part, int] = {}
        for part in parts:
            if part.count:
                quantised = part.quantised and not (stored is not None and part.module and stored.skips(part.module))
                kind = replace(part, count=0, module="", quantised=quantised)
                added[kind] = added.get(kind, 0) + part.count
        return tuple(replace(kind, count=count) for kind, count in added.items())

    def _ends(self) -> Iterable[Part]:
        facts, table = self.facts, self.facts.vocab * self.facts.hidden
        if self.draft and "dflash_config" in self.config:
            return  # a DFLASH drafter uses the target's
        if self.draft:
            yield Part("embedding", table, quantised=False)
            small = _int(self.config, "draft_vocab_size") or facts.vocab
            yield Part("head", small * facts.hidden, quantised=False)
            return
        tied = self.text.get("tie_word_embeddings", self.config.get("tie_word_embeddings", False))
        if not tied:
            yield Part("embedding", table, quantised=False)
        yield Part("head", table, quantised=False)  # of tied ones the same weights
        yield Part("norms", facts.hidden, "none", quantised=False)

    def _layers(self) -> Iterable[Part]:
        facts = self.facts
        pattern = self.pattern if isinstance(self.pattern, str) else ""
        for number, kind in enumerate(self.kinds):
            yield Part("norms", (1 if pattern else 2) * facts.hidden, "none", quantised=False)
            if kind in ("attention", "sliding"):
                yield from self._attention()
            elif kind == "recurrent":
                yield from self._state()
            if pattern:
                if pattern[number] in "-E":
                    yield from self._feed_forward(number, dense=pattern[number] == "-")
            else:
                yield from self._feed_forward(number)

    def _attention(self) -> Iterable[Part]:
        facts, text, hidden = self.facts, self.text, self.facts.hidden
        module = "model.layers.0.self_attn.q_proj"
        if facts.latent is not None:
            rank, rope = _int(text, "kv_lora_rank") or 0, _int(text, "qk_rope_head_dim") or 0
            low = _int(text, "q_lora_rank")
            query = facts.heads * facts.head_dim
            yield Part("attention", (low or hidden) * query, module=module)
            shared = hidden * (rank + rope) + (hidden * low if low else 0)
            yield Part("attention, shared", shared, "none", module=module)
            up = facts.heads * (facts.head_dim - rope + facts.value_dim)
            yield Part("attention", rank * up + facts.heads * facts.value_dim * hidden, module=module)
            if facts.indexer_dim:
                index = (_int(text, "index_n_heads") or 1) * facts.indexer_dim
                yield Part("indexer", (low or hidden) * index + hidden * facts.indexer_dim, "none", module=module)
            return
        into = hidden * (2 if "draft_vocab_size" in self.config else 1)  # EAGLE-3: the embedding beside the features
        gated = bool(text.get("attn_output_gate", facts.recurrent is not None and "linear_num_value_heads" in text))
        query = facts.heads * facts.head_dim
        yield Part("attention", into * query * (2 if gated else 1), module=module)
        yield Part("attention, keys and values", into * facts.kv_heads * (facts.head_dim + facts.value_dim), "kv",
                   "model.layers.0.self_attn.k_proj")  # fmt: skip
        yield Part("attention", facts.heads * facts.value_dim * hidden, module="model.layers.0.self_attn.o_proj")
        if text.get("attention_bias"):
            yield Part("norms", query + 2 * facts.kv_heads * facts.head_dim + hidden, quantised=False)

    def _state(self) -> Iterable[Part]:
        facts, state = self.facts, self.facts.recurrent
        if state is None:
            return
        hidden, module = facts.hidden, "model.layers.0.linear_attn.in_proj_qkvz"
        inner = state.heads * state.value_dim
        if "linear_attn_config" in self.text:  # Kimi delta attention: q, k, v, two low-rank gates, out
            gates = 2 * (hidden * state.value_dim + state.value_dim * inner) + hidden * state.heads
            yield Part("recurrent", 3 * hidden * inner + gates + inner * hidden, module=module)
        elif _int(self.text, "linear_num_value_heads"):
            yield Part("recurrent", hidden * (state.channels + inner) + inner * hidden, module=module)
            yield Part("recurrent", hidden * 2 * state.heads, quantised=False)
        else:  # Mamba 2: value_dim is the state's size here, key_dim the head's
            inner = state.heads * state.key_dim
            yield Part("recurrent", hidden * (inner + state.channels + state.heads) + inner * hidden, module=module)
        yield Part("recurrent", state.channels * state.kernel + 3 * state.heads, quantised=False)

    def _feed_forward(self, number: int, *, dense: bool | None = None) -> Iterable[Part]:
        facts, hidden = self.facts, self.facts.hidden
        gate = 2 if self.pattern else 3  # Nemotron-H has no gate in its feed-forward layers
        if dense if dense is not None else not self._has_experts(number):
            width = _int(self.text, "dense_intermediate_size", "intermediate_size_mlp") or facts.intermediate
            yield Part("feed forward", gate * hidden * width, module=f"model.layers.{number}.mlp.gate_proj")
            return
        width = _int(self.text, "moe_intermediate_size", "expert_ffn_hidden_size") or facts.intermediate
        share = facts.experts_active / facts.experts
        yield Part("experts", facts.experts * gate * hidden * width,
                   module=f"model.layers.{number}.mlp.experts.0.gate_proj", active=share)  # fmt: skip
        yield Part("router", facts.experts * hidden, "none", quantised=False)
        shared = _int(self.text, "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
        if shared is None:
            shared = (_int(self.text, "n_shared_experts", "num_shared_experts") or 0) * width
        elif _int(self.text, "n_shared_experts"):
            shared *= _int(self.text, "n_shared_experts") or 1
        if shared:
            yield Part("shared experts", gate * hidden * shared,
                       module=f"model.layers.{number}.mlp.shared_experts.gate_proj")  # fmt: skip

    def _has_experts(self, number: int) -> bool:
        facts, text = self.facts, self.text
        if not facts.experts or not facts.experts_active:
            return False
        if number < (_int(text, "first_k_dense_replace") or 0):
            return False
        only = text.get("mlp_only_layers")
        if isinstance(only, list) and number in only:
            return False
        frequency = text.get("moe_layer_freq")
        if isinstance(frequency, list) and number < len(frequency):
            return bool(frequency[number])
        listed = text.get("moe_layers")
        if isinstance(listed, list) and listed:
            return number in listed
        step = _int(text, "decoder_sparse_step", "interleave_moe_layer_step") or 1
        return (number + 1) % step == 0

    def _vision(self) -> Iterable[Part]:
        vision = self.config.get("vision_config")
        if not isinstance(vision, Mapping) or self.facts.vision_hidden is None:
            return
        width = self.facts.vision_hidden
        depth = _int(vision, "depth", "num_hidden_layers", "layers", "vt_num_hidden_layers") or 24
        inner = _int(vision, "intermediate_size", "vt_intermediate_size") or int(width * 4)
        gate = 3 if vision.get("hidden_act") == "silu" and "out_hidden_size" in vision else 2
        patch = _int(vision, "patch_size") or 14
        count = depth * (4 * width * width + gate * width * inner)
        count += (_int(vision, "in_channels", "num_channels") or 3) * patch * patch * width * (
            _int(vision, "temporal_patch_size") or 1
        )  # fmt: skip
        count += (_int(vision, "num_position_embeddings") or 0) * width
        merged = width * (_int(vision, "spatial_merge_size") or 1) ** 2
        count += merged * merged + merged * (_int(vision, "out_hidden_size") or self.facts.hidden)
        yield Part("vision", count, module="visual.blocks.0.attn.qkv", active=0.0, quantised=False)

    def _drafting(self) -> Iterable[Part]:
        """What joins the target's hidden states to a drafter."""
        target = _int(self.config, "target_hidden_size") or self.facts.hidden
        dflash = self.config.get("dflash_config")
        if isinstance(dflash, Mapping):
            taken = dflash.get("target_layer_ids")
            count = len(taken) if isinstance(taken, list) else self.facts.layers
            yield Part("joining", count * target * self.facts.hidden, "none", quantised=False)
        elif "draft_vocab_size" in self.config:
            yield Part("joining", 3 * target * self.facts.hidden, "none", quantised=False)
