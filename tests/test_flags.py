"""Flags are checked against the help text of what is installed."""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuctl.engines
from gpuctl.flags import Arguments, NoFlags, Number, arguments, check, dashed, parse_help, unreadable
from gpuctl.flags import given as flags_given

GROUND_TRUTH = Path(__file__).parent / "ground_truth/sglang"

SGLANG = """\
usage: launch_server.py [-h] --model-path MODEL_PATH [--tp-size TENSOR_PARALLEL_SIZE]
                        [--cuda-graph-max-bs-decode N] [--cuda-graph-max-bs-prefill N]

options:
  -h, --help            show this help message and exit
  --model-path MODEL_PATH, --model MODEL_PATH
                        where the weights are. --not-a-flag is only mentioned
  --tensor-parallel-size TENSOR_PARALLEL_SIZE, --tp-size TENSOR_PARALLEL_SIZE, --tp TENSOR_PARALLEL_SIZE
                        GPUs
  --attention-backend {triton,fa3,flashinfer}
                        kernels
  --cuda-graph-max-bs-decode CUDA_GRAPH_MAX_BS_DECODE
  --cuda-graph-max-bs-prefill CUDA_GRAPH_MAX_BS_PREFILL
  --cuda-graph-bs-decode CUDA_GRAPH_BS_DECODE [CUDA_GRAPH_BS_DECODE ...]
  --mem-fraction-static MEM_FRACTION_STATIC
                        share of memory
  --disable-radix-cache
                        no prefix cache
"""

VLLM = """\
usage: vllm serve [model_tag] [options]

ModelConfig:
  --max-model-len MAX_MODEL_LEN
                        tokens (default: None)
  --dtype {auto,bfloat16,float16}
  --enforce-eager, --no-enforce-eager
                        no graphs (default: False)

ParallelConfig:
  --tensor-parallel-size TENSOR_PARALLEL_SIZE, -tp TENSOR_PARALLEL_SIZE
  --speculative-config SPECULATIVE_CONFIG
"""

LLAMACPP = """\
----- common params -----

-h,    --help, --usage                  print usage and exit
-t,    --threads N                      number of CPU threads to use during generation (default: -1)
                                        (env: LLAMA_ARG_THREADS)
-c,    --ctx-size N                     size of the prompt context (default: 0, 0 = loaded from model)
-fa,   --flash-attn [on|off|auto]       set Flash Attention use ('on', 'off', or 'auto', default: 'auto')
--cpu-strict <0|1>                      use strict CPU placement (default: 0)
-md,   --model-draft, --spec-draft-model FNAME
                                        draft model for speculative decoding
--no-warmup                             skip warming up the model
"""


@pytest.mark.parametrize("engine", ["sglang", "vllm", "llamacpp"])
def test_every_number_that_a_plan_reads_is_checked(engine: str) -> None:
    """A flag that is read and not in NUMBERS would be taken for absent where it is no number."""
    folder = Path(gpuctl.engines.__file__).parent / engine
    names = set()
    for file in folder.glob("*.py"):
        for reads in re.findall(
            r"\bgiven\.(?:whole|number|many)\(([^)]*)\)|length\(given\.text\(([^)]*)\)", file.read_text()
        ):
            names |= set(re.findall(r'"(--?[\w-]+)"', "".join(reads)))
    module = importlib.import_module(f"gpuctl.engines.{engine}.memory")
    checked = {name for number in module.NUMBERS for name in number.names}
    assert len(names) >= 3
    assert {dashed(name) for name in names} <= checked


@given(st.text() | st.integers().map(str) | st.floats().map(str))
def test_a_number_is_taken_or_refused_with_its_value_and_what_is_expected(text: str) -> None:
    number = Number(("--tp-size",))
    found = list(unreadable(Arguments({"--tp-size": (text,)}), (number,)))
    try:
        good = int(text) >= 1
    except ValueError:
        good = False
    assert bool(found) != good or len(text) > 300
    assert all(repr(text) in one.summary and "at least 1" in one.summary for one in found)


def ids(argv: str, text: str, engine: str = "sglang", **more: dict[str, str]) -> list[str]:
    return [finding.id for finding in check(argv.split(), parse_help(text, engine=engine), engine=engine, **more)]


def test_a_help_text_gives_every_name_of_every_flag() -> None:
    found = parse_help(SGLANG)
    assert set(found.by_name) == {
        "-h", "--help", "--model-path", "--model", "--tensor-parallel-size", "--tp-size", "--tp", "--attention-backend",
        "--cuda-graph-max-bs-decode", "--cuda-graph-max-bs-prefill", "--cuda-graph-bs-decode", "--mem-fraction-static",
        "--disable-radix-cache",
    }  # fmt: skip
    assert found.by_name["--attention-backend"].choices == ("triton", "fa3", "flashinfer")
    assert found.by_name["--tp"].takes == "1"
    assert found.by_name["--disable-radix-cache"].takes == "0"
    assert found.by_name["--cuda-graph-bs-decode"].takes == "+"


def test_flags_of_the_installed_version_pass() -> None:
    argv = "--model-path /m --tp 4 --mem-fraction-static=0.8 --attention-backend triton --disable-radix-cache"
    assert ids(argv, SGLANG) == []
    assert (
        ids("serve /m --max_model_len 8192 -tp 2 --no-enforce-eager --speculative-config.method mtp", VLLM, "vllm")
        == []
    )
    assert ids("-c 4096 -fa on --cpu-strict 1 -md /d --no-warmup --spec-draft-model /d", LLAMACPP, "llamacpp") == []


def test_a_flag_that_was_split_is_ambiguous() -> None:
    found = list(check(["--cuda-graph-max-bs", "8"], parse_help(SGLANG), engine="sglang"))
    assert [finding.id for finding in found] == ["ambiguous-flag"]
    assert "--cuda-graph-max-bs-decode, --cuda-graph-max-bs-prefill" in found[0].summary


def test_a_unique_beginning_works_and_is_warned_of() -> None:
    assert ids("--mem-fraction 0.8", SGLANG) == ["abbreviated-flag"]
    assert ids("--ctx 512", LLAMACPP, "llamacpp") == ["unknown-flag"]  # llama.cpp takes no beginnings


def test_an_unknown_flag_names_the_one_that_was_meant() -> None:
    found = list(check(["--disable-radix-cach3"], parse_help(SGLANG), engine="sglang"))
    assert found[0].advice == "Did you mean --disable-radix-cache?"


def test_another_engines_flag_is_named_in_this_engines_words() -> None:
    foreign = {"--gpu-memory-utilization": "--mem-fraction-static"}
    found = list(check(["--gpu-memory-utilization", "0.9"], parse_help(SGLANG), engine="sglang", foreign=foreign))
    assert (found[0].id, found[0].advice) == ("unknown-flag", "It is called --mem-fraction-static here.")


@pytest.mark.parametrize(
    ("argv", "id"),
    [
        ("--attention-backend flash3", "bad-choice"),
        ("--tp-size", "bad-argument"),
        ("--disable-radix-cache true", "bad-argument"),
    ],
)
def test_values_that_argparse_refuses_are_found(argv: str, id: str) -> None:
    assert ids(argv, SGLANG) == [id]


@pytest.mark.parametrize(
    ("case", "expected"), [("fail-unknown-flag", "unknown-flag"), ("fail-bad-choice", "bad-choice")]
)
def test_what_a_real_sglang_refused_is_foreseen_from_its_own_usage(case: str, expected: str) -> None:
    import json

    usage = USAGE.read_text()
    argv = json.loads((GROUND_TRUTH / case / "argv.json").read_text())["argv"][3:]
    assert [f.id for f in check(argv, parse_help(usage, engine="sglang"), engine="sglang")] == [expected]


USAGE = Path(__file__).parent / "ground_truth/sglang/usage.txt"


@pytest.mark.parametrize("case", sorted(path.parent.name for path in GROUND_TRUTH.glob("ok-*/argv.json")))
def test_what_a_real_sglang_took_is_taken(case: str) -> None:
    import json

    argv = json.loads((GROUND_TRUTH / case / "argv.json").read_text())["argv"][3:]
    assert list(check(argv, parse_help(USAGE.read_text(), engine="sglang"), engine="sglang")) == []


def test_a_text_without_flags_is_refused_in_one_line() -> None:
    with pytest.raises(NoFlags, match="is it the output of --help"):
        parse_help("bash: sglang: command not found")


def test_the_last_of_a_flag_counts_and_negative_numbers_are_values() -> None:
    found = arguments(["serve", "/m", "--a", "1", "--a=2", "--n", "-1", "--json", '{"a": "-b"}', "--on"])
    assert (found.text("--a"), found.number("--n"), found.text("--json")) == ("2", -1.0, '{"a": "-b"}')
    assert found.on("--on")
    assert not found.on("--off")


names = st.from_regex(r"[a-z][a-z0-9]{1,12}(-[a-z0-9]{1,8}){0,3}", fullmatch=True)
options = st.lists(
    st.tuples(
        st.lists(names, min_size=1, max_size=3, unique=True),
        st.sampled_from(["none", "one", "choice", "many"]),
        st.text("abcdefgh -.,(){}[]", max_size=60),
    ),
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(options)
def test_whatever_argparse_prints_is_read_back(wanted: list[tuple[list[str], str, str]]) -> None:
    parser = argparse.ArgumentParser(prog="engine")
    group = parser.add_argument_group("Group")
    known: dict[tuple[str, ...], str] = {}
    for flags, kind, words in wanted:
        flags = [f"--{flag}" for flag in flags if not any(f"--{flag}" in other for other in known)]
        if not flags or "--help" in flags:
            continue
        more: dict[str, object] = {"help": re.sub(r"\s+", " ", words).replace("%", "") or None}
        if kind == "none":
            more["action"] = "store_true"
        elif kind == "choice":
            more["choices"] = ["auto", "x-1", "fp8_e4m3"]
        elif kind == "many":
            more["nargs"] = "+"
        group.add_argument(*flags, **more)  # type: ignore[arg-type]
        known[tuple(flags)] = kind
    found = parse_help(parser.format_help())
    takes = {"none": "0", "one": "1", "choice": "1", "many": "+"}
    for flags, kind in known.items():
        for flag in flags:
            option = found.by_name[flag]
            assert set(flags) <= set(option.names)
            assert option.takes == takes[kind]
            assert option.choices == (("auto", "x-1", "fp8_e4m3") if kind == "choice" else ())
    assert set(found.by_name) == {"-h", "--help", *(flag for flags in known for flag in flags)}


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=400), st.lists(st.text(max_size=20), max_size=8))
def test_no_text_breaks_it(text: str, argv: list[str]) -> None:
    flags_given(argv)
    try:
        found = parse_help(text)
    except NoFlags:
        return
    list(check(argv, found, engine="sglang"))


@pytest.mark.parametrize("word", ["1e400", "-1e400", "nan", "inf", "x", ""])
def test_what_is_no_finite_number_is_none(word):
    assert arguments(["--f", word]).number("--f") is None
    assert arguments(["--f", word]).whole("--f") is None
