"""Puts the SGLang double into a root file system, as a virtual environment with the real one would stand there.

`install(root, "0.5.11")` makes /opt/sglang-0.5.11 with bin/python, and what a tool asks an installation for: the version
in `sglang.__version__`, package metadata, and the source files by which a fork is told from a release.
`write_model(...)` makes a small model folder with the true config.json of a big one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.lab.hub.repositories import Repository, files_of

HERE = Path(__file__).parent
PACKAGE = HERE / "sglang"
MODELS = HERE / "models"
FAULTS = "run/lab/sglang/faults.json"
# Prefix under /opt in the example inventory -> (release, has the DDTree fork).
EXAMPLE = {"/opt/sglang": ("0.5.11", False), "/opt/sglang-ddtree": ("0.5.11", True)}

# What the release's wheel asks for, and what stands installed beside it.
PINS = {
    "0.5.11": {
        "torch": "2.11.0", "transformers": "5.6.0", "sglang-kernel": "0.4.2", "flashinfer_python": "0.6.8.post1",
        "xgrammar": "0.1.32", "compressed-tensors": "0.15.0",
    },
    "0.5.16": {
        "torch": "2.11.0", "transformers": "5.12.1", "sglang-kernel": "0.4.5", "flashinfer_python": "0.6.14",
        "xgrammar": "0.2.1", "compressed-tensors": "0.17.0",
    },
    "0.5.23": {
        "torch": "2.14.1", "transformers": "5.19.0", "sglang-kernel": "0.4.10", "flashinfer_python": "0.7.2",
        "xgrammar": "0.2.7", "compressed-tensors": "0.18.0",
    },
}  # fmt: skip
UNPINNED = {("0.5.11", "compressed-tensors"), ("0.5.16", "compressed-tensors")}
# The texts by which the arithmetic of an installation is recognised, whatever its version string says.
LANDMARKS = {
    "0.5.11": {
        "srt/model_executor/model_runner_kv_cache_mixin.py": "mamba_state_intermediate_size = mamba_cache_per_req * "
        "max_running_requests * speculative_num_draft_tokens",
    },
    "0.5.16": {
        "srt/mem_cache/kv_cache_configurator.py": "int(mamba_budget_bytes // (per_req * (1 + D / ratio)))\n"
        "draft weights are now counted",
    },
    "0.5.23": {
        "srt/mem_cache/kv_cache_configurator.py": "(mamba_budget_bytes - per_req * (1 + D) - extra_per_slot) // "
        "(per_req * (1 + D / ratio) + extra_per_slot)\ndraft weights are now counted",
    },
}
WRAPPER = """#!/bin/sh
# The lab's SGLang double: the machine's own Python with the double on its path.
PYTHONPATH={site}${{PYTHONPATH:+:$PYTHONPATH}} exec "{python}" "$@"
"""
COMMAND = """#!/bin/sh
[ "$1" = serve ] && shift
exec "$(dirname "$0")/python" -m sglang.launch_server "$@"
"""


def install(
    root: Path,
    release: str,
    *,
    prefix: str | None = None,
    fork: bool = False,
    profile: Mapping[str, Any] | str | None = None,
    startup_scale: float = 0.1,
    python: str = "/usr/bin/python3",
) -> Path:
    """Installs the double of a release below `root` and returns its folder. Replaces what is there.

    `prefix` is where it stands in that root (default /opt/sglang-<release>); `fork` adds DDTREE. `profile` is the name of
    a built-in profile or a document (it may say `base`); default: the campaign's machine. `startup_scale` shortens the
    delays of a start, never the speeds. `python` is the interpreter in that root, 3.9 or newer, json and ctypes included.
    """
    if release not in PINS:
        raise ValueError(f"no SGLang release {release!r}: there are {', '.join(PINS)}")
    prefix = prefix or f"/opt/sglang-{release}"
    folder = root / prefix.lstrip("/")
    shutil.rmtree(folder, ignore_errors=True)
    site = folder / "lib" / "python3" / "site-packages"
    target = site / "sglang"
    shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns("__pycache__"))
    (target / "VERSION").write_text(release + "\n")
    if profile is None:
        profile = "campaign-ddtree" if fork else "campaign"
    document = {"base": profile} if isinstance(profile, str) else dict(profile)
    document["startup"] = {**document.get("startup", {}), "scale": startup_scale}
    (target / "profile.json").write_text(json.dumps(document, indent=1) + "\n")
    for path, text in LANDMARKS[release].items():
        file = target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            f'"""Of this file the double has only what tells the release\'s memory arithmetic:\n\n'
            f'server_args.mamba_full_memory_ratio\n{text}\n"""\n'
        )
    (target / "srt" / "server_args.py").write_text(
        f'"""Of this file the double has only that it is another one for each set of flags: {release}'
        f'{" with DDTREE" if fork else ""}"""\n'
    )
    for name, version in {"sglang": release, **PINS[release]}.items():
        needs = [other if (release, other) in UNPINNED else f"{other}=={pin}" for other, pin in PINS[release].items()]
        _metadata(site, name, version, needs if name == "sglang" else [])
    inside = f"{prefix}/lib/python3/site-packages"
    if str(root) in (".", "/"):
        inside = str(site.resolve())
    _program(folder / "bin" / "python", WRAPPER.format(site=inside, python=python))
    (folder / "bin" / "python3").symlink_to("python")
    _program(folder / "bin" / "sglang", COMMAND)
    return folder


def _metadata(site: Path, name: str, version: str, needs: Sequence[str]) -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {other}" for other in needs]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    (folder / "INSTALLER").write_text("pip\n")


def _program(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


def write_model(root: Path, path: str, name: str, *, shards: int = 3, size: int = 1 << 20, seed: str = "") -> Path:
    """Writes the model `name` (a folder of models/) to `path` below `root`; returns the folder.

    config.json is the big model's own. The weights are `shards` true safetensors files of about `size` bytes altogether,
    of pseudo-random bytes from `seed`: the same arguments give the same bytes.
    """
    if not (MODELS / name).is_dir():
        raise ValueError(f"no model {name!r}: there are {', '.join(sorted(p.name for p in MODELS.iterdir()))}")
    folder = root / path.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((MODELS / name / "config.json").read_text())
    text = config.get("text_config", config)
    files: dict[str, bytes] = {"config.json": json.dumps(config, indent=2).encode() + b"\n"}
    files["generation_config.json"] = json.dumps(
        {"do_sample": True, "eos_token_id": text.get("eos_token_id"), "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    ).encode()
    files["tokenizer_config.json"] = json.dumps(
        {"model_max_length": text["max_position_embeddings"], "tokenizer_class": "PreTrainedTokenizerFast"}
    ).encode()
    files["tokenizer.json"] = json.dumps(
        {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    ).encode()
    weights: dict[str, str] = {}
    total, each = 0, max(64, size // shards // 2 // 16 * 16)
    for number in range(1, shards + 1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        names = [f"model.layers.{2 * number + i}.mlp.down_proj.weight" for i in range(2)]
        files[file] = safetensors({one: _bytes(f"{seed}:{name}:{one}", each) for one in names})
        weights.update(dict.fromkeys(names, file))
        total += 2 * each
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        files["model.safetensors.index.json"] = json.dumps(index, indent=1).encode()
    for file, data in files.items():
        (folder / file).write_bytes(data)
    return folder


def safetensors(tensors: Mapping[str, bytes]) -> bytes:
    """A safetensors file of byte tensors: length of the header, header, payload."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


def _bytes(seed: str, count: int) -> bytes:
    return hashlib.shake_256(seed.encode()).digest(count)


def write_cache(root: Path, cache: str, repo: str, name: str, **known: Any) -> Path:
    """Writes the model `name` into a Hugging Face cache below `root` as `repo`; returns the snapshot's folder.

    As the client lays it out: blobs by their hash, a snapshot of relative links, refs/main, trees/<commit>.json.
    """
    store = root / cache.lstrip("/") / f"models--{repo.replace('/', '--')}"
    blobs = store / "blobs"
    plain = write_model(store, "incoming", name, **known)
    repository = Repository(repo)
    commit = repository.commit(files_of(plain))
    snapshot = store / "snapshots" / commit
    for folder in (blobs, snapshot, store / "refs", store / "trees"):
        folder.mkdir(parents=True, exist_ok=True)
    tree = {}
    for path, file in repository.commits[commit].items():
        os.replace(plain / path, blobs / file.etag)
        (snapshot / path).symlink_to(f"../../blobs/{file.etag}")
        tree[path] = {"size": file.size, "blob_id": file.blob}
        if file.large:
            tree[path].update(lfs_sha256=file.sha256, lfs_size=file.size)
    plain.rmdir()
    (store / "refs" / "main").write_text(commit)
    (store / "trees" / f"{commit}.json").write_text(json.dumps({"format_version": 1, "files": tree}))
    return snapshot


def install_guest(root: Path) -> None:
    """What a guest of the lab has: the engines and models that the example inventory names, small."""
    for prefix, (release, fork) in EXAMPLE.items():
        install(root, release, prefix=prefix, fork=fork, startup_scale=0.05)
    for name in ("Qwen3.6-27B-DFlash", "Kimi-K2.6", "Kimi-K2.6-EAGLE3"):
        write_model(root, f"/root/models/{name}", name)
    write_cache(root, "/root/.cache/huggingface/hub", "Qwen/Qwen3.6-27B", "Qwen3.6-27B", shards=4, size=8 << 20)


def set_faults(root: Path, faults: Sequence[Mapping[str, Any]]) -> Path:
    """Says what shall go wrong from now on, in servers that run and in those that start; an empty list heals all."""
    file = root / FAULTS
    file.parent.mkdir(parents=True, exist_ok=True)
    (file.parent / "starts").unlink(missing_ok=True)
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps({"faults": list(faults)}, indent=1) + "\n")
    os.replace(fresh, file)
    return file
