"""Boxes from snapshot files, and snapshots as a file to keep or to mail."""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpuctl import redaction
from gpuctl.box import SCHEMA, Box, Snapshot, Wanted
from gpuctl.snapshots import NotASnapshot, read

MAX_BYTES = 256 << 20


def read_snapshots(path: Path) -> list[Snapshot]:
    """The snapshots of a file (- is stdin): one, or guest and node. Packed with gzip or not.

    Raises NotASnapshot, in one line.
    """
    try:
        if path == Path("-"):
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        if data[:2] == b"\x1f\x8b" and len(data) <= MAX_BYTES:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
                data = packed.read(MAX_BYTES + 1)
    except IsADirectoryError:
        raise NotASnapshot(f"{path}: a folder; give the file in it") from None
    except OSError as error:
        raise NotASnapshot(f"{path}: {error.strerror or 'not gzip, though it begins like it'}") from None
    except EOFError:
        raise NotASnapshot(f"{path}: cut off; gzip's end is missing") from None
    if len(data) > MAX_BYTES:
        raise NotASnapshot(f"{path}: larger than {MAX_BYTES >> 20} MiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("utf-8", "replace")  # logs carry odd bytes
    return read(text.replace("\r\n", "\n"), str(path))


def box_from(snapshots: Sequence[Snapshot], wanted: Wanted | None = None) -> Box:
    """Guest and node among the snapshots. Raises NotASnapshot where there are too many of a kind, or none."""
    node = [snapshot for snapshot in snapshots if snapshot.role == "node"]
    guest = [snapshot for snapshot in snapshots if snapshot.role != "node"]
    if len(guest) == 2 and not node:  # two files, neither says which it is: the one with configurations is the node's
        looks = [s for s in guest if any(path.startswith("/etc/pve/") for path in s.mapping("files"))]
        if len(looks) == 1:
            node, guest = looks, [s for s in guest if s is not looks[0]]
    if len(guest) > 1:  # a file with nothing but a configuration is its node's, and says no more of the guest
        guest = [s for s in guest if _says_something(s)] or guest
    for kind, found in (("node", node), ("guest", guest)):
        if len(found) > 1:
            names = ", ".join(f"{s.name} ({s.source})" if s.source else s.name for s in found)
            raise NotASnapshot(f"one box has one {kind}, these are {len(found)}: {names}; role: tells them apart")
    if not guest and not node:
        raise NotASnapshot("no snapshot given")
    if not guest:
        return Box(node[0], node[0], completed(node, wanted))
    return Box(guest[0], node[0] if node else None, completed([*guest, *node], wanted))


def _says_something(snapshot: Snapshot) -> bool:
    names = {"role", "machine", "vmid", "node_name", "taken", "packages", "stat"}
    return any(value for section, value in snapshot.document.items() if section not in names)


def completed(snapshots: Sequence[Snapshot], wanted: Wanted | None) -> Wanted:
    """What the inventory says, completed by what the snapshots say of themselves."""
    wanted = wanted or Wanted()
    for snapshot in snapshots:
        document, service = snapshot.document, snapshot.mapping("service")
        if wanted.gpus is None and document.get("expected_gpus") is not None:
            wanted = replace(wanted, gpus=int(document["expected_gpus"]))
        if wanted.vmid is None and document.get("vmid") is not None:
            wanted = replace(wanted, vmid=int(document["vmid"]))
        if not wanted.node and document.get("node_name"):
            wanted = replace(wanted, node=str(document["node_name"]))
        if wanted.user is None and service.get("user"):
            wanted = replace(wanted, user=str(service["user"]))
        if wanted.unit is None and service.get("unit"):
            wanted = replace(wanted, unit=str(service["unit"]))
    return wanted


def saved(snapshots: Sequence[Snapshot], *, masked: bool = True) -> tuple[str, list[str]]:
    """One JSON document with all snapshots, and lines that tell what in it was masked."""
    documents = [dict(snapshot.document) for snapshot in snapshots if snapshot.present]
    told: list[str] = []
    if masked:
        documents, told = redaction.mask(documents)
    if len(documents) == 1:
        whole = documents[0]
    else:
        whole = {"schema": SCHEMA}
        for number, document in enumerate(documents):
            whole["node" if document.get("role") == "node" else "guest" if number == 0 else f"guest{number}"] = document
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n", told
