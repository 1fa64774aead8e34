"""The hub double, spoken to by the real huggingface_hub: whole snapshots, and every way in which one goes wrong."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.engines.install import write_model
from tests.lab.hub import Fault, Hub
from tests.lab.hub.server import byte_range

REPO = "Qwen/Qwen3.6-27B"
WEIGHTS = "model-00001-of-00002.safetensors"


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path, "origin", "Qwen3.6-27B", shards=2, size=400_000)


@pytest.fixture
def hub(model):
    with Hub() as running:
        running.commit(REPO, model)
        yield running


# What the client counts as received is whole pieces of 10 MiB, were it not told otherwise.
SMALL_PIECES = "import huggingface_hub.constants as c; c.DOWNLOAD_CHUNK_SIZE = 16384\n"


class Client:
    """The real client in a process of its own, so that its settings are only its own."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        self.hub, self.cache = hub, folder / "cache"

    def run(self, code: str, *, timeout: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.cache.parent),
            "HF_ENDPOINT": self.hub.url,
            "HF_HOME": str(self.cache),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": "1",
            "HF_HUB_ETAG_TIMEOUT": "2",
            **env,
        }
        source = (
            "from huggingface_hub import HfApi, hf_hub_download, snapshot_download\n"
            "import huggingface_hub.utils._http as h\nh.time.sleep = lambda s: None\n" + textwrap.dedent(code)
        )
        return subprocess.run(
            [sys.executable, "-c", source],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def snapshot(self, *, timeout: float = 60, arguments: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        return self.run(f"print(snapshot_download({REPO!r}{arguments}))", timeout=timeout, **env)


@pytest.fixture
def client(hub, tmp_path):
    return Client(hub, tmp_path)


def same(folder: Path, model: Path) -> bool:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == {
        p.name: p.read_bytes() for p in model.iterdir()
    }


def fetched(hub: Hub, name: str) -> list[tuple[str | None, int]]:
    """(range, status) of each GET of a file's bytes."""
    shas = {
        file.sha256: path
        for repo in hub.repositories.values()
        for files in repo.commits.values()
        for path, file in files.items()
    }
    return [
        (seen.range, seen.status)
        for seen in hub.requests
        if seen.method == "GET"
        and (
            shas.get(seen.path.rpartition("/")[2]) == name
            or (seen.path.endswith(name) and "resolve-cache" in seen.path)
        )
    ]


# -- all is well


def test_a_snapshot_is_complete_and_laid_out_as_the_real_hubs(hub, client, model):
    done = client.snapshot()
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    sha = hub.repositories[REPO].branches["main"]
    assert folder.name == sha
    assert same(folder, model)
    store = folder.parents[1]
    assert (store / "refs" / "main").read_text() == sha
    weights = hashlib.sha256((model / WEIGHTS).read_bytes()).hexdigest()
    assert (folder / WEIGHTS).readlink().name == weights
    tree = json.loads((store / "trees" / f"{sha}.json").read_text())["files"]
    assert tree[WEIGHTS]["lfs_sha256"] == weights
    assert tree[WEIGHTS]["size"] == (model / WEIGHTS).stat().st_size
    config = (model / "config.json").read_bytes()
    assert (folder / "config.json").readlink().name == hashlib.sha1(b"blob %d\0" % len(config) + config).hexdigest()


def test_a_second_snapshot_fetches_nothing_and_works_without_the_hub(hub, client, model):
    client.snapshot()
    before = len(hub.requests)
    assert client.snapshot().returncode == 0
    assert all(seen.sent == 0 or "/api/" in seen.path for seen in hub.requests[before:])
    assert client.snapshot(HF_HUB_OFFLINE="1").returncode == 0


def test_a_new_commit_fetches_what_changed(hub, client, model):
    client.snapshot()
    (model / "config.json").write_text("{}")
    hub.commit(REPO, model)
    before = len(hub.requests)
    folder = Path(client.snapshot().stdout.strip())
    assert (folder / "config.json").read_text() == "{}"
    assert not [seen for seen in hub.requests[before:] if "/storage/" in seen.path]


def test_information_listings_and_refs_are_read_by_the_client(hub, client):
    hub.repositories[REPO].tags["v1"] = hub.repositories[REPO].branches["main"]
    done = client.run(
        f"""
        api = HfApi()
        info = api.model_info({REPO!r}, files_metadata=True)
        print(info.sha, len(info.siblings), [s.lfs.size for s in info.siblings if s.lfs][0])
        print([b.name for b in api.list_repo_refs({REPO!r}).branches], [t.name for t in api.list_repo_refs({REPO!r}).tags])
        print(sorted(f.path for f in api.list_repo_tree({REPO!r}))[:1], api.get_paths_info({REPO!r}, ["config.json"])[0].blob_id)
        print(api.file_exists({REPO!r}, "config.json"), api.file_exists({REPO!r}, "none"), api.revision_exists({REPO!r}, "v1"))
        """
    )
    assert done.returncode == 0, done.stderr
    main = hub.repositories[REPO].branches["main"]
    lines = done.stdout.splitlines()
    assert lines[0].startswith(main)
    assert lines[1:] == [
        "['main'] ['v1']",
        f"['config.json'] {hub.repositories[REPO].commits[main]['config.json'].blob}",
        "True False True",
    ]


def test_long_listings_come_in_pages_and_folders_are_listed(hub, client):
    hub.commit("a/many", {f"part/{n:04}.txt": b"x" for n in range(1100)} | {"deep/er/file.bin": b"y"})
    done = client.run(
        """
        files = list(HfApi().list_repo_tree("a/many", recursive=True))
        print(len([f for f in files if isinstance(f, RepoFile)]), sorted(f.path for f in files if not isinstance(f, RepoFile)))
        print([f.path for f in HfApi().list_repo_tree("a/many", "deep")], len(list(HfApi().list_repo_tree("a/many"))))
        """.replace("isinstance", "isinstance")
        .replace("RepoFile", "hf_api.RepoFile")
        .replace("files = ", "from huggingface_hub import hf_api; files = ")
    )
    assert done.stdout.splitlines() == ["1101 ['deep', 'deep/er', 'part']", "['deep/er'] 2"], done.stderr


def test_a_snapshot_can_be_verified_with_the_clients_own_means(hub, client):
    client.snapshot()
    done = client.run(
        f"v = HfApi().verify_repo_checksums({REPO!r}); print(len(v.mismatches), len(v.missing_paths), v.checked_count)"
    )
    assert done.stdout.split()[:2] == ["0", "0"], done.stderr


# -- who may read


def test_a_repository_that_is_not_there(hub, client):
    done = client.run("snapshot_download('no/body')")
    assert "RepositoryNotFoundError: 401 Client Error." in done.stderr
    done = client.run("snapshot_download('no/body', token='hf_x')")
    assert "RepositoryNotFoundError: 404 Client Error." in done.stderr


def test_a_revision_and_a_file_that_are_not_there(hub, client):
    assert "RevisionNotFoundError: 404" in client.snapshot(arguments=", revision='v9'").stderr
    assert "EntryNotFoundError: 404" in client.run(f"hf_hub_download({REPO!r}, 'none.bin')").stderr


def test_a_private_repository_is_there_with_its_token_only(hub, client, model):
    hub.commit("me/mine", model, token="hf_secret")
    assert "RepositoryNotFoundError: 401" in client.run("snapshot_download('me/mine')").stderr
    assert client.run("print(snapshot_download('me/mine'))", HF_TOKEN="hf_secret").returncode == 0


def test_a_gated_repository_is_seen_and_not_read(hub, client, model):
    hub.commit("me/gated", model, token="hf_secret", gated=True)
    assert "GatedRepoError" in client.run("snapshot_download('me/gated')").stderr
    assert client.run("print(snapshot_download('me/gated'))", HF_TOKEN="hf_secret").returncode == 0


# -- the way is bad


def test_a_slow_hub_takes_its_time(hub, client, model):
    size = (model / WEIGHTS).stat().st_size
    hub.faults.add(Fault("slow", WEIGHTS, rate=200_000))
    began = time.monotonic()
    done = client.snapshot()
    assert done.returncode == 0
    assert time.monotonic() - began >= size / 200_000


@pytest.mark.parametrize("kind", ["stall", "cut"])
def test_a_transfer_that_stops_is_resumed_where_it_stopped(kind, hub, client, model):
    hub.faults.add(Fault(kind, WEIGHTS, times=1, after=65_536, seconds=3))
    done = client.run(f"{SMALL_PIECES}print(snapshot_download({REPO!r}))")
    assert done.returncode == 0, done.stderr
    assert "Trying to resume download..." in done.stderr
    assert same(Path(done.stdout.strip()), model)
    ranges = fetched(hub, WEIGHTS)
    assert (ranges[0][0], len(ranges)) == (None, 2)
    assert ranges[1] == ("bytes=65536-", 206)


def test_a_reset_connection_ends_the_clients_snapshot(hub, client, model):
    hub.faults.add(Fault("reset", WEIGHTS, times=1, after=65_536))
    done = client.snapshot()
    assert done.returncode == 1  # 2.4.0 resumes after a close and after silence, not after RST
    assert "Connection reset by peer" in done.stderr
    assert same(Path(client.snapshot().stdout.strip()), model)


def test_a_hub_that_ignores_ranges_starts_the_file_again(hub, client, model):
    hub.faults.add(Fault("cut", WEIGHTS, times=1, after=65_536))
    hub.faults.add(Fault("no-ranges", WEIGHTS))
    done = client.run(f"{SMALL_PIECES}print(snapshot_download({REPO!r}))")
    assert done.returncode == 0, done.stderr
    assert same(Path(done.stdout.strip()), model)
    assert fetched(hub, WEIGHTS)[-1] == ("bytes=65536-", 200)


def test_a_transfer_that_never_moves_is_given_up(hub, client):
    hub.faults.add(Fault("cut", WEIGHTS, after=0))
    done = client.snapshot()
    assert done.returncode == 1
    assert "Max retries exceeded." in done.stderr
    assert len(fetched(hub, WEIGHTS)) == 6


def test_a_truncated_file_is_noticed_by_its_length(hub, client):
    hub.faults.add(Fault("truncated", WEIGHTS, after=1000))
    done = client.snapshot()
    assert done.returncode == 1
    assert "Consistency check failed: file should be of size" in done.stderr


def test_a_flipped_bit_passes_the_client_and_not_a_hash(hub, client, model):
    hub.faults.add(Fault("flipped", WEIGHTS))
    done = client.snapshot()
    assert done.returncode == 0
    file = Path(done.stdout.strip()) / WEIGHTS
    true = (model / WEIGHTS).read_bytes()
    assert sum(a != b for a, b in zip(file.read_bytes(), true, strict=True)) == 1
    assert hashlib.sha256(file.read_bytes()).hexdigest() != file.readlink().name
    done = client.run(f"print(len(HfApi().verify_repo_checksums({REPO!r}).mismatches))")
    assert done.stdout.strip() == "1", done.stderr


def test_a_sign_in_page_instead_of_a_file_is_noticed(hub, client):
    hub.faults.add(Fault("page", WEIGHTS))
    assert "Consistency check failed" in client.snapshot().stderr


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_hub_is_asked_again(status, hub, client, model):
    hub.faults.add(Fault("status", "/api/models/*/tree/*", status=status, times=2, retry_after=0))
    if status == 429:
        hub.faults.add(Fault("status", WEIGHTS, status=429, times=2, retry_after=0))
    done = client.snapshot()
    assert done.returncode == 0, done.stderr
    assert same(Path(done.stdout.strip()), model)


def test_a_hub_that_is_down_is_said_to_be(hub, client):
    hub.faults.add(Fault("status", "/api/*", status=503))
    done = client.snapshot()
    assert done.returncode == 1
    assert "503 Service Unavailable" in done.stderr


@pytest.mark.parametrize(
    ("status", "words"), [(401, "Client error '401 Unauthorized'"), (404, "Client error '404 Not Found'")]
)
def test_a_refusal_in_the_middle_of_a_snapshot(status, words, hub, client):
    hub.faults.add(Fault("status", f"/{REPO}/resolve/*", status=status, method="*"))
    done = client.snapshot()
    assert done.returncode == 1
    assert words in done.stderr


def test_a_connection_refused_halfway_leaves_a_partial_cache_that_a_later_run_completes(hub, client, model):
    hub.faults.add(Fault("status", WEIGHTS, status=500))
    assert client.snapshot().returncode == 1
    store = client.cache / "hub" / "models--Qwen--Qwen3.6-27B"
    present = {path.name for path in (store / "snapshots").rglob("*")}
    assert "config.json" in present
    assert WEIGHTS not in present
    hub.faults.clear()
    done = client.snapshot()
    assert done.returncode == 0, done.stderr
    assert same(Path(done.stdout.strip()), model)


# -- the hub itself


def get(url: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def test_ranges_of_a_file(hub, model):
    true = (model / WEIGHTS).read_bytes()
    url = f"{hub.url}/{REPO}/resolve/main/{WEIGHTS}"
    status, headers, body = get(url, Range="bytes=10-19")
    assert (status, body, headers["Content-Range"]) == (206, true[10:20], f"bytes 10-19/{len(true)}")
    assert get(url, Range="bytes=-5")[2] == true[-5:]
    assert get(url, Range=f"bytes={len(true)}-")[0] == 416
    etag = get(url)[1]["ETag"]
    assert get(url, **{"If-None-Match": etag})[0] == 304
    assert get(url, Range="bytes=10-", **{"If-Range": '"other"'})[0] == 200


@given(st.text(alphabet="bytes=0123456789-, x", max_size=20), st.integers(0, 50))
def test_any_range_header_gives_part_of_the_file_or_none(header, size):
    span = byte_range(header, size)
    assert span is None or 0 <= span[0] <= span[1] <= size


def test_many_clients_at_once_get_their_own_bytes(hub, model):
    true = (model / WEIGHTS).read_bytes()
    got: list[bool] = []

    def part(n: int) -> None:
        body = get(f"{hub.url}/{REPO}/resolve/main/{WEIGHTS}", Range=f"bytes={n * 1000}-{n * 1000 + 999}")[2]
        got.append(body == true[n * 1000 : n * 1000 + 1000])

    threads = [threading.Thread(target=part, args=(n,)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [True] * 20


def test_by_hand_a_folder_is_served_and_faults_are_set(tmp_path, model):
    (tmp_path / "serve" / "a").mkdir(parents=True)
    model.rename(tmp_path / "serve" / "a" / "b")
    command = [sys.executable, "-m", "tests.lab.hub"]
    root = Path(__file__).parents[2]
    with subprocess.Popen([*command, str(tmp_path / "serve")], stdout=subprocess.PIPE, text=True, cwd=root) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("a/b  ")
        url = running.stdout.readline().split()[0].removeprefix("HF_ENDPOINT=")
        assert get(f"{url}/a/b/resolve/main/config.json")[0] == 200

        def fault(text: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [*command, "--url", url, "--faults", text], capture_output=True, text=True, cwd=root, check=False
            )

        assert fault('[{"kind": "status", "match": "config.json", "status": 503}]').returncode == 0
        assert get(f"{url}/a/b/resolve/main/config.json")[0] == 503
        wrong = fault('[{"kind": "flood"}]')
        assert (wrong.returncode, wrong.stderr.startswith("no fault of kind 'flood': there are slow, stall")) == (
            2,
            True,
        )
        assert fault("[]").returncode == 0
        assert get(f"{url}/a/b/resolve/main/config.json")[0] == 200
        running.terminate()
        assert running.wait(5) == 0
    missing = subprocess.run(
        [*command, str(tmp_path / "nothing")], capture_output=True, text=True, cwd=root, check=False
    )
    assert missing.returncode == 2
