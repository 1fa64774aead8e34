"""Boxes side by side: what a glance says, what needs attention, and that nobody who works is disturbed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuctl import overview
from gpuctl.overview import Campaign, Glance
from gpuctl.store import Run
from gpuctl.transport import Local, agent

ROOT = Path(__file__).parents[1]
NOW = 1_796_029_200.0  # 2026-11-30 09:00 UTC
MODELS = {
    "/run/m/q": ("qwen3.6-27b", True),
    "/root/k": ("kimi-k2.6", False),
    "/run/m/k": ("kimi-eagle3", True),
    "/no": ("lost", False),
}


@pytest.fixture(autouse=True)
def utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def gpu(index, used):
    return {"index": index, "name": "RTX PRO 6000", "memory_used_mib": used, "memory_total_mib": 97887}


def answer(**more):
    return {
        "now": NOW,
        "started": NOW - 7500,
        "units": [
            {"Id": "gpuctl-tp4-linear.service", "ActiveState": "active", "Result": "success", "since": NOW - 130},
            {"Id": "gpuctl-k26.service", "ActiveState": "failed", "Result": "exit-code", "since": NOW - 400},
            {"Id": "gpuctl-stage-q.service", "ActiveState": "inactive", "UnitFileState": "enabled", "since": None},
            {"Id": "gpuctl-failed@x.service", "ActiveState": "inactive"},
        ],
        "failed": {"gpuctl-gone.service": "2026-11-30T07:00:00Z exit-code"},
        "models": {
            "/run/m/q": {"bytes": 55_600_000_000, "manifest": True},
            "/root/k": {"bytes": 595_000_000_000, "manifest": False},
            "/run/m/k": {"bytes": 1_000_000, "manifest": False},
            "/no": {"bytes": None, "manifest": False},
        },
        "gpus": [gpu(n, 88_000 if n in (0, 1, 2) else 41_000 if n == 7 else 3) for n in range(8)],
        "nodes": {"/dev/nvidiactl": "OK", "/dev/nvidia-uvm": "EPERM"},
        **more,
    }


def well(**more):
    return answer(units=[], failed={}, models={}, nodes={}, **more)


def test_boxes_campaigns_and_what_needs_attention(golden):
    wanted = {"qwen3.6-27b", "kimi-eagle3", "lost"}
    boxes = [
        overview.glance("ct200", answer(), MODELS, wanted),
        Glance("ct202", why="ct202: guest 202 on kpro6 is not running; start it there: pct start 202"),
        overview.glance("laptop", well(gpus=[]), MODELS, ()),
        overview.glance("ct210", well(gpus={"error": "nvidia-smi did not end within 20 s"}), MODELS, ()),
    ]
    campaigns = [
        Campaign("qwen36", "runs/qwen36", "gpuctl with pid 7 on desk, since 2026-11-30T08:00:00Z", "tp4-linear is measured", 14, 1, 12.0),
        Campaign("old", "runs/old", "", "", 3, 0, 90_000.0),
    ]  # fmt: skip
    golden("status.txt", overview.as_text(boxes, campaigns))


def test_a_long_name_of_a_box_that_is_not_there_keeps_the_columns():
    boxes = [Glance("a-box-with-a-very-long-name", why="refused"), overview.glance("b", well(gpus=[]), MODELS, ())]
    head, gone, here, *_ = overview.as_text(boxes, []).splitlines()
    assert head.index("UP SINCE") == gone.index("not reachable") == here.index("2026")


def test_a_guest_that_only_its_node_reaches_needs_attention():
    box = overview.glance("ct200", well(gpus=[], sshd="ct200: root@ct200:22: No route to host"), MODELS, ())
    assert list(overview.attention_of([box])) == [
        "ct200: seen through its node only, since over SSH: ct200: root@ct200:22: No route to host"
    ]


def test_a_box_that_is_well_needs_nobody():
    box = overview.glance("ct200", well(gpus=[gpu(0, 2)]), {}, ())
    assert box.attention == ()
    assert "nothing needs attention" in overview.as_text([box], [])


def test_the_note_of_a_unit_that_runs_again_is_shown_until_somebody_looks():
    note = {"gpuctl-tp4-linear.service": "2026-11-30T07:00:00Z exit-code"}
    box = overview.glance("ct200", answer(failed=note), {}, ())
    assert any("tp4-linear failed at 2026-11-30T07:00:00Z exit-code" in line for line in box.attention)


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), ([3, 1, 2], "1-3"), ([0, 2, 3, 7], "0,2-3,7"), ([], "")]
)  # fmt: skip
def test_numbers_are_written_as_ranges(numbers, text):
    assert overview.ranges(numbers) == text


def test_the_agent_answers_here(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "x.safetensors").write_bytes(b"123")
    command, stdin = agent("glance", {"models": [str(tmp_path / "m"), "/nonexistent"]}, python=sys.executable)
    found = json.loads(Local().run(command, stdin=stdin, timeout=60).stdout)
    assert found["models"] == {
        str(tmp_path / "m"): {"bytes": 3, "manifest": False},
        "/nonexistent": {"bytes": None, "manifest": False},
    }
    assert 0 < found["started"] <= found["now"] <= time.time() + 1
    assert abs(found["now"] - time.time()) < 60


def test_who_works_on_a_run_is_seen_without_touching_its_lock(tmp_path):
    run = Run(tmp_path / "c")
    assert run.holder() == ""
    with run:
        assert re.fullmatch(rf"gpuctl with pid {os.getpid()} on \S+, since [\dTZ:-]+", Run(tmp_path / "c").holder())
        with pytest.raises(Exception, match="in use by gpuctl with pid"):
            Run(tmp_path / "c").__enter__()
    assert run.holder() == ""
    (tmp_path / "c/lock").write_text("gpuctl with pid 1 on x, since 2026, killed")
    assert run.holder() == ""


def gpuctl(cwd, *words):
    return subprocess.run(
        [sys.executable, "-m", "gpuctl", *words], cwd=cwd, capture_output=True, text=True, timeout=90,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(cwd)},
    )  # fmt: skip


def test_a_run_that_broke_off_is_shown_and_json_says_the_same(tmp_path):
    run = Run(tmp_path / "runs/c")
    run.folder.mkdir(parents=True)
    run.event("server_started", server="s")
    done = gpuctl(tmp_path, "status", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["schema"], told["verdict"]) == (0, "gpuctl.status/1", "well")
    assert [box["reachable"] for box in told["boxes"]] == [True]
    assert told["campaigns"][0]["doing"] == "s is starting"
    assert "campaign c: nobody works on it" in gpuctl(tmp_path, "status").stdout
    run.event("run_finished", phase="p")
    assert json.loads(gpuctl(tmp_path, "status", "--json").stdout)["campaigns"] == []


def test_watching_prints_plain_lines_again_and_again_where_nobody_looks(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "gpuctl", "status", "--watch", "--every", "1"], cwd=tmp_path, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}, text=True,
    )  # fmt: skip
    heads = 0
    for line in process.stdout:
        assert "\033" not in line
        heads += line.startswith("BOX ")
        if heads == 2:
            break
    process.send_signal(2)
    assert process.wait(60) in (0, 4)  # 4: Ctrl-C in the middle of a look
    process.stdout.close()


def test_a_machine_that_is_away_is_a_line_and_exit_code_3(tmp_path):
    folder = tmp_path / "inventory/x"
    folder.mkdir(parents=True)
    (folder / "hosts.yml").write_text(
        "all: {hosts: {box: {ansible_host: 127.0.0.1, ansible_port: 9, ansible_user: root}}}"
    )
    for name, text in (("models", "{}"), ("servers", "servers: {}"), ("phases", "phases: {}")):
        (folder / f"{name}.yml").write_text(text)
    done = gpuctl(tmp_path, "status", "-i", "x")
    assert (done.returncode, done.stderr) == (3, "")
    assert "box  not reachable" in done.stdout
    assert "Connection refused" in done.stdout.splitlines()[-1]
