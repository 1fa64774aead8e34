"""A model into memory: every state told apart, whole or not at all, going on after a kill, room asked first."""

from __future__ import annotations

import errno
import hashlib
import io
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
from gpuctl.config import Model, Server
from gpuctl.hosts import Machine
from gpuctl.staging import Found, StagingError
from gpuctl.transport import Local
from tests.lab.engines.install import write_model
from tests.lab.hub.repositories import describe

PROGRAM = Path(program.__file__)
HERE = Machine("here", "machine", "local")
WEIGHTS = "model-00002-of-00003.safetensors"
REPO = "Qwen/Qwen3.6-27B"


@pytest.fixture
def memory():
    """A folder in a memory file system."""
    if program.mount_under("/dev/shm")[1] != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    with tempfile.TemporaryDirectory(prefix="gpuctl-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUCTL_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def source(tmp_path):
    return write_model(tmp_path, "disk/m", "Qwen3.6-27B", size=6 << 20)


@pytest.fixture(scope="session")
def large(tmp_path_factory):
    """Large enough to be interrupted."""
    return write_model(tmp_path_factory.mktemp("large"), "m", "Qwen3.6-27B", size=120 << 20, seed="large")


def cached(folder, cache, *, tree=True, name=REPO):
    """The files of a folder as the hub's library keeps them in its cache; returns the snapshot."""
    repository, commit = cache / program.repository_folder(name), hashlib.sha1(str(folder).encode()).hexdigest()
    snapshot = repository / "snapshots" / commit
    listed = {}
    for part in ("refs", "blobs", "trees"):
        (repository / part).mkdir(parents=True)
    for file in sorted(folder.iterdir()):
        known = describe(file.name, file)
        (repository / "blobs" / known.etag).write_bytes(file.read_bytes())
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / file.name).symlink_to(f"../../blobs/{known.etag}")
        listed[file.name] = {"size": known.size, "blob_id": known.blob}
        if known.large:
            listed[file.name] |= {"lfs_sha256": known.sha256, "lfs_size": known.size}
    (repository / "refs" / "main").write_text(commit)
    if tree:
        (repository / "trees" / f"{commit}.json").write_text(json.dumps({"format_version": 1, "files": listed}))
    return snapshot


def job(memory, source=None, **more):
    model = Model(path=str(memory / "m"), stage=True, source=str(source) if source else None, **more)
    return staging.job_for("m", model, HERE)


def look(memory, source=None, verify=False, **more):
    return staging.look(Local(), job(memory, source, **more), verify=verify)


def stage(memory, source=None, *, told=None, asked=None, **more):
    rows = told if told is not None else []
    return staging.stage(
        Local(), {**job(memory, source, **more), "progress_s": 0.01, **(asked or {})}, on_progress=rows.append
    )


def same(one, other):
    files = {path.name: path.read_bytes() for path in one.iterdir()}
    return files == {path.name: path.read_bytes() for path in other.iterdir() if path.name != "MANIFEST.json"}


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(bytes(data))


def nothing_beside(memory):
    return [path.name for path in memory.iterdir()] == ["m"]


# -- a model, from each kind of source


@pytest.mark.parametrize("kind", ["folder", "cache", "cache that an old library filled", "snapshot", "file"])
def test_from_every_kind_of_source(memory, source, tmp_path, kind):
    if kind == "folder":
        found = stage(memory, source)
    elif kind.startswith("cache"):
        cached(source, tmp_path / "hf" / "hub", tree=kind == "cache")
        found = stage(memory, hub=REPO)
    elif kind == "snapshot":
        found = stage(memory, cached(source, tmp_path / "somewhere"))
    else:
        found = stage(memory, source / WEIGHTS)
    assert (found.state, found.well, found.raw["did"]) == ("staged", True, "staged")
    if kind == "file":
        assert (memory / "m").read_bytes() == (source / WEIGHTS).read_bytes()
    else:
        assert same(source, memory / "m")
        assert nothing_beside(memory)
    again = staging.stage(Local(), job(memory, found.raw["source"]["place"] if kind != "file" else source / WEIGHTS))
    assert (again.state, again.raw["did"]) == ("staged", "nothing")


def test_it_tells_how_far_it_is(memory, large):
    told = []
    stage(memory, large, told=told)
    progress = [row for row in told if row["type"] == "progress"]
    assert progress
    assert {"what", "bytes", "of", "rate", "eta_s"} <= set(progress[0])
    assert all(row["bytes"] <= row["of"] for row in progress)


def test_the_manifest_names_every_file_by_its_sha256(memory, source):
    stage(memory, source)
    manifest = json.loads((memory / "m" / "MANIFEST.json").read_text())
    for one in manifest["files"]:
        assert one["sha256"] == hashlib.sha256((source / one["path"]).read_bytes()).hexdigest()
    assert {one["path"] for one in manifest["files"]} == {path.name for path in source.iterdir()}


# -- states, each with what is missing


def gone(folder):
    shutil.rmtree(folder)


def metadata_only(folder):
    for path in folder.glob("*.safetensors"):
        Path(os.path.realpath(path)).unlink()


def one_shard_gone(folder):
    path = folder / WEIGHTS
    Path(os.path.realpath(path)).unlink()


def one_byte_short(folder):
    path = Path(os.path.realpath(folder / WEIGHTS))
    os.truncate(path, path.stat().st_size - 1)


def emptied(folder):
    os.truncate(os.path.realpath(folder / WEIGHTS), 0)


def one_byte_long(folder):
    with open(os.path.realpath(folder / WEIGHTS), "ab") as file:
        file.write(b"x")


def a_web_page(folder):
    path = Path(os.path.realpath(folder / WEIGHTS))
    page = b"<!doctype html><html>Please sign in.</html>"
    path.write_bytes(page.ljust(path.stat().st_size, b" "))


def a_flipped_bit(folder):
    flip(Path(os.path.realpath(folder / WEIGHTS)))


def without_config(folder):
    Path(os.path.realpath(folder / "config.json")).unlink()


DAMAGES = [
    (gone, "absent", ""),
    (metadata_only, "metadata only", "model-00001-of-00003.safetensors"),
    (one_shard_gone, "partial", WEIGHTS),
    (one_byte_short, "size mismatch", "1 bytes too short"),
    (emptied, "size mismatch", WEIGHTS),
    (one_byte_long, "size mismatch", "1 bytes too long"),
    (a_web_page, "corrupt", "it is a web page"),
]


@pytest.mark.parametrize("where", ["cache", "cache without trees", "folder"])
@pytest.mark.parametrize(("damage", "state", "said"), DAMAGES, ids=[one[0].__name__ for one in DAMAGES])
def test_what_is_wrong_with_a_source_is_known_before_a_byte_is_copied(
    memory, source, tmp_path, where, damage, state, said
):
    folder = source if where == "folder" else cached(source, tmp_path / "hf" / "hub", tree=where == "cache")
    damage(folder)
    more = {"source": source} if where == "folder" else {"hub": REPO}
    found = look(memory, **more)
    assert found.state == state, found.raw
    assert any(said in line for line in found.missing), found.missing
    with pytest.raises(StagingError) as caught:
        staging.stage(Local(), job(memory, **more), download=False)
    assert caught.value.kind == "source"
    assert "\n" not in str(caught.value)
    assert not (memory / "m").exists()


def test_bytes_that_are_missing_are_counted(memory, source, tmp_path):
    cached(source, tmp_path / "hf" / "hub")
    one_shard_gone(
        tmp_path
        / "hf"
        / "hub"
        / program.repository_folder(REPO)
        / "snapshots"
        / os.listdir(tmp_path / "hf" / "hub" / program.repository_folder(REPO) / "snapshots")[0]
    )
    (missing,) = look(memory, hub=REPO).raw["source"]["missing"]
    assert (missing["path"], missing["bytes"]) == (WEIGHTS, (source / WEIGHTS).stat().st_size)


def test_a_config_that_is_missing_makes_a_model_partial_where_that_can_be_known(memory, source, tmp_path):
    without_config(cached(source, tmp_path / "hf" / "hub"))
    assert look(memory, hub=REPO).state == "partial"


def test_a_flipped_bit_in_a_cache_is_found_while_copying_and_nothing_is_published(memory, source, tmp_path):
    a_flipped_bit(cached(source, tmp_path / "hf" / "hub"))
    assert look(memory, hub=REPO).state == "complete"  # nothing quick can see it
    assert look(memory, hub=REPO, verify=True).state == "corrupt"
    with pytest.raises(StagingError, match=WEIGHTS) as caught:
        staging.stage(Local(), job(memory, hub=REPO), download=False)
    assert caught.value.kind == "source"
    assert not (memory / "m").exists()


def test_a_bit_that_flipped_on_the_disk_of_a_folder_is_known_the_next_time(memory, source):
    stage(memory, source)
    shutil.rmtree(memory / "m")
    seen = (source / WEIGHTS).stat()
    flip(source / WEIGHTS)
    os.utime(source / WEIGHTS, ns=(seen.st_atime_ns, seen.st_mtime_ns))  # no program did it
    with pytest.raises(StagingError, match=WEIGHTS):
        stage(memory, source)


# -- the copy


@pytest.mark.parametrize(
    ("damage", "state"),
    [
        (one_shard_gone, "partial"),
        (one_byte_short, "size mismatch"),
        (metadata_only, "metadata only"),
        (without_config, "partial"),
    ],
)
def test_a_damaged_copy_is_told_and_made_whole(memory, source, damage, state):
    stage(memory, source)
    damage(memory / "m")
    assert look(memory, source).state == state
    assert stage(memory, source).state == "staged"
    assert same(source, memory / "m")


def test_a_bit_that_flipped_in_memory_is_found_by_verifying_and_mended(memory, source):
    stage(memory, source)
    flip(memory / "m" / WEIGHTS)
    assert look(memory, source).state == "staged"
    found = look(memory, source, verify=True)
    assert (found.state, found.well) == ("corrupt", False)
    assert any(WEIGHTS in line for line in found.missing)
    done = staging.stage(Local(), job(memory, source), verify=True)
    assert (done.state, done.raw["did"]) == ("staged", "staged")
    assert same(source, memory / "m")


def test_a_copy_is_stale_when_its_source_is_another_and_the_same_files_are_not_copied_again(memory, source, tmp_path):
    cached(source, tmp_path / "hf" / "hub")
    stage(memory, hub=REPO)
    shutil.rmtree(tmp_path / "hf")
    (source / "config.json").write_text('{"new": true}')
    cached(source, tmp_path / "hf" / "hub")
    found = look(memory, hub=REPO)
    assert (found.state, found.raw["stale"]) == ("stale", "config.json has another size")
    inode = (memory / "m" / WEIGHTS).stat().st_ino
    done = stage(memory, hub=REPO)
    assert (done.state, (memory / "m" / WEIGHTS).stat().st_ino) == ("staged", inode)
    assert same(source, memory / "m")


def test_a_damaged_file_of_the_old_copy_is_not_taken_over(memory, source, tmp_path):
    cached(source, tmp_path / "hf" / "hub")
    stage(memory, hub=REPO)
    flip(memory / "m" / WEIGHTS)
    shutil.rmtree(tmp_path / "hf")
    (source / "config.json").write_text('{"new": true}')
    cached(source, tmp_path / "hf" / "hub")
    assert stage(memory, hub=REPO).state == "staged"
    assert same(source, memory / "m")


def test_without_its_source_a_good_copy_is_still_good(memory, source):
    stage(memory, source)
    shutil.rmtree(source)
    assert look(memory, source).state == "staged"
    assert stage(memory, source).raw["did"] == "nothing"


def test_a_copy_somebody_made_by_hand_gets_its_manifest(memory, source):
    shutil.copytree(source, memory / "m")
    found = look(memory, source)
    assert (found.state, found.well) == ("complete", False)
    assert "no manifest" in found.raw["copy"]["notes"][0]
    assert stage(memory, source).state == "staged"


# -- interrupted


def running(memory, source, **more):
    """stage.py as a process, slowed down by nothing but its size."""
    text = json.dumps({**job(memory, source), "json": True, "progress_s": 0.01, "threads": 1, **more})
    process = subprocess.Popen([sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdin.write(text.encode())
    process.stdin.close()
    process.stdin = None
    return process


def killed(memory, source, number):
    """Starts it and ends it by a signal in the middle: again, should it have come to its end before. Its exit status."""
    for _ in range(20):
        process = running(memory, source)
        journal = memory / ".staging-m" / ".journal"
        while process.poll() is None and not (journal.exists() and journal.read_text().count("\n") > 2):
            time.sleep(0.001)
        process.send_signal(number)
        status = process.wait(60)
        process.stdout.close()
        if not (memory / "m").exists():
            return status
        shutil.rmtree(memory / "m")
    raise AssertionError("it was always faster")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 4)])
def test_killed_in_the_middle_it_goes_on_where_it_stopped(memory, large, number, status):
    assert killed(memory, large, number) == status
    found = look(memory, large)
    assert (found.state, found.raw["begun_bytes"] > 0) == ("complete", True)
    told = []
    assert stage(memory, large, told=told).state == "staged"
    assert any("are there from before" in row.get("text", "") for row in told)
    assert same(large, memory / "m")
    assert nothing_beside(memory)


def test_nobody_sees_a_half_model_and_the_old_one_stays_until_the_new_one_is_there(memory, tmp_path, large):
    old = write_model(tmp_path, "disk/old", "Qwen3.6-27B", size=1 << 20, seed="old")
    stage(memory, old)
    process = running(memory, large)
    seen = set()
    while process.poll() is None:
        manifest = json.loads((memory / "m" / "MANIFEST.json").read_text())
        seen.add(manifest["bytes"])
    process.stdout.close()
    assert same(large, memory / "m")
    assert len(seen) <= 2


def test_what_an_interrupted_run_of_another_source_left_is_not_taken_for_this_one(memory, large, source):
    killed(memory, large, signal.SIGKILL)
    assert stage(memory, source).state == "staged"
    assert same(source, memory / "m")
    assert nothing_beside(memory)


def test_two_at_once_are_one_after_the_other(memory, source):
    both = [running(memory, source), running(memory, source)]
    said = [json.loads(process.communicate()[0].splitlines()[-1]) for process in both]
    assert [row["state"] for row in said] == ["staged", "staged"]
    assert sorted(row["did"] for row in said) == ["nothing", "staged"]


def test_when_nobody_listens_any_more_it_stops_and_what_is_done_stays(memory, large):
    process = running(memory, large)
    process.stdout.close()
    assert process.wait(60) == 4
    assert not (memory / "m").exists()


# -- room


def test_what_does_not_fit_is_refused_before_a_byte_is_written(memory, source):
    told = {"limits": [{"what": "the memory of the node", "free": 10 << 20}]}
    with pytest.raises(StagingError, match=r"the memory of the node has 10\.5 MB free, and .* are needed") as caught:
        stage(memory, source, asked=told)
    assert caught.value.kind == "room"
    assert list(memory.iterdir()) == []


def test_where_old_and_new_have_no_room_the_old_one_stays_unless_it_is_given_up(memory, tmp_path):
    old = write_model(tmp_path, "disk/old", "Qwen3.6-27B", size=1 << 20, seed="old")
    new = write_model(tmp_path, "disk/new", "Qwen3.6-27B", size=40 << 20, seed="new")
    stage(memory, old)
    tight = {"limits": [{"what": "the tmpfs", "free": 10 << 20}]}
    with pytest.raises(StagingError, match="the old copy stays until the new one is there"):
        stage(memory, new, asked=tight)
    assert same(old, memory / "m")


def test_the_old_one_is_given_up_only_where_that_makes_room(memory, tmp_path):
    old = write_model(tmp_path, "disk/old", "Qwen3.6-27B", size=40 << 20, seed="old")
    new = write_model(tmp_path, "disk/new", "Qwen3.6-27B", size=30 << 20, seed="new")
    stage(memory, old)
    tight = {**job(memory, new), "limits": [{"what": "the node", "free": 20 << 20}], "headroom_bytes": 1 << 20}

    def given_up(**more):
        return staging.stage(Local(), {**tight, **more}, drop_old=True, limits=tight["limits"])

    with pytest.raises(StagingError, match=r"the old copy stays .* without it: the node has"):
        given_up(headroom_bytes=1 << 30)
    assert same(old, memory / "m")
    assert given_up().state == "staged"
    assert same(new, memory / "m")


def test_a_disk_is_no_memory(tmp_path, source):
    if program.mount_under(str(tmp_path))[1] in program.IN_MEMORY:
        pytest.skip("the folder for tests is in memory itself")
    with pytest.raises(StagingError, match="no tmpfs is mounted there") as caught:
        stage(tmp_path / "to", source)
    assert caught.value.kind == "room"


# -- what cannot be


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"to": "relative"}, "to: 'relative' has to be an absolute path"),
        ({"to": "/dev/shm/../x"}, "to: '/dev/shm/../x' has to be an absolute path"),
        ({"hub": {"repo": "-x; rm"}}, "hub: '-x; rm' is no name of a repository"),
        ({"source": "ssh://-oProxyCommand=x/y"}, "is not of the form ssh://"),
    ],
)
def test_a_wrong_job_is_one_line(memory, wrong, said):
    with pytest.raises(StagingError) as caught:
        staging.look(Local(), {"model": "m", "to": str(memory / "m"), **wrong})
    assert (caught.value.kind, said in str(caught.value)) == ("job", True), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_path_has_to_be_absolute_on_another_machine():
    with pytest.raises(StagingError, match=r"m: path: 'x/y' has to be absolute on ct200"):
        staging.job_for("m", Model(path="x/y"), Machine("ct200", "guest"))


def test_servers_say_which_python_has_the_hub_and_where_caches_are():
    servers = {
        "a": Server(
            engine="sglang",
            model="m",
            program=["/opt/sglang/bin/python", "-m", "x"],
            env={"TRITON_CACHE_DIR": "/c", "OTHER": "1"},
        ),
        "b": Server(engine="sglang", model="other", program=["/opt/other/bin/python"]),
    }
    made = staging.job_for(
        "m",
        Model(path="/run/m", stage=True, hub=REPO),
        Machine("ct200", "guest", vars={"gpuctl_hub_cache": "/data/hub"}),
        servers,
    )
    assert made["hub"] == {
        "repo": REPO,
        "revision": "main",
        "pythons": ["/opt/sglang/bin/python", "python3"],
        "cache": "/data/hub",
    }
    assert made["caches"] == [{"env": {"TRITON_CACHE_DIR": "/c"}}]


# -- the memory file system


def found(bytes_, mounted=None, state="complete", nodes=1):
    mount = {"point": mounted[0], "bytes": mounted[1]} if mounted else {"point": "/run", "bytes": 1}
    verdict = {"state": state, "bytes": bytes_}
    return Found(
        "m",
        "/run/gpuctl/models/m",
        True,
        state,
        {"copy": {"state": "absent"}, "source": verdict, "mount": {**mount, "numa_nodes": nodes}},
    )


def test_the_memory_file_system_is_as_large_as_it_has_to_be():
    sized = staging.tmpfs_for(HERE, "/run/gpuctl/models", [found(52 << 30), found(1 << 30)])
    assert (53 << 30) * 1.05 < sized.size_bytes < 57 << 30
    assert (sized.policy, sized.huge) == (None, None)
    assert staging.tmpfs_for(HERE, "/run/gpuctl/models", [found(1, nodes=2)]).policy == "interleave"


def test_one_that_is_mounted_and_large_enough_stays():
    mounted = ("/run/gpuctl/models", 64 << 30)
    assert staging.tmpfs_for(HERE, "/run/gpuctl/models", [found(52 << 30, mounted)]).size_bytes == 64 << 30
    assert staging.tmpfs_for(HERE, "/run/gpuctl/models", [found(80 << 30, mounted)]).size_bytes > 80 << 30


def test_the_inventory_decides_where_it_says_something():
    options = {"/run/gpuctl/models": {"size": "64G", "numa": "bind:0", "huge": "within_size"}}
    sized = staging.tmpfs_for(Machine("a", "machine", vars={"gpuctl_tmpfs": options}), "/run/gpuctl/models", [found(1)])
    assert (sized.size_bytes, sized.policy, sized.huge) == (64 << 30, "bind:0", "within_size")


def test_a_policy_that_is_no_longer_wanted_is_taken_from_what_is_mounted():
    """A remount keeps what it is not told of."""
    folder = "/run/gpuctl/models"
    mount = {"point": folder, "bytes": 64 << 30, "policy": "bind:0", "huge": "always"}

    def wanted(mount, **options):
        machine = Machine("a", "machine", vars={"gpuctl_tmpfs": {folder: options}})
        one = staging.tmpfs_for(
            machine,
            folder,
            [Found("m", f"{folder}/m", True, "staged", {"mount": mount, "copy": {"state": "staged", "bytes": 1}})],
        )
        return one.policy, staging._mounted_so(one, mount)

    assert wanted(mount, numa="none") == ("local", False)
    assert wanted({**mount, "policy": "local", "huge": ""}, numa="none") == ("local", True)
    assert wanted({**mount, "policy": "", "huge": ""}, numa="none") == (None, True)
    assert wanted({**mount, "policy": "interleave:0-1"}, numa="interleave", huge="always") == ("interleave", True)
    assert wanted(mount, numa="bind:0", huge="within_size") == ("bind:0", False)
    assert wanted({**mount, "bytes": 1}, size="64G", numa="bind:0", huge="always") == ("bind:0", False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("64G", "has to be a mapping"),
        ({"/m": 3}, "/m: has to be a mapping of size, numa, huge"),
        ({"/m": {"size": "big"}}, "size: 'big' is no size"),
        ({"/m": {"size": "0"}}, "size: '0' is no size"),
        ({"/m": {"sizes": "1G"}}, "/m: sizes: unknown key; did you mean 'size'?"),
        ({"/m": {"numa": "all"}}, "numa: 'all'; there are interleave, bind:N, none"),
        ({"/m": {"huge": "yes"}}, "huge: 'yes'; there are never, always, within_size, advise"),
    ],
)
def test_a_wrong_wish_is_one_line(options, said):
    with pytest.raises(StagingError) as caught:
        staging.tmpfs_for(Machine("a", "machine", vars={"gpuctl_tmpfs": options}), "/m", [found(1)])
    assert (said in str(caught.value), str(caught.value).startswith("a: gpuctl_tmpfs")) == (True, True), str(
        caught.value
    )


def test_the_unit_runs_the_program_with_its_job_from_a_file(memory, source):
    files = {Path(file.path).name: file.text for file in staging.boot_files(job(memory, source), str(memory))}
    assert set(files) == {"stage.py", "m.json", "gpuctl-stage-m.service", "gpuctl-failed@.service"}
    # as systemd does: the job on stdin, over several lines
    done = subprocess.run([sys.executable, "-"], input=files["stage.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2  # without a job
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], input=files["m.json"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "m: staged")
    assert same(source, memory / "m")


def test_a_cache_that_only_a_login_knows_of_is_named_in_the_job_at_boot(memory, source, tmp_path):
    """HF_HOME in root's .bashrc holds over SSH, and in no unit."""
    cached(source, tmp_path / "hf" / "hub")
    asked = job(memory, hub=REPO)
    found = staging.look(Local(), asked)
    assert found.state == "complete"
    files = {Path(file.path).name: file.text for file in staging.boot_files(asked, str(memory), found)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], input=files["m.json"], capture_output=True, text=True, timeout=60,
        env={**environment, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "m: staged")
    elsewhere = {**asked, "hub": {**asked["hub"], "cache": "/data/hub"}}
    files = {Path(file.path).name: file.text for file in staging.boot_files(elsewhere, str(memory), found)}
    assert json.loads(files["m.json"])["hub"]["cache"] == "/data/hub", "what the inventory says wins"


def test_a_memory_file_system_never_hides_what_is_there(tmp_path):
    """A model's path inside of a Hugging Face cache, say: what would be copied lies below the mount itself."""
    (tmp_path / "snapshots" / "abc").mkdir(parents=True)
    job = {"model": "m", "to": str(tmp_path / "snapshots" / "abc"), "source": str(tmp_path / "snapshots" / "abc")}
    seen = staging.look(Local("here"), job)
    with pytest.raises(StagingError, match=r"would hide what is in it \(abc\): give m a path in a folder of its own"):
        staging.tmpfs_for(HERE, str(tmp_path / "snapshots"), [seen])
    assert staging.look(Local("here"), {**job, "to": str(tmp_path / "memory" / "m")}).raw["mount"]["hides"] == []


@pytest.mark.parametrize("name", [".staging-m/.journal", None])
def test_memory_that_somebody_fills_meanwhile_is_one_line_wherever_it_is_met(memory, source, monkeypatch, capfd, name):
    """Also where not even a line of the journal finds room. It says where, which the system itself does not always."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", *([f"{memory}/{name}"] if name else []))

    monkeypatch.setattr(program, "perform", full)
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps({**job(memory, source), "json": True}).encode()))
    )
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert program.main() == 3
    told = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (told["type"], told["kind"]) == ("error", "room")
    place = f"{memory}/{name or 'm'}"
    assert told["message"] == f"{place}: No space left on device; the same command goes on when there is room"
