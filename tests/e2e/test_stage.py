"""Models from a hub with every fault it can have, and from another machine over SSH, by the real clients."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from gpuctl import staging
from gpuctl.agent import stage as program
from gpuctl.config import Model
from gpuctl.hosts import Machine
from gpuctl.staging import StagingError
from gpuctl.transport import Local
from tests.lab.engines.install import write_model
from tests.lab.hub import Fault, Hub
from tests.sshd import Sshd

REPO = "Qwen/Qwen3.6-27B"
WEIGHTS = "model-00001-of-00002.safetensors"
HERE = Machine("here", "machine", "local")


@pytest.fixture
def memory():
    if program.mount_under("/dev/shm")[1] != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    with tempfile.TemporaryDirectory(prefix="gpuctl-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path, "origin", "Qwen3.6-27B", shards=2, size=3 << 20)


@pytest.fixture
def hub(model, tmp_path, monkeypatch):
    with Hub() as running:
        running.commit(REPO, model)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("GPUCTL_STATE", str(tmp_path / "state"))
        yield running


@pytest.fixture
def told():
    return []


@pytest.fixture
def bring(memory, told):
    """Stages the model from the hub; `more` are keys of the job."""

    def run(**more):
        job = staging.job_for("m", Model(path=str(memory / "m"), stage=True, hub=REPO), HERE)
        job["hub"]["pythons"] = [sys.executable]
        return staging.stage(Local(), {**job, "progress_s": 0.05, "pause_s": 0.1, **more}, on_progress=told.append)

    return run


def same(one, other):
    mine = {path.name: path.read_bytes() for path in one.iterdir()}
    return mine == {path.name: path.read_bytes() for path in other.iterdir() if path.name != "MANIFEST.json"}


def blobs(tmp_path):
    return tmp_path / "hf" / "hub" / program.repository_folder(REPO) / "blobs"


def notes(told):
    return " ".join(row["text"] for row in told if row["type"] == "note")


def test_a_model_that_is_not_there_is_downloaded_to_disk_and_then_staged(bring, hub, model, memory, tmp_path, told):
    hub.faults.add(Fault("slow", "*.safetensors", rate=2 << 20))
    found = bring()
    assert (found.state, found.raw["source"]["known_from"]) == ("staged", "tree")
    assert same(model, memory / "m")
    assert len(list(blobs(tmp_path).iterdir())) == len(list(model.iterdir()))
    steps = [row for row in told if row["type"] == "progress" and row["what"] == "download"]
    assert steps[-1]["of"] == sum(path.stat().st_size for path in model.iterdir())
    assert any(0 < row["bytes"] < row["of"] for row in steps)
    asked = len(hub.requests)
    assert bring().raw["did"] == "nothing"
    shutil.rmtree(memory / "m")
    assert bring().raw["did"] == "staged"
    assert len(hub.requests) == asked  # the hub is not asked for what is on the disk


@pytest.mark.parametrize(
    "fault",
    [
        Fault("cut", WEIGHTS, after=1 << 20, times=1),
        Fault("truncated", WEIGHTS, after=1 << 20, times=1),
        Fault("status", WEIGHTS, status=503, times=1),
    ],
    ids=lambda fault: fault.kind,
)
def test_what_breaks_on_the_way_is_tried_again(bring, hub, model, memory, fault):
    hub.faults.add(fault)
    assert bring().state == "staged"
    assert same(model, memory / "m")


def test_a_download_that_stalls_is_begun_again(bring, hub, model, memory, told, tmp_path):
    hub.faults.add(Fault("stall", WEIGHTS, after=1 << 20, times=1))
    assert bring(stall_s=4).state == "staged"
    assert "not a byte for 4 s; tries again" in notes(told)
    assert same(model, memory / "m")
    assert not list(blobs(tmp_path).glob("*.incomplete"))  # nothing of the one that hung is left


def test_without_xet_after_it_failed_with_it(bring, hub, monkeypatch, told):
    monkeypatch.delenv("HF_HUB_DISABLE_XET")
    hub.faults.add(Fault("stall", WEIGHTS, after=1 << 20, times=1))
    assert bring(stall_s=4).state == "staged"
    assert "without Xet" in notes(told)


def test_a_bit_that_flipped_on_the_way_is_found_and_downloaded_again(bring, hub, model, memory, told):
    hub.faults.add(Fault("flipped", WEIGHTS, times=1))
    assert bring().state == "staged"
    assert same(model, memory / "m")
    assert f"{WEIGHTS} is damaged" in notes(told)


def test_a_hub_that_always_sends_damaged_files_is_an_end_and_nothing_is_published(bring, hub, memory):
    hub.faults.add(Fault("flipped", WEIGHTS))
    with pytest.raises(StagingError, match="is damaged") as caught:
        bring()
    assert (caught.value.kind, caught.value.found.state) == ("source", "corrupt")
    assert not (memory / "m").exists()


@pytest.mark.parametrize("damage", ["short", "metadata only"])
def test_a_cache_the_library_takes_for_complete_is_made_whole(bring, hub, model, memory, tmp_path, damage):
    bring()
    shutil.rmtree(memory / "m")
    snapshot = next((blobs(tmp_path).parent / "snapshots").iterdir())
    for path in [snapshot / WEIGHTS] if damage != "metadata only" else list(snapshot.glob("*.safetensors")):
        blob = Path(os.path.realpath(path))
        if damage in ("gone", "metadata only"):
            blob.unlink()
        else:
            os.truncate(blob, 0 if damage == "empty" else blob.stat().st_size - 1)
    assert bring().state == "staged"
    assert same(model, memory / "m")


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        (Fault("status", "/api/*", status=401, method="*"), "source", "401"),
        (Fault("status", "/api/*", status=404, method="*"), "source", "404"),
        (Fault("refuse", "/api/*", method="*"), "way", "2 times in a row; what came is kept"),
    ],
    ids=["no access", "not there", "hub away"],
)
def test_what_trying_again_does_not_help_is_one_line(bring, hub, memory, fault, kind, said):
    hub.faults.add(fault)
    with pytest.raises(StagingError) as caught:
        bring(attempts=2)
    assert (caught.value.kind, said in str(caught.value), "\n" in str(caught.value)) == (kind, True, False), str(
        caught.value
    )
    assert not (memory / "m").exists()


def test_never_straight_into_memory(bring, hub, memory):
    job = staging.job_for(
        "m",
        Model(path=str(memory / "m"), stage=True, hub=REPO),
        Machine("here", "machine", "local", vars={"gpuctl_hub_cache": str(memory / "hub")}),
    )
    job["hub"]["pythons"] = [sys.executable]
    with pytest.raises(StagingError, match="a download goes to a disk first"):
        staging.stage(Local(), job)
    assert not hub.requests


def test_without_the_library_it_says_what_to_install(bring, hub, memory):
    job = staging.job_for("m", Model(path=str(memory / "m"), stage=True, hub=REPO), HERE)
    job["hub"]["pythons"] = ["/opt/none/bin/python"]
    with pytest.raises(StagingError, match=r"no huggingface_hub for /opt/none/bin/python: install it"):
        staging.stage(Local(), job)


def test_killed_while_it_downloads_nothing_of_it_runs_on_and_the_next_run_goes_on(bring, hub, model, memory, tmp_path):
    hub.faults.add(Fault("stall", WEIGHTS, after=1 << 20))
    job = staging.job_for("m", Model(path=str(memory / "m"), stage=True, hub=REPO), HERE)
    job["hub"]["pythons"] = [sys.executable]
    process = subprocess.Popen([sys.executable, program.__file__], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    process.stdin.write(json.dumps(job).encode())
    process.stdin.close()
    end = time.monotonic() + 60
    while not any(seen.sent >= 1 << 20 for seen in hub.requests if WEIGHTS in seen.path or "/storage/" in seen.path):
        assert time.monotonic() < end
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    while any(
        Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]
        for pid in children
    ):
        assert time.monotonic() < end
        time.sleep(0.05)
    hub.faults.clear()
    assert bring().state == "staged"
    assert same(model, memory / "m")


def test_only_the_files_that_belong_to_it(hub, model, memory, tmp_path):
    (model / "pytorch_model.bin").write_bytes(b"x" * 100_000)
    (model / "original").mkdir()
    hub.commit(REPO, {path.name: path for path in model.iterdir() if path.is_file()})
    job = staging.job_for("m", Model(path=str(memory / "m"), stage=True, hub=REPO), HERE)
    job["hub"]["pythons"] = [sys.executable]
    assert staging.stage(Local(), job).state == "staged"
    assert not (memory / "m" / "pytorch_model.bin").exists()
    assert not any(blob.read_bytes()[:100] == b"x" * 100 for blob in blobs(tmp_path).iterdir())


def test_a_model_that_servers_find_on_disk_is_downloaded_there_and_damage_is_known(hub, model, tmp_path):
    place = tmp_path / "models" / "m"
    if program.mount_under(str(tmp_path))[1] in program.IN_MEMORY:
        pytest.skip("the folder for tests is in memory itself")
    job = staging.job_for("m", Model(path=str(place), hub=REPO), HERE)
    job["hub"]["pythons"] = [sys.executable]
    assert staging.look(Local(), job).state == "absent"
    found = staging.stage(Local(), job)
    assert (found.state, found.well) == ("complete", True)
    for path in model.iterdir():
        assert (place / path.name).read_bytes() == path.read_bytes()
    data = bytearray((place / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (place / WEIGHTS).write_bytes(bytes(data))
    assert staging.look(Local(), job).state == "complete"
    assert staging.look(Local(), job, verify=True).state == "corrupt"
    assert staging.stage(Local(), job, verify=True).state == "complete"
    assert (place / WEIGHTS).read_bytes() == (model / WEIGHTS).read_bytes()


# -- from another machine


@pytest.fixture
def far(tmp_path, monkeypatch):
    """A machine over SSH, and a PATH on which ssh knows it by its name, as ~/.ssh/config would."""
    sshd = Sshd(tmp_path / "sshd")
    folder = tmp_path / "bin"
    folder.mkdir()
    real = shutil.which("ssh")
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {real} -F {sshd.config} "$@"\n')
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("GPUCTL_STATE", str(tmp_path / "state"))
    yield sshd
    sshd.stop()


def over_ssh(memory, path, *, look=False, host="machine", **more):
    job = staging.job_for("m", Model(path=str(memory / "m"), stage=True, source=f"ssh://{host}{path}", **more), HERE)
    return staging.look(Local(), job) if look else staging.stage(Local(), job)


def test_from_another_machine_over_ssh(far, model, memory):
    assert over_ssh(memory, model, look=True).state == "complete"
    found = over_ssh(memory, model)
    assert (found.state, found.raw["copy"]["manifest"]["hashed"]) == ("staged", True)
    assert same(model, memory / "m")
    assert over_ssh(memory, model).raw["did"] == "nothing"


def test_what_is_wrong_over_there_is_known_before_a_byte_is_copied(far, model, memory):
    os.truncate(model / WEIGHTS, 1 << 20)
    found = over_ssh(memory, model, look=True)
    assert (found.state, WEIGHTS in found.missing[0]) == ("size mismatch", True)
    (model / WEIGHTS).unlink()
    with pytest.raises(StagingError, match="is partial") as caught:
        over_ssh(memory, model)
    assert caught.value.kind == "source"


@pytest.mark.parametrize(
    ("host", "path", "kind", "said"),
    [
        ("nobody@machine", "/x", "way", "denied"),
        ("localhost:1", "/x", "way", "Connection refused"),
        ("machine", "/no/such", "source", "is absent"),
    ],
)
def test_another_machine_that_cannot_be_asked_is_one_line(far, memory, host, path, kind, said):
    with pytest.raises(StagingError) as caught:
        over_ssh(memory, path, host=host)
    seen = (caught.value.kind, said in str(caught.value), "\n" in str(caught.value))
    assert seen == (kind, True, False), str(caught.value)


def test_an_unknown_host_key_is_refused(far, model, memory):
    far.known_hosts.write_text("")
    with pytest.raises(StagingError, match=r"(?i)host key"):
        over_ssh(memory, model)


# -- the verb


@pytest.fixture
def inventory(desk, model, memory):
    desk.write(
        "models",
        f"m: {{path: {memory}/m, source: {model}, stage: true}}\ntiny: {{path: models/tiny.gguf, make: tiny}}\n",
    )
    return desk


def test_the_verb_shows_stages_verifies_and_has_nothing_to_do_the_second_time(inventory, model, memory):
    code, out, _ = inventory.gpuctl("stage", "--check")
    assert (code, "m  complete" in out, f"-> stage m into {memory}/m" in out) == (1, True, True)
    assert not (memory / "m").exists()
    code, out, _ = inventory.gpuctl("stage", "m")
    assert (code, "every SHA-256 as it has to be" in out) == (0, True)
    assert same(model, memory / "m")
    code, out, _ = inventory.gpuctl("stage", "--json", "--verify")
    document = json.loads(out)
    assert (code, document["schema"], document["verdict"]) == (0, "gpuctl.stage/1", "well")
    assert document["models"][0]["did"] == "nothing"
    data = bytearray((memory / "m" / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (memory / "m" / WEIGHTS).write_bytes(bytes(data))
    code, out, _ = inventory.gpuctl("stage", "--check", "--verify")
    assert (code, "m  corrupt" in out, WEIGHTS in out) == (1, True, True)
    code, out, _ = inventory.gpuctl("stage", "--verify")
    assert (code, same(model, memory / "m")) == (0, True)


def test_that_there_is_no_room_is_told_before_it_is_tried(inventory, memory):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32M", "small", str(memory)]).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        code, out, _ = inventory.gpuctl("stage", "--check")
        assert (code, "m: there is no room: the tmpfs at" in out) == (1, True), out
        assert json.loads(inventory.gpuctl("stage", "--check", "--json")[1])["lacks"].keys() == {"m"}
        assert "free, and" in inventory.gpuctl("stage", "m")[2]
    finally:
        subprocess.run(["umount", str(memory)], check=True)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["mm"], 2, "models.yml: no model 'mm'; did you mean 'm'?"),
        (["-t", "ct9"], 2, "no machine and no group ct9"),
        (["--threads", "0"], 2, "0 is not in the range"),
        (["--threads", "65"], 2, "65 is not in the range"),  # their buffers would take more than 300 MB
        (["-i", "nowhere"], 2, "no such inventory folder"),
    ],
)
def test_what_cannot_be_asked_of_the_verb_is_one_line(inventory, words, code, said):
    done = inventory.gpuctl("stage", *words)
    assert (done[0], said in done[2], done[2].count("\n")) == (code, True, 1), done[2]


@pytest.mark.parametrize(
    ("models", "code", "said"),
    [
        ("m: {path: /run/gpuctl/no-such/m, source: SOURCE, stage: true}", 1, "no tmpfs at /run/gpuctl/no-such"),
        ("m: {path: MEMORY/m, stage: true}", 1, "nothing says where it comes from"),
        ("m: {path: MEMORY/m, source: /no/such, stage: true}", 1, "there is no /no/such"),
        ("m: {path: MEMORY/../m, source: SOURCE, stage: true}", 2, "may not lead upwards"),
        ("m: {path: MEMORY/m, source: 'ssh://x', stage: true}", 2, "is not of the form ssh://"),
        ("m: {path: MEMORY/m, source: SOURCE, stage: true, file: x}", 2, "models.yml:1: m.file: unknown key"),
    ],
)
def test_what_the_inventory_has_wrong_is_one_line(inventory, model, memory, models, code, said):
    inventory.write("models", models.replace("SOURCE", str(model)).replace("MEMORY", str(memory)) + "\n")
    inventory.write("servers", "servers: {}\n")
    inventory.write("phases", "phases: {}\n")
    done = inventory.gpuctl("stage")
    said_where = done[1] + done[2]
    assert (done[0], said in said_where) == (code, True), said_where
    if said in done[2]:
        assert done[2].count("\n") == 1
