"""The SGLang double divides memory as real servers did (0.5.16) and as the other releases' source says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sglang._double import memory, models, profile, settings
from sglang._double.arguments import parser

from tests.recorded_sglang import CASES, MODELS, Case

H200 = profile.Profile(profile._document("h200"))


def resolve(case: Case) -> settings.Settings:
    return settings.Settings(parser(release="0.5.16").parse_args(case.arguments), H200, "0.5.16")


LOADED = [case for case in CASES if "Load weight end" in case.log]
REFUSED = re.compile(
    r"^(?:ValueError|RuntimeError): ((?:Loaded weights|Not enough GPU|Not enough memory|Hybrid).*)$", re.M
)


def test_there_are_recorded_servers_to_compare_with():
    assert len(LOADED) >= 24
    assert sum("profile" in case.trace for case in LOADED) >= 12


@pytest.mark.parametrize("case", LOADED, ids=lambda case: case.name)
def test_memory_is_divided_as_the_recorded_server_did(case, capfd):
    resolved = resolve(case)
    pre, free = case.inputs
    ask = resolved.division(pre, free)
    refused = REFUSED.search(case.log)
    exact = "profile" in case.trace
    if refused:
        with pytest.raises(memory.CannotFit) as error:
            memory.divide(ask)
        numbers = re.compile(r"-?\d+\.?\d*")
        assert numbers.sub("#", str(error.value)) == numbers.sub("#", refused[1])
        # Of inputs rounded to 0.01 GiB, one number follows that is not near: slots of a state of 12 MB.
        for mine, true in zip(numbers.findall(str(error.value)), numbers.findall(refused[1]), strict=True):
            assert float(mine) == pytest.approx(float(true), abs=2.1 if "max_mamba" in refused[1] else 0.002)
        return
    outcome = memory.divide(ask)
    tolerance = 0 if exact else 0.0005
    if exact:
        true = case.trace["resolved"]
        assert (outcome.tokens, outcome.requests) == (true["max_total_num_tokens"], true["max_running_requests"])
    for pattern, value in (
        (r"max_mamba_cache_size: (\d+)", outcome.slots),
        (r"KV Cache is allocated.*#tokens: (\d+)", outcome.tokens),
        (r"max_running_requests=(\d+),", outcome.requests),
    ):
        true = case.number(pattern)
        if true is not None and value is not None:
            assert abs(value - true) <= max(1 if not exact else 0, tolerance * true), pattern


@pytest.mark.parametrize("case", [case for case in LOADED if "profile" in case.trace], ids=lambda case: case.name)
def test_sizes_of_a_token_and_of_a_state_are_the_traced_ones(case, capfd):
    ask = resolve(case).division(*case.inputs)
    true = case.trace["profile"]
    assert ask.kv_bytes == true["kv_bytes_per_token"]
    assert ask.fraction == pytest.approx(true["mem_fraction_static"])
    if true.get("mamba_bytes_per_slot"):
        assert sum(ask.model.state(1)) == true["mamba_bytes_per_slot"]
        assert ask.slots_per_request == true["mamba_ratio"]


@pytest.mark.parametrize("case", [case for case in LOADED if "Memory pool end" in case.log], ids=lambda case: case.name)
def test_what_the_pools_take_is_what_was_seen(case, capfd):
    pre, free = case.inputs
    ask = resolve(case).division(pre, free)
    outcome = memory.divide(ask)
    pools = memory.Pools(ask, outcome)
    first = float(re.findall(r"Memory pool end. avail mem=([\d.]+)", case.log)[0])
    assert free - pools.target == pytest.approx(first, abs=0.13)
    line = re.search(
        r"ssm_state size: ([\d.]+)GB (?:intermediate_ssm_state_cache size: ([\d.]+)GB intermediate_conv_window_cache size: ([\d.]+)GB)?",
        case.log,
    )
    if line:
        near = 0.006 if "profile" in case.trace else 0.02  # of rounded inputs, a slot more or less
        assert pools.ssm == pytest.approx(float(line[1]), abs=near)
        if line[2] and "NGRAM" not in case.arguments:
            assert (pools.spec_ssm, pools.spec_conv) == pytest.approx((float(line[2]), float(line[3])), abs=0.006)


QWEN = models.read(MODELS / "hybrid-27b")
DRAFT = models.read(MODELS / "dflash-27b")


def divide(regime, **known):
    common = {
        "pre": 0,
        "free": 19.59,
        "fraction": 1,
        "context": 32768,
        "algorithm": "DFLASH",
        "mamba_ratio": 0.5,
        "requests": 8,
    }
    return memory.divide(memory.Request(QWEN, DRAFT, regime=regime, **{"draft_tokens": 16, **common, **known}))


@pytest.mark.parametrize(
    ("drafts", "requests", "slots", "tokens", "running"),
    [
        (16, 2, 34, 126_421, 2),
        (16, 4, 24, 87_048, 4),
        (16, 8, 2, 11_880, 0),
        (9, 8, 21, 78_099, 7),
        (13, 8, 10, 40_515, 3),
        (17, 8, 0, 1_141, 0),
    ],
)
def test_0_5_11_starves_the_state_by_requests_times_draft_tokens(drafts, requests, slots, tokens, running):
    outcome = divide("A", draft_tokens=drafts, requests=requests)
    assert (outcome.slots, outcome.tokens, outcome.requests) == (slots, tokens, running)


def test_0_5_11_refuses_when_nothing_is_left_for_tokens():
    with pytest.raises(memory.CannotFit, match="Not enough memory"):
        divide("A", requests=16)


@pytest.mark.parametrize(
    ("regime", "strategy", "slots", "tokens", "running"),
    [
        ("B", "no_buffer", 7, 174_744, 2),
        ("B", "extra_buffer", 10, 169_374, 2),
        # 100 MB less than without the reserve for a multimodal model: 1,219 tokens.
        ("C", "no_buffer", 4, 178_323 - 1_219, 1),
        ("C", "extra_buffer", 6, 174_744 - 1_220, 1),
    ],
)
def test_later_releases_solve_jointly_and_serve_fewer(regime, strategy, slots, tokens, running):
    outcome = divide(regime, strategy=strategy)
    assert (outcome.slots, outcome.tokens, outcome.requests) == (slots, tokens, running)
    assert outcome.warnings


@pytest.mark.parametrize(
    ("tp", "state_mib", "kv"), [(1, 146.81, 65_536), (2, 73.41, 32_768), (4, 36.70, 16_384), (8, 18.35, 16_384)]
)
def test_state_shrinks_with_tensor_parallelism_and_keys_stop_at_the_heads(tp, state_mib, kv):
    assert sum(QWEN.state(tp)) / 2**20 == pytest.approx(state_mib, abs=0.01)
    assert QWEN.kv_bytes(tp) == kv


def test_weights_computed_from_a_configuration_are_near_the_measured_ones():
    for name, measured in (("hybrid-27b", 51.05), ("dflash-27b", 3.38), ("qwen3-tiny", 0.29), ("hybrid-tiny", 0.46)):
        assert models.read(MODELS / name).weights_gib(1) == pytest.approx(measured, abs=0.1)


def test_kimi_k26_weighs_595_gb():
    kimi = models.read(Path(__file__).parent / "lab" / "engines" / "models" / "Kimi-K2.6")
    assert kimi.weights_gib(1) * 2**30 / 1e9 == pytest.approx(595, abs=1)
