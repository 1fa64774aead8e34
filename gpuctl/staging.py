"""Models on machines: in what state each is, and filling it into memory. What moves bytes is agent/stage.py.

`look` and `stage` ask one machine through its transport; both answer with a `Found`. `tmpfs_for` and `boot_files` say
what has to be placed so that the memory file system is there and filled again at each boot. `plan` looks at several
models of a machine and says what would change; `carry_out` does it, placing by playbooks.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from gpuctl.agent import stage as program
from gpuctl.agent.stage import size_of
from gpuctl.config import Inventory, Model, Server
from gpuctl.hosts import Inventory as Machines
from gpuctl.hosts import Machine, bytes_of, wrong_tmpfs
from gpuctl.playbook import Outcome, Step
from gpuctl.render import File, Tmpfs
from gpuctl.transport import Transport, TransportError, agent
from gpuctl.transport.agents import AGENTS

__all__ = [
    *("Found", "Plan", "Progress", "StagingError", "boot_files", "carry_out", "fetch", "job_for", "look"),
    *("node_limits", "plan", "preview", "stage", "tmpfs_for"),
]

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
    compiling = [one for one in users if one.engine in ("sglang", "vllm")]  # their kernels come from Python
    if compiling:
        job["caches"] = _environments(compiling)
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
    return found


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


def fetch(way: Transport, job: Mapping[str, Any], *, on_progress: Callable[[Progress], None] | None = None) -> Found:
    """Downloads what is missing of a model to the disk there; copies nothing. Raises StagingError, TransportError."""
    return _done(way, {**job, "do": "fetch"}, on_progress, None)


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
    there) and a twentieth; a mounted one that is large enough stays as it is. Raises StagingError (job), also where it
    would hide what is in the folder.
    """
    options = _tmpfs_options(machine, folder)
    if hidden := next((one.raw["mount"]["hides"] for one in found if one.raw.get("mount", {}).get("hides")), None):
        raise StagingError(
            "job",
            f"{machine.name}: a memory file system at {folder} would hide what is in it ({', '.join(hidden)}): "
            f"give {', '.join(one.model for one in found)} a path in a folder of its own, or no `stage`",
        )
    mounted = next((one.raw["mount"] for one in found if one.raw.get("mount", {}).get("point") == folder), None)
    size = bytes_of(options["size"]) if "size" in options else None
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
    # What is mounted keeps a policy until it is given another one; `local` is what none comes to.
    none = "local" if mounted and mounted.get("policy") else None
    return Tmpfs(folder, size, policy=none if numa == "none" else numa, huge=options.get("huge"))


def _tmpfs_options(machine: Machine, folder: str) -> dict[str, Any]:
    wanted = machine.vars.get("gpuctl_tmpfs") or {}
    for key, what in wrong_tmpfs({folder: wanted.get(folder)} if isinstance(wanted, Mapping) else wanted):
        raise StagingError("job", ": ".join((machine.name, "gpuctl_tmpfs", *key, what)))
    return dict(wanted.get(folder) or {})


def boot_files(job: Mapping[str, Any], folder: str, found: Found | None = None) -> tuple[File, ...]:
    """What stages a model at boot without us: stage.py, its job, its unit gpuctl-stage-<model>. Raises CannotRender.

    `found`: the model as it was seen there. A unit has no login's environment: where HF_HOME led to is in its job.
    """
    from gpuctl import render

    kept = {key: value for key, value in job.items() if key != "caches"}
    if found is not None and (cache := found.raw.get("hub_cache")) and kept.get("hub") and not kept.get("source"):
        kept["hub"] = {"cache": cache, **kept["hub"]}
    text = (AGENTS / "stage.py").read_text(encoding="utf-8")
    return render.stage(str(job["model"]), {**kept, "do": "stage"}, folder, text)


# --- several models of a machine


@dataclass(frozen=True)
class Plan:
    """What is on a machine, and what would change there. Nothing has been changed."""

    machine: Machine
    jobs: Mapping[str, Mapping[str, Any]]  # by model
    found: Mapping[str, Found]
    troubles: Mapping[str, StagingError]  # models nothing can be done for, and why
    tmpfs: tuple[Tmpfs, ...] = ()  # to be mounted, or to take another size
    files: tuple[File, ...] = ()  # to be placed for the boot
    unsized: tuple[str, ...] = ()  # models that have to be downloaded before their tmpfs has a size

    @property
    def changes(self) -> tuple[str, ...]:
        """What would be done, one line each; empty: everything is as it has to be."""
        lines = [f"mount {one.path}: {_in_words(one)}" for one in self.tmpfs]
        units = [PurePosixPath(file.path).name for file in self.files if file.path.endswith(".service")]
        lines += [f"place {', '.join(units)}: staged at each boot"] if units else []
        for name, found in self.found.items():
            if found.well or name in self.troubles:
                continue
            source = found.raw.get("source")
            hub = self.jobs[name].get("hub") or {}
            if (source and source["state"] != "complete") or (source is None and hub):
                lines.append(f"download {hub.get('repo', '')} for {name}")
            if source is not None:
                size = f", {size_of(found.source_bytes)}" if found.source_bytes else ""
                lines.append(f"stage {name} into {found.path}{size}")
        return tuple(lines)

    @property
    def lacks(self) -> Mapping[str, str]:
        """Models there is no room for, as far as the machine itself knows, and why. One that has an old copy
        there is not judged: that may have to go first.
        """
        told: dict[str, str] = {}
        taken = 0  # by those before it
        new = tuple(one.path for one in self.tmpfs)
        for name, found in self.found.items():
            room = found.raw.get("room") or {}
            absent = (found.raw.get("copy") or {}).get("state") == "absent"
            if found.well or name in self.troubles or not (found.in_memory and absent and room.get("need")):
                continue
            replaced = _folder(found.path) in new  # what is mounted there now is not what will be
            limits = [
                one for one in room["limits"] if not (replaced and one["what"].startswith(("the tmpfs", "the disk")))
            ]
            taken += room["need"]
            fits, why = program.fits(taken, limits, program.headroom_for(taken))
            if not fits:
                told[name] = why
        return told


def _in_words(one: Tmpfs) -> str:
    more = [f"NUMA {one.policy}"] if one.policy else []
    more += [f"huge pages {one.huge}"] if one.huge else []
    return ", ".join([f"tmpfs of {one.size_bytes / GIB:.4g} GiB", *more])


def plan(
    known: Inventory,
    machine: Machine,
    way: Transport,
    names: Sequence[str],
    *,
    verify: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Looks at these models of the inventory on a machine, and at what is placed there. Raises TransportError.

    Others that are staged into the same memory file system are looked at for its size.
    """
    jobs: dict[str, Mapping[str, Any]] = {}
    found: dict[str, Found] = {}
    troubles: dict[str, StagingError] = {}
    folders = {_folder(known.models[name].path) for name in names if known.models[name].stage}
    beside = [
        name for name, one in known.models.items() if one.stage and _folder(one.path) in folders and name not in names
    ]
    for name in [*names, *beside]:
        try:
            jobs[name] = job_for(name, known.models[name], machine, known.servers)
            found[name] = look(way, jobs[name], verify=verify and name in names, on_progress=on_progress)
            if (error := _hopeless(name, jobs[name], found[name])) is not None:
                troubles[name] = error
        except StagingError as error:
            troubles[name] = error
    staged = {name: one for name, one in found.items() if one.in_memory}
    tmpfs, files, unsized = _to_place(machine, way, names, jobs, staged, troubles)
    return Plan(
        machine,
        {name: jobs[name] for name in names if name in jobs},
        {name: found[name] for name in names if name in found},
        {name: error for name, error in troubles.items() if name in names},
        tmpfs,
        files,
        unsized,
    )


def _folder(path: str) -> str:
    return str(PurePosixPath(path).parent)


def _hopeless(name: str, job: Mapping[str, Any], found: Found) -> StagingError | None:
    """Why no download and no copying can bring this model, where that is known."""
    source = found.raw.get("source")
    if found.well or job.get("hub"):
        return None
    if source is None:
        what = f"{found.path} is {found.state}" if not found.in_memory else "nothing says where it comes from"
        return StagingError("source", f"{name}: {what}; give it a `hub` or a `source` in models.yml", found)
    if source["state"] == "complete":
        return None
    notes = "; ".join(source["notes"])
    kind = "way" if source["state"] == "unknown" else "source"
    return StagingError(kind, f"{name}: {source['place']}: {source['state']}{': ' if notes else ''}{notes}", found)


_PLACED = """
[ -d /run/systemd/system ] && [ "$(id -u)" = 0 ] && echo systemd
n=$1; shift
while [ "$n" -gt 0 ]; do sha256sum -- "$1" 2>/dev/null; shift; n=$((n-1)); done
echo
[ $# -gt 0 ] && systemctl show --property=Id,FragmentPath,SourcePath,UnitFileState -- "$@" 2>/dev/null
exit 0
"""


def _to_place(
    machine: Machine,
    way: Transport,
    names: Sequence[str],
    jobs: Mapping[str, Mapping[str, Any]],
    staged: Mapping[str, Found],
    troubles: dict[str, StagingError],
) -> tuple[tuple[Tmpfs, ...], tuple[File, ...], tuple[str, ...]]:
    """Memory file systems and files that are not there as they have to be, and models without a size yet."""
    from gpuctl import render

    tmpfs: dict[str, Tmpfs] = {}
    units: dict[str, File] = {}
    files: list[tuple[File, ...]] = []
    unsized: list[str] = []
    for name in (name for name in names if name in staged):
        folder = _folder(staged[name].path)
        mount = staged[name].raw["mount"]
        try:
            files.append(boot_files(jobs[name], folder, staged[name]))
            theirs = mount["in_memory"] and not mount["shared"] and mount["point"] != folder
            if folder in tmpfs or (theirs and folder not in (machine.vars.get("gpuctl_tmpfs") or {})):
                continue  # it lies in a memory file system that somebody has made for it
            if staged[name].source_bytes is None and jobs[name].get("hub"):
                unsized.append(name)
            alike = [one for one in staged.values() if _folder(one.path) == folder]
            known = [one for one in alike if one.source_bytes is not None or one is staged[name]]
            tmpfs[folder] = tmpfs_for(machine, folder, known)
            units[folder] = render.tmpfs(tmpfs[folder])
        except StagingError as error:
            if name not in unsized:
                troubles.setdefault(name, error)
        except render.CannotRender as error:
            troubles.setdefault(name, StagingError("job", f"{machine.name}: {name}: {error}"))
    if not files:
        return (), (), ()
    paths = list(dict.fromkeys([file.path for several in files for file in several] + [u.path for u in units.values()]))
    services = [PurePosixPath(path).name for path in paths if path.endswith((".service", ".mount")) and "@" not in path]
    asked = ["sh", "-c", _PLACED, "sh", str(len(paths)), *paths, *services]
    there, shown, systemd = read_placed(way.run(asked, timeout=60).text)
    if not systemd:
        for name in (name for name in names if name in staged and name not in troubles):
            mount, folder = staged[name].raw["mount"], _folder(staged[name].path)
            if not mount["in_memory"] or mount["shared"]:
                size = f"-o size={tmpfs[folder].size_bytes} " if folder in tmpfs else ""
                by_hand = f"mkdir -p {folder}; mount -t tmpfs {size}tmpfs {folder}"
                why = f"there is no tmpfs at {folder}, and no systemd (as root) to mount one; by hand: {by_hand}"
                troubles[name] = StagingError("room", f"{machine.name}: {name}: {why}", staged[name])
        return (), (), tuple(unsized)

    def in_place(file: File) -> bool:
        unit = shown.get(PurePosixPath(file.path).name, {})
        started = "@" in file.path or unit.get("UnitFileState", "enabled") == "enabled"
        return there.get(file.path) == hashlib.sha256(file.text.encode()).hexdigest() and started

    wanted = []
    for folder, one in tmpfs.items():
        unit = shown.get(PurePosixPath(units[folder].path).name, {})
        if unit.get("SourcePath") == "/etc/fstab":
            continue  # the user's own
        mounted = [found.raw["mount"] for found in staged.values() if found.raw["mount"]["point"] == folder]
        if not mounted or not _mounted_so(one, mounted[0]) or not in_place(units[folder]):
            wanted.append(one)
    missing = [file for several in files if not all(in_place(file) for file in several) for file in several]
    return tuple(wanted), tuple({file.path: file for file in missing}.values()), tuple(unsized)


def _mounted_so(wanted: Tmpfs, mount: Mapping[str, Any]) -> bool:
    """Whether what is mounted is large enough, and has this policy and these huge pages. (The kernel says
    `interleave:0-1` of an `interleave`: which nodes are in it is seen in the unit.)"""
    policy = str(mount.get("policy") or "").partition(":")[0] == (wanted.policy or "").partition(":")[0]
    huge = (mount.get("huge") or "never") == (wanted.huge or "never")
    return mount["bytes"] >= wanted.size_bytes and policy and huge


def read_placed(text: str) -> tuple[dict[str, str], dict[str, dict[str, str]], bool]:
    """({path: SHA-256}, {unit: its properties}, whether there is a systemd that we may use) of what `_PLACED` says."""
    there = {path: digest for digest, path in re.findall(r"^([0-9a-f]{64}) [ *](/.*)$", text, re.M)}
    shown: dict[str, dict[str, str]] = {}
    for block in re.split(r"\n\n+", text):
        properties = dict(re.findall(r"^([A-Z][A-Za-z]+)=(.*)$", block, re.M))
        if "Id" in properties:
            shown[properties["Id"]] = properties
    return there, shown, bool(re.search(r"^systemd$", text, re.M))


def preview(plan_: Plan, machines: Machines, *, on_step: Callable[[Step], None] = lambda step: None) -> list[Outcome]:
    """What the playbooks would change, in check mode."""
    from gpuctl import deploy

    done = []
    if plan_.tmpfs:
        done.append(deploy.mount(plan_.tmpfs, machines, plan_.machine, check=True, remount=True, on_step=on_step))
    if plan_.files:
        done.append(deploy.stage_at_boot(plan_.files, machines, plan_.machine, check=True, on_step=on_step))
    return done


def carry_out(
    plan_: Plan,
    known: Inventory,
    machines: Machines,
    way: Transport,
    *,
    verify: bool = False,
    hash_: bool = True,
    drop_old: bool = False,
    threads: int | None = None,
    boot: bool = True,
    limits: Sequence[Mapping[str, Any]] = (),
    on_step: Callable[[Step], None] = lambda step: None,
    on_progress: Callable[[Progress], None] | None = None,
) -> dict[str, Found | StagingError]:
    """Downloads, mounts, places (`boot`), copies and verifies; what became of each model. What is well is not touched.

    `verify` and the others as in `stage`. Raises TransportError.
    """
    from gpuctl import deploy

    names = list(dict.fromkeys([*plan_.found, *plan_.troubles]))
    ended: dict[str, Found | StagingError] = dict(plan_.troubles)
    if plan_.unsized:
        for name in plan_.unsized:
            try:
                fetch(way, plan_.jobs[name], on_progress=on_progress)
            except StagingError as error:
                ended[name] = error
        plan_ = plan(known, plan_.machine, way, [name for name in names if name not in ended])
        ended |= plan_.troubles
    outcomes = []
    if plan_.tmpfs:
        outcomes.append(deploy.mount(plan_.tmpfs, machines, plan_.machine, remount=True, on_step=on_step))
    if plan_.files and boot:
        outcomes.append(deploy.stage_at_boot(plan_.files, machines, plan_.machine, on_step=on_step))
    failed = next((done.why for done in outcomes if not done.well), "")
    for name in names:
        if name in ended:
            continue
        found = plan_.found[name]
        if failed:
            ended[name] = StagingError("room", failed, found)
        elif found.well and not verify:
            ended[name] = found
        else:
            try:
                ended[name] = stage(
                    way,
                    plan_.jobs[name],
                    verify=verify,
                    hash_=hash_,
                    drop_old=drop_old,
                    limits=limits,
                    threads=threads,
                    on_progress=on_progress,
                )
            except StagingError as error:
                ended[name] = error
    return {name: ended[name] for name in names}
