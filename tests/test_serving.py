"""A server from its start to "it answers, and it is ours": what goes wrong on the way is told as what it was."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from gpuctl import plugins, serving
from gpuctl.config import Server
from gpuctl.engines import Launch
from gpuctl.serving import Log, StartFailed, bring_up, take_down
from gpuctl.store import Run
from gpuctl.supervision import Processes
from gpuctl.transport import Local

# Healthy and of the right name; what it does when it is asked for an answer is the test's.
SERVER = """
import http.server, json, os, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def say(self, document):
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        self.say({"data": [{"id": "m"}], "model_path": "m", "total_slots": 4})
    def do_POST(self):
        %s
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
ANSWERS = "self.say({'choices': [{'text': 'Paris'}], 'usage': {'completion_tokens': 1, 'prompt_tokens': 5}})"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def supervisor(tmp_path):
    supervisor = Processes(Local(), str(tmp_path / "servers"), python=sys.executable)
    yield supervisor
    for unit in supervisor.status()[0]:
        supervisor.stop(unit.unit, grace_s=0)


def brought_up(supervisor, tmp_path, answering=ANSWERS, **options):
    server = Server(
        engine="llamacpp",
        model="m",
        program=[sys.executable, "-c", SERVER % answering],
        port=free_port(),
        ready_within_s=60,
    )
    engine = plugins.get("engines", "llamacpp")
    return bring_up(
        engine,
        Launch("s", server, "m"),
        supervisor,
        run=Run(tmp_path / "run"),
        owner="test",
        tell=lambda *_, **__: None,
        **options,
    )


def test_a_server_that_answers_is_up_and_its_identity_known(supervisor, tmp_path):
    up = brought_up(supervisor, tmp_path)
    assert (up.model_id, up.identity.requests_at_once) == ("m", 4)
    assert take_down(up, supervisor).running is False


def test_a_server_that_dies_of_its_first_request_died_and_did_not_answer_wrongly(supervisor, tmp_path):
    dying = "print('kernel image is not available', flush=True); os._exit(3)"
    with pytest.raises(StartFailed, match=r"s died of the first thing it was asked.*exit status 3") as error:
        brought_up(supervisor, tmp_path, dying)
    failure = error.value.failure
    assert (failure.kind, failure.exit_status) == ("start_failed", 3)
    assert "kernel image is not available" in "\n".join(failure.evidence)


def test_a_server_that_talks_nonsense_is_not_measured(supervisor, tmp_path):
    with pytest.raises(StartFailed, match="was answered with 'Paris'") as error:
        brought_up(supervisor, tmp_path, known_answer={"The capital of Italy is": "Rome"})
    assert error.value.failure.kind == "wrong_answer"
    assert [unit.running for unit in supervisor.status()[0]] == [False]


def told_of(log: str, tmp_path, *, stopped_by_us=False) -> list[tuple[str, str]]:
    """(line that had just come, what was told) while a log comes line by line."""
    told: list[tuple[str, str]] = []
    line = ""
    server = Server(engine="sglang", model="m", program=["python3"], port=30000, ready_within_s=60)
    reading = Log(
        server, "s", tmp_path / "log", lambda event, **facts: event == "dying" and told.append((line, facts["why"]))
    )
    reading.going = stopped_by_us
    for line in log.splitlines(keepends=True):
        reading.take(line)
    reading.close()
    return told


KILLED = Path(__file__).parent / "logs/sglang/scheduler-killed-while-serving.txt"


def test_a_server_that_goes_down_is_told_of_when_its_log_says_so_and_once(tmp_path):
    ((line, why),) = told_of(KILLED.read_text().split("---\n", 1)[1], tmp_path)
    assert "Subprocess scheduler_0 (pid=1653) crashed" in line
    assert "ended from outside with SIGKILL" in why


def test_a_server_that_is_told_to_stop_is_not_going_down(tmp_path):
    log = KILLED.read_text().split("---\n", 1)[1]
    before, after = log.split("[2026-11-30 16:56:01] Subprocess", 1)
    asked = "[2026-11-30 16:56:01] SIGTERM received. signum=None frame=None. Draining requests and shutting down...\n"
    assert told_of(before + asked + "[2026-11-30 16:56:01] Subprocess" + after, tmp_path) == []
    assert told_of(log, tmp_path, stopped_by_us=True) == []


STARTING = """
import sys, time
print("load_tensors: loading model tensors, this can take a while", flush=True)
while True:
    %s
"""


def started_slowly(supervisor, tmp_path, what, ready_within_s=60):
    server = Server(
        engine="llamacpp",
        model="m",
        program=[sys.executable, "-c", STARTING % what],
        port=free_port(),
        ready_within_s=ready_within_s,
    )
    with pytest.raises(StartFailed) as error:
        bring_up(
            plugins.get("engines", "llamacpp"),
            Launch("s", server, "m"),
            supervisor,
            run=Run(tmp_path / "run"),
            owner="test",
            tell=lambda *_, **__: None,
        )
    return error.value.failure


def test_a_start_that_only_spins_is_a_hang_with_the_name_of_its_stage(supervisor, tmp_path, monkeypatch):
    """A collective that waits in vain for a rank computes at full speed."""
    monkeypatch.setattr(serving, "HANG_AFTER_S", 2.0)
    failure = started_slowly(supervisor, tmp_path, "pass")
    assert failure.kind == "hang"
    assert "s hangs after “loading weights”: no log line, reading or growth of memory for" in failure.summary
    assert "this can take a while" in "\n".join(failure.evidence)
    assert not any(unit.running for unit in supervisor.status()[0])


@pytest.mark.parametrize(
    "what", ["open('/dev/zero', 'rb').read(4 << 20)", "kept = [*globals().get('kept', ()), b'x' * (2 << 20)]"]
)
def test_reading_and_growing_are_no_hang(supervisor, tmp_path, monkeypatch, what):
    monkeypatch.setattr(serving, "HANG_AFTER_S", 4.0)
    failure = started_slowly(supervisor, tmp_path, f"{what}; time.sleep(0.2)", ready_within_s=7)
    assert failure.kind == "timeout"
    assert "was not ready within 7 s; it stopped after “" in failure.summary
