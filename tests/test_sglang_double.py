"""The SGLang double behaves as recorded servers did: refusals, start-up, answers, streams, speeds and deaths."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.lab.engines.install import install, install_guest, safetensors, set_faults, write_model
from tests.lab.engines.running import Double, double
from tests.recorded_sglang import ANSWERS, BY_NAME, CASES, MODELS

QWEN, DRAFT = str(MODELS / "hybrid-27b"), str(MODELS / "dflash-27b")
BASE = ["--model-path", QWEN, "--load-format", "dummy", "--attention-backend", "triton", "--context-length", "32768"]
# The campaign's speculative servers under 0.5.11.
CAMPAIGN = [
    *BASE,
    *(
        "--mem-fraction-static",
        "0.75",
        "--mamba-scheduler-strategy",
        "extra_buffer",
        "--mamba-full-memory-ratio",
        "0.5",
    ),
    *("--speculative-draft-model-path", DRAFT),
]
DFLASH = [*CAMPAIGN, "--speculative-algorithm", "DFLASH"]
DDTREE = [*CAMPAIGN, "--speculative-algorithm", "DDTREE"]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def arguments(case):
    """Of a recorded server; the port is chosen here."""
    argv = list(case.arguments)
    at = argv.index("--port")
    return argv[:at] + argv[at + 2 :]


def refusal(text):
    """The last line that says why, without paths."""
    lines = [line for line in text.splitlines() if re.match(r"^([\w.]+Error|sglang serve: error|Exception)\b", line)]
    return lines[-1].replace(f"{MODELS}/", "/models/") if lines else ""


# -- the command line


@pytest.mark.parametrize("case", [c for c in CASES if c.exit in (1, 2)], ids=lambda c: c.name)
def test_a_refused_command_line_ends_as_recorded(case, tmp_path):
    with double(tmp_path, arguments(case), profile="h200") as server:
        assert server.wait() == case.exit
        mine, true = refusal(server.log), refusal(case.log)
        if sys.version_info < (3, 12):
            true = true.replace("', '", "', '")
        assert mine == true


def test_the_usage_is_the_recorded_one():
    from sglang._double.arguments import parser

    assert parser(release="0.5.16").format_usage().split() == ANSWERS["usage"].split()


@pytest.mark.parametrize(
    ("release", "flags", "said"),
    [
        ("0.5.23", ["--cuda-graph-max-bs", "8"], "error: ambiguous option: --cuda-graph-max-bs could match"),
        (
            "0.5.23",
            ["--mamba-scheduler-strategy", "auto"],
            "error: unrecognized arguments: --mamba-scheduler-strategy auto",
        ),
        (
            "0.5.11",
            ["--mamba-radix-cache-strategy", "auto"],
            "error: unrecognized arguments: --mamba-radix-cache-strategy",
        ),
        ("0.5.11", ["--cuda-graph-max-bs-decode", "8"], "error: unrecognized arguments: --cuda-graph-max-bs-decode 8"),
        ("0.5.11", ["--max-num-seqs", "8"], "error: unrecognized arguments: --max-num-seqs 8"),
        (
            "0.5.11",
            ["--speculative-ddtree-budget", "8"],
            "error: unrecognized arguments: --speculative-ddtree-budget 8",
        ),
    ],
)
def test_flags_of_another_release_exit_2(release, flags, said, tmp_path):
    with double(tmp_path, [*BASE, *flags], release=release) as server:
        assert server.wait() == 2
        assert said in server.log


@pytest.mark.parametrize("release", ["0.5.11", "0.5.16", "0.5.23"])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--context-length", "300000"], "ValueError: Warning: User-specified context_length (300000) is greater than"),
        (["--served-model-name", "a:b"], "AssertionError: served_model_name cannot contain a colon"),
    ],
)
def test_combinations_that_every_release_refuses_exit_1(release, flags, said, tmp_path):
    with double(tmp_path, [*BASE, "--disable-radix-cache", *flags], release=release) as server:
        assert server.wait() == 1
        assert said in server.log
        assert "Traceback (most recent call last):" in server.log


def test_a_part_of_the_eagle_flags_dies_of_an_assertion_without_text(tmp_path):
    flags = ["--disable-radix-cache", "--speculative-algorithm", "EAGLE3", "--speculative-num-draft-tokens", "4"]
    with double(tmp_path, [*BASE, *flags], release="0.5.11") as server:
        assert server.wait() == 1
        assert server.lines[-1] == "AssertionError"


def test_0_5_11_refuses_speculation_on_a_hybrid_model_without_an_extra_buffer(tmp_path):
    flags = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", DRAFT]
    with double(tmp_path, [*BASE, *flags], release="0.5.11") as server:
        assert server.wait() == 1
        assert "is not compatible with radix cache when using --mamba-scheduler-strategy no_buffer" in server.log


# -- start-up

STAGES = re.compile(
    r"Init torch distributed|Load weight|draft runner|fused KV|Mamba Cache is|KV Cache is|Memory pool end|Capture .* graph|"
    r"prefill CUDA graph because|hybrid linear attention|max_total_num_tokens=|Radix|Tree cache|Started server|startup|Uvicorn|"
    r"fired up|Scheduler hit an exception|^\w[\w.]*Error|sigquit|kill_process_tree|was reduced from"
)


def shape(text):
    """The lines of a start in order, numbers as #."""
    lines = []
    for line in text.splitlines():
        line = re.sub(r"^\[[^\]]*?( TP\d)?\] ", r"\1> ", line)
        if STAGES.search(line) and "server_args=" not in line:
            line = re.sub(r"\[[\d, ]+\]", "[#]", line.replace(f"{MODELS}/", "/models/"))
            lines.append(NUMBER.sub("#", line))
        if "fired up" in line:
            break
    return lines


UP = [
    "ok-27b-default", "ok-27b-96gb-mrr8", "ok-27b-dflash-mrr4", "ok-dense-eagle3", "ok-dense-maxtokens", "ok-dense-nograph", "ok-hybrid-ngram",
]  # fmt: skip


@pytest.mark.parametrize("name", UP)
def test_a_start_has_the_recorded_lines_in_the_recorded_order(name, tmp_path):
    case = BY_NAME[name]
    profile = tmp_path / "profile.json"
    held = 44.51 if "96gb" in name else 0
    profile.write_text(json.dumps({"base": "h200", "gpu": {"held_gib": held}}))
    with double(tmp_path, arguments(case), profile=str(profile)) as server:
        server.ready()
        assert shape(server.log) == shape(case.log)
        for pattern in (r"max_total_num_tokens=(\d+)", r"max_running_requests=(\d+)", r"context_len=(\d+)"):
            mine, true = re.search(pattern, server.log), re.search(pattern, case.log)
            assert int(mine[1]) == pytest.approx(int(true[1]), rel=0.003)


DOWN = [
    "fail-27b-96gb-noradix-mrr8", "fail-27b-fraction-too-small", "fail-fraction-tiny", "fail-missing-weights",
    "fail-mrr-zero-flag", "fail-mrr-zero-tokens", "fail-kvpool-oom", "fail-tp2-one-gpu",
]  # fmt: skip


@pytest.mark.parametrize("name", DOWN)
def test_a_failing_start_dies_as_recorded(name, tmp_path):
    case = BY_NAME[name]
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"base": "h200", "gpu": {"held_gib": 44.51 if "96gb" in name else 0}}))
    with double(tmp_path, arguments(case), profile=str(profile)) as server:
        assert server.wait() == case.exit == -9
        mine, true = refusal(server.log), refusal(case.log)
        assert NUMBER.sub("#", mine)[:250] == NUMBER.sub("#", true)[:250]
        # What another rank still says while all is being killed may come last.
        mine, true = ([line for line in shape(log) if not line.startswith(" TP")] for log in (server.log, case.log))
        assert mine[-2:] == true[-2:]


def test_the_campaigns_failure_and_its_cure(tmp_path):
    with double(tmp_path, [*DFLASH, "--max-running-requests", "8"], release="0.5.11") as server:
        assert server.wait() == -9
        assert "max_mamba_cache_size: 2, " in server.log
        assert re.search(r"KV Cache is allocated. #tokens: 118\d\d,", server.log)
        assert "AssertionError: max_running_request is zero" in server.log
    with double(tmp_path, [*DFLASH, "--max-running-requests", "4"], release="0.5.11") as server:
        server.ready()
        assert "max_mamba_cache_size: 24, " in server.log
        assert re.search(r"max_running_requests=4,", server.log)


def test_the_same_flags_serve_nobody_or_one_request_in_0_5_23(tmp_path):
    flags = [flag.replace("mamba-scheduler-strategy", "mamba-radix-cache-strategy") for flag in DFLASH]
    with double(tmp_path, [*flags, "--max-running-requests", "8"], release="0.5.23") as server:
        assert server.wait() == -9
        assert "state cache is too small to serve any requests. max_mamba_cache_size=4, mamba_ratio=5" in server.log
    with double(
        tmp_path, [*flags, "--max-running-requests", "8", "--mamba-ssm-dtype", "bfloat16"], release="0.5.23"
    ) as server:
        server.ready()
        assert re.search(r"max_running_requests is capped to \d by the mamba state cache", server.log)
        assert server.ask("GET", "/ready")[0] == 200
        assert server.ask("GET", "/get_load")[0] == 404


# -- what it answers


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    """A 0.5.16 server without speculation, as `ok-27b-default` was."""
    folder = tmp_path_factory.mktemp("serving")
    (folder / "fast.json").write_text(
        json.dumps({"base": "h200", "speeds": [{"step_ms": {"1": 1.5}, "prefill_tok_s": 90_000}]})
    )
    flags = arguments(BY_NAME["ok-27b-default"])
    with double(folder, flags, profile=str(folder / "fast.json")) as server:
        yield server.ready()


@pytest.fixture(scope="module")
def speculating(tmp_path_factory):
    """A 0.5.16 server that speculates, as `ok-dense-ngram` did."""
    with double(tmp_path_factory.mktemp("speculating"), arguments(BY_NAME["ok-dense-ngram"]), profile="h200") as server:
        yield server.ready()


def keys(value):
    """The shape of a JSON value: keys in order, types of the rest."""
    if isinstance(value, dict):
        return {key: keys(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [keys(inner) for inner in value[:1]]
    if isinstance(value, bool) or value is None:
        return value
    return "number" if isinstance(value, int | float) else "text"


def ordered(value):
    return json.dumps(keys(value))


RECORDED = ANSWERS["ok-27b-default"]
SAME = ["health", "model_info", "models", "get_load", "v1_loads", "completion", "chat", "generate", "error_404", "error_bad_json_field",
        "error_max_tokens", "error_unknown_model"]  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_an_answer_has_the_recorded_status_headers_and_keys(name, serving):
    recorded = RECORDED[name]
    request = recorded["request"]
    status, headers, body = serving.ask(request["method"], request["path"], request["body"])
    assert status == recorded["status"]
    assert sorted(headers) == sorted(key.lower() for key in recorded["headers"])
    if recorded["body"] == "":
        assert body == b""
    else:
        assert ordered(json.loads(body)) == ordered(recorded["body"])


def test_the_words_of_errors_are_the_recorded_ones(serving):
    for name in ("error_404", "error_bad_json_field", "error_max_tokens"):
        request = RECORDED[name]["request"]
        body = json.loads(serving.ask(request["method"], request["path"], request["body"])[2])
        mine, true = (
            re.sub(r"\b\d+ tokens from|total of \d+", "#", json.dumps(b)) for b in (body, RECORDED[name]["body"])
        )
        assert mine == true


def test_a_prompt_over_the_context_is_400_also_when_streaming(serving):
    for stream in (False, True):
        body = {"prompt": "word " * 270_000, "max_tokens": 8, "stream": stream}
        status, headers, text = serving.ask("POST", "/v1/completions", body)
        answer = json.loads(text)
        assert status == 400
        assert headers["content-type"] == "application/json"
        assert re.fullmatch(
            r"The input \(\d+ tokens\) is longer than the model's context length \(262144 tokens\).", answer["message"]
        )
        assert (answer["type"], answer["code"]) == ("BadRequestError", 400)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"max_tokens": 1}, "'loc': ('body', 'prompt')"),
        ("/v1/chat/completions", {}, "'loc': ('body', 'messages')"),
        ("/v1/chat/completions", {"messages": []}, "Messages cannot be empty."),
        ("/generate", {}, "Either text, input_ids or input_embeds should be provided."),
    ],
)
def test_a_request_without_its_text_is_400(path, body, words, serving):
    status, _, text = serving.ask("POST", path, body)
    assert status == 400
    assert words in json.loads(text)["message"]


def test_garbage_instead_of_json_is_400_and_the_server_lives(serving):
    with socket.create_connection(("127.0.0.1", serving.port)) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n{oops")
        assert raw.recv(4096).startswith(b"HTTP/1.1 400")
    with socket.create_connection(("127.0.0.1", serving.port)) as raw:
        raw.sendall(b"\x16\x03\x01 not http at all\r\n\r\n")
        assert raw.recv(4096).endswith(b"Invalid HTTP request received.")
    assert serving.ask("GET", "/model_info")[0] == 200


STREAMS = ["sse", "sse_continuous_usage", "sse_no_usage", "sse_chat", "sse_generate"]


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_has_the_recorded_chunks(name, serving):
    recorded = RECORDED[name]
    request = recorded["request"]
    status, headers, text = serving.ask("POST", request["path"], request["body"])
    assert status == 200
    assert sorted(headers) == sorted(key.lower() for key in recorded["headers"])
    blocks = text.decode().split("\n\n")
    assert blocks.pop() == ""
    assert len(blocks) == recorded["count"]
    for mine, true in zip(blocks[:2] + blocks[-4:], recorded["events"], strict=True):
        assert mine.startswith("data: {") or mine == "data: [DONE]"
        if mine == "data: [DONE]":
            assert true == mine
        else:
            assert ordered(json.loads(mine[6:])) == ordered(json.loads(true[6:]))


def test_under_speculation_a_chunk_carries_several_tokens(speculating):
    recorded = ANSWERS["ok-dense-ngram"]["generate"]
    body = {"prompt": "one two three", "max_tokens": 64, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True}}  # fmt: skip
    events = speculating.events("/v1/completions", body)
    counts = [event["usage"]["completion_tokens"] for event in events[:-2]]
    assert counts[0] == 1
    assert counts[-1] == events[-2]["usage"]["completion_tokens"] == 64
    assert max(b - a for a, b in itertools.pairwise(counts)) > 3
    answer = speculating.json("POST", "/generate", recorded["request"]["body"])
    assert ordered(answer).split('"e2e')[0] == ordered(recorded["body"]).split('"e2e')[0]
    assert sorted(answer["meta_info"]) == sorted(recorded["body"]["meta_info"])
    assert answer["meta_info"]["spec_accept_length"] > 4


def test_server_info_has_the_recorded_keys(serving):
    info = serving.json("GET", "/server_info")
    assert list(info)[:20] == RECORDED["server_info_keys"][:20]
    missing = set(RECORDED["server_info_keys"]) - set(info)
    assert missing == {"kv_events"}
    state = info["internal_states"][0]
    assert [key for key in RECORDED["internal_state_keys"] if key not in state and not key.startswith("_")] == []
    assert state["memory_usage"] == pytest.approx(RECORDED["memory_usage"], rel=0.1)
    assert info["max_req_input_len"] == 262_138


def test_metrics_are_the_recorded_series(serving, speculating):
    for server, case in ((serving, "ok-27b-default"), (speculating, "ok-dense-ngram")):
        status, _, text = server.ask("GET", "/metrics")
        assert status == 200
        names = {re.match(r"[\w:]+", line)[0] for line in text.decode().splitlines() if line and line[0] != "#"}
        assert set(ANSWERS[case]["metric_names"]) - names <= {"sglang:get_loads_duration_seconds"}


def test_metrics_are_404_unless_asked_for(tmp_path):
    with double(tmp_path, BASE) as server:
        assert server.ready().ask("GET", "/metrics")[0] == 404


def test_lines_of_a_served_request_look_as_recorded(serving):
    serving.json("POST", "/v1/completions", {"prompt": "a b c d", "max_tokens": 90, "ignore_eos": True})
    for kind in ("Prefill batch", "Decode batch"):
        mine = [line for line in serving.lines if kind in line][-1]
        true = [line for line in BY_NAME["ok-27b-default"].log.splitlines() if kind in line][-1]
        assert NUMBER.sub("#", mine.split("] ", 1)[1]) == NUMBER.sub("#", true.split("] ", 1)[1])


def test_prompts_are_counted_by_the_documented_rule_and_cached_until_flushed(serving):
    words = " ".join(f"w{'abcde'[i % 5]}{'fghij'[i // 5 % 5]}" for i in range(3000))
    assert serving.json("POST", "/tokenize", {"prompt": words})["count"] == 3000
    body = {"text": words, "sampling_params": {"max_new_tokens": 1}}
    first, again = (serving.json("POST", "/generate", body)["meta_info"] for _ in range(2))
    assert first["prompt_tokens"] == 3000
    assert first["cached_tokens"] == 0
    assert again["cached_tokens"] > 2800
    assert serving.ask("POST", "/flush_cache")[0] == 200
    assert serving.json("POST", "/generate", body)["meta_info"]["cached_tokens"] == 0


def test_an_evident_question_is_answered_rightly(serving):
    question = {
        "messages": [{"role": "user", "content": "What is 17 + 25? Answer with the number only."}],
        "max_tokens": 8,
    }
    answer = serving.json("POST", "/v1/chat/completions", question)
    assert answer["choices"][0]["message"]["content"].startswith("42")
    assert answer["choices"][0]["finish_reason"] == "stop"


# -- how it dies


def served(server: Double, body=None) -> bool:
    """Whether a request gets an answer."""
    try:
        return server.ask("POST", "/v1/completions", body or {"prompt": "hello there", "max_tokens": 2})[0] == 200
    except OSError:
        return False
    except Exception as error:  # http.client's own
        assert "closed connection" in str(error), error
        return False


@pytest.mark.parametrize("budget", [8, 12])
def test_small_trees_die_of_an_illegal_instruction_at_the_first_request(budget, tmp_path):
    flags = [*DDTREE, "--speculative-ddtree-budget", str(budget), "--max-running-requests", "2"]
    with double(tmp_path, flags, release="0.5.11", profile="campaign-ddtree") as server:
        assert not served(server.ready())
        assert server.wait() == -9
        assert "torch.AcceleratorError: CUDA error: an illegal instruction was encountered" in server.log
        assert "SIGQUIT received. signum=None, frame=None. It usually means one child failed." in server.log


def test_a_server_without_room_for_activations_dies_at_the_first_long_prompt(tmp_path):
    case = BY_NAME["fail-27b-runtime-oom"]
    with double(tmp_path, arguments(case), profile="h200") as server:
        server.ready()
        assert served(server)
        assert not served(server, {"prompt": "word " * 9000, "max_tokens": 2})
        assert server.wait() == -9
        assert refusal(server.log).startswith(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 160.00 MiB."
        )


def test_memory_runs_out_on_demand_while_serving(tmp_path):
    with double(tmp_path, BASE, faults=[]) as server:
        assert served(server.ready())
        (tmp_path / "faults.json").write_text(json.dumps({"faults": [{"kind": "oom"}]}))
        assert not served(server)
        assert server.wait() == -9


def test_a_killed_scheduler_takes_the_server_with_it(tmp_path):
    with double(tmp_path, BASE) as server:
        server.ready()
        listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
        found = [
            line.split()
            for line in listed.splitlines()
            if "sglang::scheduler" in line and line.split()[1] == str(server.process.pid)
        ]
        assert len(found) == 1
        os.kill(int(found[0][0]), signal.SIGKILL)
        assert server.wait() == -9
        pid = found[0][0]
        assert (
            f"Subprocess scheduler_0 (pid={pid}) crashed with exit code -9. Triggering SIGQUIT for cleanup..."
            in server.log
        )
        true = [line.split("] ", 1)[1] for line in BY_NAME["fail-scheduler-killed"].log.splitlines()[-5:]]
        mine = [line.split("] ", 1)[1] for line in server.lines[-5:]]
        assert [NUMBER.sub("#", line) for line in mine] == [NUMBER.sub("#", line) for line in true]


def test_a_taken_port_is_noticed_last_and_the_server_hangs(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with double(tmp_path, BASE, port=other.getsockname()[1]) as server:
            server.says("address already in use")
            assert "max_total_num_tokens=" in server.log
            true = [line.split("] ", 1)[1] for line in BY_NAME["fail-port-in-use"].log.splitlines()[-2:]]
            assert [NUMBER.sub("#", line.split("] ", 1)[1]) for line in server.lines[-2:]] == [
                NUMBER.sub("#", line) for line in true
            ]
            time.sleep(0.3)
            assert server.process.poll() is None


def test_sigterm_ends_in_sigkill_after_the_requests(tmp_path):
    with double(tmp_path, BASE) as server:
        server.ready()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            running = pool.submit(served, server, {"prompt": "hello", "max_tokens": 30, "ignore_eos": True})
            time.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            assert running.result()
        assert server.wait() == -9
        assert "Gracefully exiting... Remaining number of requests 1." in server.log
        assert "Gracefully exiting... Remaining number of requests 0." in server.log


def test_a_hang_in_nccl_says_nothing_more(tmp_path):
    with double(tmp_path, [*BASE, "--tp-size", "2"], faults=[{"kind": "hang", "at": "nccl"}]) as server:
        server.says("TP1] Init torch distributed begin.")
        time.sleep(0.3)
        assert server.process.poll() is None
        assert "Init torch distributed ends" not in server.log


def test_a_rank_killed_while_starting_is_told_by_its_exit_code(tmp_path):
    with double(tmp_path, [*BASE, "--tp-size", "2"], faults=[{"kind": "rank-killed", "rank": 1}]) as server:
        assert server.wait() == 1
        assert (
            "RuntimeError: Rank 1 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL)"
            in server.log
        )


def test_the_diagnosed_failure_of_a_fault_that_does_not_exist_is_one_line(tmp_path):
    with double(tmp_path, BASE, faults=[{"kind": "earthquake"}]) as server:
        assert server.wait() == 1
        assert "no fault of kind 'earthquake'; there are illegal-instruction" in server.lines[-1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp-size", "3"], "AssertionError"),
        (["--tp-size", "5"], "AssertionError"),
        (["--tp-size", "16"], "torch.AcceleratorError: CUDA error: invalid device ordinal"),
        (["--attention-backend", "fa3"], "AssertionError: Only {"),
    ],
)
def test_what_does_not_fit_the_model_or_the_machine_dies(flags, words, tmp_path):
    with double(tmp_path, [*BASE, *flags]) as server:
        assert server.wait() == -9
        assert words in server.log


def test_a_gpu_that_somebody_else_fills_unbalances_the_ranks(tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"base": "campaign", "gpu": {"held_gib": {"1": 40}}}))
    with double(tmp_path, [*BASE, "--tp-size", "2"], profile=str(profile)) as server:
        assert server.wait() == -9
        assert "TP0] Scheduler hit an exception" in server.log
        assert (
            "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes."
            in server.log
        )


# -- weights, installation, other Pythons


def test_weights_are_really_looked_at(tmp_path):
    write_model(tmp_path, "model", "Qwen3.6-27B", shards=2, size=4096)
    folder = tmp_path / "model"
    flags = ["--model-path", str(folder), "--attention-backend", "triton", "--context-length", "32768"]
    with double(tmp_path, flags) as server:
        assert "100% Completed | 2/2" in server.ready().log
    first = folder / "model-00001-of-00002.safetensors"
    whole = first.read_bytes()
    for wrong, words in (
        (whole[:-1], "incomplete metadata, file not fully covered"),
        (whole[:40], "invalid header length"),
        (b"", "header too small"),
        (b"version https://git-lfs", "header too large"),
    ):
        first.write_bytes(wrong)
        with double(tmp_path, flags) as server:
            assert server.wait() == -9
            assert f"Error while deserializing header: {words}" in server.log
    first.unlink()
    with double(tmp_path, flags) as server:
        answer = server.ready().json("POST", "/v1/completions", {"prompt": "hi", "max_tokens": 2})
        assert answer["choices"][0]["text"] == " foss foss"
    assert len(safetensors({"a": b"12345678"})) % 8 == 0


def test_an_installation_answers_what_tools_ask_one(tmp_path):
    folder = install(Path("/"), "0.5.11", prefix=str(tmp_path / "opt"), python=sys.executable, startup_scale=0.0)
    python = str(folder / "bin" / "python")

    def run(*argv: str) -> str:
        return subprocess.run(
            [python, *argv], capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]}
        ).stdout

    assert run("-c", "import sglang; print(sglang.__version__)") == "0.5.11\n"
    assert run("-c", "from importlib.metadata import version as v; print(v('sglang'), v('torch'))") == "0.5.11 2.11.0\n"
    assert "--cuda-graph-max-bs CUDA_GRAPH_MAX_BS" in run("-m", "sglang.launch_server", "--help")
    mixin = folder / "lib/python3/site-packages/sglang/srt/model_executor/model_runner_kv_cache_mixin.py"
    assert "D / ratio" not in mixin.read_text()
    install(Path("/"), "0.5.23", prefix=str(tmp_path / "opt"), python=sys.executable)
    assert not mixin.exists()
    assert "- per_req * (1 + D)" in (mixin.parents[1] / "mem_cache" / "kv_cache_configurator.py").read_text()
    with pytest.raises(ValueError, match=r"no SGLang release '0.4.0': there are 0.5.11"):
        install(tmp_path, "0.4.0")


def test_a_guest_has_the_engines_and_models_of_the_example_inventory(tmp_path):
    install_guest(tmp_path)
    servers = yaml.safe_load((Path(__file__).parents[1] / "inventory" / "kpro6" / "servers.yml").read_text())
    models = yaml.safe_load((Path(__file__).parents[1] / "inventory" / "kpro6" / "models.yml").read_text())
    programs = {entry["program"][0] for entry in servers["defaults"].values() if "program" in entry}
    assert all((tmp_path / program.lstrip("/")).exists() for program in programs)
    for model in models.values():
        there = (tmp_path / model["path"].lstrip("/") / "config.json").exists()
        cached = list(
            tmp_path.glob(
                f"root/.cache/huggingface/hub/models--{model.get('hub', '-').replace('/', '--')}/snapshots/*/config.json"
            )
        )
        assert there or (model.get("stage") and cached), model
    assert not [path for path in tmp_path.rglob("*") if path.is_symlink() and not path.exists()]


def test_faults_are_set_in_a_root_and_healed(tmp_path):
    file = set_faults(tmp_path, [{"kind": "garbage"}])
    assert json.loads(file.read_text()) == {"faults": [{"kind": "garbage"}]}
    assert json.loads(set_faults(tmp_path, []).read_text()) == {"faults": []}


OLD = Path.home() / ".pyenv" / "versions"


@pytest.mark.skipif(not list(OLD.glob("3.9.*")), reason="no Python 3.9 here")
def test_it_runs_under_python_3_9(tmp_path):
    python = str(next(OLD.glob("3.9.*")) / "bin" / "python3")
    with double(tmp_path, [*DFLASH, "--max-running-requests", "4"], release="0.5.11", python=python) as server:
        events = server.ready().events(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stream": True}
        )
        assert events[0]["choices"][0]["delta"] == {"reasoning_content": None, "role": "assistant", "content": ""}
        assert events[-1] == "[DONE]"
