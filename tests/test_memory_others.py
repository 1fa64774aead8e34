"""What fits under vLLM and llama.cpp, and what a GGUF file says of its model."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl import tiny_model
from gpuctl.agent import capacity
from gpuctl.engines.llamacpp import memory as llamacpp
from gpuctl.engines.vllm import memory as vllm
from gpuctl.facts import gguf, model_config
from gpuctl.facts.model import ModelFacts
from gpuctl.memory import GIB, MIB, Gpu, Plan, Question, Verdict

MODELS = Path(__file__).parent / "ground_truth/sglang/models"
CARD = Gpu(97887 * MIB, name="NVIDIA RTX PRO 6000 Blackwell Server Edition")


def model(name: str) -> ModelFacts:
    return model_config.read(json.loads((MODELS / f"{name}.json").read_text()))


def dense(**more: object) -> ModelFacts:
    """Qwen3-8B's shape."""
    return model_config.read({
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 40960, **more,
    })  # fmt: skip


# vLLM


def planned(argv: str, target: ModelFacts | None = None, **more: object) -> Plan:
    known: dict[str, object] = {"gpu": CARD, "gpus": 8, **more}
    return vllm.plan(Question(argv.split(), target or dense(), **known))  # type: ignore[arg-type]


def test_a_dense_model_divides_what_is_allowed_into_blocks() -> None:
    found = planned("--max-model-len 32768 --max-num-seqs 64")
    terms = {term.name: term.bytes for term in found.terms}
    assert found.verdict is Verdict.FITS
    allowed = 0.9 * (97887 - 620) * MIB
    assert sum(terms[name] for name in ("weights", "activations", "graphs", "kv")) == pytest.approx(allowed, rel=1e-3)
    assert found.kv_tokens == pytest.approx(terms["kv"] / (36 * 8 * 256 * 2), rel=1e-3)


def test_blocks_of_a_hybrid_model_are_as_long_as_a_state_is_large() -> None:
    """A state of a layer is 3,207,168 B, a token of one 4,096 B: 783 tokens, and blocks are multiples of 16."""
    found = planned("--max-model-len 32768 --max-num-seqs 64", model("hybrid-27b"))
    kv = next(term for term in found.terms if term.name == "kv")
    assert "blocks of 784 tokens" in kv.how
    assert found.state_slots == found.requests * 0 + int(kv.how.split()[0].replace(",", ""))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("argv", "target", "more", "cause", "says", "change"),
    [
        ("--max-num-seqs 1024", "hybrid-27b", {}, "state-blocks-below-max-num-seqs", "needs one for its recurrent state",
         "--max-num-seqs"),
        ("--gpu-memory-utilization 0.5 --max-num-seqs 64", "hybrid-27b", {}, "no-kv-cache-memory", "too little", "--gpu-memory-utilization"),
        ("--max-model-len 262144 --max-num-seqs 8 --gpu-memory-utilization 0.67", "hybrid-27b", {},
         "context-exceeds-kv-cache", "tokens fit", "--gpu-memory-utilization"),
        ("--max-model-len 32768 --max-num-seqs 8", "hybrid-27b", {"gpu": Gpu(97887 * MIB, 70000 * MIB)}, "gpu-memory-held",
         "while others hold the rest", "--gpu-memory-utilization"),
        ("--max-num-seqs 8", "hybrid-27b", {"gpu": Gpu(49140 * MIB), "gpus": 1}, "weights-exceed-gpu", "more than the GPU",
         ""),
        ("-tp 3", "hybrid-27b", {}, "tp-not-divisible", "4 KV heads", "--tensor-parallel-size 1 or 2 or 4 or 8"),
        ("-tp 16", "hybrid-27b", {}, "gpu-index", "16 GPUs are asked for, 8 are there", "--tensor-parallel-size 8"),
        ("--max-model-len 1M", "hybrid-27b", {}, "context-exceeds-model", "1048576 is more", "262144"),
        ("--speculative-config.method eagle3 --speculative-config.num_speculative_tokens 3", "hybrid-27b", {},
         "speculative-draft-missing", "eagle3", "draft"),
    ],
)  # fmt: skip
def test_what_cannot_start_gets_the_id_that_its_log_gets(
    argv: str, target: str, more: dict[str, object], cause: str, says: str, change: str
) -> None:
    found = planned(argv, model(target), **more)
    assert (found.verdict, found.cause) == (Verdict.IMPOSSIBLE, cause)
    assert says in found.summary
    assert change in str(found.change)


def test_a_change_makes_it_fit() -> None:
    found = planned("--max-num-seqs 1024", model("hybrid-27b"))
    assert found.change is not None
    again = planned(f"--max-num-seqs {found.change.to}", model("hybrid-27b"))
    assert again.verdict is Verdict.FITS


def test_lengths_are_read_as_vllm_reads_them() -> None:
    assert [vllm.length(text) for text in ("32768", "32k", "32K", "1.5k", "auto", None)] == [
        32768, 32000, 32768, 1500, None, None,
    ]  # fmt: skip


def test_defaults_follow_the_gpu_and_the_installed_source() -> None:
    large, small = planned(""), planned("", gpu=Gpu(24564 * MIB, name="NVIDIA GeForce RTX 4090"))
    assert (large.requests, small.requests) == (1024, 0)
    text = "    gpu_memory_utilization: float = Field(default=0.92, gt=0, le=1)"
    assert any("0.92" in note for note in planned("", installed={"cache.py": text}).notes)


def test_a_drafter_takes_weights_and_layers_of_the_cache() -> None:
    spec = '--speculative-config {"method":"dflash","num_speculative_tokens":15} --max-num-seqs 32'
    found = planned(spec, model("hybrid-27b"), draft=model("dflash-27b"))
    plain = planned("--max-num-seqs 32", model("hybrid-27b"))
    assert {term.name for term in found.terms} - {term.name for term in plain.terms} == {"drafter"}
    assert found.kv_tokens is not None
    assert plain.kv_tokens is not None
    assert found.kv_tokens < plain.kv_tokens


def test_half_the_cache_is_twice_the_tokens() -> None:
    whole, half = planned("--max-num-seqs 64"), planned("--max-num-seqs 64 --kv-cache-dtype fp8")
    assert half.kv_tokens == pytest.approx(2 * (whole.kv_tokens or 0), rel=0.001)


def test_sliding_windows_take_blocks_of_the_window_only() -> None:
    gemma = {"sliding_window": 1024, "layer_types": ["sliding_attention", "full_attention"] * 18}
    found = planned("--max-num-seqs 16 --max-num-batched-tokens 2048", dense(**gemma), contexts=(32768,), requests=1)
    whole = planned("--max-num-seqs 16 --max-num-batched-tokens 2048", dense(), contexts=(32768,), requests=1)
    assert (found.kv_tokens or 0) > 1.6 * (whole.kv_tokens or 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([
    "--max-model-len", "1", "-1", "0.5", "99999999999", "32k", "--gpu-memory-utilization", "nan", "1e400", "--block-size", "16",
    "--max-num-seqs", "-tp", "7", "--enforce-eager", "--speculative-config", "{", '{"num_speculative_tokens": "x"}',
    "--speculative-config.method", "mtp", "--kv-cache-dtype", "fp8", "-pp", "2", "--max-num-batched-tokens"]),
    max_size=10), st.sampled_from(["hybrid-tiny", "hybrid-27b", "qwen3-tiny"]))  # fmt: skip
def test_any_command_line_of_vllm_gets_a_plan(argv: list[str], name: str) -> None:
    found = vllm.plan(Question(argv, model(name), Gpu(24 * GIB), requests=4, contexts=(100, 10**7)))
    json.dumps(found.as_json())
    assert found.summary


# GGUF and llama.cpp


def write_gguf(path: Path, metadata: dict[str, object], tensors: dict[str, int]) -> None:
    """A file with this header; each tensor as many bytes as said."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def value(one: object) -> bytes:
        if isinstance(one, bool):
            return struct.pack("<I?", 7, one)
        if isinstance(one, int):
            return struct.pack("<II", 4, one)
        if isinstance(one, float):
            return struct.pack("<If", 6, one)
        if isinstance(one, str):
            return struct.pack("<I", 8) + text(one)
        assert isinstance(one, list)
        inside = 4 if all(isinstance(item, int) for item in one) else 8
        body = b"".join(struct.pack("<I", item) if inside == 4 else text(item) for item in one)
        return struct.pack("<IIQ", 9, inside, len(one)) + body

    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + value(one) for key, one in metadata.items())
    at = 0
    for name, size in tensors.items():
        head += text(name) + struct.pack("<IQIQ", 1, size, 24, at)
        at += size
    path.write_bytes(head + bytes(at))


HYBRID = {
    "general.architecture": "qwen3next", "qwen3next.block_count": 8, "qwen3next.embedding_length": 512,
    "qwen3next.attention.head_count": 8, "qwen3next.attention.head_count_kv": 2, "qwen3next.attention.key_length": 64,
    "qwen3next.attention.value_length": 64, "qwen3next.context_length": 32768, "qwen3next.full_attention_interval": 4,
    "qwen3next.ssm.state_size": 128, "qwen3next.ssm.inner_size": 1024, "qwen3next.ssm.conv_kernel": 4,
    "qwen3next.ssm.group_count": 4, "qwen3next.ssm.time_step_rank": 8, "qwen3next.expert_count": 16,
    "qwen3next.expert_used_count": 4, "tokenizer.ggml.tokens": ["a"] * 5000,
}  # fmt: skip
TENSORS = {
    "token_embd.weight": 4096,
    "blk.0.ffn_up_exps.weight": 64000,
    "blk.0.attn_q.weight": 8000,
    "output.weight": 2048,
}


def facts(tmp_path: Path, metadata: dict[str, object] = HYBRID) -> ModelFacts:
    path = tmp_path / "m.gguf"
    write_gguf(path, metadata, TENSORS)
    told = capacity.model(str(path))
    return gguf.read(told["gguf"], told["bytes"])


def test_the_header_of_a_gguf_file_is_read(tmp_path: Path) -> None:
    found = facts(tmp_path)
    assert (found.layers, found.attention_layers, found.recurrent.layers) == (8, 2, 6)  # type: ignore[union-attr]
    assert found.recurrent.conv_bytes(1, 4) == 6 * 3 * (1024 + 2 * 4 * 128) * 4  # type: ignore[union-attr]
    assert found.recurrent.ssm_bytes(1, 4) == 6 * 1024 * 128 * 4  # type: ignore[union-attr]
    assert found.vocab == 5000
    assert found.active_bytes() == pytest.approx(
        (8000 + 2048 + 64000 / 4) * found.weight_bytes() / found.computed_bytes()
    )


def test_the_embedded_model_is_as_large_as_it_says(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_model.write(path)
    told = capacity.model(str(path))
    found, stated = gguf.read(told["gguf"], told["bytes"]), tiny_model.facts()
    assert stated.stored_bytes == path.stat().st_size
    for name in ("layers", "hidden", "vocab", "heads", "kv_heads", "head_dim", "intermediate", "context"):
        assert getattr(found, name) == getattr(stated, name), name
    assert found.active_bytes() == pytest.approx(stated.active_bytes(), rel=0.03)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 2000), st.booleans())
def test_whatever_lies_in_a_gguf_file_is_an_answer(tmp_path_factory, noise: bytes, cut: int, front: bool) -> None:
    path = tmp_path_factory.mktemp("g") / "m.gguf"
    write_gguf(path, HYBRID, TENSORS)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut] + noise + whole[cut + len(noise) :] if not front else b"GGUF" + noise)
    told = capacity.model(str(path))
    assert "error" in told or told["bytes"] == path.stat().st_size
    if told.get("gguf"):
        try:
            gguf.read(told["gguf"], told["bytes"])
        except model_config.NotAModel:
            pass


@pytest.mark.parametrize(
    ("argv", "slots", "window", "kv_mib"),
    [
        ("--ctx-size 32768 --parallel 4 --no-kv-unified", 4, 8192, 32),
        ("-c 32768 -np 4 --kv-unified", 4, 32768, 32),
        ("-c 32768 -np 2 -ctk q8_0 -ctv q8_0", 2, 16384, 17),
        ("-c 0 -np 1", 1, 32768, 32),
    ],
)
def test_slots_share_the_context_or_have_it_each(tmp_path, argv, slots, window, kv_mib) -> None:
    found = llamacpp.plan(Question(argv.split(), facts(tmp_path), Gpu(24 * GIB), gpus=1, requests=1))
    kv = next(term.bytes for term in found.terms if term.name == "kv")
    assert (found.requests, found.context) == (slots, window)
    assert kv / MIB == pytest.approx(kv_mib, rel=0.01)


def test_each_slot_has_a_recurrent_state(tmp_path: Path) -> None:
    def states(slots: int) -> int:
        argv = f"-c 8192 -np {slots}".split()
        found = llamacpp.plan(Question(argv, facts(tmp_path), Gpu(24 * GIB), gpus=1))
        return next(term.bytes for term in found.terms if term.name == "states")

    assert states(8) == 8 * states(1)


def test_a_context_too_large_for_the_gpu_is_shrunk_by_the_server_or_refused(tmp_path: Path) -> None:
    small = Gpu(2 * GIB)
    argv = "-c 4194304 -np 1"
    fit = llamacpp.plan(Question(argv.split(), facts(tmp_path), small, gpus=1))
    off = llamacpp.plan(Question([*argv.split(), "--fit", "off"], facts(tmp_path), small, gpus=1))
    assert fit.verdict is Verdict.LIMITED
    assert "--fit shrinks the context" in fit.summary
    assert (off.verdict, off.cause) == (Verdict.IMPOSSIBLE, "buffer-allocation-failed")
    assert off.change is not None
    assert off.change.flag == "--ctx-size"


def test_a_slot_too_small_for_a_request_is_foreseen(tmp_path: Path) -> None:
    argv = "-c 16384 -np 4 --no-kv-unified".split()
    found = llamacpp.plan(Question(argv, facts(tmp_path), Gpu(24 * GIB), gpus=1, requests=4, contexts=(5000,)))
    assert found.verdict is Verdict.LIMITED
    assert "exceed a slot's window of 4096" in found.summary
    assert str(found.change).startswith("--ctx-size 20224")


def test_a_folder_and_a_split_file_are_read_too(tmp_path: Path) -> None:
    for number in (1, 2):
        write_gguf(tmp_path / f"m-0000{number}-of-00002.gguf", HYBRID, {f"blk.{number}.attn_q.weight": 1000 * number})
    told = capacity.model(str(tmp_path / "m-00001-of-00002.gguf"))
    assert told["gguf"]["tensors"]["rest"] == 3000
    (tmp_path / "config.json").write_text("{}")
    folder = capacity.model(str(tmp_path))
    assert folder["config"] == "{}"
    assert folder["bytes"] == sum(p.stat().st_size for p in tmp_path.glob("*.gguf"))
    assert "No such file" in capacity.model(str(tmp_path / "nowhere"))["error"]


def test_the_agent_answers_one_line_whatever_it_is_asked() -> None:
    job = {"models": ["/nowhere"], "engines": [{"program": ["no-such-program"]}, {"python": "/nowhere", "package": "x"}],
           "help": {"a": [["/nowhere"], ["sh", "-c", "exit 3"]]}, "space": ["/run/somewhere/else"]}  # fmt: skip
    done = subprocess.run(
        [sys.executable, capacity.__file__], input=json.dumps(job).encode(), capture_output=True, timeout=60
    )
    answer = json.loads(done.stdout)
    assert "error" in answer["models"]["/nowhere"]
    assert all("error" in engine for engine in answer["engines"])
    assert answer["help"]["a"] == {"error": "sh -c exit 3: exit status 3"}
    assert answer["space"]["/run/somewhere/else"]["mount"]
    assert answer["memory"]["MemTotal"] > 0
