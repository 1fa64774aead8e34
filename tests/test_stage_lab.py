"""`gpuctl stage` on a guest: its own tmpfs mounted, the model of its hub cache in it, again at boot, through kills and no room."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab.engines.install import write_model
from tests.lab.faults import model as faults

pytestmark = pytest.mark.lab

ROOT = Path(__file__).parents[1]
GUEST = "ct200"
MODELS = "/run/gpuctl/models"
QWEN = f"{MODELS}/Qwen3.6-27B"


class Desk:
    def __init__(self, folder: Path, lab) -> None:
        self.lab, self.folder = lab, folder
        self.inventory = folder / "inventory"
        shutil.copytree(ROOT / "inventory" / "kpro6", self.inventory)
        self.tmpfs("{numa: interleave, huge: within_size}")
        with open(self.inventory / "models.yml", "a") as file:
            file.write(f"big: {{path: {MODELS}/big, source: /root/big, stage: true}}\n")

    def tmpfs(self, options: str) -> None:
        hosts = (self.lab.inventory / "hosts.yml").read_text()
        more = f"{GUEST}:\n          gpuctl_tmpfs: {{{MODELS}: {options}}}\n"
        (self.inventory / "hosts.yml").write_text(hosts.replace(f"{GUEST}:\n", more))

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "gpuctl", "stage", *words, "-i", str(self.inventory), "-t", GUEST],
            cwd=self.folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def stage(self, *words: str) -> tuple[int, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=200)
        assert "Traceback" not in err, err
        return process.returncode, out + err

    def here(self, *argv: str) -> str:
        return self.lab.check(GUEST, list(argv)).strip()


@pytest.fixture
def desk(lab, tmp_path):
    write_model(lab.root(GUEST), "root/big", "Qwen3.6-27B", size=160 << 20)
    yield Desk(tmp_path, lab)
    clean = (
        "rm -rf /root/big; systemctl disable --now run-gpuctl-models.mount; rm -f /etc/systemd/system/gpuctl-stage-* "
        "/etc/systemd/system/run-gpuctl-models.mount /etc/gpuctl/stage/*; systemctl daemon-reload; systemctl reset-failed"
    )
    lab.run(GUEST, ["sh", "-c", clean])


def test_a_model_comes_into_a_tmpfs_of_its_own_and_is_there_again_whatever_happens(desk, lab):
    code, said = desk.stage("qwen3.6-27b", "--check")
    assert code == 1, said
    assert "-> mount /run/gpuctl/models: tmpfs of" in said
    assert "+Options=size=" in said
    assert "+StandardInput=file:/etc/gpuctl/stage/qwen3.6-27b.json" in said
    assert lab.run(GUEST, ["mountpoint", "-q", MODELS]).returncode != 0  # nothing was changed

    code, said = desk.stage("qwen3.6-27b", "--yes")
    assert (code, "every SHA-256 as it has to be" in said) == (0, True), said
    assert desk.here("findmnt", "-n", "-o", "FSTYPE", MODELS) == "tmpfs"
    assert "huge=within_size,mpol=interleave" in desk.here("grep", MODELS, "/proc/mounts")
    assert json.loads(desk.here("cat", f"{QWEN}/MANIFEST.json"))["source"]["kind"] == "hub"
    assert (
        desk.here("systemctl", "is-enabled", "gpuctl-stage-qwen3.6-27b", "run-gpuctl-models.mount")
        == "enabled\nenabled"
    )

    # what a boot does, without us
    faults.wipe_tmpfs(lab, GUEST)
    desk.here("systemctl", "restart", "gpuctl-stage-qwen3.6-27b")
    assert "staged" in desk.here("journalctl", "-u", "gpuctl-stage-qwen3.6-27b", "-n", "20", "-o", "cat")
    code, said = desk.stage("qwen3.6-27b", "--check", "--verify")
    assert (code, "->" in said) == (0, False), said

    # another wish is taken by what is mounted, and what is in it stays
    desk.tmpfs("{numa: none}")
    code, said = desk.stage("qwen3.6-27b", "--yes")
    assert (code, "NUMA local" in said) == (0, True), said
    options = desk.here("grep", MODELS, "/proc/mounts")
    assert ("huge" in options, "interleave" in options) == (False, False), options
    code, said = desk.stage("qwen3.6-27b", "--check")
    assert (code, "->" in said) == (0, False), said

    # somebody else fills it
    free = int(desk.here("stat", "-f", "-c", "%f", MODELS)) * 4096
    desk.here("fallocate", "-l", str(free - (8 << 20)), f"{MODELS}/other")
    code, said = desk.stage("big", "--yes", "--no-boot")
    assert (code, f"the tmpfs at {MODELS} has" in said) == (1, True), said
    assert lab.run(GUEST, ["test", "-e", f"{MODELS}/big"]).returncode == 1
    desk.here("rm", f"{MODELS}/other")

    # killed in the middle, gone on with
    for _ in range(10):
        lab.run(GUEST, ["rm", "-rf", f"{MODELS}/big"])
        process = desk.start("big", "--yes", "--no-boot", "--threads", "1")
        journal, lock = f"{MODELS}/.staging-big/.journal", "cat $(grep -l . /run/gpuctl/stage-*.lock)"
        begun = f'[ "$(cat {journal} 2>/dev/null | wc -l)" -gt 4 ]'
        wait = f"until {begun}; do [ -e {MODELS}/big ] && exit; sleep 0.01; done; kill -9 $({lock})"
        lab.run(GUEST, ["sh", "-c", wait])
        out, err = process.communicate(timeout=100)
        assert "Traceback" not in err
        if lab.run(GUEST, ["test", "-e", f"{MODELS}/big"]).returncode:
            break
        time.sleep(0.1)
    assert process.returncode == 1, out + err
    assert "killed (signal 9)" in err
    code, said = desk.stage("big", "--yes", "--no-boot")
    assert (code, "are there from before" in said) == (0, True), said
    assert desk.here(
        "sh", "-c", f"cd /root/big && for f in *; do cmp $f {MODELS}/big/$f || exit; done; ls -A {MODELS}"
    ) == ("Qwen3.6-27B\nbig")
