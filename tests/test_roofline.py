"""The ceiling of decoding: what a step reads over what memory delivers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl.facts.gpus import speed
from gpuctl.facts.model import ModelFacts
from gpuctl.facts.model_config import read
from gpuctl.roofline import Decoder, prefill_tok_s, tok_s

HERE = Path(__file__).parent
CARD = speed("NVIDIA RTX PRO 6000 Blackwell Server Edition")
assert CARD is not None


def model(name: str) -> ModelFacts:
    return read(json.loads((HERE / f"ground_truth/sglang/models/{name}.json").read_text()))


def test_what_the_driver_tells_is_what_the_maker_states() -> None:
    told = speed("NVIDIA H200", bus_bits=6016, memory_mhz=3201)
    stated = speed("NVIDIA H200")
    assert told is not None
    assert stated is not None
    assert told.bandwidth_bytes_s == pytest.approx(4.814e12, rel=1e-3)
    assert told.bandwidth_bytes_s == pytest.approx(stated.bandwidth_bytes_s, rel=0.01)
    assert "6016 bit" in told.source
    assert "states" in stated.source


@pytest.mark.parametrize(
    ("name", "gb"),
    [("NVIDIA A100-SXM4-80GB", 2039), ("NVIDIA A100-SXM4-40GB", 1555), ("NVIDIA H100 PCIe", 2039),
     ("NVIDIA H100 80GB HBM3", 3352), ("NVIDIA L40S", 864), ("NVIDIA L4", 300), ("NVIDIA GeForce RTX 4090", 1008),
     ("NVIDIA RTX 6000 Ada Generation", 960), ("NVIDIA B200", 8000), ("Tesla T4", 320), ("NVIDIA A10G", 600)],
)  # fmt: skip
def test_names_as_nvidia_smi_prints_them(name: str, gb: float) -> None:
    found = speed(name)
    assert found is not None
    assert found.bandwidth_bytes_s == gb * 1e9


def test_a_gpu_that_nobody_knows_has_no_ceiling() -> None:
    assert speed("Some GPU") is None


def test_the_campaign_reached_three_quarters_of_its_ceiling() -> None:
    """26.4 tok/s were measured; weights alone, embedding and vision tower included, give 32.2 to 32.8."""
    ceiling = tok_s(Decoder(model("hybrid-27b")), CARD, context=150)
    assert ceiling == pytest.approx(34.8, rel=0.01)
    assert 0.7 < 26.4 / ceiling < 0.8


def test_speculation_may_go_beyond_by_what_is_accepted() -> None:
    """140.6 tok/s with 5.687 tokens accepted a step."""
    drafting = Decoder(model("hybrid-27b"), draft=model("dflash-27b"), drafted=16)
    assert tok_s(drafting, CARD, context=150) < tok_s(Decoder(model("hybrid-27b")), CARD, context=150)
    ceiling = tok_s(drafting, CARD, context=150, accepted=5.687)
    assert 0.7 < 140.6 / ceiling < 0.8


def test_experts_are_read_as_they_are_reached() -> None:
    experts = read(
        {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
         "intermediate_size": 6144, "vocab_size": 151936, "moe_intermediate_size": 768, "num_experts": 128,
         "num_experts_per_tok": 8}
    )  # fmt: skip
    decoder = Decoder(experts)
    assert decoder.weight_bytes(1) == experts.active_bytes()
    assert decoder.weight_bytes(8) < 8 * decoder.weight_bytes(1)
    assert decoder.weight_bytes(10_000) == pytest.approx(
        experts.weight_bytes() - experts.vocab * experts.hidden * 2, rel=0.01
    )


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["hybrid-27b", "hybrid-tiny", "qwen3-tiny"]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 64),
    st.integers(0, 200_000), st.integers(0, 200_000),
)  # fmt: skip
def test_more_to_read_is_never_faster(name: str, tp: int, requests: int, context: int, more: int) -> None:
    decoder = Decoder(model(name), tp)
    here = tok_s(decoder, CARD, requests=requests, context=context)
    assert here > 0
    assert tok_s(decoder, CARD, requests=requests + 1, context=context) <= here
    assert tok_s(decoder, CARD, requests=requests, context=context + more) <= here


def test_prompts_are_bound_by_arithmetic() -> None:
    found = prefill_tok_s(model("hybrid-27b"), CARD)
    assert found == pytest.approx(503.8e12 / 2 / model("hybrid-27b").active_parameters)
    assert prefill_tok_s(model("hybrid-27b"), CARD, 4) == pytest.approx(4 * (found or 0))
    old = speed("RTX PRO 5000")
    assert old is not None
    assert prefill_tok_s(model("hybrid-27b"), old) is None
