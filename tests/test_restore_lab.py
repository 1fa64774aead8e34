"""The incident, whole: a campaign goes through it without a person, the guest comes back without a controller, and a
healthy box is left as it is. One lab, one after the other."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from tests.lab import hubclient
from tests.lab.faults import driver, model
from tests.lab.faults.boot import reboot
from tests.lab.hub import Hub
from tests.test_bench_lab import ROOT, Desk

pytestmark = pytest.mark.lab

CACHE = "/root/.cache/huggingface/hub/models--Qwen--Qwen3.6-27B"
PHASES = """
campaign: lab
phases:
  tp1:
    target: ct200
    baseline: tp1-auto
    reps: 2
    servers: [tp1-auto]
    workloads:
      - decode: {prompts: [fib, qsort, json], max_tokens: [32]}
"""


class Campaign(Desk):
    """The example inventory as it is, its model in memory, on guest 200."""

    def __init__(self, folder: Path, lab, hub: str) -> None:
        super().__init__(folder, lab, "ct200")
        example = ROOT / "inventory" / "kpro6"
        for name in ("models.yml", "servers.yml"):
            (self.inventory / name).write_text((example / name).read_text())
        (self.inventory / "phases.yml").write_text(PHASES)
        hosts = (self.inventory / "hosts.yml").read_text()
        more = f"gpuctl_serves: tp1-auto\n          gpuctl_hub_endpoint: {hub}\n"
        more += "          gpuctl_tmpfs: {/run/gpuctl/models: {size: 256M}}\n"
        (self.inventory / "hosts.yml").write_text(
            hosts.replace("        ct200:\n", f"        ct200:\n          {more}")
        )

    def inside(self, *argv: str) -> str:
        return self.lab.run("ct200", list(argv)).stdout.strip()

    def serves(self) -> bool:
        ask = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:30000/health', timeout=5).status)"
        return self.inside("python3", "-c", ask) == "200"

    def waits(self, condition, seconds: float = 240) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.inside("systemctl", "list-units", "--all", "gpuctl-*")
            time.sleep(0.5)


@pytest.fixture(scope="module")
def hub(lab_to_break, tmp_path_factory):
    """The model's repository, served where the lab's machines reach it; and the real client in the guest."""
    lab = lab_to_break
    hubclient.install(lab.root("ct200"))
    with Hub(f"{lab.subnet}.1") as hub:
        snapshot = Path(str(lab.root("ct200")) + CACHE) / "snapshots"
        (commit,) = snapshot.iterdir()
        folder = tmp_path_factory.mktemp("repository")
        for link in commit.iterdir():
            (folder / link.name).write_bytes((link.parent / link.readlink()).read_bytes())
        assert hub.commit("Qwen/Qwen3.6-27B", folder) == commit.name
        yield hub


@pytest.fixture(scope="module")
def campaign(lab_to_break, hub, tmp_path_factory):
    return Campaign(tmp_path_factory.mktemp("campaign"), lab_to_break, hub.url)


@pytest.mark.timeout(600)
def test_a_campaign_goes_through_the_incident_without_a_person(campaign):
    lab = campaign.lab
    process = campaign.start("bench", "tp1", "--yes")
    campaign.wait_for("cell_done", seconds=240)
    # what is to come after the reboot: another number, no weights in the cache, nothing at boot
    driver.renumber_uvm(lab, "kpro6", 511)
    model.remove_weights(lab, "ct200", CACHE)
    lab.check("ct200", ["sh", "-c", "systemctl disable gpuctl-stage-qwen3.6-27b run-gpuctl-models.mount"])
    reboot(lab, "kpro6", wait=False)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, out + err
    assert "Traceback" not in err
    assert "the node rebooted" in out
    assert "container 200 may not open /dev/nvidia-uvm" in out
    assert "beyond" in out, "the time that healing took is told"
    cells = list((campaign.folder / "runs/lab").glob("cells/*/*/*/*.json"))
    records = [json.loads(path.read_text()) for path in cells]
    assert [record["state"] for record in records] == ["ok"] * 3
    events = [json.loads(line) for line in (campaign.folder / "runs/lab/events.jsonl").read_text().splitlines()]
    assert all(event["boot"]["box"] == "ct200" for event in events if event["event"] == "cell_done")
    assert len({event["boot"]["node"] for event in events if event["event"] == "cell_done"}) == 2
    healed = [event["finding"] for event in events if event["event"] == "healed"]
    assert "lxc_rule_stale" in healed
    assert healed[-1] == "model_not_staged"
    (back,) = [event for event in events if event["event"] == "machine_back"]
    assert back["happened"] == "node_reboot"
    for record in records:  # none measured across the boot: a cell's server started in the boot its record names
        assert record["boot"]["boot_id"]
    print(*(line for line in out.splitlines() if "beyond" in line), sep="\n")


@pytest.mark.timeout(600)
def test_the_guest_serves_again_by_itself_while_the_controller_is_off(campaign):
    # as a server that gave up at boot
    campaign.lab.check("ct200", ["systemctl", "start", "gpuctl-failed@gpuctl-tp1-auto.service.service"])
    assert "gpuctl-tp1-auto failed at 20" in campaign.gpuctl("status", "-t", "ct200")[1]
    code, out, err = campaign.gpuctl("restore", "-t", "ct200")
    assert code == 1, out + err
    assert "nobody is there to allow it" in err
    campaign.lab.run("kpro6", ["systemctl", "disable", "gpuctl-devices.service"])  # where it is there
    code, out, err = campaign.gpuctl("restore", "-t", "ct200", "--boot", "--yes")
    assert code == 0, out + err
    assert "it comes back by itself at each boot\n" in out  # and not "as before"
    assert campaign.lab.check("kpro6", ["systemctl", "is-enabled", "gpuctl-devices.service"]).strip() == "enabled"
    assert campaign.serves()
    assert campaign.inside("sh", "-c", "ls /var/lib/gpuctl/failed") == ""
    driver.renumber_uvm(campaign.lab, "kpro6", 507)
    reboot(campaign.lab, "kpro6")
    campaign.waits(campaign.serves)
    assert campaign.inside("systemctl", "is-active", "gpuctl-tp1-auto", "gpuctl-stage-qwen3.6-27b") == "active\nactive"
    assert campaign.inside("sh", "-c", "ls /var/lib/gpuctl/failed 2>/dev/null") == ""


@pytest.mark.timeout(240)
def test_a_box_with_nothing_wrong_takes_one_look_and_no_change(campaign):
    code, out, err = campaign.gpuctl("restore", "-t", "ct200", "--json")  # nobody is there to allow a change
    assert code == 0, out + err
    (box,) = json.loads(out)["boxes"]
    assert (box["state"], box["looks"], box["steps"]) == ("well", 1, [])


@pytest.mark.timeout(900)
def test_faults_at_random_moments_lose_nothing(campaign, hub):
    from tests import soak

    seed = random.SystemRandom().randrange(1_000_000)
    print(f"python -m tests.soak --runs 1 --seed {seed} replays it")
    report = soak.run(campaign.lab, hub, seed)
    assert not report.wrong, report.line()
