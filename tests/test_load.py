"""`gpuctl load URL`: a document and a table, and clear words when nothing can be measured."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import threading

import pytest
from sse_server import DONE, plain, said, serving, stream, total

from gpuctl.load import NoServer, UsageError, load, measure, prompts, table
from gpuctl.metrics import METRICS
from gpuctl.transport import Local


def story(request):
    return stream(said("once", 1), said(" upon", 2), said(" a time", 4, reason="length"), total(4), DONE)


def ask(url, **options):
    return measure(Local(), url, python=sys.executable, **options)


def test_a_server_that_answers(tmp_path):
    raw, seen = tmp_path / "raw.jsonl", []
    with serving(story) as server:
        document = ask(server.url, concurrency=2, requests=6, max_tokens=4, raw=raw, on_request=seen.append)
    assert (document["schema"], document["verdict"]) == ("gpuctl.load/1", "ok")
    assert (document["requests"], document["failed"], document["model"]) == (6, 0, "double")
    assert document["metrics"]["completion_tokens"] == 4
    assert set(document["metrics"]) <= set(METRICS)
    assert json.loads(json.dumps(document)) == document
    lines = [json.loads(line) for line in raw.read_text().splitlines()]
    assert lines == seen
    assert {"response_id", "t_request", "t_chunks", "tokens", "usage", "finish_reason", "error"} <= set(lines[0])
    assert len({request.body["prompt"] for request in server.requests[1:]}) == 6  # the first asks what usage it takes


def test_an_earlier_raw_file_stays_until_there_is_something_new(tmp_path):
    raw = tmp_path / "raw.jsonl"
    raw.write_text("of before\n")
    with pytest.raises(NoServer):
        ask("http://127.0.0.1:1", raw=raw)
    assert raw.read_text() == "of before\n"
    with serving(story) as server:
        ask(server.url, concurrency=1, requests=2, max_tokens=4, raw=raw)
    assert len(raw.read_text().splitlines()) == 2


def test_failures_are_a_verdict_with_the_servers_words():
    with serving(lambda request: plain("404 Not Found", b'{"error": {"message": "no such model"}}')) as server:
        document = ask(server.url, concurrency=2, requests=4, model="x")
    assert (document["verdict"], document["failed"]) == ("failed", 4)
    assert document["failures"] == [{"kind": "http_error", "message": "HTTP 404: no such model", "requests": 4}]
    assert "failed: 4 x http_error: HTTP 404: no such model" in table(document)


@pytest.mark.parametrize(
    ("url", "options", "error", "words"),
    [
        ("http//h:1", {}, UsageError, "is not like http://host:port"),
        ("ws://h:1", {}, UsageError, "neither http nor https"),
        ("http://h:1", {"requests": 0}, UsageError, "at least one"),
        ("http://127.0.0.1:1", {"concurrency": 0}, UsageError, "concurrency: 0 is less than 1"),
        ("http://127.0.0.1:1", {"max_tokens": 0}, UsageError, "max_tokens: 0 is less than 1"),
        ("http://127.0.0.1:1/v1/completions", {"chat": True}, UsageError, "not the address of the chat endpoint"),
        ("http://127.0.0.1:1", {}, NoServer, "nothing listens there"),
        ("http://no.such.host.invalid:1", {}, NoServer, "cannot find no.such.host.invalid"),
    ],
)
def test_bad_addresses_and_numbers_are_one_line(url, options, error, words):
    with pytest.raises(error) as caught:
        ask(url, **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_something_that_is_no_http_server():
    listener = socket.create_server(("127.0.0.1", 0))

    def greet():
        for _ in range(2):
            sock, _ = listener.accept()
            sock.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            sock.close()

    threading.Thread(target=greet, daemon=True).start()
    with pytest.raises(NoServer, match="does not answer /v1/models"):
        ask(f"http://127.0.0.1:{listener.getsockname()[1]}")
    listener.close()


def test_prompts_are_unique_from_their_first_word_and_the_same_for_a_seed():
    assert prompts(20, seed=1) == prompts(20, seed=1)
    assert prompts(20, seed=1) != prompts(20, seed=2)
    assert len({text.split()[0] for text in prompts(50, seed=1)}) == 50


def test_over_tls(tmp_path, monkeypatch):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    make += f" -addext subjectAltName=DNS:localhost -keyout {key} -out {cert}"
    subprocess.run(make.split(), check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with serving(story, tls=context) as server:
        job = {"url": f"https://localhost:{server.port}", "concurrency": 2, "requests": [{"prompt": "x"}] * 6}
        with pytest.raises(NoServer, match="certificate verify failed"):
            load(Local(), job, python=sys.executable)
        rows = load(Local(), {**job, "model": "m"}, python=sys.executable).requests
        assert {row["error"]["kind"] for row in rows} == {"unreachable"}
        assert "certificate verify failed" in rows[0]["error"]["message"]
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        large = [{"prompt": "x" * 1_000_000}, *job["requests"]]
        result = load(Local(), {**job, "requests": large}, python=sys.executable)
    assert [row["error"] for row in result.requests] == [None] * 7
    assert result.summary["stamps"] == "kernel"


METRICS_SHOWN = {
    **{f"ttft{p}_ms": 41.5 for p in ("", "_p50", "_p90", "_p99")},
    **{f"time_per_token{p}_ms": 5.25 for p in ("", "_p50", "_p90", "_p99")},
    **{f"e2e{p}_ms": 712.0 for p in ("", "_p50", "_p90", "_p99")},
    "decode_tok_s": 190.4,
    "output_tok_s": 12345.6,
    "prefill_tok_s": 18099.9,
    "acceptance_length": 3.25,
    "load_kept": 0.994,
    "prompt_tokens": 425.8,
}
DOCUMENT = {
    "schema": "gpuctl.load/1",
    "verdict": "failed",
    "url": "http://127.0.0.1:30000",
    "api": "chat",
    "model": "qwen3.6-27b",
    "concurrency": 8,
    "rate": None,
    "max_tokens": 128,
    "target": "local",
    "metrics": METRICS_SHOWN,
    "requests": 32,
    "failed": 2,
    "wall_s": 12.3456,
    "errors": {"cut": 2},
    "finish_reasons": {"length": 29, "stop": 1},
    "sources": {"tokens": "continuous_usage", "prefill_tok_s": "ttft", "acceptance_length": "spec"},
    "notes": ["tokens not known: the server sent no usage"],
    "failures": [{"kind": "cut", "message": "the server closed the connection", "requests": 2}],
    "generator": {"lag_ms": {"p50": 0.0251, "p99": 0.31, "max": 1.2}, "ceiling_reads_s": 20120},
}


def test_the_table_as_it_is_printed(golden):
    golden("load.txt", table(DOCUMENT))


def test_the_table_of_an_open_loop_in_which_all_failed(golden):
    nothing = {"metrics": {}, "sources": {}, "notes": [], "finish_reasons": {}, "generator": {}, "failed": 32}
    golden("load-failed.txt", table({**DOCUMENT, **nothing, "rate": 2.5, "concurrency": None, "model": None}))


def test_an_address_where_the_server_has_no_such_path_is_said():
    failure = {"requests": 2, "kind": "http_error", "message": "HTTP 404: {}"}
    text = table({**DOCUMENT, "url": "http://127.0.0.1:1/x", "api": "chat", "failures": [failure]})
    assert "there is no /x/v1/chat/completions at that address: is it the server's?" in text


def test_why_answers_ended_is_not_made_up():
    assert "answers ended by              length 3, not said 2" in table(
        {**DOCUMENT, "finish_reasons": {"length": 3, "None": 2}}
    )
