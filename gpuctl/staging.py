"""Models on machines: in what state each is, and filling it into memory. What moves bytes is agent/stage.py.

`look` and `stage` ask one machine through its transport; both answer with a `Found`. `tmpfs_for` and `boot_files` say
what has to be placed so that the memory file system is there and filled again at each boot; deploy.py places it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from gpuctl.agent import stage as program
from gpuctl.agent.stage import size_of
from gpuctl.config import Model, Server
from gpuctl.hosts import Machine
from gpuctl.render import File, Tmpfs
from gpuctl.transport import Transport, TransportError, agent
from gpuctl.transport.agents import AGENTS

__all__ = ["Found", "Progress", "StagingError", "boot_files", "job_for", "look", "node_limits", "stage", "tmpfs_for"]

Progress = Mapping[str, Any]  # {"type": "progress", "what", "bytes", "of", "rate", "eta_s"} or {"type": "note", "text"}
_LOOK_S = 300.0  # headers of a thousand files on a slow disk
_CACHE_VARIABLES = re.compile(r"^(TRITON_|TORCH|FLASHINFER_|XDG_CACHE_HOME$|TMPDIR$|HOME$)")
GIB = 1 << 30


class StagingError(Exception):
    """A model could not be staged, in one line. `kind`: source (it is not usable), job (what is written is wrong), room
    (no memory, no tmpfs), way (no python3, no hub, no SSH), stopped (the same goes on). `found`: as far as was seen."""

    def __init__(self, kind: str, message: str, found: Found | None = None) -> None:
        super().__init__(message)
        self.kind, self.found = kind, found


@dataclass(frozen=True)
class Found:
    """A model on a machine. `state`: absent | metadata only | partial | size mismatch | corrupt | complete | staged |
    stale | unknown. `raw` is what agent/stage.py said: `copy`, `source`, `room`, `mount`, `caches` ..."""

    model: str
    path: str
    in_memory: bool  # it has to be staged; otherwise it lies on a disk where servers find it
    state: str
    raw: Mapping[str, Any]

    @property
    def well(self) -> bool:
        """Servers may load it as it is."""
        return self.state == "staged" if self.in_memory else self.state in ("complete", "staged")

    @property
    def source_bytes(self) -> int | None:
        """How large it is, where its source is complete or a good copy is there."""
        source, copy = self.raw.get("source"), self.raw.get("copy") or {}
        if source and source.get("state") == "complete":
            return int(source["bytes"])
        return int(copy["bytes"]) if copy.get("state") in ("staged", "complete") else None

    @property
    def missing(self) -> tuple[str, ...]:
        """What is missing or wrong, one line each: first in the copy, then where it comes from."""
        lines = []
        for where, verdict in (("", self.raw.get("copy")), ("source: ", self.raw.get("source"))):
            if not verdict or (not where and verdict["state"] == "absent"):
                continue
            for one in [*verdict["missing"], *verdict["wrong"]]:
                size = f" ({size_of(one['bytes'])})" if one.get("bytes") else ""
                lines.append(f"{where}{one['path']}{size}: {one['why']}")
            if verdict["state"] not in ("complete", "staged"):
                lines += [f"{where}{note}" for note in verdict["notes"]]
        return tuple(lines)


def job_for(name: str, model: Model, machine: Machine, servers: Mapping[str, Server] | None = None) -> dict[str, Any]:
    """What agent/stage.py has to know of a model on a machine. `servers`: those that use it say which Python has
    huggingface_hub, and where JIT caches lie. Raises StagingError (job)."""
    path = model.path
    if not path.startswith("/"):
        if machine.connection != "local":
            raise StagingError("job", f"{name}: path: {path!r} has to be absolute on {machine.name}")
        path = str(Path(path).resolve())
    if ".." in PurePosixPath(path).parts:
        raise StagingError("job", f"{name}: path: {path!r} may not lead upwards")
    job: dict[str, Any] = {"model": name, "to": str(PurePosixPath(path))}
    if model.files:
        job["files"] = list(model.files)
    users = [one for one in (servers or {}).values() if name in (one.model, one.draft)]
    job["caches"] = _environments(users)
    if not model.stage:
        job["in_place"] = True
    elif model.source:
        job["source"] = model.source
    if model.hub:
        pythons = [one.program[0] for one in users if one.program and "python" in PurePosixPath(one.program[0]).name]
        job["hub"] = {
            "repo": model.hub,
            "revision": model.revision,
            "pythons": list(dict.fromkeys([*pythons, "python3"])),
        }
        for key, variable in (("cache", "gpuctl_hub_cache"), ("endpoint", "gpuctl_hub_endpoint")):
            if machine.vars.get(variable):
                job["hub"][key] = str(machine.vars[variable])
    return job


def _environments(servers: Iterable[Server]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for server in servers:
        env = {key: str(value) for key, value in server.env.items() if _CACHE_VARIABLES.match(key)}
        one = {"user": server.user, "env": env} if server.user else {"env": env}
        if one not in found:
            found.append(one)
    return found or [{}]


def look(
    way: Transport,
    job: Mapping[str, Any],
    *,
    verify: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Found:
    """The model of a job (`job_for`) as it is now; changes nothing. `verify`: every byte is read, SHA-256 compared.

    Raises StagingError (job, way), TransportError.
    """
    return _done(way, {**job, "do": "look", "verify": verify}, on_progress, None if verify else _LOOK_S)


def stage(
    way: Transport,
    job: Mapping[str, Any],
    *,
    verify: bool = False,
    hash_: bool = True,
    drop_old: bool = False,
    download: bool = True,
    limits: Sequence[Mapping[str, Any]] = (),
    threads: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Found:
    """Fills the model into memory, unless it is there already; downloads it to the disk there first where it has to.

    What was interrupted goes on where it stopped. `verify`: the copy that is there is read whole before it is believed.
    `hash_`: SHA-256 while copying. `drop_old`: the old copy goes first where both have no room. `limits`: what the node
    knows of memory (`node_limits`). Raises StagingError, TransportError.
    """
    asked = {**job, "do": "stage", "verify": verify, "hash": hash_, "drop_old": drop_old, "download": download}
    asked |= {"limits": list(limits)} if limits else {}
    asked |= {"threads": threads} if threads else {}
    return _done(way, asked, on_progress, None)


def _done(
    way: Transport, job: Mapping[str, Any], on_progress: Callable[[Progress], None] | None, timeout: float | None
) -> Found:
    argv, stdin = agent("stage", {**job, "json": True})
    held = bytearray()
    last: dict[str, Any] = {}

    def take(data: bytes) -> None:
        held.extend(data)
        while (end := held.find(b"\n")) >= 0:
            line = bytes(held[:end])
            del held[: end + 1]
            try:
                row = json.loads(line)
                kind = row["type"]
            except (ValueError, KeyError, TypeError):
                raise TransportError(f"{way.name}: it said {line[:200]!r} in place of an answer") from None
            if kind in ("result", "error"):
                last.update(row)
            elif on_progress:
                on_progress(row)

    done = way.run(argv, stdin=stdin, timeout=timeout, on_stdout=take)
    if not last:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        if done.rc == 127:
            raise StagingError("way", f"{way.name}: no python3 there; install it (apt install python3-minimal)")
        if done.rc == -9:
            raise StagingError(
                "room", f"{way.name}: staging was killed (signal 9), as the kernel does when memory runs out"
            )
        how = said[-1][:300] if said else f"status {done.rc}"
        raise StagingError("way", f"{way.name}: staging ended without an answer: {how}")
    found = Found(str(job["model"]), str(job["to"]), not job.get("in_place"), str(last.get("state", "unknown")), last)
    if last["type"] == "error":
        raise StagingError(
            str(last["kind"]), f"{way.name}: {job['model']}: {last['message']}", found if "state" in last else None
        )
    return found


_ASK_NODE = """
cat /proc/meminfo
for d in /sys/fs/cgroup/lxc/$1 /sys/fs/cgroup/lxc.payload.$1 /sys/fs/cgroup/memory/lxc/$1; do
  for f in memory.max memory.high memory.current memory.limit_in_bytes memory.usage_in_bytes memory.stat; do
    [ -r "$d/$f" ] && echo "== $d/$f" && cat "$d/$f"
  done
done
exit 0
"""


def node_limits(way: Transport, vmid: int | None) -> list[dict[str, Any]]:
    """What a guest cannot see: its memory cgroup and its node's memory. [{"what", "free"}]. Raises TransportError."""
    said = way.run(["sh", "-c", _ASK_NODE, "sh", str(vmid or "")], timeout=30).text
    return read_node_limits(said, way.name)


def read_node_limits(text: str, node: str) -> list[dict[str, Any]]:
    """The answer of the node, as limits. Pure."""
    memory, *files = re.split(r"^== (.*)\n", text, flags=re.M)
    limits = []
    if found := re.search(r"^MemAvailable:\s+(\d+) kB", memory, re.M):
        limits.append({"what": f"memory of {node} (MemAvailable)", "free": int(found[1]) << 10})
    told = dict(zip(files[::2], files[1::2], strict=False))
    for folder in dict.fromkeys(str(PurePosixPath(path).parent) for path in told):
        unified = f"{folder}/memory.current" in told
        if limit := program.cgroup_limit(folder, unified, told.get):
            limits.append({**limit, "what": f"{limit['what']} on {node}"})
    return limits


# --- what is placed on a machine


def tmpfs_for(machine: Machine, folder: str, found: Sequence[Found]) -> Tmpfs:
    """The memory file system at `folder` (the parent of models' paths): as the inventory wants it, or as it is needed.

    The inventory's variable of the machine: `gpuctl_tmpfs: {/run/gpuctl/models: {size: 64G, numa: interleave, huge:
    within_size}}`; numa is interleave, bind:N, or none. Without a size it is that of the models (`found`: all that lie
    there) and a twentieth; a mounted one that is large enough stays as it is. Raises StagingError (job).
    """
    options = _tmpfs_options(machine, folder)
    mounted = next((one.raw["mount"] for one in found if one.raw.get("mount", {}).get("point") == folder), None)
    size = _bytes(options["size"], machine, folder) if "size" in options else None
    if size is None:
        known = [one.source_bytes for one in found]
        unknown = [one.model for one, bytes_ in zip(found, known, strict=True) if bytes_ is None]
        if unknown and not mounted:
            raise StagingError(
                "job",
                f"{machine.name}: how large {folder} has to be is known when {', '.join(unknown)} is there; "
                f"give it a size in hosts.yml: gpuctl_tmpfs: {{{folder}: {{size: 64G}}}}",
            )
        need = math.ceil((sum(one or 0 for one in known) * 1.05 + GIB / 4) / (GIB / 4)) * (GIB // 4)
        size = max(need, int(mounted["bytes"])) if mounted else need
    nodes = max((int(one.raw.get("mount", {}).get("numa_nodes", 1)) for one in found), default=1)
    numa = str(options.get("numa", "interleave" if nodes > 1 else "none"))
    return Tmpfs(folder, size, policy=None if numa == "none" else numa, huge=options.get("huge"))


def _tmpfs_options(machine: Machine, folder: str) -> dict[str, Any]:
    wanted = machine.vars.get("gpuctl_tmpfs") or {}
    where = f"{machine.name}: gpuctl_tmpfs"
    if not isinstance(wanted, Mapping):
        raise StagingError("job", f"{where}: has to be a mapping, as in {{/run/gpuctl/models: {{size: 64G}}}}")
    options = wanted.get(folder) or {}
    if not isinstance(options, Mapping):
        raise StagingError("job", f"{where}: {folder}: has to be a mapping of size, numa, huge")
    if strange := sorted(set(map(str, options)) - {"size", "numa", "huge"}):
        raise StagingError("job", f"{where}: {folder}: no {strange[0]}; there are size, numa, huge")
    numa = str(options.get("numa", "none"))
    if not re.fullmatch(r"none|interleave(:[\d,-]+)?|bind:[\d,-]+", numa):
        raise StagingError("job", f"{where}: {folder}: numa: {numa!r}; there are interleave, bind:N, none")
    huge = options.get("huge")
    if huge is not None and huge not in ("never", "always", "within_size", "advise"):
        raise StagingError("job", f"{where}: {folder}: huge: {huge!r}; there are never, always, within_size, advise")
    return dict(options)


def _bytes(text: Any, machine: Machine, folder: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", str(text).strip(), re.I)
    if not found or not float(found[1]):
        raise StagingError("job", f"{machine.name}: gpuctl_tmpfs: {folder}: size: {text!r} is no size, as 64G")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def boot_files(job: Mapping[str, Any], folder: str) -> tuple[File, ...]:
    """What stages a model at boot without us: stage.py, its job, its unit gpuctl-stage-<model>. Raises CannotRender."""
    from gpuctl import render

    kept = {key: value for key, value in job.items() if key != "caches"}
    text = (AGENTS / "stage.py").read_text(encoding="utf-8")
    return render.stage(str(job["model"]), {**kept, "do": "stage"}, folder, text)
