"""The load generator against a server that does exactly one wrong (or odd) thing at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from sse_server import (
    CHUNKED,
    CLOSE,
    DONE,
    END,
    HANG,
    RESET,
    chunk,
    delta,
    event,
    head,
    plain,
    said,
    serving,
    stream,
    total,
    usage,
)

from gpuctl.agent.load import BadJob, Job, Load, reach
from gpuctl.load import LoadError, NoServer, UsageError, load
from gpuctl.transport import Local
from tests.patience import ends_within
from tests.pythons import python

AGENT = Path(__file__).parent.parent / "gpuctl/agent/load.py"


def run(answer, *, rows=1, **job):
    """Sends one request (or the job's) to a server that answers so; returns the row (or all), and the summary."""
    with serving(answer) as server:
        result = load(
            Local(),
            {"url": server.url, "concurrency": 1, "max_tokens": 64, "requests": [{"prompt": "Hi"}] * rows}
            | {"text": True, **job},
            python=sys.executable,
            timeout=30,
        )
    return (result.requests[0] if rows == 1 else result.requests), result.summary


def answering(*events):
    return lambda request: stream(*events)


def test_a_plain_stream_gives_stamps_tokens_and_usage():
    def answer(request):
        yield from (CHUNKED, 0.05, chunk(said("a", 1)), 0.05, chunk(said("b", 2)), 0.05, chunk(said("c", 3)))
        yield from (chunk(said("", 3, reason="length")), chunk(total(3)), chunk(DONE), END)

    row, summary = run(answer)
    assert row["error"] is None
    assert (row["response_id"], row["model"], row["status"], row["text"]) == ("cmpl-1", "double", 200, "abc")
    assert row["tokens"] == [1, 2, 3]
    assert (row["usage"], row["finish_reason"]) == (usage(3), "length")
    gaps = [b - a for a, b in zip([row["t_request"], *row["t_chunks"]], row["t_chunks"], strict=False)]
    assert all(0.045 < gap < 0.2 for gap in gaps), gaps
    assert (summary["requests"], summary["failed"], summary["version"]) == (1, 0, "1")
    assert summary["stamps"] == "kernel"


def test_what_is_asked_is_what_the_job_says():
    seen = []

    def answer(request):
        seen.append(request)
        return stream(said("a", 1, reason="stop"), DONE)

    run(answer, api_key="s3cret", body={"temperature": 0, "ignore_eos": True, "stream_options": None})
    assert seen[0].path == "/v1/completions"
    assert seen[0].headers["authorization"] == "Bearer s3cret"
    assert seen[0].body == {
        "model": "double",
        "prompt": "Hi",
        "stream": True,
        "max_tokens": 64,
        "temperature": 0,
        "ignore_eos": True,
    }


def test_role_only_first_delta_is_not_the_first_token():
    def answer(request):
        yield from (CHUNKED, chunk(delta({"role": "assistant", "content": ""})), 0.1)
        yield from (chunk(delta({"content": "x"})), chunk(delta({}, reason="stop")), chunk(DONE), END)

    row, _ = run(answer, api="chat")
    assert row["t_chunks"][0] - row["t_request"] > 0.09
    assert len(row["t_chunks"]) == 1


def test_empty_deltas_and_missing_choices_are_no_chunks():
    row, _ = run(answering(said(""), said("a"), said(""), event({"choices": []}), event({"id": "x"}), total(1), DONE))
    assert row["error"] is None
    assert len(row["t_chunks"]) == 1
    assert row["text"] == "a"


@pytest.mark.parametrize("key", ["content", "reasoning_content", "reasoning"])
def test_thinking_counts_as_content(key):
    row, _ = run(
        answering(delta({"role": "assistant"}), delta({key: "hm"}), delta({}, reason="stop"), DONE), api="chat"
    )
    assert len(row["t_chunks"]) == 1
    assert row["text"] + row["reasoning"] == "hm"


def test_a_tool_call_counts_as_content():
    call = {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}
    row, _ = run(answering(delta(call), delta({}, reason="tool_calls"), DONE), api="chat")
    assert (row["error"], len(row["t_chunks"])) == (None, 1)


def test_several_tokens_in_a_chunk_are_counted_by_usage():
    row, _ = run(answering(said("a", 1), said("bcde", 5), said("fgh", 8, reason="length"), total(8), DONE))
    assert row["tokens"] == [1, 5, 8]


def test_without_running_counts_there_are_no_token_stamps():
    row, _ = run(answering(said("a"), said("b", reason="length"), total(9), DONE))
    assert row["tokens"] is None
    assert row["usage"]["completion_tokens"] == 9


def test_line_separators_inside_json_do_not_split_it():
    text = "a\u2028b\u2029c\u0085d\x0be"
    row, _ = run(answering(said(text, 1), said("", reason="stop"), DONE))
    assert (row["error"], row["text"]) == (None, text)


def test_comments_and_other_fields_are_skipped():
    row, _ = run(
        answering(b": ping\n\n", b"event: x\nid: 3\nretry: 9\n" + said("a", 1), b":\n\n", said("", reason="stop"), DONE)
    )
    assert (row["error"], row["text"]) == (None, "a")


def test_two_events_in_one_segment():
    row, _ = run(
        lambda request: [CHUNKED + chunk(said("a", 1) + said("b", 2)) + chunk(said("", 2, reason="stop") + DONE) + END]
    )
    assert row["tokens"] == [1, 2]
    assert row["t_chunks"][0] == row["t_chunks"][1]


def test_an_event_over_two_segments_is_stamped_when_it_is_whole():
    whole = chunk(said("ü", 1, reason="stop"))
    cuts = (1, 2, 10, whole.index("ü".encode()) + 1, len(whole) - 5, len(whole) - 3, len(whole) - 1)
    rows, _ = run(
        in_turn(*([CHUNKED, whole[:cut], 0.05, whole[cut:], chunk(DONE), END] for cut in cuts)), rows=len(cuts)
    )
    for cut, row in zip(cuts, rows, strict=True):
        assert (row["error"], row["text"]) == (None, "ü"), cut
        late = row["t_chunks"][0] - row["t_request"]
        assert (late > 0.045) == (cut < len(whole) - 3), cut  # the line's end is the fourth byte from the end


def test_every_byte_its_own_segment():
    data = b"".join(step for step in stream(said("aü", 1), said("", 2, reason="stop"), total(2), DONE))
    row, _ = run(lambda request: [data[i : i + 1] for i in range(len(data))])
    assert (row["error"], row["text"], row["usage"]["completion_tokens"]) == (None, "aü", 2)


def test_an_early_end_is_told():
    row, _ = run(answering(said("a", 1), said("", 1, reason="stop"), total(1), DONE), max_tokens=64)
    assert (row["finish_reason"], row["usage"]["completion_tokens"], row["max_tokens"]) == ("stop", 1, 64)


def in_turn(*answers):
    """Each request gets the next answer."""
    left = list(answers)
    return lambda request: left.pop(0)


def test_an_http_error_keeps_the_servers_words():
    told = [
        ("400 Bad Request", b'{"object":"error","message":"too long by 3","code":400}', "HTTP 400: too long by 3"),
        ("404 Not Found", b'{"error":{"message":"no such model","type":"x"}}', "HTTP 404: no such model"),
        ("429 Too Many Requests", b'{"error":"busy"}', "HTTP 429: busy"),
        ("422 X", b'{"detail":[{"loc":["body"],"msg":"bad"}]}', 'HTTP 422: [{"loc": ["body"], "msg": "bad"}]'),
        ("500 Internal Server Error", b"upstream died\n", "HTTP 500: upstream died"),
        ("503 Service Unavailable", b"", "HTTP 503"),
    ]
    rows, summary = run(in_turn(*(plain(status, body) for status, body, _ in told)), rows=len(told))
    for row, (status, _, words) in zip(rows, told, strict=True):
        assert row["error"] == {"kind": "http_error", "message": words}
        assert row["status"] == int(status[:3])
    assert summary["failed"] == len(told)


def test_a_redirect_says_where_to():
    row, _ = run(lambda request: plain("307 Temporary Redirect", b"", Location="http://other:1/v1"))
    assert row["error"]["message"] == "HTTP 307 to http://other:1/v1: give that address instead"


def test_cut_in_the_middle_of_the_stream():
    for way in (CLOSE, RESET):
        row, _ = run(lambda request, way=way: [CHUNKED, chunk(said("a", 1)), 0.05, way])
        assert row["error"]["kind"] == "cut", way
        assert len(row["t_chunks"]) == 1


def test_cut_in_the_middle_of_a_body_that_ends_with_the_connection():
    row, _ = run(lambda request: [head(Connection="close"), said("a", 1), CLOSE])
    assert row["error"]["kind"] == "cut"


def test_cut_before_any_answer():
    row, _ = run(lambda request: [CLOSE])
    assert (row["error"]["kind"], row["status"]) == ("cut", None)


def test_a_stream_that_ends_well_formed_but_early_is_cut():
    row, _ = run(answering(said("a", 1), said("b", 2)))
    assert row["error"] == {"kind": "cut", "message": "the stream ended after 2 events, without a finish_reason"}


def test_a_lost_end_after_done_is_forgiven():
    row, _ = run(lambda request: [CHUNKED, chunk(said("a", 1, reason="stop")), chunk(DONE), CLOSE])
    assert row["error"] is None


def test_done_without_an_end_is_forgiven():
    row, _ = run(lambda request: [CHUNKED, chunk(said("a", 1, reason="stop")), chunk(DONE), HANG], stall_s=0.2)
    assert row["error"] is None


def test_a_stall_ends_in_time():
    with ends_within(5):
        row, _ = run(lambda request: [CHUNKED, chunk(said("a", 1)), HANG], stall_s=0.3)
    assert row["error"] == {"kind": "stalled", "message": "nothing came for 0.3 s"}


def test_comments_do_not_hide_a_stall():
    def answer(request):
        yield from (CHUNKED, chunk(said("a", 1)))
        for _ in range(100):
            yield from (0.05, chunk(b": keep-alive\n\n"))

    row, _ = run(answer, stall_s=0.3)
    assert row["error"]["kind"] == "stalled"


def test_waiting_for_the_first_token_is_no_stall():
    row, _ = run(
        lambda request: [CHUNKED, chunk(b": ping\n\n"), 0.5, chunk(said("a", 1, reason="stop")), chunk(DONE), END],
        stall_s=0.2,
    )
    assert row["error"] is None


def test_a_request_that_takes_too_long_is_given_up():
    def answer(request):
        yield CHUNKED
        for i in range(1000):
            yield from (chunk(said("a", i + 1)), 0.02)

    row, _ = run(answer, timeout_s=0.4)
    assert row["error"]["kind"] == "timeout"


def test_garbage_instead_of_http():
    garbage = [b"\x00\xff\xfe garbage \r\n\r\n", b"HTTP/1.1 banana\r\n\r\n", b"SSH-2.0-x\r\n", b"HTTP/1.1 20\r\n\r\n"]
    rows, _ = run(in_turn(*([data, CLOSE] for data in garbage)), rows=len(garbage))
    assert [row["error"]["kind"] for row in rows] == ["bad_response"] * len(garbage)


def test_garbage_instead_of_a_chunk():
    garbage = [b"zz\r\nxx\r\n", b"-5\r\n", b"3\r\nabcdef\r\n\r\n", b"0x10\r\n"]
    rows, _ = run(in_turn(*([CHUNKED, chunk(said("a", 1)), data, CLOSE] for data in garbage)), rows=len(garbage))
    assert [row["error"]["kind"] for row in rows] == ["bad_response"] * len(garbage)


def test_garbage_instead_of_an_event():
    garbage = ['{"choices": [', "\x00\x01", "[1, 2]", '"text"', "[" * 100_000]
    answers = [stream(said("a", 1), event(data), said("", reason="stop"), DONE) for data in garbage]
    rows, _ = run(in_turn(*answers), rows=len(garbage))
    for row in rows:
        assert row["error"]["kind"] == "bad_response"
        assert "event 2" in row["error"]["message"]


def test_invalid_utf8_in_an_event():
    row, _ = run(answering(said("a", 1), b'data: {"choices": [{"text": "\xff"}]}\n\n', said("", reason="stop"), DONE))
    assert row["error"]["kind"] == "bad_response"


def test_numbers_that_json_does_not_have():
    row, _ = run(
        answering(b'data: {"choices":[{"text":"a","finish_reason":"stop"}],"timings":{"x":NaN,"y":1e999}}\n\n', DONE)
    )
    assert row["error"] is None
    assert row["timings"] == {"x": None, "y": None}


def test_lines_of_100_kb():
    text = "x" * 100_000
    row, _ = run(answering(said(text, 1), said(text, 2), said("", 2, reason="stop"), DONE))
    assert (row["error"], len(row["text"])) == (None, 200_000)


def test_an_event_over_several_data_lines():
    row, _ = run(answering(b'data: {"choices": [{"text": "a",\ndata: "finish_reason": "stop"}]}\n\n', DONE))
    assert (row["error"], row["text"]) == (None, "a")


def test_carriage_returns_before_newlines():
    lines = said("a", 1, reason="stop").replace(b"\n", b"\r\n")
    row, _ = run(answering(lines, b"data: [DONE]\r\n\r\n"))
    assert (row["error"], row["text"]) == (None, "a")


def test_usage_missing_negative_or_absurd_is_kept_as_it_came():
    absurd = [-5, 10**30, "12", 3.5, None, True]
    answers = [stream(said("a", reason="stop"), event({"choices": [], "usage": usage(sent)}), DONE) for sent in absurd]
    rows, _ = run(in_turn(*answers, stream(said("a", reason="stop"), DONE)), rows=len(absurd) + 1)
    assert [row["error"] for row in rows] == [None] * len(rows)
    assert [row["usage"] and row["usage"]["completion_tokens"] for row in rows] == [*absurd, None]
    assert {row["tokens"] for row in rows} == {None}


def test_an_error_inside_a_stream_that_began_well():
    told = [
        ({"error": {"message": "out of memory", "code": 500}}, "out of memory"),
        ({"object": "error", "message": "aborted"}, "aborted"),
        ({"error": "gone"}, "gone"),
    ]
    rows, _ = run(in_turn(*(stream(said("a", 1), event(document), DONE) for document, _ in told)), rows=len(told))
    assert [row["error"] for row in rows] == [{"kind": "server_error", "message": words} for _, words in told]


def test_a_page_instead_of_a_stream():
    row, _ = run(lambda request: plain("200 OK", b"<html>Please log in</html>", "text/html"))
    assert row["error"] == {
        "kind": "bad_response",
        "message": "no event stream but text/html: <html>Please log in</html>",
    }


def test_a_stream_without_anything_in_it():
    row, _ = run(lambda request: plain("200 OK", b"", "text/event-stream"))
    assert row["error"] == {"kind": "bad_response", "message": "an event stream without an event"}


def test_an_answer_in_one_piece_has_no_time_to_first_token():
    body = json.dumps({"choices": [{"text": "a"}], "usage": usage(1)}).encode()
    row, _ = run(lambda request: plain("200 OK", body))
    assert row["error"] == {
        "kind": "not_streaming",
        "message": "the server sent its answer in one piece (application/json)",
    }


def test_a_stream_under_another_content_type_is_read():
    row, _ = run(lambda request: plain("200 OK", said("a", 1, reason="stop") + DONE, "text/plain"))
    assert (row["error"], row["text"]) == (None, "a")


def test_an_answer_without_content_is_a_failure():
    row, _ = run(answering(said("", reason="stop"), total(0), DONE))
    assert row["error"]["kind"] == "empty"


def test_bodies_with_a_length_and_bodies_that_end_with_the_connection():
    body = said("a", 1) + said("b", 2, reason="stop") + DONE
    row, _ = run(lambda request: [head(Content_Length=str(len(body))) + body[:9], 0.02, body[9:]])
    assert (row["error"], row["text"]) == (None, "ab")
    row, _ = run(lambda request: [head() + body[:9], 0.02, body[9:], CLOSE])
    assert (row["error"], row["text"]) == (None, "ab")


def test_trailers_extensions_and_an_interim_answer():
    row, _ = run(
        lambda request: [
            b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED,
            chunk(said("a", 1, reason="stop")).replace(b"\r\n", b";x=y\r\n", 1),
            chunk(DONE) + b"0\r\nX-Trailer: 1\r\n\r\n",
        ]
    )
    assert (row["error"], row["text"]) == (None, "a")


def test_timings_of_llama_cpp_are_kept_and_count_tokens():
    def one(n, reason=None):
        return event({"choices": [{"text": "a", "finish_reason": reason}], "timings": {"predicted_n": n, "draft_n": 4}})

    row, _ = run(answering(one(1), one(4), one(6, "length"), DONE))
    assert row["tokens"] == [1, 4, 6]
    assert row["timings"] == {"predicted_n": 6, "draft_n": 4}


# --- many requests


def test_a_connection_is_kept_and_a_closed_one_is_replaced():
    rows, _ = run(answering(said("a", 1, reason="stop"), DONE), rows=4)
    assert [row["error"] for row in rows] == [None] * 4
    connections = []

    def answer(request):
        connections.append(request.connection)
        return [head(Connection="close"), said("a", 1, reason="stop"), DONE, CLOSE]

    rows, _ = run(answer, rows=4)
    assert [row["error"] for row in rows] == [None] * 4
    assert len(set(connections)) == 4


def test_a_kept_connection_that_the_server_closes_is_not_a_failure():
    # It says nothing of closing, and closes: the next request meets a dead connection.
    rows, _ = run(lambda request: [*stream(said("a", 1, reason="stop"), DONE), CLOSE], rows=6)
    assert [row["error"] for row in rows] == [None] * 6


def test_closed_loop_keeps_so_many_in_flight_and_no_more():
    now, most = [0], [0]

    def answer(request):
        now[0] += 1
        most[0] = max(most[0], now[0])
        yield from (CHUNKED, 0.03, chunk(said("a", 1, reason="stop")))
        now[0] -= 1
        yield from (chunk(DONE), END)

    rows, summary = run(answer, rows=20, concurrency=5)
    assert most[0] == 5
    assert summary["peak_in_flight"] == 5
    assert summary["load_kept"] > 0.8
    assert sorted(int(row["id"]) for row in rows) == list(range(20))


@pytest.mark.parametrize("arrival", ["constant", "poisson"])
def test_open_loop_starts_at_the_rate_whatever_the_server_does(arrival):
    def answer(request):
        yield from (CHUNKED, 1.0, chunk(said("a", 1, reason="stop")), chunk(DONE), END)

    rows, summary = run(answer, rows=40, concurrency=None, rate=100, arrival=arrival, seed=1)
    due = sorted(row["t_scheduled"] for row in rows)
    gaps = [b - a for a, b in pairwise(due)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.01, rel=0.4 if arrival == "poisson" else 0.001)
    if arrival == "constant":
        assert max(gaps) - min(gaps) < 1e-5
    else:
        assert max(gaps) > 0.02
    # No request waits for an answer, which takes a second.
    late = [row["t_request"] - row["t_scheduled"] for row in rows]
    assert min(late) >= 0
    assert max(late) < 1.0
    # What the summary says of it is what the rows say.
    assert summary["start_delay_ms"]["max"] == pytest.approx(max(late) * 1000, abs=1.0)
    last = max(rows, key=lambda row: row["t_request"])
    took = last["t_request"] - summary["t_start"]
    planned = max(due) - summary["t_start"]
    assert summary["load_kept"] == pytest.approx(min(1.0, planned / took), abs=0.01)


def test_the_same_seed_gives_the_same_arrivals():
    def planned():
        rows, _ = run(
            answering(said("a", 1, reason="stop"), DONE), rows=10, concurrency=None, rate=500, arrival="poisson", seed=7
        )
        times = sorted(row["t_scheduled"] for row in rows)
        return [t - times[0] for t in times]

    assert planned() == pytest.approx(planned(), abs=2e-6)


def test_an_open_loop_that_is_held_back_says_so():
    def answer(request):
        yield from (CHUNKED, 0.05, chunk(said("a", 1, reason="stop")), chunk(DONE), END)

    _, summary = run(answer, rows=10, concurrency=1, rate=1000)
    assert summary["load_kept"] < 0.2
    assert summary["start_delay_ms"]["max"] > 300


def test_duration_goes_through_the_requests_again():
    def answer(request):
        yield from (CHUNKED, 0.02, chunk(said("a", 1, reason="stop")), chunk(DONE), END)

    with serving(answer) as server:
        job = {"url": server.url, "concurrency": 2, "duration_s": 0.5, "requests": [{"id": "p", "prompt": "Hi"}]}
        result = load(Local(), job, python=sys.executable)
    assert 10 < len(result.requests) < 60
    assert {row["prompt"] for row in result.requests} == {"p"}
    assert len({row["id"] for row in result.requests}) == len(result.requests)


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_session_takes_its_answers_along(api):
    bodies = []

    def answer(request):
        bodies.append(request.body)
        text = f"answer{len(bodies)}"
        one = delta({"content": text}, count=3, reason="stop") if api == "chat" else said(text, 3, reason="stop")
        return stream(one, DONE)

    rows, summary = run(
        answer, rows=3, api=api, requests=[{"id": "s", "system": "be brief", "turns": ["one", "two", "three"]}]
    )
    assert [(row["prompt"], row["turn"]) for row in rows] == [("s", 0), ("s", 1), ("s", 2)]
    if api == "chat":
        assert bodies[2]["messages"] == [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "answer1"},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "answer2"},
            {"role": "user", "content": "three"},
        ]
    else:
        assert bodies[2]["prompt"] == "be briefoneanswer1twoanswer2three"
    assert summary["requests"] == 3


def test_a_session_keeps_up_its_load_through_all_its_turns():
    """Turn after turn there is one request in flight, though the session was begun only once."""

    def answer(request):
        yield from (CHUNKED, 0.1, chunk(delta({"content": "a"}, reason="stop")), chunk(DONE), END)

    _, summary = run(answer, rows=4, api="chat", requests=[{"id": "s", "turns": ["one", "two", "three", "four"]}])
    assert summary["load_kept"] > 0.5


def test_a_session_whose_turn_fails_counts_the_turns_never_sent():
    def answer(request):
        if len(request.body["messages"]) > 1:
            return plain("500 X", b'{"error": "no"}')
        return stream(delta({"content": "a"}, reason="stop"), DONE)

    rows, summary = run(answer, rows=4, api="chat", requests=[{"id": "s", "turns": ["one", "two", "three", "four"]}])
    assert [row["error"] and row["error"]["kind"] for row in rows] == [None, "http_error", "not_sent", "not_sent"]
    assert (summary["requests"], summary["failed"]) == (4, 3)


def test_a_prompt_larger_than_the_sockets_buffer():
    prompt = "word " * 2_000_000

    def answer(request):
        assert request.body["prompt"] == prompt
        return stream(said("a", 1, reason="stop"), DONE)

    row, _ = run(answer, requests=[{"prompt": prompt}])
    assert row["error"] is None


def test_a_server_that_refuses_a_large_prompt_before_it_read_it():
    with serving(lambda request: []) as server:
        pass
    import socket
    import threading

    listener = socket.create_server(("127.0.0.1", server.port))

    def refuse():
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            if sock.recv(1000).startswith(b"POST"):
                sock.sendall(plain("413 Payload Too Large", b'{"error": "4 MB at most"}')[0])
                sock.shutdown(socket.SHUT_WR)
                time.sleep(0.2)
            sock.close()

    threading.Thread(target=refuse, daemon=True).start()
    job = {"url": server.url, "model": "m", "concurrency": 1, "requests": [{"prompt": "word " * 2_000_000}]}
    result = load(Local(), job, python=sys.executable)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    assert result.requests[0]["error"]["message"] == "HTTP 413: 4 MB at most"


def test_a_server_that_dies_in_the_middle_fails_what_is_left():
    count = [0]

    def answer(request):
        count[0] += 1
        return [RESET] if count[0] > 2 else stream(said("a", 1, reason="stop"), DONE)

    rows, _ = run(answer, rows=5)
    assert [bool(row["error"]) for row in rows] == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("refused", "level"),
    [((), "continuous"), (("continuous_usage_stats",), "final"), (("continuous_usage_stats", "include_usage"), "none")],
)
def test_what_the_server_takes_of_usage_is_found_out(refused, level):
    def answer(request):
        options = request.body.get("stream_options") or {}
        for name in refused:
            if name in options:
                return plain("400 Bad Request", json.dumps({"error": f"unknown field stream_options.{name}"}).encode())
        return stream(said("a", 1, reason="stop"), DONE)

    row, summary = run(answer, usage="auto")
    assert (row["error"], summary["usage"]) == (None, level)


# --- the job, and the end of it


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"url": "gopher://x"}, "neither http nor https"),
        ({"url": "http://"}, "is not like http://host:port"),
        ({"url": "http://h:99999"}, "no port 99999"),
        ({"url": 3}, "not a string"),
        ({"concurrency": 0}, "concurrency: 0 is less than 1"),
        ({"concurrency": "4"}, "'4' is not a whole number"),
        ({"concurrency": None}, "neither concurrency nor rate"),
        ({"rate": -1}, "rate: -1 is less"),
        ({"requests": []}, "at least one request"),
        ({"requests": [{}]}, "exactly one of prompt, messages and turns"),
        ({"requests": [{"messages": [{}]}]}, "messages need the chat api"),
        ({"requests": [{"turns": []}]}, "turns is not a list"),
        ({"api": "talk"}, "neither completions nor chat"),
        ({"concurency": 3}, "unknown key: concurency"),
        ({"api_key": "a\r\nX-Evil: 1"}, "a character that no header may have"),
        ({"usage": "all"}, "none of continuous"),
        ({"arrival": "bursty"}, "neither constant nor poisson"),
    ],
)
def test_a_wrong_job_is_one_clear_line(change, words):
    with pytest.raises(BadJob) as caught:
        Job({"url": "127.0.0.1:1", "concurrency": 1, "requests": [{"prompt": "x"}]} | change)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_job_ends_with_its_line_and_without_a_connection():
    with pytest.raises(UsageError, match=r"^the job of the load generator: concurrency: 0 is less than 1$"):
        load(Local(), {"url": "127.0.0.1:1", "concurrency": 0, "requests": [{"prompt": "x"}]}, python=sys.executable)
    done = subprocess.run([sys.executable, AGENT], input=b"{not json", capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"the job of the load generator is not JSON")


def test_nobody_listens():
    with pytest.raises(NoServer, match=r"^127\.0\.0\.1:1 refused the connection: nothing listens there$"):
        load(Local(), {"url": "127.0.0.1:1", "concurrency": 1, "requests": [{"prompt": "x"}]}, python=sys.executable)


def test_no_python_there():
    with pytest.raises(LoadError, match=r"needs Python 3\.9 or newer"):
        load(Local(), {"url": "127.0.0.1:1"}, python="no-such-python")


def start(server, **job):
    document = {"url": server.url, "concurrency": 1, "requests": [{"prompt": "x"}] * 3, **job}
    process = subprocess.Popen([sys.executable, AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdin.write(json.dumps(document).encode())
    process.stdin.close()
    deadline = time.monotonic() + 10
    while not server.requests:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def test_it_ends_when_nobody_reads_it():
    with serving(lambda request: [CHUNKED, chunk(said("a", 1)), HANG]) as server:
        process = start(server)
        process.stdout.close()
        assert process.wait(5) == 4


def test_told_to_stop_it_says_what_it_has():
    with serving(lambda request: [CHUNKED, chunk(said("a", 1)), HANG]) as server:
        process = start(server)
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        lines = [json.loads(line) for line in process.stdout]
        assert process.wait(5) == 4
        process.stdout.close()
    assert lines[0]["error"] == {"kind": "interrupted", "message": "stopped by SIGTERM"}
    assert lines[-1]["interrupted"] == "SIGTERM"


def test_a_reader_that_sleeps_loses_nothing():
    text = "x" * 5000
    with serving(answering(said(text, 1, reason="stop"), DONE)) as server:
        process = start(server, requests=[{"prompt": "x"}] * 100, text=True)
        time.sleep(0.5)
        lines = process.stdout.read().splitlines()
        assert process.wait(5) == 0
        process.stdout.close()
    assert len(lines) == 101
    assert all(json.loads(line) for line in lines)


def test_starts_are_told_when_asked():
    seen = []
    with serving(answering(said("a", 1, reason="stop"), DONE)) as server:
        job = {"url": server.url, "concurrency": 1, "requests": [{"id": "p", "prompt": "x"}]}
        load(
            Local(),
            job,
            on_start=lambda row: seen.append(("start", row["prompt"])),
            on_request=lambda row: seen.append(("end", row["prompt"])),
            python=sys.executable,
        )
    assert seen == [("start", "p"), ("end", "p")]


def test_an_exception_of_the_watcher_stops_the_generator():
    class Enough(Exception):
        pass

    def enough(row):
        raise Enough

    with serving(answering(said("a", 1, reason="stop"), DONE)) as server:
        job = {"url": server.url, "concurrency": 1, "duration_s": 60, "requests": [{"prompt": "x"}]}
        with pytest.raises(Enough):
            load(Local(), job, on_request=enough, python=sys.executable)


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_a_wall_clock_that_is_set_while_it_runs_does_not_move_the_stamps(hours, monkeypatch, capfd):
    # The kernel stamps by the wall clock. Here its offset is an hour off, as after a jump.
    def calibrate(self):
        self.offset = time.time_ns() - time.monotonic_ns() + hours * 3600 * 10**9

    monkeypatch.setattr(Load, "_calibrate", calibrate)
    with serving(lambda request: [CHUNKED, 0.05, chunk(said("a", 1, reason="stop")), chunk(DONE), END]) as server:
        job = Job({"url": server.url, "concurrency": 2, "requests": [{"prompt": "x"}] * 4})
        generator = Load(job, reach(job))
        summary = generator.run()
        generator.drain()
        generator.close()
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert len(rows) == 4
    assert all(0.045 < row["t_chunks"][0] - row["t_request"] < 2 for row in rows)
    assert summary["stamps"] == ("recv" if hours else "kernel")


def test_the_key_is_not_in_the_arguments():
    with serving(lambda request: [HANG]) as server:
        process = start(server, api_key="s3cret-key")
        argv = Path(f"/proc/{process.pid}/cmdline").read_bytes() + Path(f"/proc/{process.pid}/environ").read_bytes()
        process.kill()
        process.wait()
        process.stdout.close()
    assert b"s3cret" not in argv


@pytest.mark.skipif(python("3.9") is None, reason="no Python 3.9 here")
def test_it_runs_on_python_3_9():
    with serving(answering(said("a", 1, reason="stop"), DONE)) as server:
        job = {"url": server.url, "concurrency": 1, "requests": [{"prompt": "x"}]}
        result = load(Local(), job, python=python("3.9"))
    assert result.summary["python"].startswith("3.9.")
    assert result.requests[0]["error"] is None


@pytest.mark.skipif(python("3.8") is None, reason="no Python 3.8 here")
def test_an_older_python_says_what_is_needed():
    with pytest.raises(LoadError, match=r"needs Python 3\.9 or newer, and .* is 3\.8"):
        load(Local(), {"url": "127.0.0.1:1"}, python=python("3.8"))


def test_it_imports_nothing_but_the_standard_library():
    import ast

    tree = ast.parse(AGENT.read_text(), feature_version=(3, 9))
    names = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    names |= {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names <= sys.stdlib_module_names
    assert os.access(AGENT, os.R_OK)
