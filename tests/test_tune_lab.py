"""Settings on a node with a real setpci: seen, set, read back, there again after a reboot, undone; and the picture."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gpuctl import deploy, hosts
from gpuctl.finding import Remedy
from tests.lab.faults.boot import reboot

pytestmark = pytest.mark.lab

WISHES = ["--max-read-request", "4096", "--no-acs-redirect", "--power", "450"]


def gpuctl(lab, *words):
    return subprocess.run(
        [sys.executable, "-m", "gpuctl", *words, "-i", lab.inventory], capture_output=True, text=True, timeout=120
    )


def register(lab, address, name):
    return lab.check("kpro6", ["setpci", "-s", address, name]).strip()


def test_settings_are_set_read_back_there_after_a_reboot_and_undone(lab_to_break):
    lab = lab_to_break
    before = register(lab, "0000:23:00.0", "CAP_EXP+8.w")
    # What cannot be kept is not set either: everything is as it was.
    lab.check("kpro6", ["sh", "-c", "rm -rf /etc/gpuctl; touch /etc/gpuctl"])
    bad = gpuctl(lab, "tune", "-t", "ct200", "--yes", *WISHES)
    assert bad.returncode == 1
    assert "tune.json cannot be read: Not a directory; the settings are as they were" in bad.stderr.splitlines()[-1]
    assert register(lab, "0000:23:00.0", "CAP_EXP+8.w") == before
    lab.check("kpro6", ["rm", "/etc/gpuctl"])
    seen = gpuctl(lab, "tune", "-t", "ct200", "--check", *WISHES)
    assert (seen.returncode, "MaxReadReq (12)" in seen.stdout, "600 W -> 450 W" in seen.stdout) == (1, True, True)
    assert register(lab, "0000:23:00.0", "CAP_EXP+8.w") == before
    done = gpuctl(lab, "tune", "-t", "ct200", "--yes", *WISHES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(register(lab, "0000:23:00.0", "CAP_EXP+8.w"), 16) == int(before, 16) & 0x0FFF | 0x5000
    assert int(register(lab, "0000:22:00.0", "ECAP_ACS+6.w"), 16) & 0x0C == 0
    assert gpuctl(lab, "tune", "-t", "ct200", "--check", *WISHES).returncode == 0
    # As it is wanted by chance is not enough: it has to be so after the next boot.
    assert lab.check("kpro6", ["systemctl", "is-active", "gpuctl-tune"]) == "active\n"  # so no check complains of it
    lab.check("kpro6", ["systemctl", "disable", "--now", "gpuctl-tune"])
    lost = gpuctl(lab, "tune", "-t", "ct200", "--check", *WISHES)
    assert (lost.returncode, "54 of them are not set again at the next boot" in lost.stdout) == (1, True), lost.stdout
    assert gpuctl(lab, "tune", "-t", "ct200", "--yes", *WISHES).returncode == 0
    lab.check("kpro6", ["systemctl", "stop", "gpuctl-tune"])
    machines = hosts.load(lab.inventory)
    kept = Remedy("tune", {"kept": True}, on="node")  # of the check settings_lost
    assert deploy.mend(kept, machines, machines.machines["ct200"]).why == ""
    assert lab.check("kpro6", ["systemctl", "is-active", "gpuctl-tune"]) == "active\n"
    reboot(lab, "kpro6")
    again = gpuctl(lab, "tune", "-t", "ct200", "--check", *WISHES)
    assert again.returncode == 0, again.stdout + again.stderr
    would = gpuctl(lab, "tune", "-t", "ct200", "--undo", "--check")
    assert "-MaxReadReq 0000:23:00.0 = 5000\n" in would.stdout
    undone = gpuctl(lab, "tune", "-t", "ct200", "--undo", "--yes")
    assert undone.returncode == 0, undone.stdout + undone.stderr
    assert register(lab, "0000:23:00.0", "CAP_EXP+8.w") == before
    assert int(register(lab, "0000:22:00.0", "ECAP_ACS+6.w"), 16) & 0x0C == 0x0C
    assert lab.run("kpro6", ["systemctl", "is-enabled", "gpuctl-tune"]).returncode != 0
    assert "nothing was set by gpuctl" in gpuctl(lab, "tune", "-t", "ct200", "--undo", "--check").stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--profile", "fast"], 2, "profile: 'fast' is not known; there are none, latency, throughput"),
        (["--power", "50"], 2, "power: 50 W is outside of what GPU 0000:23:00.0"),
        (["--max-read-request", "300"], 2, "MaxReadReq: 300 bytes; there are 128, 256"),
        (
            ["--max-read-request", "512", "--pci", "0000:99:00.0"],
            2,
            "PCI address: 0000:99:00.0 is not there; there are",
        ),
        (["--guest-cpus"], 2, "its GPUs are on NUMA nodes 0 and 1"),
        (["-t", "ct9"], 2, "no machine and no group ct9"),
    ],
)
def test_what_cannot_be_is_one_line(lab, words, code, said):
    done = gpuctl(lab, "tune", *(["-t", "ct200"] if "-t" not in words else []), *words)
    assert (done.returncode, said in done.stderr, done.stderr.count("\n")) == (code, True, 1), done.stderr


def test_the_picture_of_a_guests_node(lab, tmp_path):
    done = gpuctl(lab, "topo", "-t", "ct200", "--svg", str(tmp_path / "box.svg"))
    assert done.returncode == 0
    assert "kpro6: 8 GPUs" in done.stdout
    assert "0000:23:00.0  GPU 0" in done.stdout
    assert (tmp_path / "box.svg").read_text().startswith("<svg")
    document = json.loads(gpuctl(lab, "topo", "-t", "ct200", "--json").stdout)
    assert document["machines"][0]["numa"][0]["roots"][0]["ports"][0]["kind"] == "root_port"
