"""Models into memory: what is there, what is missing, filling a memory file system. One file, Python 3.9, Linux.

Reads one job (JSON) from stdin, to its end. With `"json": true` it writes JSON lines, else lines for a person. It runs
the same over SSH and alone at boot from a unit, and on the far machine when a model comes from there.

The job:
  do         "look" (changes nothing) | "stage" (default) | "fetch" (only the download) | "serve" (another stage.py)
  model      its name, for messages
  to         where servers find it: a folder, or one file, in a memory file system
  source     a folder, a file, a Hugging Face cache (or a repository in it), ssh://[user@]host[:port]/folder; optional
  hub        {"repo", "revision", "cache", "endpoint", "pythons": [executable ...], "xet": bool}; optional. Where the
             source is not complete, the real huggingface_hub downloads into the cache first, never into memory
  files      patterns of the files that belong to the model; without them all but weights in a second format
  verify     true: SHA-256 of everything that is there already, not only sizes and headers
  hash       false: no SHA-256 while copying (the manifest says so)
  drop_old   true: the old copy goes before the new one comes, where both have no room
  in_place   true: `to` is on a disk, where servers find it; there is nothing to copy, at most to download
  limits     [{"what", "free"} ...] bytes known to others, as of the node
  caches     [{"user", "env"} ...] whose JIT caches are looked at
  threads, stall_s, attempts, progress_s, headroom_bytes: numbers, each with a default

Its last line is a result (type "result": `state`, `copy`, `source`, `room`, `caches`) or an error (type "error":
`kind`, `message`, and the result's keys as far as they are known). Exit: 0 done; 1 the source is not usable; 2 the job
is wrong; 3 there is no room or no way; 4 interrupted, the same job goes on where it stopped.

How it fills. A copy grows in `.staging-NAME` beside its place: ranges of files in parallel, from the page cache by
sendfile(2) or by pieces that are hashed on the way, otherwise by O_DIRECT into huge pages, so that the page cache takes
no memory beside it. SHA-256 follows each file in order. A journal of finished ranges lies beside the files
and dies with them. MANIFEST.json comes last, then one rename (an exchange where there is an old copy). What an old copy
has already, by SHA-256, is linked and not copied.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import fnmatch
import hashlib
import json
import mmap
import os
import pwd
import re
import shlex
import shutil
import signal
import stat
import sys
import threading
import time

TYPE_CHECKING = False  # a model from the page cache is there in the time that another import takes
if TYPE_CHECKING:
    from typing import Any

VERSION = "1"
RANGE = 4 << 20
PIECE = 1 << 20  # read, written and hashed at a time: still in the caches of its processor
STEP = 16  # ranges that one thread takes at once from the page cache
BLOCK = 4096  # what O_DIRECT is aligned to
HUGE = 2 << 20
MANIFEST = "MANIFEST.json"
MAX_HEADER = 100_000_000  # as the safetensors library
WEIGHTS = re.compile(r"\.(safetensors|gguf|bin|pt|pth|ckpt|h5|msgpack|onnx|onnx_data)$")
NO_WEIGHTS = re.compile(r"(^|/)(training_args|optimizer|scheduler|rng_state[^/]*|scaler)\.(bin|pt|pth)$")
SECOND_FORMAT = re.compile(r"(^original/|^metal/|\.(bin|pt|pth|ckpt|h5|msgpack|onnx|onnx_data|ot|tflite|gguf)$)")
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)


class Bad(Exception):
    """An end with words for a person. `kind`: job | source | room | way | stopped."""

    CODES = {"source": 1, "job": 2, "room": 3, "way": 3, "stopped": 4}

    def __init__(self, kind, message, **more):
        super().__init__(message)
        self.kind, self.more = kind, more


# --- what files say of themselves (pure)


class BadHeader(ValueError):
    """A file of weights whose beginning cannot be right."""


def tensors(head, size):
    """(names of tensors, size the file has to have) from the beginning of a safetensors file. Raises BadHeader.

    `head` has to hold the whole header; `size` is the file's. The rules are those of the safetensors library, and that
    the shape of each tensor fits its place.
    """
    if len(head) < 8:
        raise BadHeader("the file has %d bytes, no header" % size)
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER:
        raise BadHeader("no safetensors header (%s)" % looks_like(head))
    if 8 + length > len(head):
        raise BadHeader("the file ends within its header")
    try:
        header = json.loads(head[8 : 8 + length].decode("utf-8"))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        places = sorted(((*_place(entry), name) for name, entry in entries.items()), key=lambda one: one[:2])
    except (ValueError, AttributeError, KeyError, TypeError):
        raise BadHeader("the header is not readable") from None
    at = 0
    for begin, end, bits, name in places:
        if begin != at or end < begin:
            raise BadHeader("the header leaves a hole at byte %d" % at)
        if bits is not None and bits != (end - begin) * 8:
            raise BadHeader("a tensor of the header does not fit its place: %s" % ascii(name))
        at = end
    return sorted(entries), 8 + length + at


def _place(entry):
    """(begin, end, bits of its shape or None) of a tensor in a header. Raises ValueError, KeyError, TypeError."""
    begin, end = entry["data_offsets"]
    numbers = [begin, end, *entry["shape"]]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError
    bits = DTYPE_BITS.get(entry["dtype"])
    if bits is not None:
        for number in entry["shape"]:
            bits *= number
    return begin, end, bits


# (elements of a block, its bytes) by ggml's number of a tensor's type
GGML_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74),
    18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2),
    26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
    40: (64, 36), 41: (128, 18),
}  # fmt: skip
GGUF_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of a value, by its type


def gguf_end(file, size):
    """How many bytes a GGUF file (ggml/docs/gguf.md) has to have at least, from its header. Raises BadHeader."""
    left = size

    def within(count):
        nonlocal left
        left -= count
        if left < 0:
            raise BadHeader("the file ends within its header")
        return count

    def number(count):
        return int.from_bytes(file.read(within(count)), "little")

    def past(count):
        file.read(within(count)) if count < BLOCK else file.seek(within(count), 1)

    def value(kind, count, depth=0):
        if kind in GGUF_BYTES:
            past(GGUF_BYTES[kind] * count)
        elif kind == 8:
            for _ in range(count):
                past(number(8))
        elif kind == 9 and depth < 4:
            for _ in range(count):
                value(number(4), number(8), depth + 1)
        else:
            raise BadHeader("the header is not readable")

    past(4)
    if number(4) not in (2, 3):
        return size  # of the first version, or for big-endian machines: not looked into
    count, pairs, align, end = number(8), number(8), 32, 0
    for _ in range(pairs):
        length = number(8)
        key = file.read(within(length)) if length < 1000 else past(length)
        kind = number(4)
        if key == b"general.alignment" and kind == 4:
            align = number(4) or 32
        else:
            value(kind, 1)
    for _ in range(count):
        past(number(8))
        dimensions, elements = number(4), 1
        if dimensions > 8:
            raise BadHeader("the header is not readable")
        for _ in range(dimensions):
            elements *= number(8)
        block, each = GGML_BLOCKS.get(number(4), (1, 0))  # of one that is not known only the place counts
        end = max(end, number(8) + -(-elements // block) * each)
    return -(-(size - left) // align) * align + end if count else size - left


def looks_like(head):
    if head.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS, not the file"
    if head[:64].lstrip()[:1] == b"<":
        return "it is a web page"
    if not head.strip(b"\0"):
        return "it begins with zeros"
    return "its beginning is something else"


def digest_of_blob(name):
    """A Hugging Face cache names large files by SHA-256, small ones by their git id. None for another name."""
    if re.fullmatch(r"[0-9a-f]{64}", name):
        return "sha256:" + name
    if re.fullmatch(r"[0-9a-f]{40}", name):
        return "git:" + name
    return None


def tree_of(text):
    """{path: {"size", "digest"}} of a cache's trees/<commit>.json; None where it is none."""
    try:
        document = json.loads(text)
        found = {}
        for path, entry in document["files"].items():
            sha = entry.get("lfs_sha256")
            size = entry.get("lfs_size") if sha and entry.get("lfs_size") is not None else entry["size"]
            if type(size) is not int or size < 0 or unsafe(path):
                return None
            found[path] = {"size": size, "digest": digest_of_blob(str(sha or entry.get("blob_id") or ""))}
        return found
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def shards_of(text):
    """{shard: [tensor ...]} of a *.index.json, or None."""
    try:
        found = {}
        for tensor, shard in json.loads(text)["weight_map"].items():
            if not isinstance(shard, str) or unsafe(shard):
                return None
            found.setdefault(shard, []).append(tensor)
        return found
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def unsafe(path):
    return path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in path.split("/"))


def is_weight(path):
    return bool(WEIGHTS.search(path)) and not NO_WEIGHTS.search(path)


def belonging(paths, patterns=()):
    """The paths that belong to a model: those of the patterns, or all but weights in a second format."""
    paths = [path for path in paths if not any(part.startswith(".") for part in path.split("/")) and path != MANIFEST]
    if patterns:
        return [path for path in paths if any(fnmatch.fnmatchcase(path, one) for one in patterns)]
    if any(path.endswith(".safetensors") and "/" not in path for path in paths):
        several = any(re.search(r"-\d+-of-\d+\.safetensors$", path) or path == "model.safetensors" for path in paths)
        paths = [
            path
            for path in paths
            if not (SECOND_FORMAT.search(path) and not NO_WEIGHTS.search(path))
            and not (several and re.search(r"^consolidated[^/]*\.safetensors", path))
        ]
    return paths


# --- what a listing means (pure)


def expected_of(listing, patterns=()):
    """(path -> {"size", "digest"}, where that is known from). The best first: a tree, an index, names, the files."""
    files, tree = listing["files"], listing.get("tree")
    if tree:
        return {path: tree[path] for path in belonging(tree, patterns)}, "tree"
    there = belonging(files, patterns)
    wanted = {path: {"size": None, "digest": files[path].get("digest")} for path in there}
    known = "files"
    for name, shards in listing.get("index", {}).items():
        if shards and name in wanted:
            folder = name.rpartition("/")[0]
            for shard in shards:
                wanted.setdefault((folder + "/" if folder else "") + shard, {"size": None, "digest": None})
            known = "index"
    if known == "files" and listing.get("kind") != "file":
        for path in there:
            found = re.fullmatch(r"(.*-)(\d+)(-of-)(\d+)(\.(?:safetensors|gguf|bin))", path)
            if found and 0 < int(found[4]) < 100000:
                for number in range(1, int(found[4]) + 1):
                    other = "%s%0*d%s%s%s" % (found[1], len(found[2]), number, found[3], found[4], found[5])
                    wanted.setdefault(other, {"size": None, "digest": None})
                known = "names"
    return wanted, known


def judge(listing, patterns=()):
    """What state the files of a listing are in, and what is missing.

    {"state", "files": [{"path", "size", "digest"}], "bytes", "missing": [{"path", "bytes", "why"}], "wrong": [...],
    "known_from", "notes"}. States: absent, metadata only, partial, size mismatch, corrupt, complete.
    """
    files = listing["files"]
    wanted, known = expected_of(listing, patterns)
    answer = {"state": "absent", "files": [], "bytes": 0, "missing": [], "wrong": [], "known_from": known, "notes": []}
    if not (listing.get("exists", True) or listing.get("tree")) or not wanted:
        answer["notes"] = [listing["why"]] if listing.get("why") else []
        if not answer["notes"] and files:
            answer["notes"] = ["none of its files belongs to the model: %s" % (", ".join(patterns) or "no weights")]
        return answer
    missing, wrong, good = [], [], []
    for path in sorted(wanted):
        want, have = wanted[path], files.get(path)
        if have is None or have.get("size") is None:
            missing.append(
                {"path": path, "bytes": want["size"], "why": "not there" if have is None else "its link leads nowhere"}
            )
            continue
        size, head = have["size"], have.get("head") or {}
        should = want["size"] if want["size"] is not None else head.get("end")
        digest = want["digest"] or have.get("digest")
        if should is not None and size != should:
            why = "%d bytes %s" % (abs(should - size), "too short" if size < should else "too long")
            wrong.append({"path": path, "bytes": should, "why": why, "kind": "size mismatch"})
        elif head.get("error"):
            wrong.append({"path": path, "bytes": should, "why": head["error"], "kind": head.get("kind", "corrupt")})
        elif have.get("found") and digest and have["found"].get(digest.split(":")[0]) not in (None, digest):
            wrong.append(
                {
                    "path": path,
                    "bytes": size,
                    "why": "its %s is not the one it has to have" % digest_name(digest),
                    "kind": "corrupt",
                }
            )
        else:
            good.append({"path": path, "size": size, "digest": digest, "mtime_ns": have.get("mtime_ns")})
            if head.get("names") is not None and (lost := _lost_tensors(path, set(head["names"]), listing)):
                good.pop()
                wrong.append(
                    {
                        "path": path,
                        "bytes": None,
                        "why": "%d tensors of the index are not in it" % lost,
                        "kind": "corrupt",
                    }
                )
    for name, shards in listing.get("index", {}).items():
        if shards is None and name in wanted and not any(one["path"] == name for one in wrong):
            wrong.append({"path": name, "bytes": None, "why": "it is no index", "kind": "corrupt"})
    answer.update(files=good, missing=missing, wrong=wrong, bytes=sum(one["size"] for one in good))
    answer["state"] = _state(wanted, answer)
    if answer["state"] == "metadata only" and not any(is_weight(path) for path in wanted):
        answer["notes"].append("not one file of weights is there, and nothing that is there says which it has to have")
    if listing.get("incomplete", {}).get("bytes"):
        answer["notes"].append(
            "%s of downloads that never ended lie beside it" % size_of(listing["incomplete"]["bytes"])
        )
    return answer


def _lost_tensors(path, names, listing):
    folder, _, own = path.rpartition("/")
    for index, shards in listing.get("index", {}).items():
        if shards and index.rpartition("/")[0] == folder and own in shards:
            return sum(1 for tensor in shards[own] if tensor not in names)
    return 0


def _state(wanted, answer):
    weights = [path for path in wanted if is_weight(path)]
    gone = {one["path"] for one in answer["missing"]}
    if not answer["files"] and not answer["wrong"]:
        return "absent"
    if not weights or all(path in gone for path in weights):
        return "metadata only"
    if gone:
        return "partial"
    kinds = {one["kind"] for one in answer["wrong"]}
    for kind in ("size mismatch", "corrupt"):
        if kind in kinds:
            return kind
    return "complete"


def judge_copy(listing, manifest):
    """As `judge`, for a copy of ours: what its manifest says has to be there. State staged where all is well."""
    tree = {
        one["path"]: {"size": one["size"], "digest": "sha256:" + one["sha256"] if one.get("sha256") else None}
        for one in manifest["files"]
    }
    answer = judge({**listing, "tree": tree, "index": {}}, ["*"])
    if not answer["missing"] and not answer["wrong"]:
        answer["state"] = "staged"
    answer["known_from"] = "manifest"
    return answer


def differs(manifest, source):
    """Why a copy with this manifest is not what the source has now; "" where it is. `source`: a verdict of `judge`."""
    have = {one.get("from", one["path"]): one for one in manifest["files"]}
    for one in source["files"]:
        mine = have.pop(one["path"], None)
        if mine is None:
            return "%s is new" % one["path"]
        if mine["size"] != one["size"]:
            return "%s has another size" % one["path"]
        digest = one.get("digest")
        kind = (digest or "").split(":")[0]
        known = {"sha256": mine.get("sha256"), "git": mine.get("git")}.get(kind)
        if digest and known:
            if kind + ":" + known != digest:
                return "%s has other contents" % one["path"]
        elif mine.get("mtime_ns") and one.get("mtime_ns") and mine["mtime_ns"] != one["mtime_ns"]:
            return "%s was changed" % one["path"]
    return "%s is no longer in it" % sorted(have)[0] if have else ""


def manifest_of(text):
    """A manifest as written by `publish`, or None."""
    try:
        document = json.loads(text)
        for one in document["files"]:
            if (
                unsafe(one["path"])
                or type(one["size"]) is not int
                or not re.fullmatch(r"[0-9a-f]{64}|", one.get("sha256") or "")
            ):
                return None
        return document if document["files"] else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def overall(copy, source, stale):
    """One word for a model: its copy's state where there is one, else its source's."""
    if copy["state"] == "staged":
        return "stale" if stale else "staged"
    if copy["state"] != "absent":
        return copy["state"]
    return source["state"] if source else "absent"


def headroom_for(need: int) -> int:
    return max(64 << 20, min(1 << 30, need // 50))


def fits(need: int, limits: list[dict[str, Any]], headroom: int) -> tuple[bool, str]:
    """(whether `need` bytes and the headroom fit each limit, one line why not)."""
    for limit in limits:
        if need + headroom > limit["free"]:
            return False, "%s has %s free, and %s are needed (%s of them left over for others)" % (
                limit["what"], size_of(max(0, limit["free"])), size_of(need + headroom), size_of(headroom)
            )  # fmt: skip
    return True, ""


def size_of(count: float) -> str:
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= step:
            return "%.*f %s" % (1 if count < 100 * step else 0, count / step, unit)
    return "%d bytes" % count


def digest_name(digest):
    return {"sha256": "SHA-256", "git": "git id"}[digest.split(":")[0]]


# --- looking at files


def read_text(path, limit=64 << 20):
    try:
        with open(path, "rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return None


def head_of(path, size):
    """{"names", "end"} of a safetensors file, {"error", "kind"} where it cannot be right, None for other kinds."""
    try:
        with open(path, "rb") as file:
            if path.endswith(".gguf"):
                head = file.read(64)
                if head[:4] != b"GGUF":
                    return {"error": "no GGUF file (%s)" % looks_like(head)}
                file.seek(0)
                end = gguf_end(file, size)
                short = "%d bytes too short" % (end - size)
                return {"error": short, "kind": "size mismatch"} if end > size else None
            if not path.endswith(".safetensors"):
                return None
            head = file.read(8)
            length = int.from_bytes(head, "little")
            head += file.read(min(length, MAX_HEADER, 256) if length > size else length)
    except OSError as error:
        return {"error": "cannot be read: %s" % error.strerror}
    except BadHeader as error:
        return {"error": str(error), "kind": "size mismatch" if "ends within" in str(error) else "corrupt"}
    try:
        names, end = tensors(head, size)
        return {"names": names, "end": end}
    except BadHeader as error:
        short = size < 8 or (len(head) >= 8 and size < 8 + int.from_bytes(head[:8], "little") <= MAX_HEADER)
        return {"error": str(error), "kind": "size mismatch" if short else "corrupt"}


def listing_of(root, kind="folder", commit=None):
    """What lies under a folder, or a file alone, as `judge` reads it."""
    answer = {"kind": kind, "path": root, "commit": commit, "exists": os.path.exists(root), "files": {}, "index": {}}
    single = os.path.isfile(root)
    paths = [(os.path.basename(root), root)] if single else []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(one for one in folders if not one.startswith("."))
        for name in sorted(names):
            full = os.path.join(folder, name)
            paths.append((os.path.relpath(full, root), full))
    for path, full in paths:
        if any(part.startswith(".") for part in path.split("/")) or (path == MANIFEST and not single):
            continue
        try:
            found = os.stat(full)
        except OSError:
            answer["files"][path] = {"size": None}
            continue
        if not stat.S_ISREG(found.st_mode):
            continue
        entry = {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "digest": None}
        if os.path.islink(full):
            entry["digest"] = digest_of_blob(os.path.basename(os.path.realpath(full)))
        entry["head"] = head_of(full, found.st_size)
        answer["files"][path] = entry
        if path.endswith(".index.json"):
            answer["index"][path] = shards_of(read_text(full) or "")
    if not answer["exists"]:
        answer["why"] = "there is no %s" % root
    if not single:
        _digests_of_local_dir(root, answer)
    _digests_recorded(root, answer)
    return answer


def _digests_of_local_dir(root, answer):
    """What `hf download --local-dir` noted: .cache/huggingface/download/PATH.metadata has commit, etag and time."""
    for path, entry in answer["files"].items():
        note = os.path.join(root, ".cache/huggingface/download", path + ".metadata")
        lines = (read_text(note, 4096) or "").split("\n")
        if len(lines) >= 2 and entry.get("size") is not None and not entry["digest"]:
            entry["digest"] = digest_of_blob(lines[1].strip())


def record_of(root):
    """Where it is noted, on disk, which SHA-256 the files of a folder had when they were staged the last time."""
    folder = os.environ.get("GPUCTL_STATE") or "/var/lib/gpuctl"
    return os.path.join(folder, "digests", hashlib.sha256(os.path.realpath(root).encode()).hexdigest()[:24] + ".json")


def _digests_recorded(root, answer):
    """Files that nobody changed (size, time) have the digest they had; if they have not, the disk has changed them."""
    try:
        known = json.loads(read_text(record_of(root)) or "")["files"]
        for path, entry in answer["files"].items():
            size, mtime_ns, sha256 = known.get(path) or (None, None, None)
            if not entry.get("digest") and (size, mtime_ns) == (entry.get("size"), entry.get("mtime_ns")):
                entry["digest"] = "sha256:" + sha256
    except (ValueError, KeyError, TypeError):
        pass


def record(root, manifest):
    """Notes them. A machine where that cannot be written is none the worse for it."""
    files = {
        one["path"]: [one["size"], one["mtime_ns"], one["sha256"]] for one in manifest["files"] if one.get("sha256")
    }
    path = record_of(root)
    try:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        put(path, (json.dumps({"path": root, "files": files}) + "\n").encode())
    except OSError:
        pass


def repository_folder(repo):
    return "models--" + repo.replace("/", "--")


def hub_cache(hub):
    """The folder of the Hugging Face cache, as the library finds it."""
    if hub.get("cache"):
        return os.path.expanduser(hub["cache"])
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    return os.path.expanduser(
        os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    )


def snapshot_of(repository, revision):
    """(folder of the snapshot, commit, why not)."""
    named = (read_text(os.path.join(repository, "refs", revision), 4096) or "").strip()
    commit = named or (revision if os.path.isdir(os.path.join(repository, "snapshots", revision)) else None)
    if not commit:
        return None, None, "%s is not in the cache (no refs/%s)" % (revision, revision)
    folder = os.path.join(repository, "snapshots", commit)
    return (
        folder,
        commit,
        "" if os.path.isdir(folder) else "refs/%s names %s, which is not in the cache" % (revision, commit[:12]),
    )


def repository_of(source, hub):
    """The repository's folder in the cache that `source` and `hub` of a job name; None: `source` is no cache."""
    if not source:
        return os.path.join(hub_cache(hub), repository_folder(hub["repo"]))
    source = os.path.expanduser(source).rstrip("/")
    if os.path.basename(source).startswith("models--"):
        return source
    for cache in (source, os.path.join(source, "hub")):
        if hub and (os.path.basename(cache) == "hub" or _has_repositories(cache)) and os.path.isdir(cache):
            return os.path.join(cache, repository_folder(hub["repo"]))
    return None


def _has_repositories(folder):
    try:
        return any(name.startswith("models--") for name in os.listdir(folder))
    except OSError:
        return False


def source_listing(source, hub):
    """The listing of what `source` and `hub` of a job name: a folder, a file, a cache, or a repository in a cache."""
    repository = repository_of(source, hub)
    if repository:
        return _cached(repository, (hub or {}).get("revision") or "main")
    source = os.path.expanduser(source).rstrip("/")
    found = listing_of(source, "file" if os.path.isfile(source) else "folder")
    above, _, commit = source.rpartition("/")
    if os.path.basename(above) == "snapshots":
        found["tree"] = _tree(os.path.dirname(above), commit)
        found["commit"] = commit
    if found["kind"] == "folder" and (mine := manifest_of(read_text(os.path.join(source, MANIFEST)) or "")):
        for one in mine["files"]:  # a copy of ours is a source, too
            if one["path"] in found["files"] and one.get("sha256") and not found["files"][one["path"]].get("digest"):
                found["files"][one["path"]]["digest"] = "sha256:" + one["sha256"]
    return found


def _cached(repository, revision):
    folder, commit, why = snapshot_of(repository, revision)
    if folder and os.path.isdir(folder):
        found = listing_of(folder, "hub", commit)
    else:
        found = {"kind": "hub", "path": repository, "commit": commit, "exists": False, "files": {}, "index": {}}
        found["why"] = why if os.path.isdir(repository) else "there is no %s" % repository
    found["repository"] = repository
    found["tree"] = _tree(repository, commit) if commit else None
    found["incomplete"] = _incomplete(repository)
    return found


def _tree(repository, commit):
    return tree_of(read_text(os.path.join(repository, "trees", "%s.json" % commit)) or "")


def _incomplete(repository):
    names = []
    try:
        names = [name for name in os.listdir(os.path.join(repository, "blobs")) if name.endswith(".incomplete")]
        return {
            "files": len(names),
            "bytes": sum(os.stat(os.path.join(repository, "blobs", name)).st_size for name in names),
        }
    except OSError:
        return {"files": len(names), "bytes": 0}


def hash_files(listing, paths, tell):
    """Reads files whole and notes their SHA-256 and git id as `found`. Several at a time."""
    left = sorted(paths, key=lambda path: -(listing["files"].get(path, {}).get("size") or 0))
    lock = threading.Lock()
    trouble = []

    def work():
        while True:
            with lock:
                if not left or trouble:
                    return
                path = left.pop(0)
            entry = listing["files"].get(path)
            if not entry or entry.get("size") is None:
                continue
            full = listing["path"] if os.path.isfile(listing["path"]) else os.path.join(listing["path"], path)
            sums = {"sha256": hashlib.sha256(), "git": hashlib.sha1(b"blob %d\0" % entry["size"])}
            if not (entry.get("digest") or "").startswith("git:"):
                del sums["git"]
            try:
                with open(full, "rb", buffering=0) as file:
                    piece = bytearray(1 << 20)
                    while n := file.readinto(piece):
                        for one in sums.values():
                            one.update(memoryview(piece)[:n])
                        tell(n)
                entry["found"] = {name: name + ":" + one.hexdigest() for name, one in sums.items()}
            except OSError as error:
                entry["head"] = {"error": "cannot be read: %s" % error.strerror}
            except BaseException as error:
                trouble.append(error)
                return

    together(work, default_threads())
    if trouble:
        raise trouble[0]


def together(work, count):
    workers = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        while worker.is_alive():
            worker.join(0.2)  # in steps: a signal is taken between them


def in_huge_pages(size):
    """A buffer for O_DIRECT, in pages of 2 MiB where the kernel has some.

    A request to a disk lists the pages it fills, up to a few hundred: with pages of 4 KiB a range becomes many small
    requests (of a virtual disk, half its rate).
    """
    whole = mmap.mmap(-1, -(-size // HUGE) * HUGE + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        whole.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):
        pass  # a kernel without
    at = -ctypes.addressof(ctypes.c_char.from_buffer(whole)) % HUGE
    return memoryview(whole)[at : at + size]


def default_threads():
    """A disk needs many reads at once, and each hashes in between."""
    return max(8, min(32, 2 * len(os.sched_getaffinity(0))))


def look_at_copy(to, patterns=()):
    """(verdict, manifest or None, listing) of what lies at `to`."""
    single = os.path.isfile(to)
    manifest = manifest_of(read_text(to + "." + MANIFEST if single else os.path.join(to, MANIFEST)) or "")
    listing = listing_of(to, "file" if single else "folder")
    if manifest:
        return judge_copy(listing, manifest), manifest, listing
    verdict = judge(listing, patterns)
    if verdict["state"] == "complete":
        verdict["notes"].append("it has no manifest: not put there by gpuctl, or not to the end")
    return verdict, None, listing


# --- room


def mounts():
    """[(mount point, type of file system, root, options)] as /proc/self/mountinfo has them, in its order."""
    found = []
    for line in (read_text("/proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, more = before.split(), after.split()
        if len(fields) >= 5 and len(more) >= 3:
            point = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), fields[4])
            found.append((point, more[0], fields[3], more[2]))
    return found


def mount_under(path, table=None):
    """(mount point, type) of the file system a path is on; the path need not be there."""
    path = os.path.realpath(path)
    best = ("/", "?")
    for point, kind, _, _ in mounts() if table is None else table:
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best[0]):
            best = (point, kind)
    return best


IN_MEMORY = ("tmpfs", "ramfs")


def cgroup_limits(table=None, own=None, read=read_text):
    """[{"what", "free"}] of every memory cgroup above this process that has a limit, v1 and v2."""
    limits = []
    table = mounts() if table is None else table
    for line in (own if own is not None else read("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        unified = controllers == ""
        if not unified and "memory" not in controllers.split(","):
            continue
        for point, kind, root, options in table:
            if (unified and kind != "cgroup2") or (
                not unified and (kind != "cgroup" or "memory" not in options.split(","))
            ):
                continue
            inside = path[len(root) :] if root != "/" and path.startswith(root) else path
            folder = os.path.normpath(point + "/" + inside.lstrip("/")) if "/.." not in inside else point
            while folder.startswith(point):
                if limit := cgroup_limit(folder, unified, read):
                    limits.append(limit)
                if folder == point:
                    break
                folder = os.path.dirname(folder)
            break
    return limits


def cgroup_limit(folder: str, unified: bool, read: Any) -> dict[str, Any] | None:
    names = ("memory.max", "memory.high") if unified else ("memory.limit_in_bytes",)
    bounds = [
        (int(text), name)
        for name in names
        for text in [(read(os.path.join(folder, name)) or "").strip()]
        if text.isdigit()
    ]
    used = (read(os.path.join(folder, "memory.current" if unified else "memory.usage_in_bytes")) or "").strip()
    if not bounds or min(bounds)[0] >= 1 << 60 or not used.isdigit():
        return None
    files = r"^(?:inactive_file|active_file) (\d+)$" if unified else r"^total_(?:inactive_file|active_file) (\d+)$"
    cache = sum(int(one) for one in re.findall(files, read(os.path.join(folder, "memory.stat")) or "", re.M))
    bound, name = min(bounds)
    return {"what": "the memory cgroup (%s of %s)" % (name, folder), "free": bound - int(used) + cache}


def mount_of(folder):
    """What a folder, which need not be there, is on.

    {"point", "kind", "in_memory", "shared", "bytes", "used", "numa_nodes", "hides", "policy", "huge"}
    `shared`: a memory file system that the system needs for itself. `hides`: some names of what is in the folder, where
    it is none's mount point: a file system that is mounted there hides it. `policy`, `huge`: a tmpfs's, or "".
    """
    asked = folder
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    table = mounts()
    point, kind = mount_under(folder, table)
    options = [one for at, _, _, one in table if at == point][-1:]  # the last one hides those below it
    policy, huge = (re.search("(?:^|,)%s=([^,]*)" % name, "".join(options)) for name in ("mpol", "huge"))
    try:
        hides = sorted(os.listdir(asked))[:3] if point != os.path.realpath(asked) else []
    except OSError:
        hides = []
    seen = os.statvfs(folder)
    whole = seen.f_blocks * seen.f_frsize
    used = whole - seen.f_bfree * seen.f_frsize
    places = "/sys/devices/system/node"
    nodes = [name for name in os.listdir(places) if re.fullmatch(r"node\d+", name)] if os.path.isdir(places) else []
    shared = point in ("/", "/run", "/run/lock", "/tmp", "/dev") or point.startswith("/run/user/")
    return {
        "point": point, "kind": kind, "in_memory": kind in IN_MEMORY, "shared": shared, "bytes": whole, "used": used,
        "numa_nodes": len(nodes), "hides": hides,
        "policy": policy[1] if policy else "", "huge": huge[1] if huge else "",
    }  # fmt: skip


def limits_at(folder):
    """[{"what", "free"}] that hold for writing under a folder in memory."""
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    seen = os.statvfs(folder)
    point, kind = mount_under(folder)
    limits = []
    if kind == "tmpfs" and seen.f_blocks:
        limits.append({"what": "the tmpfs at %s" % point, "free": seen.f_bavail * seen.f_frsize})
    elif kind not in IN_MEMORY:
        return [{"what": "the disk at %s" % point, "free": seen.f_bavail * seen.f_frsize}]
    limits += cgroup_limits()
    available = re.search(r"^MemAvailable:\s+(\d+) kB", read_text("/proc/meminfo") or "", re.M)
    if available:
        limits.append({"what": "memory (MemAvailable)", "free": int(available[1]) << 10})
    return limits


# --- telling


class Teller:
    """Lines on stdout: JSON, or words. Progress comes at most every `every` seconds, with rate and time left."""

    def __init__(self, as_json, every):
        self.as_json, self.every = as_json, every
        self.lock = threading.Lock()
        self.begin("", 0)

    def begin(self, what, total, done=0):
        with self.lock:
            self.what, self.total, self.done = what, total, done
            self.told = time.monotonic()
            self.seen = [(self.told, done)]

    def add(self, count):
        with self.lock:
            self.done += count

    def tick(self):
        """Tells how far it is, when it is time. Raises BrokenPipeError when nobody listens any more."""
        with self.lock:
            now = time.monotonic()
            if now - self.told < self.every:
                return
            self.told = now
            self.seen = [*self.seen[-9:], (now, self.done)]
            line = self.progress(now)
        self.emit(line)

    def progress(self, now):
        began, had = self.seen[0]
        rate = max(0, self.done - had) / max(now - began, 1e-3)  # a file that is read again takes away from `done`
        left = (self.total - self.done) / rate if rate > 0 and self.total else None
        return {
            "type": "progress",
            "what": self.what,
            "bytes": self.done,
            "of": self.total,
            "rate": round(rate),
            "eta_s": None if left is None else round(max(0.0, left), 1),
        }

    def say(self, text):
        self.emit({"type": "note", "text": text})

    def emit(self, row):
        if self.as_json:
            text = json.dumps(row)
        elif row["type"] == "progress":
            left = "" if row["eta_s"] is None else ", %d s left" % row["eta_s"]
            text = "%s: %s of %s, %s/s%s" % (
                row["what"],
                size_of(row["bytes"]),
                size_of(row["of"] or 0),
                size_of(row["rate"]),
                left,
            )
        elif row["type"] == "note":
            text = row["text"]
        elif row["type"] == "error":
            text = row["message"]
        else:
            text = "%s: %s" % (row.get("model") or "model", row["state"])
        data = (text + "\n").encode()
        while data:
            data = data[os.write(1, data) :]


# --- where bytes come from


def cached_pages(fd, at, length):
    """How many pages of a span the page cache has: cachestat(2), Linux 6.5. None where that cannot be told."""
    span, found = (ctypes.c_uint64 * 2)(at, length), (ctypes.c_uint64 * 5)()
    return None if ctypes.CDLL(None).syscall(451, fd, span, found, 0) else found[0]


class Folder:
    """Files on this machine."""

    def __init__(self, listing):
        self.listing = listing
        self.alone = os.path.isfile(listing["path"])

    def open(self, path):
        return _Opened(self.listing["path"] if self.alone else os.path.join(self.listing["path"], path))

    def close(self):
        pass


class _Opened:
    """One file, read by any number of threads into the copy."""

    def __init__(self, path):
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.direct = -1
        try:
            self.direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            pass  # a file system without it
        self.sendfile = True
        self.warm = False  # whether what was read last came from the page cache
        self.asked_by_reading = False  # what is in the page cache, where cachestat(2) does not tell it
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)  # what is not in the page cache is not read ahead into it

    def unchanged(self, one):
        seen = os.fstat(self.fd)
        return seen.st_size == one["size"] and (not one.get("mtime_ns") or seen.st_mtime_ns == one["mtime_ns"])

    def into(self, copy, offset, length, buffer, sums, alone):
        """Fills a span of the copy: what the page cache has from there, the rest past it. `sums` hash it in passing."""
        at, end = offset, offset + length
        while at < end:
            began, upto = at, end
            warm = self.resident(at, upto - at)
            if not warm and upto - at > RANGE:
                upto = at + RANGE
                warm = self.resident(at, RANGE)
            self.warm = warm  # of others, too, who read elsewhere in it
            while at < upto:
                if not warm and self.direct >= 0 and at % BLOCK == 0 and upto - at >= BLOCK:
                    at += self.past_cache(copy, at, min((upto - at) // BLOCK * BLOCK, PIECE), buffer, sums)
                else:
                    at += self.buffered(copy, at, upto - at, buffer, sums, alone)
            if not warm and (self.asked_by_reading or self.direct < 0 or at % BLOCK):
                # nothing of it was in the cache before us, and the copy takes that memory
                os.posix_fadvise(self.fd, began, at - began, os.POSIX_FADV_DONTNEED)

    def ahead(self, at, length):
        """Whether the page cache has what comes next; where nothing tells that, whether it had what was read last."""
        pages = cached_pages(self.fd, at, length)
        return self.warm if pages is None else pages >= -(-length // mmap.PAGESIZE)

    def resident(self, at, length):
        """Whether the page cache has it, as far as can be told."""
        pages = cached_pages(self.fd, at, length)
        if pages is not None:
            return pages >= -(-length // mmap.PAGESIZE)
        # A byte that may not wait; the kernel begins to read ahead for it, which takes a third of a disk's rate.
        self.asked_by_reading = True
        if length > RANGE:
            return False
        try:
            return os.preadv(self.fd, [bytearray(1)], at, os.RWF_NOWAIT) > 0
        except BlockingIOError:
            return False
        except OSError:
            return self.direct < 0  # cannot be told here

    def buffered(self, copy, at, length, buffer, sums, alone):
        # Within the kernel where nothing has to see the bytes. A file in tmpfs takes one writer at a time, so the lock
        # is not held for long beside another one.
        if self.sendfile and not sums and alone:
            try:
                os.lseek(copy.fd, at, os.SEEK_SET)
                sent = os.sendfile(copy.fd, self.fd, at, length)
                if sent:
                    return sent
                raise Bad("source", "%s ended at byte %d while it was read" % (self.path, at))
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOSYS):
                    raise
                self.sendfile = False
        return self.read(self.fd, copy, at, min(length, PIECE), buffer, sums)

    def past_cache(self, copy, at, length, buffer, sums):
        try:
            return self.read(self.direct, copy, at, length, buffer, sums)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = -1  # opened, but not possible: read as usual
            return 0

    def read(self, fd, copy, at, length, buffer, sums):
        got = os.preadv(fd, [buffer[:length]], at)
        if not got:
            raise Bad("source", "%s ended at byte %d while it was read" % (self.path, at))
        copy.put(buffer[:got], at, sums)
        return got

    def close(self):
        for fd in (self.fd, self.direct):
            if fd >= 0:
                os.close(fd)


class Far:
    """Files on another machine, over OpenSSH as it is set up here: this same program runs there, a few of it at once.

    Host keys are checked, no question is asked. `stall_s` without a byte ends a connection.
    """

    def __init__(self, address, job, stall_s):
        found = re.fullmatch(r"ssh://(?:([\w.-]+)@)?(\[[0-9a-fA-F:]+\]|[\w.-]+)(?::(\d+))?(/.+)", address)
        if not found or found[2].startswith("-"):
            raise Bad("job", "source: %r is not of the form ssh://[user@]machine[:port]/folder" % address)
        user, self.host, port, self.path = found.groups()
        self.command = [
            "ssh",
            "-T",
            "-oBatchMode=yes",
            "-oStrictHostKeyChecking=yes",
            "-oConnectTimeout=15",
            "-oServerAliveInterval=10",
        ]
        self.command += ["-oServerAliveCountMax=3", "-oCompression=no", "-oClearAllForwardings=yes"]
        self.command += [*(["-p", port] if port else []), *(["-l", user] if user else []), "--", self.host.strip("[]")]
        self.command += [shlex.join(["python3", "-c", BOOTSTRAP, "stage.py"])]
        self.job, self.stall_s = job, stall_s
        self.lock, self.idle, self.all = threading.Lock(), [], []

    def connect(self, do="serve"):
        """A running stage.py over there: (process, what it said first)."""
        job = {"do": do, "source": self.path, "hub": self.job.get("hub"), "files": self.job.get("files"), "json": True}
        program = own_program()
        import subprocess

        process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        with self.lock:
            self.all.append(process)
        try:
            process.stdin.write(b"%d\n" % len(program) + program + json.dumps(job).encode() + b"\n")
            process.stdin.flush()
            first = json.loads(self.line(process))
        except (OSError, ValueError):
            raise Bad("way", self.why(process)) from None
        if first.get("type") == "error":
            raise Bad("source", "%s: %s" % (self.host, first["message"]))
        return process, first

    def line(self, process):
        text = b""
        while not text.endswith(b"\n"):
            text += self.some(process, 1)
        return text

    def some(self, process, count):
        """Up to `count` bytes, waited for at most `stall_s`."""
        import select

        ready, _, _ = select.select([process.stdout], [], [], self.stall_s)
        if not ready:
            process.kill()
            raise Bad(
                "way", "%s: not a byte for %g s; the same command goes on where it stopped" % (self.host, self.stall_s)
            )
        data = os.read(process.stdout.fileno(), count)
        if not data:
            raise OSError(errno.EPIPE, "ended")
        return data

    def why(self, process):
        process.kill()
        said = process.stderr.read().decode("utf-8", "replace").strip().splitlines()
        words = next(
            (line for line in reversed(said) if "host key" in line.lower() or "denied" in line.lower()),
            said[-1] if said else "no word",
        )
        if "python3" in words and "not found" in words:
            words = "there is no python3 there"
        return "ssh to %s: %s" % (self.host, words.strip()[:300])

    def verdict(self):
        process, first = self.connect()
        with self.lock:
            self.idle.append(process)
        return first

    def open(self, path):
        return _FarOpened(self, path)

    def close(self):
        with self.lock:
            processes, self.all, self.idle = self.all, [], []
        for process in processes:
            process.kill()
            process.wait()


class _FarOpened:
    def __init__(self, far, path):
        self.far, self.path = far, path

    def unchanged(self, one):
        return True  # the far side looks, with every range

    def ahead(self, at, length):
        return False

    def into(self, copy, offset, length, buffer, sums, alone):
        with self.far.lock:
            process = self.far.idle.pop() if self.far.idle else None
        if process is None:
            process, _ = self.far.connect()
        try:
            process.stdin.write(json.dumps([self.path, offset, length]).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(self.far.line(process))
            if isinstance(answer, str):
                raise Bad("source", "%s: %s" % (self.far.host, answer))
            at, end = offset, offset + length
            while at < end:
                data = self.far.some(process, min(end - at, 1 << 20))
                copy.put(memoryview(data), at, sums)
                at += len(data)
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            raise Bad("way", self.far.why(process)) from None
        with self.far.lock:
            self.far.idle.append(process)

    def close(self):
        pass


def serve(job):
    """The far side: a verdict, then ranges of files as they are asked for, until stdin ends."""
    listing = source_listing(job["source"], job.get("hub"))
    verdict = judge(listing, job.get("files") or ())
    verdict.update(type="verdict", kind=listing["kind"], path=listing["path"], commit=listing.get("commit"))
    out(json.dumps(verdict).encode() + b"\n")
    folder, opened = Folder(listing), {}
    known = {one["path"]: one for one in verdict["files"]}
    for line in sys.stdin.buffer:
        path, offset, length = json.loads(line)
        try:
            if path not in opened:
                opened[path] = folder.open(path)
            file = opened[path]
            if not file.unchanged(known[path]):
                raise OSError(errno.ESTALE, "was changed while it was read")
            out(b"%d\n" % length)
            at, end = offset, offset + length
            while at < end:
                sent = os.sendfile(1, file.fd, at, min(end - at, 1 << 20))
                if not sent:
                    return  # what was promised cannot come: the end of the connection says so
                at += sent
        except (OSError, KeyError) as error:
            out(json.dumps("%s: %s" % (path, getattr(error, "strerror", None) or error)).encode() + b"\n")
    return


def out(data):
    while data:
        data = data[os.write(1, data) :]


BOOTSTRAP = (
    "import sys;b=sys.stdin.buffer;n=int(b.readline());p=b.read(n);"
    "exec(compile(p,sys.argv[1],'exec'),{'__name__':'__main__','__program__':p})"
)


def own_program():
    """This file, as bytes: from where it was read, or as it came over stdin."""
    if "__program__" in globals():
        return globals()["__program__"]
    with open(__file__, "rb") as file:
        return file.read()


# --- filling


class Copy:
    """A file of the copy as it grows: written by ranges, hashed in order."""

    def __init__(self, path, size, write=True):
        self.path = path
        if write and os.path.lexists(path) and os.lstat(path).st_nlink > 1:
            os.unlink(path)  # the old copy has it, too
        self.fd = os.open(path, (os.O_RDWR | os.O_CREAT if write else os.O_RDONLY) | os.O_CLOEXEC, 0o644)
        try:
            if write:
                os.fchmod(self.fd, 0o644)
                os.truncate(path, size)  # by its name, so that an error has it
        except BaseException:
            os.close(self.fd)
            raise

    def put(self, data, at, sums=()):
        done = 0
        while done < len(data):
            done += os.pwrite(self.fd, data[done:], at + done)
        for one in sums:
            one.update(data)

    def close(self):
        os.close(self.fd)


class Part:
    """One file: which ranges are there, how far it is hashed."""

    def __init__(self, number, entry):
        self.number, self.entry, self.path, self.size = number, entry, entry["path"], entry["size"]
        self.ranges = -(-self.size // RANGE)
        self.linked = False
        self.copy = self.source = None
        self.tries = 0
        self.begin()

    def begin(self):
        self.done = bytearray(self.ranges)
        self.next = self.copiers = self.hashed = self.ready = 0
        self.warm = -1  # up to which range the page cache has what comes next; -1: not asked yet
        self.hashing = False
        self.sums = {"sha256": hashlib.sha256()}
        if (self.entry.get("digest") or "").startswith("git:"):
            self.sums["git"] = hashlib.sha1(b"blob %d\0" % self.size)

    def span(self, number, count=1):
        return number * RANGE, min(count * RANGE, self.size - number * RANGE)

    def left(self):
        """Bytes that have to be written."""
        last = self.ranges * RANGE - self.size  # how much shorter than others the last range is
        return self.done.count(0) * RANGE - (last if self.ranges and not self.done[-1] else 0)

    def advance(self):
        while self.next < self.ranges and self.done[self.next]:
            self.next += 1
        while self.ready < self.ranges and self.done[self.ready]:
            self.ready += 1

    def look_ahead(self, source):
        """Asks whether the page cache has all of the next step; with less, it is a disk's."""
        if self.warm <= self.next < self.ranges:
            self.warm = self.next + (STEP if source.ahead(*self.span(self.next, STEP)) else 0)


class Filling:
    """All parts of a model on their way into the staging folder."""

    def __init__(self, folder, entries, source, teller, hash_=True):
        self.folder, self.source, self.teller, self.hash = folder, source, teller, hash_
        self.cores = len(os.sched_getaffinity(0))
        self.busy = 0  # threads that copy out of the page cache
        self.parts = [
            Part(number, entry)
            for number, entry in enumerate(sorted(entries, key=lambda one: (-one["size"], one["path"])))
        ]
        self.unfinished = self.parts[:]
        self.lock = threading.Condition()
        self.own = threading.local()
        self.over = threading.Event()
        self.trouble = []
        self.damaged = []  # paths whose bytes are not what they have to be
        self.journal = -1

    def identity(self):
        facts = [
            RANGE,
            [[part.path, part.size, part.entry.get("digest") or part.entry.get("mtime_ns")] for part in self.parts],
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def resume(self):
        """Takes up what an interrupted run left, or begins anew. Returns the bytes that are there already."""
        path = os.path.join(self.folder, ".journal")
        lines = (read_text(path) or "").split("\n")[:-1]  # the last one is empty, or was cut
        if lines[:1] == [self.identity()]:
            for line in lines[1:]:
                words = line.split()
                if len(words) == 2 and all(word.isdigit() for word in words):
                    number, which = int(words[0]), int(words[1])
                    if number < len(self.parts) and which < self.parts[number].ranges:
                        self.parts[number].done[which] = 1
                elif len(words) == 2 and words[0] == "again" and words[1].isdigit() and int(words[1]) < len(self.parts):
                    self.parts[int(words[1])].begin()
            for part in self.parts:
                full = os.path.join(self.folder, part.path)
                if any(part.done) and (not os.path.isfile(full) or os.stat(full).st_size != part.size):
                    part.begin()
        else:
            lines = []
            remove(self.folder)
            os.makedirs(self.folder, mode=0o755)
        self.journal = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.ftruncate(self.journal, sum(len(line) + 1 for line in lines))  # nothing is written on behind a cut line
        if not lines:
            self.note(self.identity())
        return sum(part.size - part.left() for part in self.parts)

    def note(self, line):
        """Whole, or not at all: the next line would be written on behind a cut one."""
        data = (line + "\n").encode()
        wrote = os.write(self.journal, data)
        if wrote < len(data):
            os.ftruncate(self.journal, os.fstat(self.journal).st_size - wrote)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.path.join(self.folder, ".journal"))

    def link(self, old, manifest):
        """Takes files of the old copy that are the same by SHA-256. They take no room twice."""
        have = {one["path"]: one for one in (manifest or {}).get("files", [])}
        by_digest = {
            (one["size"], "sha256:" + one["sha256"]): one["path"] for one in have.values() if one.get("sha256")
        }
        for part in self.parts:
            mine = have.get(part.path)
            same = by_digest.get((part.size, part.entry.get("digest")))
            if same is None and mine and mine.get("git") and part.entry.get("digest") == "git:" + mine["git"]:
                same = part.path
            full = os.path.join(self.folder, part.path)
            if same is None or any(part.done) or not part.size or not self.hash:
                continue
            try:
                if os.stat(os.path.join(old, same)).st_size != part.size:
                    continue
                os.makedirs(os.path.dirname(full), exist_ok=True)
                if os.path.lexists(full):
                    os.unlink(full)
                os.link(os.path.join(old, same), full)
            except OSError:
                continue
            part.linked = True
            part.done = bytearray(b"\1" * part.ranges)

    def left(self):
        return sum(-(-part.left() // BLOCK) * BLOCK for part in self.parts)

    def run(self, threads, watch):
        """Fills. Raises Bad; what is done stays for the next run."""
        total = sum(part.size for part in self.parts)
        for part in self.parts:
            part.advance()
        self.teller.begin("staging", total, 0 if self.hash else total - sum(part.left() for part in self.parts))
        workers = [threading.Thread(target=self.work, daemon=True) for _ in range(threads)]
        for worker in workers:
            worker.start()
        watched = time.monotonic()
        while not self.over.wait(min(0.1, self.teller.every)):
            self.teller.tick()
            if time.monotonic() - watched >= 1:
                watched = time.monotonic()
                try:
                    watch(sum(part.left() for part in self.parts))
                except Bad as error:
                    self.fail(error)
        for worker in workers:
            worker.join(5)
        os.close(self.journal)
        self.journal = -1
        if self.trouble:
            raise self.trouble[0]

    def fail(self, error):
        with self.lock:
            self.trouble.append(error)
            self.over.set()
            self.lock.notify_all()

    def work(self):
        part = step = None
        try:
            while True:
                with self.lock:
                    if step and step[2]:
                        self.copied(*step)
                    step = self.take()
                    while step is None and not self.over.is_set():
                        self.lock.wait()
                        step = self.take()
                    if step is None:
                        return
                    self.lock.notify()  # there may be more to do; this thread went on first: its caches have the file's
                part, number, count, chained, _ = step
                self.copy_ranges(part, number, count, chained) if count else self.hash_range(part)
        except BaseException as error:
            self.fail(self.in_words(error, part))

    def take(self):
        """The next thing to do, with the lock held: (part, first range to copy, how many, whether its hash can follow
        at once, whether out of the page cache), or (part, 0, 0, True, False): hash what is there; it goes first, and so
        keeps up. None: nothing, for the moment or for good.
        """
        if self.trouble:
            return None
        best = None
        for part in self.unfinished:
            whole = part.ready == part.ranges and not part.copiers
            if not part.hashing and (whole or (self.hash and part.ready > part.hashed)):
                part.hashing = True
                return part, 0, 0, True, False
            if part.next == part.ranges or self.crowded(part):
                continue
            if best is None or part.copiers < best.copiers:
                best = part
                if not part.copiers:
                    break
        if best is None:
            if not self.unfinished:
                self.over.set()
                self.lock.notify_all()
            return None
        number = best.next
        self.open(best)
        best.look_ahead(best.source)
        warm = number < best.warm
        chained = self.hash and not best.hashing and best.hashed == number
        most = min(best.ranges, best.warm if warm and chained == self.hash else number + 1)
        while best.next < most and not best.done[best.next]:
            best.next += 1
        count = best.next - number
        best.copiers += 1
        self.busy += warm
        best.hashing = best.hashing or chained
        while best.next < best.ranges and best.done[best.next]:
            best.next += 1
        best.look_ahead(best.source)
        return best, number, count, chained, warm

    def crowded(self, part):
        """Whether one more thread would only be in the way. A disk wants them all. Out of memory into memory, more than
        there are processors take the caches from each other, and a file in tmpfs has one writer at a time: a second
        thread helps only where the first one hashes.
        """
        if self.busy < self.cores and part.copiers <= (1 if self.hash else 0):
            return False
        if part.warm < 0:  # not left open: of hundreds that wait, that would be too many
            source = self.source.open(part.path)
            part.look_ahead(source)
            source.close()
        return part.next < part.warm

    def open(self, part, reading=False):
        """With the lock held."""
        if part.source is None and not reading:
            part.source = self.source.open(part.path)
            if not part.source.unchanged(part.entry):
                raise Bad("source", "%s was changed since it was looked at; the same command looks again" % part.path)
        if part.copy is None:
            full = os.path.join(self.folder, part.path)
            os.makedirs(os.path.dirname(full), exist_ok=True)
            part.copy = Copy(full, part.size, write=not part.linked)

    def buffer(self):
        """This thread's own."""
        if not hasattr(self.own, "buffer"):
            self.own.buffer = in_huge_pages(PIECE)
        return self.own.buffer

    def copy_ranges(self, part, number, count, chained):
        offset, length = part.span(number, count)
        sums = list(part.sums.values()) if chained else []
        part.source.into(part.copy, offset, length, self.buffer(), sums, part.copiers == 1)
        if chained or not self.hash:
            self.teller.add(length)

    def copied(self, part, number, count, chained, warm):
        """With the lock held."""
        part.copiers -= 1
        self.busy -= warm
        part.done[number : number + count] = b"\1" * count
        if chained:
            part.hashing = False
            part.hashed += count
        while part.ready < part.ranges and part.done[part.ready]:
            part.ready += 1
        self.note("\n".join("%d %d" % (part.number, one) for one in range(number, number + count)))

    def hash_range(self, part):
        """Hashes on what is in the copy, and finishes a file that is there to its end."""
        with self.lock:
            self.open(part, reading=part.ready == part.ranges)
            upto = part.ready if self.hash else part.ranges
        buffer = self.buffer()
        while self.hash and part.hashed < upto:
            offset, length = part.span(part.hashed)
            at, end = offset, offset + length
            while at < end:
                got = os.preadv(part.copy.fd, [buffer[: min(end - at, PIECE)]], at)
                if not got:
                    raise Bad("room", "%s became shorter while it was copied: somebody else writes there" % part.path)
                for one in part.sums.values():
                    one.update(buffer[:got])
                at += got
            part.hashed += 1
            self.teller.add(length)
        with self.lock:
            part.hashing = False
            if part.ready == part.ranges and (part.hashed == part.ranges or not self.hash):
                self.finish(part)

    def finish(self, part):
        """With the lock held: the whole file is there, and hashed."""
        if part.source is not None:
            changed = not part.source.unchanged(part.entry)
            part.source.close()
            part.source = None
            if changed:
                raise Bad("source", "%s was changed while it was read; the same command looks again" % part.path)
        digest = part.entry.get("digest")
        kind = (digest or "").split(":")[0]
        part.copy.close()
        part.copy = None
        if self.hash and digest and kind in part.sums and kind + ":" + part.sums[kind].hexdigest() != digest:
            # Read once more: it may have been damaged in memory, in the old copy or by somebody who wrote into it.
            if part.tries == 0:
                os.unlink(os.path.join(self.folder, part.path))
                self.teller.add(-part.size)
                part.begin()
                part.advance()
                part.linked = False
                part.tries = 1
                self.note("again %d" % part.number)
                return
            self.damaged.append(part.path)
            self.note("again %d" % part.number)
        self.unfinished.remove(part)

    def in_words(self, error, part):
        what = getattr(error, "filename", None) or (part.path if part else "a file")
        if isinstance(error, OSError) and error.errno in FULL:
            return Bad(
                "room",
                "%s is full: %s could not be copied to its end; what is there stays for the next run"
                % (mount_under(self.folder)[0], what),
            )
        if isinstance(error, OSError):
            return Bad("source", "%s: %s" % (what, error.strerror))
        return error

    def manifest(self, model, source):
        files = []
        for part in sorted(self.parts, key=lambda part: part.path):
            entry = {"path": part.path, "size": part.size, "mtime_ns": part.entry.get("mtime_ns")}
            digest = part.entry.get("digest") or ""
            if self.hash:
                entry.update({name: one.hexdigest() for name, one in part.sums.items()})
            elif digest:
                entry[digest.split(":")[0]] = digest.split(":")[1]
            files.append(entry)
        return {
            "format": 1, "model": model, "source": source, "hashed": self.hash, "files": files,
            "bytes": sum(part.size for part in self.parts), "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }  # fmt: skip


def remove(path):
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    elif os.path.isdir(path):
        shutil.rmtree(path)


def bytes_freed(path):
    """What removing a file or a folder gives back: files that have another name elsewhere give nothing."""
    paths = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names] or [path]
    found = [os.lstat(one) for one in paths]
    return sum(one.st_blocks * 512 for one in found if stat.S_ISREG(one.st_mode) and one.st_nlink == 1)


def put(path, data):
    with open(path + ".new", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(path + ".new", path)


def exchange(one, other):
    """renameat2(RENAME_EXCHANGE): both names have the other's folder at once. False where the kernel cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        done = libc.renameat2(-100, os.fsencode(one), -100, os.fsencode(other), 2)
    except AttributeError:
        return False
    if done == 0:
        return True
    if ctypes.get_errno() in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), one)


def publish(staging, to, manifest):
    """The copy gets its name: the manifest last, then one rename. What was there before goes afterwards."""
    text = (json.dumps(manifest, indent=1) + "\n").encode()
    if manifest.get("alone"):
        for beside in (to + "." + MANIFEST,):
            remove(beside)
        if os.path.isdir(to):
            shutil.rmtree(to)
        os.rename(os.path.join(staging, manifest["alone"]), to)
        put(to + "." + MANIFEST, text)
        shutil.rmtree(staging)
        return
    put(os.path.join(staging, MANIFEST), text)
    if os.path.lexists(to):
        if not exchange(staging, to):
            aside = os.path.join(os.path.dirname(to), ".old-" + os.path.basename(to))
            remove(aside)
            os.rename(to, aside)
            os.rename(staging, to)
            remove(aside)
        remove(staging)
    else:
        os.rename(staging, to)
    remove(os.path.join(to, ".journal"))


# --- the hub

# Runs under a Python that has huggingface_hub. Says first what the repository has, hears which files are wanted.
_DOWNLOAD = r"""
import ctypes, json, os, sys
ctypes.CDLL(None).prctl(1, 9)  # it ends with its parent, whatever ends that
job = json.loads(sys.stdin.readline())
import huggingface_hub
import huggingface_hub.constants as constants
constants.DOWNLOAD_CHUNK_SIZE = 1 << 20  # progress can be seen every MiB, not every ten
def told(error):
    kind = type(error).__name__
    text = " ".join(str(error).split())
    status = getattr(getattr(error, "response", None), "status_code", None)
    lasting = kind == "HFValidationError" or status in (400, 401, 403, 404, 410, 451)
    text = text.split(" For more information")[0].split(" For more details")[0]
    print(json.dumps({"error": kind + ": " + text[:300], "lasting": lasting}), flush=True)
    sys.exit(1)
try:
    info = huggingface_hub.HfApi().repo_info(job["repo"], revision=job["revision"], files_metadata=True)
    files = {one.rfilename: one.size for one in info.siblings}
except Exception as error:
    told(error)
print(json.dumps({"commit": info.sha, "files": files}), flush=True)
wanted = json.loads(sys.stdin.readline())
quoted = ["".join("[%s]" % c if c in "*?[" else c for c in path) for path in wanted]
try:
    path = huggingface_hub.snapshot_download(
        job["repo"], revision=job["revision"], allow_patterns=quoted, max_workers=job["workers"],
        **({"local_dir": job["local_dir"]} if job["local_dir"] else {"cache_dir": job["cache"]}),
    )
except Exception as error:
    told(error)
print(json.dumps({"path": path}), flush=True)
"""


def python_with_hub(candidates):
    """The first of these Pythons that has huggingface_hub. Raises Bad."""
    import subprocess

    for python in candidates:
        python = os.path.expanduser(python)
        try:
            done = subprocess.run(
                [python, "-c", "import huggingface_hub"], stdin=subprocess.DEVNULL, capture_output=True, timeout=120
            )
        except (OSError, subprocess.SubprocessError):
            continue
        if done.returncode == 0:
            return python
    raise Bad("way", "no huggingface_hub for %s: install it (pip install huggingface_hub)" % ", ".join(candidates))


class Download:
    """One attempt: the child, and how much has come."""

    def __init__(self, python, job, environment):
        import subprocess

        self.root = job["local_dir"] or os.path.join(job["cache"], repository_folder(job["repo"]))
        self.before = set(self.files())
        self.process = subprocess.Popen(
            [python, "-c", _DOWNLOAD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment, start_new_session=True,
        )  # fmt: skip
        self.rows, self.said = [], []
        self.readers = [
            threading.Thread(target=self.read, daemon=True),
            threading.Thread(target=self.listen, daemon=True),
        ]
        self.send(job)
        for reader in self.readers:
            reader.start()

    def send(self, value):
        try:
            self.process.stdin.write(json.dumps(value).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it ended, and has said why

    def read(self):
        for line in self.process.stdout:
            try:
                self.rows.append(json.loads(line))
            except ValueError:
                self.said.append(line.decode("utf-8", "replace"))

    def listen(self):
        for line in self.process.stderr:
            self.said = [*self.said[-20:], line.decode("utf-8", "replace")]

    def files(self):
        """Files of the repository in the cache, or of the folder it downloads into."""
        return [os.path.join(folder, name) for folder, _, names in os.walk(self.root) for name in names]

    def came(self):
        """Bytes in the cache, those of unfinished files too. Xet preallocates: what counts is what is written."""
        total = 0
        for path in self.files():
            try:
                seen = os.lstat(path)
                if stat.S_ISREG(seen.st_mode):
                    total += min(seen.st_size, seen.st_blocks * 512)
            except OSError:
                pass
        return total

    def ended(self):
        if self.process.poll() is None:
            return False
        for reader in self.readers:
            reader.join(5)
        return True

    def stop(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        for path in self.files():  # another process cannot go on with them
            if path.endswith(".incomplete") and path not in self.before:
                try:
                    os.unlink(path)
                except OSError:
                    pass


def fetch(job, teller):
    """Downloads to disk by the real huggingface_hub: into its cache, or with `in_place` into the model's own folder.

    Where not a byte comes for `stall_s` it is begun again, without Xet. `attempts` in a row that bring nothing end it.
    """
    hub = job["hub"]
    local_dir = job["to"] if job.get("in_place") else None
    cache = local_dir or os.path.dirname(repository_of(job.get("source"), hub) or hub_cache(hub) + "/x")
    point, kind = mount_under(cache)
    if kind in IN_MEMORY:
        what = "%s is in memory (%s), and a download goes to a disk first" % (cache, point)
        raise Bad("way", what + ("" if local_dir else "; name a cache on a disk (gpuctl_hub_cache in hosts.yml)"))
    try:
        os.makedirs(cache, exist_ok=True)
    except OSError as error:
        raise Bad("way", "%s: %s" % (cache, error.strerror)) from None
    _put_away_damaged(job)
    python = python_with_hub(hub.get("pythons") or ["python3"])
    wish = {"repo": hub["repo"], "revision": hub.get("revision") or "main", "cache": cache, "local_dir": local_dir}
    wish["workers"] = job.get("workers") or 8
    environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment["PYTHONWARNINGS"] = "ignore"
    environment.pop("HF_HUB_OFFLINE", None)
    if hub.get("endpoint"):
        environment["HF_ENDPOINT"] = hub["endpoint"]
    if hub.get("xet") is False:
        environment["HF_HUB_DISABLE_XET"] = "1"
    stall_s, attempts = float(job.get("stall_s") or 120), int(job.get("attempts") or 5)
    fruitless, kept = 0, -1
    while True:
        download = Download(python, wish, environment)
        try:
            why = _follow(download, wish, job, teller, stall_s)
        finally:
            download.stop()
        if not why:
            return
        have = download.came()
        fruitless, kept = (0 if have > kept >= 0 else fruitless + 1), max(kept, have)
        if fruitless >= attempts:
            raise Bad("way", "%s: %s, %d times in a row; what came is kept" % (hub["repo"], why, attempts))
        pause = min(60.0, float(job.get("pause_s") or 2.0) * 2**fruitless)
        without = ""
        if "HF_HUB_DISABLE_XET" not in environment:
            environment["HF_HUB_DISABLE_XET"] = "1"  # hangs and memory of Xet end here
            without = ", without Xet"
        teller.say("%s: %s; tries again in %g s%s" % (hub["repo"], why, pause, without))
        time.sleep(pause)


def _follow(download, wish, job, teller, stall_s):
    """Waits for its end. Returns why that was no good one, else "". Raises Bad where trying again is no use."""
    seen, since, base = -1, time.monotonic(), None
    while True:
        over = download.ended()
        came = download.came()
        for row in list(download.rows):
            if row.get("error"):
                if row["lasting"]:
                    raise Bad("source", "%s: %s" % (wish["repo"], row["error"]))
                return row["error"]
            if row.get("path"):
                return ""
            if row.get("files") is not None and base is None:
                have = _ask_for(download, wish, job, row, teller)
                base, since = came - have, time.monotonic()
        if over:
            said = " ".join(download.said[-1].split())[:300] if download.said else ""
            return "the download ended: %s" % (said or "status %d" % download.process.returncode)
        if came != seen:
            if base is not None:
                teller.add(came - base - teller.done)
            seen, since = came, time.monotonic()
        if time.monotonic() - since > stall_s:
            return "not a byte for %g s" % stall_s
        teller.tick()
        time.sleep(0.2)


def _ask_for(download, wish, job, row, teller):
    """Says which files are wanted, when the disk has room for them. Returns the bytes that are there already."""
    wanted = belonging(row["files"], job.get("files") or ())
    if not wanted:
        raise Bad("source", "%s has no file of those that belong to the model" % wish["repo"])
    folder = wish["local_dir"] or os.path.join(download.root, "snapshots", row["commit"])
    total = have = 0
    for path in wanted:
        size = row["files"][path] or 0
        total += size
        try:
            have += min(os.stat(os.path.join(folder, path)).st_size, size)
        except OSError:
            pass
    seen = os.statvfs(wish["cache"])
    free = seen.f_bavail * seen.f_frsize
    if total - have + headroom_for(total) > free:
        words = "the disk of %s has %s free, and %s are still to come" % (
            wish["cache"],
            size_of(free),
            size_of(total - have),
        )
        raise Bad("room", words)
    teller.begin("download", total, have)
    download.send(wanted)
    return have


def _put_away_damaged(job):
    """The library takes a file that is there for a good one. Those that are too short, too long or changed go."""
    listing = listing_of(job["to"]) if job.get("in_place") else source_listing(job.get("source"), job["hub"])
    verdict = judge(listing, job.get("files") or ())
    bad = [one["path"] for one in verdict["wrong"]] + list(job.get("damaged") or ())
    for path in bad if job.get("in_place") else ():
        for one in (path, os.path.join(".cache/huggingface/download", path + ".metadata")):
            remove(os.path.join(job["to"], one))
    if listing["kind"] != "hub" or "repository" not in listing:
        return
    for path in bad:
        full = os.path.join(listing["path"], path)
        real = os.path.realpath(full)
        if os.path.dirname(real) == os.path.join(os.path.realpath(listing["repository"]), "blobs"):
            remove(real)
        if os.path.lexists(full):
            os.unlink(full)


# --- JIT caches


def cache_places(env: dict[str, str], home: str, user: str) -> dict[str, tuple[str, str]]:
    """{cache: (folder, variable that moves it)}, as the libraries themselves decide it."""
    get, join = env.get, os.path.join
    cache = get("XDG_CACHE_HOME") or join(home, ".cache")
    triton = get("TRITON_CACHE_DIR") or join(get("TRITON_HOME") or home, ".triton/cache")
    inductor = get("TORCHINDUCTOR_CACHE_DIR") or join(get("TMPDIR") or "/tmp", "torchinductor_" + user)
    return {
        "triton": (triton, "TRITON_CACHE_DIR"),
        "flashinfer": (
            join(get("FLASHINFER_WORKSPACE_BASE") or home, ".cache/flashinfer"),
            "FLASHINFER_WORKSPACE_BASE",
        ),
        "torch inductor": (inductor, "TORCHINDUCTOR_CACHE_DIR"),
        "torch extensions": (get("TORCH_EXTENSIONS_DIR") or join(cache, "torch_extensions"), "TORCH_EXTENSIONS_DIR"),
    }


def caches(job):
    """Where compiled kernels lie, how much there is of them, and whether a reboot takes them (`lost`: why, or "")."""
    found, told = [], set()
    emptied = any(re.search(r"^D!?\s+/tmp\s", read_text(path) or "", re.M) for path in tmpfiles())
    table = mounts()
    for one in job.get("caches") or []:
        user = one.get("user") or pwd.getpwuid(os.geteuid()).pw_name
        try:
            home = pwd.getpwnam(user).pw_dir
        except KeyError:
            continue
        env = {**{"HOME": home}, **(one.get("env") or {})}
        for name, (place, variable) in cache_places(env, env["HOME"], user).items():
            path = os.path.normpath(place)
            if path in told:
                continue
            told.add(path)
            point, kind = mount_under(path, table)
            lost = "it is in memory (%s)" % point if kind in IN_MEMORY else ""
            if not lost and emptied and path.startswith("/tmp/"):
                lost = "/tmp is emptied at each boot"
            files = size = 0
            for folder, _, names in os.walk(path):
                for file in names:
                    try:
                        size += os.lstat(os.path.join(folder, file)).st_size
                        files += 1
                    except OSError:
                        pass
                if files > 200000:
                    break
            found.append(
                {"cache": name, "path": path, "files": files, "bytes": size, "lost": lost, "variable": variable}
            )
    return found


def tmpfiles():
    """The files that say what happens to /tmp, those that hold: one in /etc takes the place of one in /usr/lib."""
    found = {}
    for folder in ("/usr/lib/tmpfiles.d", "/run/tmpfiles.d", "/etc/tmpfiles.d"):
        try:
            found.update({name: os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".conf")})
        except OSError:
            pass
    return sorted(found.values())


# --- jobs


def checked(job):
    """The job, or Bad with what is wrong in it."""
    if not isinstance(job, dict):
        raise Bad("job", "the job is no JSON object")
    if job.get("do", "stage") not in ("look", "stage", "fetch", "serve"):
        raise Bad("job", "do: %r; there are look, stage, fetch, serve" % job["do"])
    if job.get("do") == "serve":
        return job
    to = job.get("to")
    if not isinstance(to, str) or not to.startswith("/") or os.path.normpath(to) != to or to == "/":
        raise Bad("job", "to: %r has to be an absolute path" % (to,))
    if job.get("hub") is not None and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(job["hub"].get("repo", ""))):
        raise Bad("job", "hub: %r is no name of a repository, as in Qwen/Qwen3-8B" % (job["hub"].get("repo"),))
    if job.get("do") == "fetch" and not job.get("hub"):
        raise Bad("job", "hub: a download needs a repository")
    return job


class Model:
    """One model of a job: its copy, its source, and the way from one to the other."""

    def __init__(self, job, teller):
        self.job, self.teller = job, teller
        self.to = job["to"]
        self.parent, self.name = os.path.split(self.to)
        self.staging = os.path.join(self.parent, ".staging-" + self.name)
        self.patterns = job.get("files") or ()
        self.far = None
        self.listing = None
        self.source = None
        self.said = {"type": "result", "model": job.get("model"), "to": self.to, "did": "nothing"}

    def look(self, whole=False):
        """Copy and source as they are. `whole`: SHA-256 of the copy, or of the source where there is no copy."""
        self.copy, self.manifest, listing = look_at_copy(self.to, self.patterns)
        if whole and (self.manifest or self.job.get("in_place")):
            self.read_whole("verifying", listing, self.copy)
            self.copy = judge_copy(listing, self.manifest) if self.manifest else judge(listing, self.patterns)
        self.look_at_source(whole and self.copy["state"] == "absent")
        self.stale = ""
        if self.manifest and self.source and self.source["state"] == "complete":
            self.stale = differs(self.manifest, self.source)
        self.report()

    def look_at_source(self, whole=False):
        job = self.job
        self.source = self.listing = None
        if job.get("in_place"):
            return
        if str(job.get("source") or "").startswith("ssh://"):
            self.far = self.far or Far(job["source"], job, float(job.get("stall_s") or 120))
            try:
                self.source = self.far.verdict()
            except Bad as error:
                if error.kind == "job":
                    raise
                self.source = {
                    "state": "unknown",
                    "files": [],
                    "bytes": 0,
                    "missing": [],
                    "wrong": [],
                    "notes": [str(error)],
                    "known_from": "",
                }
            self.source.setdefault("kind", "ssh")
            self.source["place"] = job["source"]
        elif job.get("source") or job.get("hub"):
            self.listing = source_listing(job.get("source"), job.get("hub"))
            self.source = judge(self.listing, self.patterns)
            if whole and self.source["state"] in ("complete", "partial"):
                self.read_whole("verifying", self.listing, self.source)
                self.source = judge(self.listing, self.patterns)
            self.source.update(kind=self.listing["kind"], place=self.listing["path"], commit=self.listing.get("commit"))

    def read_whole(self, what, listing, verdict):
        paths = [one["path"] for one in verdict["files"]]
        self.teller.begin(what, verdict["bytes"])
        stop = threading.Event()
        trouble = []

        def ticks():
            while not stop.wait(0.2):
                try:
                    self.teller.tick()
                except OSError as error:
                    trouble.append(error)
                    return

        ticker = threading.Thread(target=ticks, daemon=True)
        ticker.start()
        try:
            hash_files(listing, paths, self.teller.add)
        finally:
            stop.set()
            ticker.join()
        if trouble:
            raise trouble[0]

    def report(self):
        said = self.said
        said["state"] = overall(self.copy, self.source, self.stale)
        said["copy"] = {key: self.copy[key] for key in ("state", "bytes", "missing", "wrong", "notes")}
        said["copy"]["files"] = len(self.copy["files"])
        if self.manifest:
            said["copy"]["manifest"] = {key: self.manifest.get(key) for key in ("bytes", "made", "source", "hashed")}
        said["source"] = None
        if self.source:
            said["source"] = {
                key: self.source.get(key)
                for key in ("state", "kind", "place", "commit", "bytes", "missing", "wrong", "notes", "known_from")
            }
            said["source"]["files"] = len(self.source["files"])
        if self.listing and self.listing.get("repository"):
            said["hub_cache"] = os.path.dirname(self.listing["repository"])
        said["stale"] = self.stale
        said["mount"] = mount_of(self.parent)
        said["begun_bytes"] = sum(
            os.lstat(os.path.join(folder, name)).st_blocks * 512
            for folder, _, names in os.walk(self.staging)
            for name in names
        )
        need = max(0, (self.source["bytes"] if self.source else 0) - said["begun_bytes"])
        said["room"] = {"need": need, "limits": self.limits()}

    def limits(self):
        return [*limits_at(self.parent), *(self.job.get("limits") or [])]

    # -- staging

    def stage(self):
        self.look(bool(self.job.get("verify")))
        if self.job.get("in_place"):
            return self.bring()
        if self.copy["state"] == "staged" and not self.stale:
            remove(self.staging)
            self.said["begun_bytes"] = 0
            return None
        mount = mount_of(self.parent)
        if not mount["in_memory"]:
            raise Bad("room", "%s is not in memory: no tmpfs is mounted there, and a disk is not filled" % self.parent)
        if mount["shared"]:
            raise Bad(
                "room", "%s lies in %s of the system, and needs a tmpfs of its own" % (self.parent, mount["point"])
            )
        self.have_source()
        if damaged := self.fill():
            self.condemn(damaged)
            if not self.can_fetch():
                raise Bad("source", self.damaged_in_words(damaged))
            self.teller.say(self.damaged_in_words(damaged) + "; downloaded again")
            self.job["damaged"] = damaged
            self.download()
            self.have_source()
            if damaged := self.fill():
                self.condemn(damaged)
                raise Bad("source", self.damaged_in_words(damaged))
        self.look()
        if self.copy["state"] != "staged":
            raise Bad("room", "%s is not as it was put there: %s" % (self.to, missing_in_words(self.copy)))
        self.said["did"] = "staged"
        return None

    def bring(self):
        """A model that servers find on a disk: at most it is downloaded there."""
        if self.copy["state"] in ("complete", "staged"):
            return
        if not self.job.get("hub") or not self.job.get("download", True):
            raise Bad("source", "%s is %s: %s" % (self.to, self.copy["state"], missing_in_words(self.copy)))
        self.job["damaged"] = [one["path"] for one in self.copy["wrong"]]
        self.download()
        self.look()
        if self.copy["state"] != "complete":
            words = (self.to, self.copy["state"], missing_in_words(self.copy))
            raise Bad("source", "%s is %s after the download: %s" % words)

    def fetch(self):
        """Only the download, where there is something to download."""
        self.look()
        if self.job.get("in_place"):
            self.bring()
        else:
            self.have_source()

    def can_fetch(self):
        hub = self.listing is None or self.listing["kind"] == "hub"
        return bool(self.job.get("hub")) and self.job.get("download", True) and self.far is None and hub

    def have_source(self):
        name = self.job.get("model") or self.to
        if self.source is None:
            raise Bad("source", "%s: nothing says where it comes from: give it a `source` or a `hub`" % name)
        for after in ("", " after the download"):
            if self.source["state"] == "complete":
                return
            if after or not self.can_fetch():
                if self.source["state"] == "unknown":
                    raise Bad("way", "%s: %s" % (self.source.get("place"), missing_in_words(self.source)))
                words = (self.source.get("place"), self.source["state"], after, missing_in_words(self.source))
                raise Bad("source", "%s is %s%s: %s" % words)
            self.download()

    def download(self):
        repo = self.job["hub"]["repo"]
        self.teller.say("%s: %s; downloads %s" % (self.job.get("model") or self.to, self.said["state"], repo))
        fetch(self.job, self.teller)
        self.job.pop("damaged", None)
        self.look_at_source()
        self.said["did"] = "downloaded"
        self.report()

    def damaged_in_words(self, paths):
        which = "%s is" % paths[0] if len(paths) == 1 else "%s and %d more are" % (paths[0], len(paths) - 1)
        return "%s: %s damaged: its bytes are not those its digest says" % (self.source.get("place"), which)

    def condemn(self, damaged):
        """The source has files whose bytes are not what they have to be."""
        why = "its bytes are not those its digest says"
        self.source["wrong"] += [{"path": path, "bytes": None, "why": why, "kind": "corrupt"} for path in damaged]
        self.source["files"] = [one for one in self.source["files"] if one["path"] not in damaged]
        self.source["state"] = "corrupt"
        self.report()

    def fill(self):
        """Copies and publishes. Returns the paths whose bytes are not what their digests say."""
        job = self.job
        alone = self.source.get("kind") == "file" or (self.listing is not None and self.listing["kind"] == "file")
        source = self.far or Folder(self.listing)
        os.makedirs(self.parent, mode=0o755, exist_ok=True)
        filling = Filling(self.staging, self.source["files"], source, self.teller, job.get("hash", True))
        begun = filling.resume()
        if begun:
            self.teller.say("%s of %s are there from before" % (size_of(begun), size_of(self.source["bytes"])))
        if not alone and os.path.isdir(self.to):
            filling.link(self.to, self.manifest)
        headroom = job.get("headroom_bytes")
        need = filling.left()
        headroom = headroom_for(need) if headroom is None else int(headroom)
        self.said["room"] = {"need": need, "headroom": headroom, "limits": self.limits()}
        good, why = fits(need, self.said["room"]["limits"], headroom)
        if not good and self.copy["state"] != "absent":
            freed = bytes_freed(self.to)
            hopeful = [{**limit, "free": limit["free"] + freed} for limit in self.said["room"]["limits"]]
            enough, still = fits(need, hopeful, headroom)
            if not job.get("drop_old") or not enough:
                stays = "--drop-old gives up %s of it first" % size_of(freed) if enough else "without it: %s" % still
                self.leave_nothing(begun)
                raise Bad("room", "%s; the old copy stays until the new one is there; %s" % (why, stays))
            self.teller.say("the old copy goes first: %s" % why)
            remove(self.to + "." + MANIFEST)
            remove(self.to)
        elif not good:
            self.leave_nothing(begun)
            raise Bad("room", why)

        def watch(left):
            for limit in limits_at(self.parent):
                if left > limit["free"] and limit["free"] < 32 << 20:
                    raise Bad(
                        "room",
                        "%s has %s left: something else takes it; stopped before anything is killed for memory"
                        % (limit["what"], size_of(max(0, limit["free"]))),
                    )

        began = time.monotonic()
        threads = int(job.get("threads") or (min(4, default_threads()) if self.far else default_threads()))
        try:
            filling.run(threads, watch)
        finally:
            source.close()
        if filling.damaged:
            return filling.damaged
        seconds = max(time.monotonic() - began, 1e-6)
        self.said["took"] = {
            "seconds": round(seconds, 3),
            "bytes": self.source["bytes"],
            "copied": need,
            "bytes_per_s": round(self.source["bytes"] / seconds),
        }
        origin = {key: self.source.get(key) for key in ("kind", "place", "commit") if self.source.get(key)}
        manifest = filling.manifest(job.get("model"), origin)
        if self.listing is not None and self.listing["kind"] != "hub" and job.get("hash", True):
            record(self.listing["path"], manifest)
        if alone:
            manifest["alone"] = self.source["files"][0]["path"]
            manifest["files"][0]["path"] = self.name
            if manifest["alone"] != self.name:
                manifest["files"][0]["from"] = manifest["alone"]
        publish(self.staging, self.to, manifest)
        return []

    def leave_nothing(self, begun):
        """Refused before a byte was written: a journal of nothing would look like a copy that was broken off."""
        if not begun:
            remove(self.staging)
            self.said["begun_bytes"] = 0


def missing_in_words(verdict):
    """What is missing and what is wrong, in one line."""
    parts = ["%s %s" % (one["path"], one["why"]) for one in [*verdict["missing"], *verdict["wrong"]]]
    shown = "; ".join(parts[:4]) + ("; and %d more" % (len(parts) - 4) if len(parts) > 4 else "")
    known = [one["bytes"] for one in verdict["missing"] if one["bytes"] is not None]
    if known and len(known) == len(verdict["missing"]):
        shown += " (%s missing)" % size_of(sum(known))
    return shown or "; ".join(verdict.get("notes") or []) or "nothing is there"


class Lock:
    """One at a time for a place; the others wait, and say for whom."""

    def __init__(self, path, teller, wait_s):
        self.path, self.teller, self.wait_s = path, teller, wait_s
        self.fd = -1

    def __enter__(self):
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        told, began = 0.0, time.monotonic()
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = time.monotonic()
                if now - began > self.wait_s:
                    raise Bad(
                        "stopped", "process %s stages it already, for longer than %g s" % (self.holder(), self.wait_s)
                    ) from None
                if now - told > 5:
                    self.teller.say("waits for process %s, which stages it already" % self.holder())
                    told = now
                time.sleep(0.1)
        os.ftruncate(self.fd, 0)
        os.write(self.fd, b"%d\n" % os.getpid())
        return self

    def holder(self):
        return (read_text(self.path) or "").strip() or "?"

    def __exit__(self, *_):
        os.close(self.fd)


def perform(job, teller):
    """Does a job; returns the result. Raises Bad, with the result so far in `more`."""
    model = Model(job, teller)
    try:
        do = job.get("do", "stage")
        if do == "look":
            model.look(bool(job.get("verify")))
            if job.get("caches") is not None:
                model.said["caches"] = caches(job)
            return model.said
        place = hashlib.sha256(job["to"].encode()).hexdigest()[:16]
        folder = (
            "/run/gpuctl"
            if os.geteuid() == 0
            else os.path.join(os.environ.get("XDG_RUNTIME_DIR") or "/tmp", "gpuctl-%d" % os.geteuid())
        )
        with Lock(os.path.join(folder, "stage-%s.lock" % place), teller, float(job.get("wait_s") or 3600)):
            if do == "fetch":
                model.fetch()
            else:
                model.stage()
        return model.said
    except Bad as error:
        error.more = {**{key: value for key, value in model.said.items() if key != "type"}, **error.more}
        raise
    finally:
        if model.far:
            model.far.close()


def stopped(number, _):
    raise Bad("stopped", "stopped by signal %d; the same command goes on where it was" % number)


def main():
    teller = Teller(True, 1.0)
    try:
        first = sys.stdin.buffer.readline()
        try:
            job = json.loads(first)
        except ValueError:  # a job in a file is written over several lines
            try:
                job = json.loads(first + sys.stdin.buffer.read())
            except ValueError as error:
                raise Bad("job", "the job is no JSON: %s" % error) from None
        teller = Teller(
            bool(isinstance(job, dict) and job.get("json")),
            float(
                (isinstance(job, dict) and job.get("progress_s"))
                or (1.0 if isinstance(job, dict) and job.get("json") else 10.0)
            ),
        )
        checked(job)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, stopped)
        if job.get("do") == "serve":
            serve(job)
            return 0
        teller.emit(perform(job, teller))
        return 0
    except Bad as error:
        try:
            teller.emit({**error.more, "type": "error", "kind": error.kind, "message": str(error)})
        except OSError:
            pass
        return Bad.CODES[error.kind]
    except BrokenPipeError:
        return 4
    except OSError as error:  # somebody filled it meanwhile, and not a journal's line has room
        if error.errno not in FULL:
            raise
        message = "%s: %s; the same command goes on when there is room" % (error.filename or job["to"], error.strerror)
        teller.emit({"type": "error", "kind": "room", "message": message})
        return Bad.CODES["room"]


if __name__ == "__main__":
    sys.stdout.flush()
    code = main()
    os._exit(code)  # threads in a read that hangs do not hold it up
