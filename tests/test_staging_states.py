"""What files of a model say of themselves, and which state follows; what memory allows; placing. Pure."""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import mmap
import os
import random
import resource
import tempfile
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl import staging
from gpuctl.agent import stage as program
from gpuctl.agent.stage import Bad, BadHeader, Filling, Folder, Teller, belonging, differs, judge, judge_copy, tensors
from tests.lab.engines.install import safetensors

SHARDS = [f"model-{n:05d}-of-00004.safetensors" for n in range(1, 5)]
SIZES = {
    "config.json": 700,
    "tokenizer.json": 9000,
    "model.safetensors.index.json": 500,
    **dict.fromkeys(SHARDS, 10_000),
}


def sha(path):
    return "sha256:" + hashlib.sha256(path.encode()).hexdigest()


def listing(*, tree=True, index=True, without=(), **changed):
    """A complete model's listing, with what is changed in it."""
    files = {
        path: {"size": size, "digest": sha(path), "mtime_ns": 1} for path, size in SIZES.items() if path not in without
    }
    for path in SHARDS:
        if path in files:
            files[path]["head"] = {"names": [path], "end": 10_000}
    for path, change in changed.items():
        files[path].update(change)
    found = {"kind": "hub", "path": "/cache", "exists": True, "files": files, "index": {}, "tree": None}
    if index and "model.safetensors.index.json" in files:
        found["index"] = {"model.safetensors.index.json": {path: [path] for path in SHARDS}}
    if tree:
        found["tree"] = {path: {"size": size, "digest": sha(path)} for path, size in SIZES.items()}
    return found


# -- headers


@given(st.dictionaries(st.text(min_size=1, max_size=20), st.binary(max_size=200), max_size=8), st.binary(max_size=20))
def test_a_safetensors_file_is_as_long_as_its_header_says(content, more):
    if "__metadata__" in content:
        return
    data = safetensors(content)
    names, end = tensors(data, len(data))
    assert (names, end) == (sorted(content), len(data))
    assert tensors(data + more, len(data + more))[1] == len(data)


@given(st.binary(max_size=400))
def test_any_bytes_are_a_header_or_are_refused(data):
    try:
        names, end = tensors(data, len(data))
    except BadHeader as error:
        assert str(error)
        assert "\n" not in str(error)
    else:
        assert names == sorted(names)
        assert end >= 8


@given(st.integers(0, 300), st.integers(0, 7))
def test_a_bit_flipped_in_a_header_is_refused_or_changes_what_it_says(at, bit):
    data = bytearray(safetensors({"a.weight": b"x" * 100, "b.weight": b"y" * 60}))
    length = 8 + int.from_bytes(data[:8], "little")
    at %= length
    before = tensors(bytes(data), len(data))
    flipped = bytes(data[:at]) + bytes([data[at] ^ 1 << bit]) + bytes(data[at + 1 :])
    try:
        assert (
            tensors(flipped, len(data)) != before
            or json.loads(flipped[8:length]) != json.loads(data[8:length])
            or at >= 8
        )
    except BadHeader:
        pass


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no header"),
        (b"1234567", "no header"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
        (b"<!doctype html><html>", "a web page"),
        (b"\xff" * 60, "its beginning is something else"),
        ((1 << 20).to_bytes(8, "little") + b"{}", "ends within its header"),
        ((2).to_bytes(8, "little") + b"[]", "not readable"),
        ((2).to_bytes(8, "little") + b"{x", "not readable"),
    ],
)
def test_what_is_no_safetensors_file_is_told(data, said):
    with pytest.raises(BadHeader, match=said):
        tensors(data, len(data))


def test_a_header_with_a_hole_or_a_tensor_of_another_shape_is_refused():
    def file(**entry):
        text = json.dumps({"t": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8], **entry}}).encode()
        return len(text).to_bytes(8, "little") + text

    assert tensors(file(), 0)[0] == ["t"]
    with pytest.raises(BadHeader, match="hole"):
        tensors(file(data_offsets=[8, 16]), 0)
    with pytest.raises(BadHeader, match="does not fit"):
        tensors(file(shape=[5]), 0)


def gguf_file(folder, *, tokens=20, alignment=None):
    """As the library writes one: strings, arrays, tensors of three types."""
    path = folder / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"token {number}" for number in range(tokens)])
    writer.add_token_scores([0.0] * tokens)
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_tensor("norm", np.ones((3, 5), dtype=np.float32))
    writer.add_tensor("half", np.ones((4, 256), dtype=np.float16))
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("last", gguf.quants.quantize(np.ones((4, 256), dtype=np.float32), kind), raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 64])
def test_a_gguf_file_that_was_cut_is_no_complete_model(tmp_path, alignment):
    """`wget` that was broken off leaves one; nothing but its header says so."""
    path = gguf_file(tmp_path, alignment=alignment)
    whole = path.read_bytes()
    assert judge(program.source_listing(str(path), None))["state"] == "complete"
    last = 4 * 256 // 32 * 34  # bytes of the last tensor; what stands behind it is padding
    for size, said in [
        (len(whole) - last, f"{last} bytes too short"),
        (len(whole) - last // 2, f"{last // 2} bytes too short"),
        (200, "the file ends within its header"),
        (6, "the file ends within its header"),
    ]:
        path.write_bytes(whole[:size])
        verdict = judge(program.source_listing(str(path), None))
        assert (verdict["state"], verdict["wrong"][0]["why"]) == ("size mismatch", said)
    path.write_bytes(b"<html>" + whole)
    assert judge(program.source_listing(str(path), None))["state"] == "corrupt"


def test_types_of_tensors_are_as_large_as_the_library_says():
    sizes = gguf.constants.GGML_QUANT_SIZES
    known = {int(kind): size for kind, size in sizes.items() if kind.name not in ("Q8_1",)}  # never in a file
    assert {kind: size for kind, size in program.GGML_BLOCKS.items() if kind in known} == {
        kind: size for kind, size in known.items() if kind in program.GGML_BLOCKS
    }
    assert len(set(known) & set(program.GGML_BLOCKS)) > 30


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 900), st.booleans())
def test_any_bytes_have_an_end_or_are_refused(any_gguf, noise, cut, front):
    data = b"GGUF" + noise if front else any_gguf[:cut] + noise + any_gguf[cut + len(noise) :]
    try:
        assert program.gguf_end(io.BytesIO(data), len(data)) >= 0
    except BadHeader:
        pass


@pytest.fixture(scope="module")
def any_gguf(tmp_path_factory):
    return gguf_file(tmp_path_factory.mktemp("any")).read_bytes()


# -- what is expected


def test_weights_in_a_second_format_do_not_belong_to_a_model():
    paths = [
        "config.json",
        *SHARDS,
        "pytorch_model.bin",
        "original/consolidated.00.pth",
        "onnx/model.onnx",
        "consolidated.safetensors",
        ".gitattributes",
        "m.gguf",
        "training_args.bin",
    ]
    assert set(belonging(paths)) == {"config.json", *SHARDS, "training_args.bin"}
    assert belonging(["a.Q4.gguf", "a.Q8.gguf", "README.md"], ["*Q4*"]) == ["a.Q4.gguf"]
    assert set(belonging(["pytorch_model.bin", "config.json"])) == {"pytorch_model.bin", "config.json"}


@given(st.text(max_size=60) | st.from_regex(r"\{.*\}", fullmatch=True))
def test_any_text_is_a_tree_an_index_a_manifest_or_none(text):
    for read in (program.tree_of, program.shards_of, program.manifest_of):
        found = read(text)
        assert found is None or isinstance(found, dict)


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a//b", "a/./b", "", "a\0b"])
def test_a_tree_or_an_index_cannot_lead_out_of_the_model(path):
    assert program.tree_of(json.dumps({"files": {path: {"size": 1, "blob_id": "x"}}})) is None
    assert program.shards_of(json.dumps({"weight_map": {"t": path}})) is None
    assert program.manifest_of(json.dumps({"files": [{"path": path, "size": 1, "sha256": "0" * 64}]})) is None


# -- states


def test_a_complete_model():
    for tree, index, known in [(True, True, "tree"), (False, True, "index"), (False, False, "names")]:
        verdict = judge(listing(tree=tree, index=index))
        assert (verdict["state"], verdict["known_from"], verdict["missing"], verdict["wrong"]) == (
            "complete",
            known,
            [],
            [],
        )


@pytest.mark.parametrize(
    ("change", "state", "missing"),
    [
        ({"without": SHARDS}, "metadata only", SHARDS),
        ({"without": [SHARDS[2]]}, "partial", [SHARDS[2]]),
        ({"without": ["config.json"]}, "partial", ["config.json"]),
        ({"without": list(SIZES)}, "absent", sorted(SIZES)),
        ({SHARDS[0]: {"size": None}}, "partial", [SHARDS[0]]),
        ({SHARDS[0]: {"size": 9_999}}, "size mismatch", []),
        ({SHARDS[0]: {"head": {"error": "x"}}}, "corrupt", []),
        ({SHARDS[0]: {"head": {"names": ["other"], "end": 10_000}}}, "corrupt", []),
        ({SHARDS[0]: {"found": {"sha256": "sha256:" + "0" * 64}}}, "corrupt", []),
    ],
)
def test_each_state_and_what_is_missing(change, state, missing):
    verdict = judge(listing(**change))
    assert (verdict["state"], sorted(one["path"] for one in verdict["missing"])) == (state, sorted(missing))
    assert all(one["bytes"] == SIZES[one["path"]] for one in verdict["missing"])


def test_where_nothing_says_what_is_missing_that_is_said():
    """A cache of an older library without `trees/`, and not even an index in it."""
    verdict = judge({"files": {"config.json": {"size": 2}}, "index": {}})
    assert verdict["state"] == "metadata only"
    assert program.missing_in_words(verdict).startswith("not one file of weights is there")
    verdict = judge({"files": {"config.json": {"size": 2}}, "index": {}}, ["*.gguf"])
    assert verdict["state"] == "absent"
    assert program.missing_in_words(verdict) == "none of its files belongs to the model: *.gguf"


def test_a_folder_that_is_not_there_is_absent_with_the_reason():
    verdict = judge({"exists": False, "files": {}, "index": {}, "why": "there is no /x"})
    assert (verdict["state"], verdict["notes"]) == ("absent", ["there is no /x"])


damages = st.dictionaries(
    st.sampled_from(list(SIZES)),
    st.sampled_from(["gone", "dangling", "short", "long", "header", "digest"]),
    max_size=5,
)


@given(damages, st.booleans())
def test_whatever_is_damaged_is_named_and_the_rest_is_not(damage, tree):
    seen = listing(tree=tree, without=[path for path, how in damage.items() if how == "gone"])
    for path, how in damage.items():
        entry = seen["files"].get(path)
        if how == "dangling":
            entry["size"] = None
        elif how in ("short", "long"):
            entry["size"] += -1 if how == "short" else 1
        elif how == "header":
            entry["head"] = {"error": "no header"}
        elif how == "digest":
            entry["found"] = {"sha256": "sha256:" + "f" * 64}
    verdict = judge(seen)
    named = {one["path"] for one in [*verdict["missing"], *verdict["wrong"]]}
    good = {one["path"] for one in verdict["files"]}
    assert not named & good
    if tree:
        assert named == set(damage)
        assert good == set(SIZES) - set(damage)
    # without a tree a shard is still known by the index or the names of the others, and by its header
    lost = {
        path
        for path in damage
        if path in SHARDS and damage[path] in ("gone", "dangling", "short", "long", "header", "digest")
    }
    if set(damage) - {"model.safetensors.index.json"} and len({p for p in lost if damage[p] == "gone"}) < 4:
        assert lost <= named
    assert (verdict["state"] == "complete") <= (not named)
    if tree:
        assert (verdict["state"] == "complete") == (not damage)


@given(damages)
def test_a_copy_is_staged_only_if_it_is_all_there(damage):
    manifest = {"files": [{"path": path, "size": size, "sha256": sha(path)[7:]} for path, size in SIZES.items()]}
    seen = listing(tree=False, without=[path for path, how in damage.items() if how == "gone"])
    for path, how in damage.items():
        if how != "gone":
            seen["files"][path]["size"] = None if how == "dangling" else SIZES[path] - 1
    assert (judge_copy(seen, manifest)["state"] == "staged") == (not damage)


def test_a_copy_is_stale_when_anything_of_its_source_is_another():
    source = judge(listing())
    manifest = {
        "files": [
            {"path": one["path"], "size": one["size"], "sha256": one["digest"][7:], "mtime_ns": 1}
            for one in source["files"]
        ]
    }
    assert differs(manifest, source) == ""
    assert (
        differs(manifest, judge(listing(**{"config.json": {"digest": sha("x")}}, tree=False)))
        == "config.json has other contents"
    )
    assert differs({"files": manifest["files"][1:]}, source) == "config.json is new"
    assert differs({"files": [*manifest["files"], {"path": "z", "size": 1}]}, source) == "z is no longer in it"
    touched = judge(listing(**{"config.json": {"digest": None, "mtime_ns": 2}}, tree=False))
    assert differs(manifest, touched) == "config.json was changed"


# -- room


@given(st.integers(0, 1 << 42), st.lists(st.integers(-(1 << 30), 1 << 42), max_size=4))
def test_it_fits_only_where_every_limit_leaves_its_headroom(need, free):
    headroom = program.headroom_for(need)
    good, why = program.fits(need, [{"what": str(i), "free": one} for i, one in enumerate(free)], headroom)
    assert good == all(one >= need + headroom for one in free)
    assert bool(why) != good


V2 = "0::/system.slice/gpuctl-stage-m.service\n"
TABLE = [("/", "ext4", "/", "rw"), ("/sys/fs/cgroup", "cgroup2", "/", "rw")]


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        ({"/sys/fs/cgroup/memory.max": "max", "/sys/fs/cgroup/memory.current": "5"}, None),
        ({"/sys/fs/cgroup/memory.max": "1000", "/sys/fs/cgroup/memory.current": "400"}, 600),
        (
            {
                "/sys/fs/cgroup/memory.max": "1000",
                "/sys/fs/cgroup/memory.high": "900",
                "/sys/fs/cgroup/memory.current": "400",
            },
            500,
        ),
        (
            {
                "/sys/fs/cgroup/system.slice/memory.max": "1000",
                "/sys/fs/cgroup/system.slice/memory.current": "900",
                "/sys/fs/cgroup/system.slice/memory.stat": "anon 1\ninactive_file 300\nactive_file 50\nshmem 7\n",
            },
            450,
        ),
    ],
)
def test_the_memory_cgroup_of_this_process_and_those_above(files, free):
    limits = program.cgroup_limits(TABLE, V2, files.get)
    assert [one["free"] for one in limits] == ([] if free is None else [free])


def test_the_memory_cgroup_of_old_kernels_and_in_a_guest():
    files = {
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "1000",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "100",
        "/sys/fs/cgroup/memory/memory.stat": "inactive_file 7\ntotal_inactive_file 50\n",
    }
    table = [("/sys/fs/cgroup/memory", "cgroup", "/lxc/200", "rw,memory")]
    assert program.cgroup_limits(table, "5:memory:/lxc/200/x\n", files.get)[0]["free"] == 950
    assert program.cgroup_limits(table, "5:memory:/../other\n", files.get)[0]["free"] == 950
    files["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = str((1 << 63) - 4096)
    assert program.cgroup_limits(table, "5:memory:/lxc/200\n", files.get) == []


@given(st.text(max_size=200), st.text(max_size=200))
def test_no_text_of_proc_confuses_it(own, node):
    program.cgroup_limits(TABLE, own, lambda path: None)
    staging.read_node_limits(node, "n")
    staging.read_placed(node)


def test_what_a_node_knows_of_its_guest():
    text = (
        "MemTotal: 100 kB\nMemAvailable: 2000 kB\n"
        "== /sys/fs/cgroup/lxc/200/memory.max\n1000000\n== /sys/fs/cgroup/lxc/200/memory.high\n900000\n"
        "== /sys/fs/cgroup/lxc/200/memory.current\n500000\n== /sys/fs/cgroup/lxc/200/memory.stat\ninactive_file 1000\nactive_file 0\n"
    )
    memory, guest = staging.read_node_limits(text, "kpro6")
    assert (memory["free"], guest["free"]) == (2000 << 10, 401000)
    assert "memory.high of /sys/fs/cgroup/lxc/200) on kpro6" in guest["what"]


def test_what_is_placed_on_a_machine():
    text = f"systemd\n{'a' * 64}  /etc/x y.json\n\nId=gpuctl-stage-m.service\nUnitFileState=enabled\nSourcePath=\n\nId=run-m.mount\nSourcePath=/etc/fstab\n"
    there, shown, systemd = staging.read_placed(text)
    assert (there, systemd) == ({"/etc/x y.json": "a" * 64}, True)
    assert shown["run-m.mount"]["SourcePath"] == "/etc/fstab"
    assert shown["gpuctl-stage-m.service"]["UnitFileState"] == "enabled"


# -- caches


def test_where_compiled_kernels_lie():
    places = program.cache_places({}, "/home/a", "a")
    assert {name: place for name, (place, _) in places.items()} == {
        "triton": "/home/a/.triton/cache",
        "flashinfer": "/home/a/.cache/flashinfer",
        "torch inductor": "/tmp/torchinductor_a",
        "torch extensions": "/home/a/.cache/torch_extensions",
    }
    moved = program.cache_places(
        {
            "TRITON_HOME": "/d",
            "TORCHINDUCTOR_CACHE_DIR": "/e",
            "XDG_CACHE_HOME": "/f",
            "FLASHINFER_WORKSPACE_BASE": "/g",
        },
        "/home/a",
        "a",
    )
    assert [place for place, _ in moved.values()] == [
        "/d/.triton/cache",
        "/g/.cache/flashinfer",
        "/e",
        "/f/torch_extensions",
    ]


def test_a_cache_in_memory_is_lost_and_said(tmp_path):
    here = program.caches(
        {"caches": [{"env": {"TRITON_CACHE_DIR": "/dev/shm/no-such", "TORCHINDUCTOR_CACHE_DIR": "/var/no-such"}}]}
    )
    found = {one["cache"]: one for one in here}
    if program.mount_under("/dev/shm")[1] == "tmpfs":
        assert "in memory (/dev/shm)" in found["triton"]["lost"]
    assert found["torch inductor"]["lost"] == ""


# -- filling: cut off at any point, gone on with, the bytes are the same


def test_buffers_are_where_the_disk_can_write_into_huge_pages():
    for size in (1 << 20, program.RANGE, (5 << 20) + 4096):
        buffer = program.in_huge_pages(size)
        assert len(buffer) == size
        assert ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % program.HUGE == 0
        buffer[-1] = 1


def pages_cached(path) -> int:
    """cachestat(2): pages of a file in the page cache."""
    span, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    with open(path, "rb") as file:
        if ctypes.CDLL(None).syscall(451, file.fileno(), ctypes.byref(span), ctypes.byref(found), 0) != 0:
            pytest.skip("a kernel without cachestat")
    return int(found[0])


def cold_file(folder):
    """One that only the disk has, or the test is skipped."""
    folder.mkdir()
    with open(folder / "f", "wb") as file:
        file.write(random.Random(1).randbytes(3 * program.RANGE + 5000))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if pages_cached(folder / "f") > 4:
        pytest.skip("a file system that cannot forget")
    try:
        os.close(os.open(folder / "f", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("a file system without O_DIRECT")


def fill(source, copy, hashed):
    """Copies the file; returns the bytes that came from a disk for it."""
    seen = os.stat(source / "f")
    entry = {"path": "f", "size": seen.st_size, "digest": None, "mtime_ns": seen.st_mtime_ns}
    filling = Filling(str(copy), [entry], Folder({"path": str(source)}), Teller(True, 1e9), hashed)
    filling.resume()
    before = from_disk()
    filling.run(4, lambda left: None)
    return from_disk() - before


def from_disk() -> int:
    """Of this process, since it began."""
    (line,) = [one for one in Path("/proc/self/io").read_text().splitlines() if one.startswith("read_bytes")]
    return int(line.split()[1])


@pytest.fixture(params=["cachestat", "without cachestat"])
def kernel(request, monkeypatch):
    """A kernel of today, and one before 6.5."""
    if request.param == "without cachestat":
        monkeypatch.setattr(program, "cached_pages", lambda fd, at, length: None)


@pytest.mark.parametrize("hashed", [True, False])
def test_what_comes_from_a_disk_leaves_nothing_in_the_page_cache(tmp_path, kernel, hashed):
    cold_file(tmp_path / "source")
    before = pages_cached(tmp_path / "source/f")
    assert fill(tmp_path / "source", tmp_path / "copy", hashed) >= 3 * program.RANGE
    assert pages_cached(tmp_path / "source/f") <= before, "asking what is there brings nothing there that stays"
    assert (tmp_path / "copy/f").read_bytes() == (tmp_path / "source/f").read_bytes()


@pytest.mark.parametrize("hashed", [True, False])
def test_what_the_page_cache_has_is_not_read_from_the_disk(tmp_path, kernel, hashed):
    cold_file(tmp_path / "source")
    data = (tmp_path / "source/f").read_bytes()
    assert fill(tmp_path / "source", tmp_path / "copy", hashed) == 0
    assert (tmp_path / "copy/f").read_bytes() == data


@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize("numbers", [[*range(20), 25], [*range(0, 40, 2)]])
def test_of_what_the_page_cache_has_in_part_the_rest_comes_past_it(tmp_path, monkeypatch, hashed, numbers):
    """Also within the many ranges that one thread takes at once from a file that was cached so far, and while others
    read what is cached elsewhere in it.
    """
    monkeypatch.setattr(program, "RANGE", 1 << 18)
    monkeypatch.setattr(program, "PIECE", 1 << 12)
    folder, size = tmp_path / "source", 40 << 18
    cold_file(folder)
    with open(folder / "f", "wb") as file:
        file.write(random.Random(2).randbytes(size))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with open(folder / "f", "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for number in numbers:
            os.pread(file.fileno(), 1 << 18, number << 18)
    cached = pages_cached(folder / "f")
    assert fill(folder, tmp_path / "copy", hashed) == size - cached * mmap.PAGESIZE
    assert pages_cached(folder / "f") <= cached
    assert (tmp_path / "copy/f").read_bytes() == random.Random(2).randbytes(size)


@pytest.mark.parametrize(("hashed", "writers"), [(True, 2), (False, 1)])
def test_out_of_the_page_cache_threads_do_not_crowd_one_file(tmp_path, monkeypatch, hashed, writers):
    monkeypatch.setattr(program, "RANGE", 1 << 12)
    monkeypatch.setattr(program, "STEP", 2)
    (tmp_path / "source").mkdir()
    (tmp_path / "source/f").write_bytes(random.Random(3).randbytes(400 << 12))
    counts = []

    class Counting(Folder):
        def open(self, path):
            opened = super().open(path)
            opened.warm, into = True, opened.into
            monkeypatch.setattr(program._Opened, "resident", lambda *_: True)

            def counted(*arguments):
                counts.append(filling.parts[0].copiers)
                into(*arguments)

            opened.into = counted
            return opened

    seen = program.listing_of(str(tmp_path / "source"))
    entries = [{"path": "f", "size": seen["files"]["f"]["size"], "digest": None, "mtime_ns": None}]
    filling = Filling(
        str(tmp_path / "copy"), entries, Counting({"path": str(tmp_path / "source")}), Teller(True, 1e9), hashed
    )
    filling.resume()
    filling.cores = 8
    filling.run(8, lambda left: None)
    assert max(counts) <= writers
    assert (tmp_path / "copy/f").read_bytes() == (tmp_path / "source/f").read_bytes()


class Cached(Folder):
    """A source of which the page cache has what `has(path, number of a range)` says. Notes every step as
    (path, first range, how many), and how many of its files are open.
    """

    def __init__(self, listing, has, meanwhile=lambda path: None):
        super().__init__(listing)
        self.has, self.meanwhile = has, meanwhile
        self.steps, self.opened, self.most = [], 0, 0

    def open(self, path):
        opened = super().open(path)
        into, close = opened.into, opened.close
        self.opened += 1
        self.most = max(self.most, self.opened)

        def resident(at, length):
            return all(self.has(path, at // program.RANGE + one) for one in range(-(-length // program.RANGE)))

        def noted(copy, offset, length, *more):
            self.steps.append((path, offset // program.RANGE, -(-length // program.RANGE)))
            self.meanwhile(path)
            into(copy, offset, length, *more)

        def closed():
            self.opened -= 1
            close()

        opened.resident = opened.ahead = resident
        opened.into, opened.close = noted, closed
        return opened


def filling_of(folder, sizes, source, *, hashed=True, cores=1):
    """Of files with so many ranges of a page each; `source`: what opens them, of a listing."""
    (folder / "source").mkdir()
    for path, ranges in sizes.items():
        (folder / "source" / path).write_bytes(random.Random(path).randbytes(ranges * program.RANGE))
    seen = program.listing_of(str(folder / "source"))
    entries = [{"path": path, "size": one["size"], "digest": None} for path, one in seen["files"].items()]
    filling = Filling(str(folder / "copy"), entries, source(seen), Teller(True, 1e9), hashed)
    filling.cores = cores
    filling.resume()
    return filling


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(program, "RANGE", 1 << 12)
    monkeypatch.setattr(program, "STEP", 8)


@pytest.mark.parametrize("hashed", [True, False])
def test_of_many_cached_files_only_those_are_open_that_are_copied(tmp_path, small, hashed):
    """A process may have 1024 files open."""
    sizes = {f"f{number:03}": 4 for number in range(300)}
    filling = filling_of(tmp_path, sizes, lambda seen: Cached(seen, lambda *_: True), hashed=hashed, cores=2)
    filling.run(8, lambda left: None)
    assert filling.source.most <= 16
    assert filling.teller.done == filling.teller.total == 300 * 4 * 4096
    assert filling.busy == filling.source.opened == 0


@pytest.mark.parametrize("hashed", [True, False])
def test_what_a_disk_has_is_not_left_to_one_thread_because_a_little_of_it_is_cached(tmp_path, small, hashed):
    """A thread takes many ranges at once only where the page cache has all of them."""

    def has(path, number):
        return number % 16 == 3 or 100 <= number < 140

    filling = filling_of(tmp_path, {"f": 200}, lambda seen: Cached(seen, has), hashed=hashed, cores=2)
    filling.run(8, lambda left: None)
    assert sum(count for _, _, count in filling.source.steps) == 200
    long = [(at, count) for _, at, count in filling.source.steps if count > 1]
    assert all(has("f", number) for at, count in long for number in range(at, at + count))
    assert long or hashed, "what is cached is taken in long steps; a hash that is behind follows range by range"


@pytest.mark.parametrize("hashed", [True, False])
def test_what_is_cached_does_not_wait_until_the_disk_is_done(tmp_path, small, hashed):
    """More threads than processors read the disk: they do not keep the processors busy."""
    there = threading.Event()

    def slow(path):
        assert path == "warm" or there.wait(20), "the disk was asked for everything first"
        if path == "warm" and sum(one[0] == "warm" for one in filling.source.steps) == 2:
            there.set()

    sizes = {"cold": 40, "warm": 16}
    filling = filling_of(
        tmp_path, sizes, lambda seen: Cached(seen, lambda path, _: path == "warm", slow), hashed=hashed
    )
    filling.run(4, lambda left: None)


def test_nothing_is_written_on_behind_a_line_of_the_journal_that_was_cut(tmp_path, small):
    """It would say that a range is there which is not."""
    sizes = {f"f{number:02}": 3 for number in range(12)}
    filling = filling_of(tmp_path, sizes, Folder)
    filling.note("0 0")
    with open(tmp_path / "copy/.journal", "a") as file:
        file.write("1")  # of "11 1"
    for one in filling.parts:
        (tmp_path / "copy" / one.path).write_bytes(bytes(one.size))
    for done in ([(0, 0)], [(0, 0), (0, 2)]):
        filling = Filling(filling.folder, [one.entry for one in filling.parts], filling.source, filling.teller)
        filling.resume()
        assert [(one.number, at) for one in filling.parts for at in range(3) if one.done[at]] == done
        filling.note("0 2")


def test_a_line_that_the_journal_has_no_room_for_is_not_in_it(tmp_path, small):
    filling = filling_of(tmp_path, {"f": 3}, Folder)
    before = (tmp_path / "copy/.journal").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 2, hard))
    try:
        with pytest.raises(OSError, match="No space left"):
            filling.note("0 1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "copy/.journal").read_bytes() == before


def test_a_file_that_must_not_be_as_large_is_an_end_that_names_it(tmp_path, small):
    """`ulimit -f`: met by every thread before it has copied anything."""
    filling = filling_of(tmp_path, {"f": 300}, Folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 12, hard))
    try:
        with pytest.raises(Bad, match=r"copy/f: File too large$"):
            filling.run(3, lambda left: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_is_read_again_is_no_speed_below_nothing():
    teller = Teller(True, 1e9)
    teller.begin("staging", 100)
    teller.add(80)
    teller.seen = [(teller.told, teller.done)]
    teller.add(-50)
    told = teller.progress(teller.told + 1)
    assert (told["bytes"], told["rate"], told["eta_s"]) == (30, 0, None)


class CutOff(Folder):
    """A source that fails after so many ranges."""

    def __init__(self, listing, after):
        super().__init__(listing)
        self.after = after

    def open(self, path):
        opened, into = super().open(path), None
        into = opened.into

        def counted(*arguments):
            self.after -= 1
            if self.after < 0:
                raise Bad("source", "cut off")
            into(*arguments)

        opened.into = counted
        return opened


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 5 << 16), min_size=1, max_size=5),
    st.lists(st.integers(0, 12), max_size=3),
    st.integers(1, 4),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_cut_off_anywhere_and_gone_on_with_the_copy_is_the_source(sizes, cuts, threads, hashed, dice):
    quiet = Teller(True, 1e9)
    before, program.RANGE = program.RANGE, 1 << 16
    try:
        with tempfile.TemporaryDirectory() as folder:
            source, copy = Path(folder, "source"), Path(folder, "copy")
            source.mkdir()
            for number, size in enumerate(sizes):
                (source / f"f{number}").write_bytes(random.Random(dice.random()).randbytes(size))
            seen = program.listing_of(str(source))
            entries = [
                {"path": path, "size": one["size"], "digest": None, "mtime_ns": one["mtime_ns"]}
                for path, one in seen["files"].items()
            ]
            for after in [*cuts, 10**9]:
                filling = Filling(str(copy), entries, CutOff(seen, after), quiet, hashed)
                filling.resume()
                try:
                    filling.run(threads, lambda left: None)
                except Bad as error:
                    assert str(error) == "cut off"
            assert not filling.damaged
            for number in range(len(sizes)):
                assert (copy / f"f{number}").read_bytes() == (source / f"f{number}").read_bytes()
            for one in filling.manifest("m", {})["files"]:
                if hashed:
                    assert one["sha256"] == hashlib.sha256((source / one["path"]).read_bytes()).hexdigest()
            os.unlink(copy / ".journal")
    finally:
        program.RANGE = before
