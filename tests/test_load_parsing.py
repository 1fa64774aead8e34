"""In whatever pieces an answer comes, the same tokens are read; and nothing that comes makes the reader fall."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sse_server import CHUNKED, DONE, END, chunk, delta, event, head, said, total, usage

from gpuctl.agent.load import BadAnswer, Exchange, Job, Unit, endpoint, read_answer

SGLANG = Path(__file__).parent / "sse/sglang"  # bytes of SGLang 0.5.16 with NGRAM speculation, as they came


def exchange():
    job = Job({"url": "h:1", "concurrency": 1, "requests": [{"prompt": "x"}]})
    return Exchange(Unit(job, job.requests[0], 0), 0, None)


def read(pieces, failure=None):
    """(answer, error, index of the piece at which the end was seen) of an answer that comes in these pieces."""
    one = exchange()
    ended = None
    try:
        for stamp, data in enumerate(pieces):
            if data and one.take(stamp, data) and ended is None:
                ended = stamp
        one.advance()
    except BadAnswer as error:
        failure = failure or ("bad_response", str(error))
    reader = read_answer(one.framer, failure)
    while True:
        try:
            next(reader)
        except StopIteration as result:
            return (*result.value, ended)


def split(data, cuts):
    at = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(at)]


def chunked(events):
    return CHUNKED + b"".join(chunk(one) for one in events) + END


texts = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=20)
answers = st.lists(texts, min_size=1, max_size=12)
cuts = st.lists(st.integers(0, 1 << 20), max_size=30)


@given(answers, cuts, st.sampled_from(["chunked", "length", "close", "all in one chunk"]), st.booleans())
@example(["a\u2028b\x85", "ü\r\n", "0\r\n\r\n"], list(range(2000)), "chunked", True)
@example(["0\r\n\r\n"], [], "chunked", False)
def test_any_split_of_the_bytes_gives_the_same_tokens(words, cuts, framing, carriage):
    events = [said(word, n + 1) for n, word in enumerate(words)] + [said("", reason="stop"), total(len(words)), DONE]
    if carriage:
        events = [one[:-2] + b"\r\n\r\n" for one in events]
    data = {
        "chunked": chunked(events),
        "all in one chunk": chunked([b"".join(events)]),
        "length": head(Content_Length=str(len(b"".join(events)))) + b"".join(events),
        "close": head() + b"".join(events),
    }[framing]
    pieces = split(data, cuts)
    answer, error, ended = read(pieces)
    assert error is None
    assert "".join(answer.text) == "".join(words)
    assert answer.tokens == list(range(1, len(words) + 1))
    assert answer.stamps == sorted(answer.stamps)
    assert answer.usage == usage(len(words))
    assert ended == (None if framing == "close" else len(pieces) - 1)


@given(answers, cuts)
def test_a_chunk_is_stamped_by_the_piece_that_ends_its_line(words, cuts):
    events = [said(word) for word in words]
    data = head() + b"".join(events)
    pieces = split(data, cuts)
    ends, at = [], len(head())
    for one in events:
        at += len(one)
        ends.append(at - 1)  # of the line's \n; the empty line comes after it
    lengths = [sum(map(len, pieces[: i + 1])) for i in range(len(pieces))]
    expected = [next(i for i, length in enumerate(lengths) if length >= end) for end in ends]
    assert read(pieces)[0].stamps == expected


@given(st.binary(max_size=400), cuts)
def test_bytes_of_any_kind_are_an_error_and_nothing_worse(data, cuts):
    _, error, _ = read(split(data, cuts))
    assert error is not None
    assert error[0] in {"bad_response", "cut", "http_error"}


KEYS = (
    *(
        "choices",
        "delta",
        "text",
        "content",
        "tool_calls",
        "usage",
        "completion_tokens",
        "error",
        "object",
        "id",
        "model",
    ),
    *("timings", "predicted_n", "metrics", "meta_info", "spec_verify_ct", "finish_reason", "message", "detail"),
)
jsons = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(jsons, max_size=4), st.sampled_from(["200 OK", "400 Bad Request", "503 X"]))
def test_json_of_any_shape_never_raises(documents, status):
    data = head(status) + b"".join(event(json.dumps(one)) for one in documents)
    answer, error, _ = read([data])
    assert error is None or (isinstance(error[0], str) and isinstance(error[1], str))
    assert len(answer.stamps) == len(answer.tokens)


@given(st.binary(max_size=60), st.integers(0, 2000), cuts)
def test_garbage_anywhere_in_a_good_answer_never_raises(garbage, at, cuts):
    data = chunked([said("a", 1), said("b", 2, reason="stop"), DONE])
    at %= len(data)
    read(split(data[:at] + garbage + data[at:], cuts))


@given(st.integers(0, 2000), cuts)
def test_an_answer_cut_anywhere_is_an_error_unless_it_was_complete(at, cuts):
    data = chunked([said("a", 1), said("b", 2), said("", reason="stop"), DONE])
    at %= len(data)
    answer, error, _ = read(split(data[:at], cuts), ("cut", "closed"))
    assert (error is None) == answer.done
    if error:
        assert error == ("cut", "closed")


# --- what a real SGLang sent


def sglang(name):
    """The SSE of a file as it travelled: each event in a chunk of its own."""
    events = [one + b"\n\n" for one in (SGLANG / name).read_bytes().split(b"\n\n")[:-1]]
    return [CHUNKED, *(chunk(one) for one in events), END]


def test_sglang_several_tokens_in_a_chunk_are_32_by_usage_and_5_by_chunks():
    answer, error, _ = read(sglang("ngram-completion.txt"))
    assert error is None
    assert len(answer.stamps) == 5
    assert answer.usage["completion_tokens"] == 32
    assert answer.finish_reason == "length"
    assert set(answer.tokens) == {None}


def test_sglang_continuous_usage_counts_every_chunk():
    answer, error, _ = read(sglang("ngram-continuous_usage.txt"))
    assert error is None
    assert answer.tokens == [1, 9, 17, 25, 33, 41, 49, 57, 65, 73, 81, 89, 97, 105, 113, 121, 128]
    assert answer.usage["completion_tokens"] == 128
    assert answer.response_id == "b6fdbf280c4a4069b776e0b226c05705"


def test_sglang_chat_begins_with_a_role_that_is_no_token():
    pieces = sglang("ngram-chat.txt")
    answer, error, _ = read(pieces)
    assert error is None
    assert answer.stamps[0] == 2  # head, role, then the first token
    assert (answer.usage["prompt_tokens"], answer.usage["completion_tokens"]) == (379, 48)
    assert answer.finish_reason == "length"
    assert not answer.reasoning


def test_sglang_without_usage():
    answer, error, _ = read(sglang("ngram-no_usage.txt"))
    assert error is None
    assert answer.usage is None
    assert answer.done


def test_sglang_refuses_a_prompt_that_is_too_long():
    body = (SGLANG / "ngram-error_too_long.txt").read_bytes()
    _, error, ended = read([head("400 Bad Request", "application/json", Content_Length=str(len(body))), body])
    assert error == (
        "http_error",
        "HTTP 400: The input (300000 tokens) is longer than the model's context length (32768 tokens).",
    )
    assert ended == 1


@given(cuts, st.sampled_from(sorted(file.name for file in SGLANG.glob("ngram-c*.txt"))))
def test_sglang_in_any_pieces(cuts, name):
    whole = b"".join(sglang(name))
    answer, error, _ = read(split(whole, cuts))
    expected, _, _ = read([whole])
    assert error is None
    assert (answer.text, answer.tokens, answer.usage) == (expected.text, expected.tokens, expected.usage)


# --- addresses


@pytest.mark.parametrize(
    ("url", "api", "host", "port", "path"),
    [
        ("http://h:30000", None, "h", 30000, "/v1/completions"),
        ("h:30000", "chat", "h", 30000, "/v1/chat/completions"),
        ("http://h", None, "h", 80, "/v1/completions"),
        ("https://h/", None, "h", 443, "/v1/completions"),
        ("http://h:1/v1/", "chat", "h", 1, "/v1/chat/completions"),
        ("http://h:1/proxy/openai/v3", None, "h", 1, "/proxy/openai/v3/completions"),
        ("http://h:1/proxy", None, "h", 1, "/proxy/v1/completions"),
        ("http://h:1/v1/chat/completions", None, "h", 1, "/v1/chat/completions"),
        ("http://[::1]:8080", None, "::1", 8080, "/v1/completions"),
    ],
)
def test_addresses(url, api, host, port, path):
    _, got_host, got_port, got_path, base, _ = endpoint(url, api)
    assert (got_host, got_port, got_path) == (host, port, path)
    assert path.startswith(base)


def test_the_role_of_an_answer_is_read_from_any_delta():
    answer, error, _ = read([head() + delta({"role": "assistant", "content": "a"}, reason="stop") + DONE])
    assert (error, answer.text) == (None, ["a"])
