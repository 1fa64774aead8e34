"""A model's size is read from its configuration: counted against what is published of public models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl.facts.model import divide
from gpuctl.facts.model_config import NotAModel, read

MODELS = Path(__file__).parent / "ground_truth/sglang/models"
GIB = 1 << 30

# Dimensions of public models, and their parameters in billions as published: all, and those a token passes through.
DEEPSEEK = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "vocab_size": 129280, "num_nextn_predict_layers": 1,
}  # fmt: skip
KIMI = DEEPSEEK | {
    "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1,
    "vocab_size": 163840, "num_nextn_predict_layers": 0,
}  # fmt: skip
QWEN3_NEXT = {
    "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "intermediate_size": 5120, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512,
    "num_experts_per_tok": 10, "vocab_size": 151936, "full_attention_interval": 4, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
NEMOTRON_H = {
    "hidden_size": 4096, "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 21504, "vocab_size": 131072, "mamba_num_heads": 128, "mamba_head_dim": 64,
    "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
}  # fmt: skip
GPT_OSS = {
    "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4, "vocab_size": 201088,
    "attention_bias": True, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
}  # fmt: skip
PUBLIC: dict[str, tuple[dict[str, Any], float, float]] = {
    "Qwen3-8B": ({"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
                  "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936}, 8.19, 7.57),
    "Llama-3.1-8B": ({"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                      "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}, 8.03, 7.50),
    "Mixtral-8x7B": ({"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                      "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000,
                      "num_local_experts": 8, "num_experts_per_tok": 2}, 46.7, 12.8),
    "DeepSeek-V3": (DEEPSEEK, 671.0, 36.6),
    "Kimi-K2": (KIMI, 1026.4, 31.7),
    "Qwen3-30B-A3B": ({"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
                       "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936,
                       "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}, 30.5, 3.04),
    "Qwen3-Next-80B-A3B": (QWEN3_NEXT, 79.7, 3.56),
    "gpt-oss-120b": (GPT_OSS, 116.8, 5.13),
    "Nemotron-H-8B": (NEMOTRON_H, 8.1, 7.56),
    "Gemma-3-27B": ({"hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32, "vocab_size": 262208,
                     "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21504, "sliding_window": 1024,
                     "sliding_window_pattern": 6, "tie_word_embeddings": True}, 27.0, 27.0),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_the_parameters_of_public_models_are_counted(name: str) -> None:
    config, whole, active = PUBLIC[name]
    facts = read(config)
    assert facts.parameters / 1e9 == pytest.approx(whole, rel=0.005)
    assert facts.active_parameters / 1e9 == pytest.approx(active, rel=0.01)


# What a real SGLang 0.5.16 computed for these models: bytes of KV cache a token, bytes of a recurrent state.
@pytest.mark.parametrize(
    ("name", "weights_gib", "kv", "state"),
    [
        ("qwen3-tiny", 0.25, 32768, None),
        ("hybrid-tiny", 0.384, 8192, 12877824),
        ("hybrid-27b", 50.955, 65536, 153944064),
        ("dflash-27b", 3.223, 20480, None),
    ],
)
def test_sizes_are_those_a_real_server_computed(name: str, weights_gib: float, kv: int, state: int | None) -> None:
    facts = read(json.loads((MODELS / f"{name}.json").read_text()))
    assert facts.weight_bytes() / GIB == pytest.approx(weights_gib, abs=0.001)
    assert facts.kv_token_bytes() == kv
    assert (facts.recurrent.slot_bytes() if facts.recurrent else None) == state


@pytest.mark.parametrize(
    ("tp", "state_mib", "half_mib", "kv"),
    [(1, 146.81, 74.81, 65536), (2, 73.41, 37.41, 32768), (4, 36.70, 18.70, 16384), (8, 18.35, 9.35, 16384)],
)
def test_states_and_kv_cache_of_the_27b_on_several_gpus(tp: int, state_mib: float, half_mib: float, kv: int) -> None:
    facts = read(json.loads((MODELS / "hybrid-27b.json").read_text()))
    assert facts.recurrent is not None
    assert facts.recurrent.slot_bytes(tp) / (1 << 20) == pytest.approx(state_mib, abs=0.01)
    assert facts.recurrent.slot_bytes(tp, 2) / (1 << 20) == pytest.approx(half_mib, abs=0.01)
    assert facts.kv_token_bytes(tp) == kv  # 4 KV heads are repeated on 8 GPUs


def test_a_latent_cache_is_the_same_on_every_gpu() -> None:
    facts = read(DEEPSEEK)
    assert facts.kv_token_bytes() == facts.kv_token_bytes(8) == 61 * (512 + 64) * 2


def test_weights_are_divided_but_what_every_gpu_needs_whole() -> None:
    dense = read(PUBLIC["Qwen3-8B"][0])
    assert dense.weight_bytes(4) / dense.weight_bytes(1) == pytest.approx(0.25, rel=0.001)
    repeated = read(PUBLIC["Qwen3-30B-A3B"][0])  # 4 KV heads
    assert repeated.weight_bytes(8) > repeated.weight_bytes(1) / 8


@pytest.mark.parametrize(
    ("quantisation", "gib"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8.8),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 5.7),
        ({"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": {"group_0": {"weights": {
            "num_bits": 4, "type": "float", "group_size": 16}}}}, 6.0),
        ({"quant_method": "compressed-tensors", "ignore": ["re:.*self_attn.*", "lm_head"], "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}}}, 8.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 6.0),
    ],
)  # fmt: skip
def test_quantised_weights_take_their_bits_and_scales(quantisation: dict[str, Any], gib: float) -> None:
    facts = read(PUBLIC["Qwen3-8B"][0] | {"quantization_config": quantisation})
    assert facts.weight_bytes() / GIB == pytest.approx(gib, abs=0.1)


def test_kimi_k2_in_int4_is_as_large_as_its_files() -> None:
    ignored = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
    config = KIMI | {"quantization_config": {"quant_method": "compressed-tensors", "ignore": ignored, "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}}}}  # fmt: skip
    assert read(config).weight_bytes() / 1e9 == pytest.approx(595, rel=0.01)


def test_the_files_size_counts_where_the_configuration_is_not_understood() -> None:
    config, _, _ = PUBLIC["Qwen3-8B"]
    exact = read(config).computed_bytes()
    assert read(config, stored_bytes=exact).weight_bytes() == exact
    assert read(config, stored_bytes=round(exact * 1.5)).weight_bytes() == pytest.approx(exact * 1.5)
    assert read(config, stored_bytes=round(exact * 1.5)).weight_bytes(2) == pytest.approx(exact * 0.75, rel=0.01)


def test_layers_for_multi_token_prediction_in_the_files_are_not_loaded() -> None:
    facts = read(DEEPSEEK)
    stored = facts.computed_bytes() + facts.computed_bytes(1, facts.mtp_parts)
    assert read(DEEPSEEK, stored_bytes=stored).weight_bytes() == facts.computed_bytes()


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_27b_runs_on_1_2_4_and_8_gpus(size: int) -> None:
    assert divide(read(json.loads((MODELS / "hybrid-27b.json").read_text())), size).possible


@pytest.mark.parametrize(("size", "why"), [(3, "KV heads"), (6, "feed-forward"), (16, "attention heads")])
def test_the_27b_does_not_run_on_3_6_and_16_gpus(size: int, why: str) -> None:
    found = divide(read(json.loads((MODELS / "hybrid-27b.json").read_text())), size)
    assert not found.possible
    assert any(why in line for line in found.findings)


def test_eight_gpus_with_four_kv_heads_are_possible_and_said_to_repeat_them() -> None:
    found = divide(read(json.loads((MODELS / "hybrid-27b.json").read_text())), 8)
    assert found.possible
    assert "repeated 2 times" in found.findings[0]


def test_blocks_of_quantised_weights_are_not_cut() -> None:
    config = json.loads((MODELS / "hybrid-27b.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert divide(read(config), 8).possible  # 17408 / 8 = 17 x 128
    config["text_config"]["intermediate_size"] = 17408 + 64 * 8
    found = divide(read(config), 8)
    assert not found.possible
    assert "whole number of blocks of 128" in found.findings[0]


@pytest.mark.parametrize("document", [{}, {"hidden_size": 5}, [], {"hidden_size": "x", "num_hidden_layers": 3}])
def test_what_is_no_model_is_refused_in_one_line(document: Any) -> None:
    with pytest.raises(NotAModel, match=r"^[^\n]+$"):
        read(document)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**6) | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KEYS = sorted({key for config, _, _ in PUBLIC.values() for key in config} | {"text_config", "vision_config"})


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), values, max_size=12))
def test_a_strange_configuration_is_read_or_refused(changes: dict[str, Any]) -> None:
    try:
        facts = read({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **changes})
    except NotAModel:
        return
    for tp in (1, 2, 3):
        divide(facts, tp)
        facts.weight_bytes(tp)
        facts.kv_token_bytes(tp)
