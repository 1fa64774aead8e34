"""`gpuctl bench` with a real llama.cpp: measured, kept, continued after any end, and honest about failures."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

CELLS = {
    f"p/{server}/{cell}"
    for server in ("plain", "ngram")
    for cell in ("decode/fib-24", "decode/qsort-24", "concurrency/c2", "context/300", "agentic/t2-c1")
}


def test_a_phase_is_measured_once_and_then_kept(desk):
    code, out, err = desk.gpuctl("bench", "p")
    assert (code, err) == (0, ""), out + err
    records = desk.records()
    assert set(records) == CELLS
    assert {record["state"] for record in records.values()} == {"ok"}
    assert "fib:" in out
    assert "tok/s" in out
    assert (desk.run / "report" / "report.md").exists()
    assert desk.servers_running() == []
    code, out, _ = desk.gpuctl("bench", "p")
    assert code == 0
    assert out.count("SKIP") == len(CELLS)
    assert desk.records() == records


def test_numbers_are_what_the_server_did(desk):
    desk.gpuctl("bench", "p", "--only", "plain")
    for name, record in desk.records().items():
        lines = [json.loads(line) for line in (desk.run / f"cells/{name}.raw.jsonl").read_text().splitlines()]
        wanted = record["parameters"].get("max_tokens")
        assert all(line["usage"]["completion_tokens"] <= wanted for line in lines)
        assert record["metrics"]["output_tok_s"]["n"] == 2
        assert record["fingerprint"]["engine"]["xllamacpp"]
        assert record["server"]["pid"] > 0
    context = desk.records()["p/plain/context/300"]
    assert context["metrics"]["prompt_tokens"]["mean"] == pytest.approx(300, rel=0.02)


def test_a_changed_flag_measures_again_and_says_why(desk):
    desk.gpuctl("bench", "p", "--only", "plain/decode/*")
    text = (desk.inventory / "servers.yml").read_text()
    desk.write("servers", text.replace("ctx-size: 8192", "ctx-size: 4096"))
    code, out, _ = desk.gpuctl("bench", "p", "--only", "plain/decode/*")
    assert code == 0
    assert "argv without 8192 with 4096" in out
    assert "SKIP" not in out


def test_fresh_and_only(desk):
    desk.gpuctl("bench", "p", "--only", "plain/decode/fib-24")
    (first,) = desk.records().values()
    time.sleep(1.1)
    desk.gpuctl("bench", "p", "--only", "plain/decode/fib-24", "--fresh")
    (second,) = desk.records().values()
    assert second["started"] > first["started"]
    _, out, _ = desk.gpuctl("report", "--format", "json")
    part = ["gpuctl", "bench", "p", "-i", "local"]
    only = ["--only", "plain/decode/fib-24"]
    assert json.loads(out)["commands"] == [[*part, *only], [*part, "--fresh", *only]]


def test_check_changes_nothing(desk):
    code, out, _ = desk.gpuctl("bench", "p", "--check")
    assert code == 0
    assert f"{len(CELLS)} to measure" in out
    assert not (desk.folder / "runs").exists()
    assert desk.servers_running() == []


def test_json_is_one_document(desk):
    code, out, _ = desk.gpuctl("bench", "p", "--only", "plain/decode/fib-24", "--json")
    document = json.loads(out)
    assert (code, document["verdict"], len(document["measured"])) == (0, "ok", 1)


# ------------------------------------------------------------ ends of gpuctl


def test_continues_after_being_killed_at_any_moment(desk):
    """Twenty and more ends, by SIGKILL and SIGINT, at random moments; what was measured stays as it was."""
    seed = int(os.environ.get("GPUCTL_SEED", random.randrange(1 << 30)))
    print(f"GPUCTL_SEED={seed}")
    chance = random.Random(seed)
    kept: dict[str, tuple] = {}
    kills = 0
    while kills < 22:
        before = set(desk.servers_running())  # of a run that was killed: found and stopped once this one gets so far
        process = desk.start("bench", "p", *(["--fresh"] if kills % 11 == 10 else []))
        if kills % 11 == 10:
            kept = {}
        try:
            process.communicate(timeout=chance.uniform(0.1, 6))
            if process.returncode == 0:  # ended by itself: begin anew
                assert set(desk.records()) == CELLS
                kept = {}
                subprocess.run(["rm", "-rf", desk.run], check=True)
                continue
        except subprocess.TimeoutExpired:
            number = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGINT])
            process.send_signal(number)
            process.communicate(timeout=60)
            kills += 1
            if number == signal.SIGINT and process.returncode == 4:
                assert set(desk.servers_running()) <= before
        for name, record in desk.records().items():  # every file that is there is whole
            assert record["state"] == "ok", record["failure"]
            stamp = (record["started"], record["ended"])
            assert kept.setdefault(name, stamp) == stamp, f"{name} was measured twice"
    code, out, err = desk.gpuctl("bench", "p")
    assert code == 0, out + err
    records = desk.records()
    assert set(records) == CELLS
    for name, stamp in kept.items():
        assert (records[name]["started"], records[name]["ended"]) == stamp
    assert not list(desk.run.glob("**/*.tmp"))
    assert desk.servers_running() == []


test_continues_after_being_killed_at_any_moment = pytest.mark.timeout(600)(
    test_continues_after_being_killed_at_any_moment
)


def killed_while_it_measures(desk) -> list[int]:
    """The servers that it leaves."""
    process = desk.start("bench", "p")
    desk.wait_for(lambda: (desk.run / "cells").exists())
    process.kill()
    process.communicate()
    left = desk.servers_running()
    assert left
    return left


def test_an_orphan_of_a_killed_run_is_found_and_stopped(desk):
    killed_while_it_measures(desk)
    code, out, _ = desk.gpuctl("bench", "p", "--only", "plain/decode/fib-24")
    assert code == 0
    assert "left running by an earlier run" in out
    assert desk.servers_running() == []


def test_a_server_of_another_run_is_left_alone_whatever_its_campaign_is_called(desk):
    """Two people on one box, each with the campaign that `gpuctl init` named."""
    theirs = killed_while_it_measures(desk)
    code, out, err = desk.gpuctl("bench", "p", "--run", "mine", "--only", "plain/decode/fib-24")
    assert code == 4, out + err
    assert re.search(r"gpuctl-plain runs already, for campaign \S+ \(run [0-9a-f]{8}\); wait for that run to end", err)
    assert desk.servers_running() == theirs
    assert not list(desk.run.with_name("mine").glob("cells/**/*.json"))
    assert desk.gpuctl("bench", "p", "--only", "plain/decode/fib-24")[0] == 0, "its own run stops it and goes on"
    assert desk.servers_running() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_interrupted_says_so_and_exits_4(desk, number):
    process = desk.start("bench", "p")
    desk.wait_for(lambda: (desk.run / "cells").exists())
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 4, err
    assert "the same command goes on" in err
    assert desk.servers_running() == []


# ------------------------------------------------------------ ends of the server


def server_pid(desk) -> int | None:
    for path in (desk.folder / "home/.local/state/gpuctl/servers").glob("*/state.json"):
        with contextlib.suppress(ValueError, OSError):
            state = json.loads(path.read_text())
            if os.path.exists(f"/proc/{state['pid']}"):
                return state["pid"]
    return None


def kill_the_server(desk, ready: int) -> None:
    """Once it is ready for the n-th time."""
    desk.wait_for(lambda: [e["event"] for e in events(desk)].count("server_ready") == ready, seconds=60)
    os.kill(server_pid(desk), signal.SIGKILL)
    desk.wait_for(lambda: [e["event"] for e in events(desk)].count("server_died") >= min(ready, 4), seconds=5)


def test_a_server_that_is_killed_is_started_again_and_at_the_third_time_a_failure_with_its_cause(desk):
    desk.write("phases", (desk.inventory / "phases.yml").read_text().replace("[24]", "[2000]"))
    process = desk.start("bench", "p", "--only", "*/decode/fib*")
    for ready in (1, 2, 3):
        kill_the_server(desk, ready)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1, out
    assert out.count("BROKEN OFF") == 3
    names = [event["event"] for event in events(desk)]
    assert names[names.index("server_died") + 1] == "server_stopped", "told at once, before what is left is stopped"
    record = desk.records()["p/plain/decode/fib-2000"]
    assert (record["state"], record["metrics"]) == ("failed", {})
    assert (record["failure"]["signal"], record["failure"]["exit_status"]) == ("SIGKILL", -9)
    assert "broken off 3 times" in record["failure"]["summary"]
    assert record["failure"]["evidence"]
    assert desk.records()["p/ngram/decode/fib-2000"]["state"] == "ok", "the next server goes on"
    process = desk.start("bench", "p", "--only", "plain/decode/fib*", "--retry-failed")
    kill_the_server(desk, 5)  # the fourth was the other server's
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert desk.records()["p/plain/decode/fib-2000"]["state"] == "ok", "killed once: measured again"


def events(desk):
    with contextlib.suppress(OSError):
        return [json.loads(line) for line in (desk.run / "events.jsonl").read_text().splitlines()]
    return []


def process_state(desk) -> str:
    """ "measuring" once the first cell of the first server is in flight."""
    return "measuring" if any(e["event"] == "server_ready" for e in events(desk)) else ""


def test_a_server_that_does_not_start_is_a_failure_with_its_last_words(desk):
    (desk.folder / "models").mkdir()
    (desk.folder / "models/tiny.gguf").write_bytes(b"not a model at all")
    code, out, _ = desk.gpuctl("bench", "p")
    assert code == 1
    assert "is not a GGUF model" in out
    for record in desk.records().values():
        assert record["state"] == "failed"
        assert record["failure"]["kind"] == "start_failed"
        assert record["failure"]["exit_status"] == 1


def test_a_server_that_cannot_be_bound_as_asked_is_not_measured_unbound(desk):
    if Path("/run/systemd/system").is_dir() and os.geteuid() == 0:
        pytest.skip("here it would be a unit, and bound")
    servers = (desk.inventory / "servers.yml").read_text()
    desk.write("servers", servers.replace("plain: {use: tiny}", "plain: {use: tiny, cpus: '0'}"))
    code, out, _ = desk.gpuctl("bench", "p", "--only", "plain/decode/fib-24")
    assert code == 1
    assert "cpus: only units of systemd are bound" in out
    assert desk.records()["p/plain/decode/fib-24"]["metrics"] == {}


def test_failed_cells_are_kept_until_asked_for(desk):
    servers = (desk.inventory / "servers.yml").read_text()
    desk.write("servers", servers.replace("spec-type: ngram-map-k", "spec-type: ngram-mapk"))
    assert desk.gpuctl("bench", "p")[0] == 1
    code, out, _ = desk.gpuctl("bench", "p")
    assert code == 1
    assert "--retry-failed" in out
    before = desk.records()["p/ngram/decode/fib-24"]["started"]
    time.sleep(1.1)
    code, out, _ = desk.gpuctl("bench", "p", "--retry-failed")
    assert code == 1
    assert desk.records()["p/ngram/decode/fib-24"]["started"] > before


def test_a_port_that_is_taken_names_who_has_it(desk):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", desk.port))
        other.listen()
        code, out, _ = desk.gpuctl("bench", "p", "--only", "plain")
    assert code == 1
    assert f"port {desk.port} is in use by pid {os.getpid()}" in out
    code, out, _ = desk.gpuctl("bench", "p", "--only", "plain")
    assert code == 0, "a port is free again: tried again without being asked"


def test_a_failure_of_the_moment_never_takes_a_numbers_place(desk):
    """As after a reboot, when the model is not in memory yet: finished cells hold again as soon as it is there."""
    assert desk.gpuctl("bench", "p", "--only", "plain/decode/fib-24")[0] == 0
    before = desk.records()["p/plain/decode/fib-24"]
    model = desk.folder / "models/tiny.gguf"
    servers = (desk.inventory / "models.yml").read_text()
    desk.write("models", servers.replace("make: tiny", ""))
    model.rename(model.with_suffix(".away"))
    code, out, _ = desk.gpuctl("bench", "p", "--only", "plain/decode/*")
    assert code == 1
    assert "no_model" in out
    assert desk.records()["p/plain/decode/fib-24"] == before
    assert desk.records()["p/plain/decode/qsort-24"]["failure"]["kind"] == "no_model"
    model.with_suffix(".away").rename(model)
    code, out, _ = desk.gpuctl("bench", "p", "--only", "plain/decode/*")
    assert (code, out.count("SKIP")) == (0, 1), out
    assert desk.records()["p/plain/decode/fib-24"] == before


# ------------------------------------------------------------ external


def test_a_server_of_somebody_else_is_measured_and_left_running(desk):
    desk.gpuctl("bench", "p", "--only", "plain/decode/fib-24")  # writes the model
    import sys

    model = desk.folder / "models/tiny.gguf"
    argv = [sys.executable, "-m", "gpuctl.agent.llama_server", "-m", str(model), "--port", str(desk.port), "-c", "4096"]
    other = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        desk.wait_for(lambda: listening(desk.port))
        desk.write("servers", f"servers:\n  theirs: {{engine: external, url: 'http://127.0.0.1:{desk.port}'}}\n")
        desk.write(
            "phases",
            "campaign: theirs\nphases:\n  p:\n    servers: [theirs]\n    unstable_above: 100\n    workloads:\n      - decode: {prompts: [fib], max_tokens: [8]}\n",
        )
        code, out, err = desk.gpuctl("bench", "p")
        assert code == 0, out + err
        code, out, err = desk.gpuctl(
            "load", f"http://127.0.0.1:{desk.port}", "--max-tokens", "8", "--requests", "4", "--json"
        )
        assert code == 0, err
        assert json.loads(out)["requests"] == 4
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    code, out, _ = desk.gpuctl("bench", "p", "--fresh")
    assert code == 1
    assert "does not answer: refused" in out


def listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


# ------------------------------------------------------------ the folder


def test_two_at_once_name_the_holder(desk):
    process = desk.start("bench", "p")
    desk.wait_for(lambda: (desk.run / "lock").exists() and (desk.run / "events.jsonl").exists())
    code, _, err = desk.gpuctl("bench", "p")
    assert code == 2
    assert f"pid {process.pid}" in err
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)


def mounted(desk, options: str) -> tuple[str, ...]:
    """A prefix that runs a command where runs/ is a tmpfs of its own with these options."""
    (desk.folder / "runs").mkdir(exist_ok=True)
    script = f'mount -t tmpfs -o {options} tmpfs "{desk.folder}/runs" && exec "$@"'
    return ("unshare", "-rm", "sh", "-c", script, "sh")


def test_a_read_only_run_folder_is_one_line(desk):
    code, _, err = desk.gpuctl("bench", "p", prefix=mounted(desk, "ro"))
    assert code == 2
    assert err.count("\n") == 1
    assert "cannot be written" in err or "Read-only" in err


def test_a_full_disk_is_one_line_and_can_be_continued(desk):
    code, _, err = desk.gpuctl("bench", "p", prefix=mounted(desk, "size=24k"))
    assert code == 4, err
    assert "the disk is full" in err
    assert desk.servers_running() == []


def test_mistakes_in_the_inventory_are_lines_with_places(desk):
    desk.write("servers", "servers:\n  plain: {engine: llamacpp, modle: tiny}\n")
    code, out, err = desk.gpuctl("bench", "p")
    assert (code, out) == (2, "")
    assert "inventory/local/servers.yml:2: servers.plain.modle: unknown key; did you mean 'model'?" in err


def test_a_server_that_cannot_work_is_not_started_unless_it_is_forced(desk):
    servers, phases = ((desk.inventory / f"{name}.yml").read_text() for name in ("servers", "phases"))
    desk.write("servers", servers + "  bad: {use: tiny, flags: {n-gpu-layer: 1}}\n")
    desk.write("phases", phases.replace("[plain, ngram]", "[bad]").replace("baseline: plain", "baseline: bad"))
    code, out, err = desk.gpuctl("bench", "p")
    assert code == 1, out + err
    (failure, *_) = [record["failure"] for record in desk.records().values()]
    assert (failure["kind"], failure["finding"]["id"]) == ("refused", "unknown-flag")
    assert "The installed llamacpp has no flag --n-gpu-layer" in out
    assert "--force starts it all the same" in out
    assert not (desk.run / "logs").exists() or not list((desk.run / "logs").iterdir())
    code, out, err = desk.gpuctl("bench", "p", "--force")
    assert code == 1, out + err
    (failure, *_) = [record["failure"] for record in desk.records().values()]
    assert failure["kind"] == "start_failed"
    assert failure["exit_status"] == 2
