"""What a server double does wrong never becomes a number: the cell fails, with the server's words."""

from __future__ import annotations

import json

import pytest

from tests.sse_server import CLOSE, DONE, HANG, plain, said, serving, stream, total

SERVERS = "servers:\n  theirs: {{engine: external, url: '{url}'}}\n"
PHASES = """
campaign: small
phases:
  p:
    servers: [theirs]
    reps: 3
    unstable_above: 100
    workloads:
      - {workload}
"""
DECODE = "decode: {prompts: [fib], max_tokens: [8]}"


def measured(desk, answer, workload=DECODE, unstable_above=100):
    """One record: what became of the cell when the server answers so. Plain requests get a plain answer."""

    def reply(request):
        if not (request.body or {}).get("stream"):
            body = {"choices": [{"text": "Paris"}], "usage": {"completion_tokens": 1, "prompt_tokens": 5}}
            return plain("200 OK", json.dumps(body).encode())
        return answer(request)

    with serving(reply) as server:
        desk.write("servers", SERVERS.format(url=server.url))
        desk.write("phases", PHASES.replace("above: 100", f"above: {unstable_above}").format(workload=workload))
        code, out, err = desk.gpuctl("bench", "p")
    (record,) = desk.records().values()
    assert (code == 0) == (record["state"] != "failed"), out + err
    return record


def tokens(count, prompt=7):
    """A good stream of `count` tokens."""
    return stream(*(said("a", n + 1) for n in range(count)), total(count, prompt), DONE)


def test_a_good_answer_is_a_number(desk):
    record = measured(desk, lambda request: tokens(request.body["max_tokens"]))
    assert record["state"] == "ok"
    assert record["metrics"]["completion_tokens"]["mean"] == 8
    assert record["metrics"]["output_tok_s"]["n"] == 3
    assert record["generator"]["lag_ms"]["p99"] >= 0


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (lambda r: tokens(5), "wrong_length", "asked for 8 tokens, got 5"),  # it ended early
        (lambda r: stream(said("a"), DONE), "no_usage", "does not say how many tokens"),
        (lambda r: plain("400 Bad Request", b'{"message": "the window is 4 tokens"}'), "http_error", "the window is 4 tokens"),
        (lambda r: plain("429 Too Many Requests", b"come back later"), "http_error", "come back later"),
        (lambda r: plain("500 Internal Server Error", b"kernel panic"), "http_error", "kernel panic"),
        (lambda r: [*stream(said("a", 1))[:2], CLOSE], "request_failed", "of 1 requests failed"),
        (lambda r: plain("200 OK", b"<html>hello</html>", "text/html"), "request_failed", "of 1 requests failed"),
    ],
)  # fmt: skip
def test_a_wrong_answer_is_a_failure_with_the_servers_words(desk, answer, kind, words):
    record = measured(desk, answer)
    assert record["state"] == "failed"
    assert record["metrics"] == {}
    assert record["failure"]["kind"] == kind
    assert words in record["failure"]["summary"]


def test_one_failed_repetition_fails_the_cell(desk):
    count = iter(range(100))

    def answer(request):  # warm-up, one repetition, and then it breaks
        return tokens(8) if next(count) < 2 else plain("503 Service Unavailable", b"draining")

    record = measured(desk, answer)
    assert (record["state"], record["metrics"]) == ("failed", {})
    assert "draining" in record["failure"]["summary"]


def test_a_prompt_of_another_length_than_asked_is_no_context(desk):
    # whatever is sent, the server says 82: a context of 300 was never read
    record = measured(
        desk, lambda r: tokens(r.body["max_tokens"], prompt=82), "context: {tokens: [300], max_tokens: 8}"
    )
    assert record["failure"]["kind"] == "wrong_length"
    assert "should have 300 tokens and has 82" in record["failure"]["summary"]


def test_more_at_once_than_the_server_runs_is_marked(desk):
    (desk.inventory / "phases.yml").write_text(
        PHASES.format(workload="concurrency: {concurrency: [4], max_tokens: 8, rounds: 1}").replace("theirs", "plain")
    )
    code, out, _ = desk.gpuctl("bench", "p")  # parallel: 2
    (record,) = desk.records().values()
    assert (code, record["state"]) == (0, "capacity_limited"), out
    assert any("runs 2 requests at once, 4 were sent" in note for note in record["notes"])


def test_repetitions_that_differ_are_marked_unstable(desk):
    count = iter(range(100))

    def answer(request):
        first, *rest = tokens(request.body["max_tokens"])
        return [first, 0.4 if next(count) % 2 else 0.02, *rest]

    record = measured(desk, answer, unstable_above=0.05)
    assert record["state"] == "unstable", record["failure"]
    assert any("repetitions differ" in note for note in record["notes"])
    assert record["metrics"]["output_tok_s"]["n"] == 3


# ------------------------------------------------------------ before anything is timed


def test_healthy_and_talking_nonsense_is_not_measured(desk):
    models = (desk.inventory / "models.yml").read_text()
    desk.write("models", models + "  known_answer: {'The capital of France is': Paris}\n")
    code, out, _ = desk.gpuctl("bench", "p", "--only", "plain")
    assert code == 1
    assert "not with 'Paris'" in out
    assert {record["failure"]["kind"] for record in desk.records().values()} == {"wrong_answer"}
    assert desk.servers_running() == []


def test_a_server_that_hangs_while_it_starts_ends_in_time(desk):
    servers = (desk.inventory / "servers.yml").read_text()
    program = 'program: [sh, -c, "case $* in *--help*) exit 2;; esac; echo loading weights; sleep 100", "--"]\n    ready_within_s: 5'
    desk.write("servers", servers.replace('program: ["{python}", -m, gpuctl.agent.llama_server]', program))
    assert desk.gpuctl("bench", "p", "--only", "plain/decode/fib-24")[0] == 1
    (record,) = desk.records().values()
    assert record["failure"]["kind"] == "timeout"
    assert "loading weights" in record["failure"]["evidence"]
    assert desk.servers_running() == []


def test_another_process_on_the_port_is_never_taken_for_the_server(desk, tmp_path):
    """Ours is up but does not listen; somebody else answers on its port, healthy, with the same model."""
    import subprocess
    import sys

    assert desk.gpuctl("bench", "p", "--only", "plain/decode/fib-24")[0] == 0  # writes the model
    servers = (desk.inventory / "servers.yml").read_text()
    desk.write(
        "servers",
        servers.replace(
            'program: ["{python}", -m, gpuctl.agent.llama_server]',
            'program: [sh, -c, "case $* in *--help*) exit 2;; esac; sleep 60", "--"]',
        ),
    )
    process = desk.start("bench", "p", "--only", "plain/decode/fib-24")
    desk.wait_for(lambda: desk.servers_running())
    model = str(desk.folder / "models/tiny.gguf")
    argv = [sys.executable, "-m", "gpuctl.agent.llama_server", "-m", model, "--port", str(desk.port), "-c", "2048"]
    impostor = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        out, _ = process.communicate(timeout=60)
    finally:
        impostor.kill()
        impostor.wait()
    assert process.returncode == 1
    assert "is answered by another process" in out
    (record,) = desk.records().values()
    assert (record["state"], record["failure"]["kind"]) == ("failed", "wrong_identity")


def test_a_server_that_stops_answering_is_not_waited_for_for_ever(desk):
    servers = "servers:\n  theirs: {engine: external, url: 'URL'}\n"
    with serving(lambda r: [HANG]) as server:
        desk.write("servers", servers.replace("URL", server.url))
        desk.write("phases", PHASES.format(workload=DECODE))
        process = desk.start("bench", "p")
        desk.wait_for(lambda: server.requests)
        process.send_signal(2)
        process.communicate(timeout=30)
    assert process.returncode == 4
