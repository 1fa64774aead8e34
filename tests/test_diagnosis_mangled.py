"""A log may be cut, mixed, doubled or no text at all: it is read all the same, in time that grows with its length."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl.diagnosis import GATES, Reader, common_rules, diagnose, engines
from gpuctl.logs.lines import Sieve, read

HERE = Path(__file__).parent
LOGS = [path.read_bytes().partition(b"\n---\n")[2] for path in sorted((HERE / "logs").glob("*/*.txt"))]
WHOLE = (HERE / "ground_truth/sglang/ok-27b-dflash-mrr4/server.log").read_bytes()
LINES = sorted({line for log in LOGS for line in log.splitlines(keepends=True)})

pieces = st.one_of(
    st.sampled_from(LINES),
    st.binary(max_size=80),
    st.sampled_from(LINES).map(lambda line: line[: len(line) // 2]),
    st.sampled_from([b"\r", b"\n", b"\x1b[31m", b"\x01", b'{"MESSAGE":', b'{"MESSAGE":"a\\u0000"}\n', b"\xff\xfe"]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(pieces, max_size=30), st.sampled_from([None, 0, 1, 2, 137, -9]), st.sampled_from([None, True, False]))
def test_whatever_stands_in_a_log_it_is_read(parts: list[bytes], exit_status: int | None, running: bool | None) -> None:
    found = diagnose(parts, exit_status=exit_status, running=running)
    found.as_json()
    assert found.verdict in {"failed", "stopped", "serving", "starting"}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(LOGS), st.lists(st.integers(1, 400), max_size=8))
def test_where_the_bytes_are_cut_makes_no_difference(log: bytes, cuts: list[int]) -> None:
    parts, rest = [], log
    for cut in cuts:
        parts.append(rest[:cut])
        rest = rest[cut:]
    assert diagnose([*parts, rest]) == diagnose([log])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(LOGS), st.integers(0, 4000))
def test_a_log_that_breaks_off_is_read(log: bytes, end: int) -> None:
    diagnose([log[:end]])


@pytest.mark.parametrize("log", LOGS, ids=range(len(LOGS)))
def test_colours_and_carriage_returns_make_no_difference(log: bytes) -> None:
    coloured = b"".join(b"\x1b[0;36m" + line.rstrip(b"\r\n") + b"\x1b[0m\r\n" for line in log.splitlines(keepends=True))
    plain, other = diagnose([log]), diagnose([coloured])
    assert [f.id for f in plain.causes] == [f.id for f in other.causes]
    assert plain.stages == other.stages


@pytest.mark.parametrize("log", LOGS, ids=range(len(LOGS)))
def test_the_cause_is_found_among_a_million_dull_bytes(log: bytes) -> None:
    dull = b'[2026-03-02 10:20:01] INFO:     127.0.0.1:5000 - "GET /health HTTP/1.1" 200 OK\n' * 4000
    if b'{"' in log[:2]:
        dull = b'{"SYSLOG_IDENTIFIER":"python3","MESSAGE":"INFO: 127.0.0.1 - GET /health 200 OK"}\n' * 4000
    assert [f.id for f in diagnose([dull, log]).causes][:1] == [f.id for f in diagnose([log]).causes][:1]


NASTY = {
    "no line ends": b"CUDA out of memory. ",
    "only carriage returns": b"Loading weights failed: error \r",
    "nothing but tracebacks": b"Traceback (most recent call last):\n",
    "tracebacks without an end": b'  File "a", line 1, in f\n    Traceback (most recent call last):\n',
    "exceptions": b"Traceback (most recent call last):\n  File \"a\", line 1, in f\nValueError: 'x' error\n",
    "colours": b"\x1b[31m\x1b[0merror\x1b[31m\n",
    "a journal of bytes": b'{"MESSAGE":[67,85,68,65,32,101,114,114,111,114]}\n',
    "broken JSON": b'{"MESSAGE":"error \\',
    "control characters": b"\x01\x01error\x00\n",
    "braces": b"server_args=ServerArgs(a='" + b"((((" * 20,
    "starts": b"server_args=ServerArgs(model_path='/m', port=1)\nLoad weight begin. avail mem=94.10 GB\n",
    "ranks": b"[2026-03-02 10:20:01 TP1] Traceback (most recent call last):\n[2026-03-02 10:20:01 TP2] error\n",
}


@pytest.mark.parametrize("name", NASTY)
def test_time_grows_with_length_and_no_faster(name: str) -> None:
    def seconds(size: int) -> float:
        log = NASTY[name] * (size // len(NASTY[name]))
        # Each line of another shape: the worst that can be read.
        log = b"".join(
            bytes([103 + i % 20, 103 + i // 20 % 20]) + log[i * 997 : i * 997 + 997] for i in range(size // 997)
        )
        began = time.perf_counter()
        diagnose([log])
        return time.perf_counter() - began

    small = min(seconds(100_000) for _ in range(2))
    large = seconds(400_000)
    assert large < 12 * small + 0.5


def test_memory_does_not_grow_with_the_log() -> None:
    sieve = Sieve(GATES)
    for number in range(3000):
        unique = b"ghijklmnop"[number % 10 : number % 10 + 1] * (number % 97)
        for _ in sieve.feed(b"error " + unique + b"%d\n" % number + b"z" * 500):
            pass
    assert sieve.held < 1 << 25
    reader = Reader()
    for _ in range(300):
        reader.feed(b"x" * 100_000)  # one line of 30 MB
    assert reader.diagnosis().verdict == "starting"


def test_every_literal_that_is_looked_for_lets_its_line_through() -> None:
    wanted = {rule.needle for rule in common_rules()}
    wanted |= {"Traceback (most recent call last):", "Main process exited", "Started gpuctl"}
    for engine in engines().values():
        wanted |= {*engine.start, *engine.envelope, *engine.fatal, *engine.dead, *engine.stopped}
        wanted |= {stage.text for stage in engine.stages} | {fact.needle for fact in engine.facts}
        wanted |= {rule.needle for rule in engine.rules}
    assert [text for text in sorted(wanted) if not any(gate in text.encode() for gate in GATES)] == []


def test_every_rule_holds_its_needle_in_its_pattern() -> None:
    """A pattern that could never match a line with its needle would be a rule that never speaks."""
    every = [*common_rules(), *(rule for engine in engines().values() for rule in engine.rules)]
    spoken = {f.id for log in LOGS for f in (*diagnose([log]).causes, *diagnose([log]).warnings)}
    silent = {rule.id for rule in every} - spoken
    assert len(silent) < len(every) / 2


def test_lines_are_read_without_what_the_journal_and_the_program_put_in_front() -> None:
    text = "Load weight begin. avail mem=94.58 GB"
    for prefix, rank, source in (
        ("", "", ""),
        ("[2026-11-29 18:38:07] ", "", ""),
        ("[2026-11-29 18:38:07 DP0 TP1] ", "DP0 TP1", ""),
        ("Nov 29 18:38:07 ct200 python3[281]: [2026-11-29 18:38:07 TP1] ", "TP1", "python3"),
        ("2026-11-29T18:38:07.123456+01:00 ct200 python3[281]: ", "", "python3"),
        ("2026-11-29T18:38:07.123456789Z stdout F ", "", ""),
        ("(Worker_TP1 pid=254) INFO 11-29 18:38:07 [gpu_model_runner.py:49] ", "Worker_TP1", ""),
        ("(EngineCore_DP0 pid=254) ", "EngineCore_DP0", ""),
        ("vllm-1  | (Worker_TP1 pid=254) INFO 11-29 18:38:07 [gpu_model_runner.py:49] ", "Worker_TP1", ""),
        ("[rank1]:[W1129 18:45:19.490575976 ProcessGroupNCCL.cpp:1575] ", "rank1", ""),
        ("0.00.003.980 E ", "", ""),
        ("[ 8123.441200] ", "", "kernel"),
    ):
        assert read(f"{prefix}{text}".encode())[:3] == (text, rank, source), prefix
