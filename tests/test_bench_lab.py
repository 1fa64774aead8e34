"""`gpuctl bench` on a guest with a real systemd, over SSH and by the node's pct exec alone, with the engine double."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.lab

ROOT = Path(__file__).parents[1]
PHASES = """
campaign: lab
phases:
  tp1:
    target: {guest}
    baseline: tp1-auto
    reps: 2
    servers: [tp1-auto, tp1-linear, tp1-starved]
    workloads:
      - decode: {{prompts: [fib], max_tokens: [64]}}
"""


class Desk:
    def __init__(self, folder: Path, lab, guest: str) -> None:
        self.lab, self.guest, self.folder = lab, guest, folder
        self.inventory = folder / "inventory"
        shutil.copytree(ROOT / "inventory" / "kpro6", self.inventory)
        shutil.copy(lab.inventory / "hosts.yml", self.inventory / "hosts.yml")
        models = (self.inventory / "models.yml").read_text()
        hub = "/root/.cache/huggingface/hub/models--Qwen--Qwen3.6-27B/snapshots"
        (snapshot,) = lab.check(guest, ["ls", hub]).split()
        (self.inventory / "models.yml").write_text(
            models.replace("/run/gpuctl/models/Qwen3.6-27B", f"{hub}/{snapshot}").replace("  stage: true\n", "")
        )
        servers = (self.inventory / "servers.yml").read_text()
        starved = """
  tp1-starved:          # the campaign as it was: eight requests on one GPU
    use: [sglang, qwen, dflash]
    flags: {tp-size: 1, max-running-requests: 8}
"""
        (self.inventory / "servers.yml").write_text(servers + starved)
        (self.inventory / "phases.yml").write_text(PHASES.format(guest=guest))

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "gpuctl", *words, "-i", str(self.inventory)],
            cwd=self.folder, stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(self.folder / "cache")},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def gpuctl(self, *words: str) -> tuple[int, str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=280)
        assert "Traceback" not in err, err
        return process.returncode, out, err

    def records(self) -> dict[str, dict]:
        found = {}
        for path in (self.folder / "runs/lab").glob("cells/*/*/*/*.json"):
            record = json.loads(path.read_text())
            found[record["cell"]["server"]] = record
        return found

    def told(self) -> list[dict]:
        path = self.folder / "runs/lab/events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def events(self) -> list[str]:
        return [event["event"] for event in self.told()]

    def wait_for(self, event: str, times: int = 1, seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while self.events().count(event) < times:
            assert time.monotonic() < end, self.events()
            time.sleep(0.1)

    def running(self) -> str:
        """Units of gpuctl's servers that run in the guest."""
        listed = ["systemctl", "list-units", "gpuctl-*.service", "--state=active,activating", "--no-legend", "--plain"]
        return self.lab.run(self.guest, listed).stdout.strip()


@pytest.fixture
def desk(request, lab, tmp_path):
    desk = Desk(tmp_path, lab, request.param)
    yield desk
    lab.run(
        desk.guest,
        ["sh", "-c", "systemctl stop 'gpuctl-tp1-*'; rm -f /etc/systemd/system/gpuctl-tp1-*; systemctl daemon-reload"],
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("desk", ["ct200", "ct202"], indirect=True)
def test_a_phase_is_deployed_as_units_measured_and_named_where_it_cannot_work(desk):
    code, out, err = desk.gpuctl("bench", "tp1", "--only", "tp1-starved")
    assert code == 1, out + err
    refused = desk.records()["tp1-starved"]["failure"]
    assert refused["kind"] == "refused", refused
    assert refused["finding"]["id"] == "state-slots-starved"
    assert "2 recurrent-state slots, one request needs 4: 2 // 4 = 0" in refused["summary"]
    assert "8 requests x 16 draft tokens x 146.8 MiB = 18.35 GiB" in out
    assert not (desk.folder / "runs/lab/logs/tp1-starved").exists()  # it was not started
    code, out, err = desk.gpuctl("bench", "tp1", "--force")
    assert code == 1, out + err  # one of the servers cannot work
    records = desk.records()
    measured = records["tp1-auto"]
    assert measured["state"] == "ok", measured["failure"]
    # the campaign's numbers; tests/lab/campaign.py runs all of it, docs/example.md has what came out
    assert measured["metrics"]["decode_tok_s"]["mean"] == pytest.approx(26.4, rel=0.05)
    linear = records["tp1-linear"]
    assert linear["state"] == "ok", linear["failure"]
    assert linear["metrics"]["decode_tok_s"]["mean"] == pytest.approx(140.6, rel=0.08)
    assert linear["metrics"]["acceptance_length"]["mean"] == pytest.approx(5.7, rel=0.08)
    assert measured["fingerprint"]["machine"]["driver"]
    assert measured["fingerprint"]["machine"]["gpus"]
    assert measured["server"]["unit"] == "gpuctl-tp1-auto"
    assert measured["server"]["capacity"]["kv_tokens"] == measured["server"]["kv_tokens"]
    # the one GPU of eight that the server is on; the driver's double draws 71 W with a context on it
    assert measured["metrics"]["gpu_power_w"]["mean"] == pytest.approx(71.4, rel=0.02)
    assert measured["metrics"]["gpu_memory_bytes"]["mean"] == pytest.approx(71.6 * (1 << 30), rel=0.05)
    assert measured["metrics"]["energy_per_token_j"]["unit"] == "J"
    campaign = json.loads((desk.folder / "runs/lab/campaign.json").read_text())
    assert campaign["phases"]["tp1"]["command"] == ["gpuctl", "bench", "tp1", "-i", str(desk.inventory), "--force"]
    starved = records["tp1-starved"]
    assert (starved["state"], starved["metrics"]) == ("failed", {})
    died = starved["failure"]["finding"]  # its log says what the plan said
    assert (died["id"], died["certainty"]) == ("state-slots-starved", "proved")
    assert "max_running_request is zero" in "\n".join(starved["failure"]["evidence"])
    assert measured["server"]["roofline_tok_s"] == pytest.approx(34.8, rel=0.02)  # 26.4 are 76 % of it
    assert desk.running() == ""
    logs = list((desk.folder / "runs/lab/logs/tp1-auto").glob("*.log"))
    assert any("fired up and ready to roll" in log.read_text() for log in logs)  # out of the journal
    code, out, _ = desk.gpuctl("bench", "tp1")
    assert out.count("SKIP") == 2
    assert code == 1  # the starved one is kept as failed


@pytest.mark.timeout(240)
@pytest.mark.parametrize("desk", ["ct200"], indirect=True)
def test_a_unit_that_is_killed_is_a_failure_with_its_signal_and_one_left_behind_is_stopped(desk):
    process = desk.start("bench", "tp1", "--only", "tp1-auto")
    desk.wait_for("server_ready")
    status = json.loads(desk.gpuctl("status", "-t", "ct200", "--json")[1])
    (box,) = status["boxes"]
    assert ("gpuctl-tp1-auto", "active") in [(unit["name"], unit["state"]) for unit in box["units"]]
    assert max(gpu["used_bytes"] for gpu in box["gpus"]) > 50 << 30
    assert "tp1-auto" in status["campaigns"][0]["doing"]
    for ready in (1, 2, 3):  # once, and twice again
        desk.wait_for("server_ready", ready)
        desk.lab.check(desk.guest, ["systemctl", "kill", "--signal=SIGKILL", "gpuctl-tp1-auto"])
        desk.wait_for("server_died", ready)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, out + err
    failure = desk.records()["tp1-auto"]["failure"]
    assert (failure["kind"], failure["signal"]) == ("server_died", "SIGKILL")
    process = desk.start("bench", "tp1", "--only", "tp1-auto", "--fresh")
    desk.wait_for("server_ready", 4)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert "gpuctl-tp1-auto" in desk.running()
    code, out, err = desk.gpuctl("bench", "tp1", "--only", "tp1-auto", "--retry-failed")
    assert code == 0, out + err
    assert "left running by an earlier run" in out
    assert desk.running() == ""


TWO = """
  two:
    use: [sglang, qwen]
    model: kimi-k2.6
    flags: {tp-size: 8, context-length: 4096, mem-fraction-static: 0.9}
    nodes: [ct200, ct210]
    env: {LAB_SGLANG_STARTUP_SCALE: "0.1"}
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("desk", ["ct200"], indirect=True)
def test_a_server_over_two_machines_is_started_healed_fails_and_is_stopped_together(desk):
    other = ["systemctl", "is-active", "gpuctl-two"]
    servers = desk.inventory / "servers.yml"
    servers.write_text(servers.read_text() + TWO)
    phases = desk.inventory / "phases.yml"
    phases.write_text(phases.read_text().replace("tp1-auto", "two").replace(", tp1-starved", ""))
    process = desk.start("bench", "tp1", "--only", "two")
    try:
        while "server_ready" not in desk.events():
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        argv = [desk.lab.check(guest, ["systemctl", "cat", "gpuctl-two"]) for guest in ("ct200", "ct210")]
        assert ['"--node-rank" "0"' in argv[0], '"--node-rank" "1"' in argv[1]] == [True, True]
        desk.lab.check("kpro7", ["pct", "reboot", "210"])
        desk.wait_for("server_ready", 2)
        back = [event for event in desk.told() if event["event"] == "machine_back"]
        assert [(event["box"], event["happened"]) for event in back] == [("ct210", "guest_restart")]
        desk.lab.check("ct210", ["systemctl", "kill", "--signal=ABRT", "gpuctl-two"])
        out, err = process.communicate(timeout=90)
        failure = desk.records()["two"]["failure"]
        assert (failure["kind"], failure["signal"]) == ("server_died", "SIGABRT"), out + err
        assert "SIGABRT on ct210" in failure["summary"]
        assert [desk.lab.run(guest, other).stdout.strip() == "active" for guest in ("ct200", "ct210")] == [False, False]
        assert set(desk.records()["two"]["fingerprint"]["others"]) == {"ct210"}
    finally:
        process.kill()
        script = "systemctl stop gpuctl-two; rm -f /etc/systemd/system/gpuctl-two.service; systemctl daemon-reload"
        for guest in ("ct200", "ct210"):
            desk.lab.run(guest, ["sh", "-c", script])
