"""A first inventory for a machine nobody has described yet: what one probe saw of it, as four commented files. Pure.

`LOOK` is what the probe runs beside its own questions: models and engines where people usually keep them, on the
machine and in its running guests that have NVIDIA devices. `seen` reads the answers, `files` writes the inventory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuctl.box import Snapshot, Unknown
from gpuctl.facts import nvidia, proxmox

_HERE = r"""
for d in ~/.cache/huggingface/hub/models--*/snapshots/* ~/models/* /models/* /opt/models/* /srv/models/* \
    /mnt/models/* /data/models/* /run/gpuctl/models/*; do
  [ -f "$d/config.json" ] && ls "$d"/*.safetensors >/dev/null 2>&1 || continue
  printf 'model\t%s\t%s\n' "$(du -sLb "$d" 2>/dev/null | cut -f1)" "$d"
done
for f in ~/models/*.gguf ~/models/*/*.gguf /models/*.gguf /models/*/*.gguf /srv/models/*.gguf /mnt/models/*.gguf; do
  [ -f "$f" ] && printf 'model\t%s\t%s\n' "$(du -sLb "$f" | cut -f1)" "$f"
done
for i in /opt/*/ ~/*/ ~/.venv/ ~/venv/ /venv/ /srv/*/ /usr/local/ /usr/; do
  for m in "$i"lib/python3*/site-packages/sglang-*.dist-info "$i"lib/python3*/site-packages/vllm-*.dist-info \
      "$i"lib/python3*/dist-packages/sglang-*.dist-info "$i"lib/python3*/dist-packages/vllm-*.dist-info; do
    [ -d "$m" ] && printf 'engine\t%s\t%s\n' "$(basename "$m" .dist-info)" "$i"
  done
done
for p in /usr/local/bin/llama-server /usr/bin/llama-server ~/llama.cpp/build/bin/llama-server \
    /opt/llama.cpp/build/bin/llama-server; do
  [ -x "$p" ] && printf 'engine\tllama-server\t%s\n' "$p"
done
[ -x /usr/local/cuda/bin/nvcc ] && printf 'cuda\tnvcc\t/usr/local/cuda\n'
:
"""
_GUESTS = r"""
command -v pct >/dev/null || exit 0
for id in $(pct list | awk '$2 == "running" {print $1}'); do
  grep -qE 'nvidia|\<195:' "/etc/pve/lxc/$id.conf" || continue
  printf 'guest\t%s\n' "$id"
  timeout 10 pct exec "$id" -- sh -c "$LOOK" </dev/null 2>/dev/null
done
:
"""
LOOK = [
    "sh",
    "-c",
    f"LOOK='{_HERE.replace(chr(39), chr(39) + chr(92) + chr(39) + chr(39))}'; eval \"$LOOK\"; {_GUESTS}",
]


@dataclass(frozen=True)
class Program:
    """An engine that is installed there. `start` are the words of `program` in servers.yml; `cuda` is the toolkit there
    that compiles its kernels."""

    engine: str
    version: str
    start: tuple[str, ...]
    cuda: str = ""


@dataclass(frozen=True)
class Weights:
    """A model that lies there. `hub` is its id where a Hugging Face cache says so."""

    path: str
    size_bytes: int
    hub: str | None = None

    @property
    def name(self) -> str:
        last = (self.hub or self.path.rstrip("/")).rpartition("/")[2].removesuffix(".gguf")
        return re.sub(r"[^a-z0-9._-]+", "-", last.lower()).strip("-._") or "model"

    @property
    def helper(self) -> bool:
        """Made to draft for another one, not to answer."""
        return re.search(r"(?i)eagle|dflash|draft|medusa|[-_.]mtp\b", self.path) is not None


@dataclass(frozen=True)
class Place:
    """A machine or a guest: what can serve there, and what with."""

    name: str
    vmid: int | None = None
    address: str | None = None  # of a guest, where its configuration has a fixed one
    running: bool = True
    models: tuple[Weights, ...] = ()
    engines: tuple[Program, ...] = ()


@dataclass(frozen=True)
class Seen:
    """What the probe found. `guests` only of a Proxmox VE node: those that have NVIDIA devices."""

    machine: Place
    node: bool
    gpus: tuple[str, ...]
    gpu_bytes: int | None  # memory of the smallest GPU
    guests: tuple[Place, ...] = ()

    @property
    def places(self) -> tuple[Place, ...]:
        return self.guests if self.node else (self.machine,)


@dataclass(frozen=True)
class Way:
    """How the machine is reached: what goes into hosts.yml. `options` are arguments of ssh."""

    local: bool = False
    host: str = ""
    user: str | None = None
    port: int | None = None
    options: str = ""
    sudo: bool = False


def seen(snapshot: Snapshot, name: str) -> Seen:
    """Reads the probe's answers."""
    here, inside = _looked(snapshot)
    node = snapshot.role == "node"
    gpus = [gpu for gpu in nvidia.answers(snapshot).get("gpus") or () if isinstance(gpu, Mapping)]
    sizes = [gpu["memory_bytes"].get("total") for gpu in gpus if isinstance(gpu.get("memory_bytes"), Mapping)]
    guests = []
    for vmid, guest in sorted((snapshot.get(proxmox.CONFS) or {}).items() if node else ()):
        if proxmox.has_gpu(guest.conf):
            address = re.search(r"\bip=(\d+\.\d+\.\d+\.\d+)/", guest.conf.get("net0") or "")
            models, engines = inside.get(vmid, ((), ()))
            found = Place(f"ct{vmid}", vmid, address[1] if address else None, vmid in inside, models, engines)
            guests.append(found)
    machine = Place(name, models=here[0], engines=here[1])
    total = min((size for size in sizes if isinstance(size, int)), default=None)
    return Seen(machine, node, tuple(str(gpu.get("name")) for gpu in gpus), total, tuple(guests))


_Looked = tuple[tuple[Weights, ...], tuple[Program, ...]]


def _looked(snapshot: Snapshot) -> tuple[_Looked, dict[int, _Looked]]:
    """What LOOK printed: of the machine, and of each running guest that has NVIDIA devices."""
    try:
        text = snapshot.output(" ".join(LOOK)).stdout
    except Unknown:
        text = ""
    lines: dict[int | None, list[list[str]]] = {None: []}
    at: int | None = None
    for line in text.splitlines():
        fields = line.split("\t")
        if fields[0] == "guest" and len(fields) == 2 and fields[1].isdigit():
            at = int(fields[1])
            lines[at] = []
        elif len(fields) == 3:
            lines[at].append(fields)
    read = {place: (tuple(_models(found)), tuple(_engines(found))) for place, found in lines.items()}
    return read[None], {vmid: found for vmid, found in read.items() if vmid is not None}


def _models(lines: Sequence[Sequence[str]]) -> Iterator[Weights]:
    taken: set[str] = set()
    for kind, size, path in lines:
        if kind != "model":
            continue
        cached = re.search(r"/models--([^/]+?)--([^/]+)/snapshots/[^/]+$", path)
        found = Weights(path, int(size) if size.isdigit() else 0, f"{cached[1]}/{cached[2]}" if cached else None)
        if found.name not in taken:
            taken.add(found.name)
            yield found


def _engines(lines: Sequence[Sequence[str]]) -> Iterator[Program]:
    starts = {"sglang": ("-m", "sglang.launch_server"), "vllm": ()}
    cuda = next((where for kind, _, where in lines if kind == "cuda"), "")
    for kind, what, where in sorted(lines, key=lambda line: len(line[2])):  # /opt/sglang before /opt/sglang-fork
        if kind != "engine":
            continue
        if what == "llama-server":
            yield Program("llamacpp", "", (where,))
            continue
        engine, _, version = what.partition("-")
        if engine in starts:
            first = f"{where}bin/vllm" if engine == "vllm" else f"{where}bin/python"
            if where in ("/usr/", "/usr/local/") and engine == "sglang":
                first = "/usr/bin/python3"
            yield Program(engine, version, (first, *starts[engine]), cuda)


# -- the four files


def files(found: Seen, way: Way) -> dict[str, str]:
    """Name -> text of hosts.yml, models.yml, servers.yml and phases.yml."""
    place = next((p for p in found.places if p.models and p.engines), found.places[0] if found.places else None)
    engine = _chosen(place)
    served = [model for model in (place.models if place else ()) if engine and _fits(model, engine.engine)]
    name = found.machine.name
    return {
        "hosts.yml": _hosts(found, way),
        "models.yml": _model_file(place),
        "servers.yml": _servers(place, engine, [model for model in served if not model.helper], found),
        "phases.yml": _phases(name, place, bool(engine and [m for m in served if not m.helper])),
    }


def _chosen(place: Place | None) -> Program | None:
    """The engine that can serve most of what lies there."""
    if place is None or not place.engines:
        return None
    return max(place.engines, key=lambda engine: sum(_fits(model, engine.engine) for model in place.models))


def _fits(model: Weights, engine: str) -> bool:
    return model.path.endswith(".gguf") == (engine == "llamacpp")


def _scalar(value: Any) -> str:
    """A value in YAML: as it is where that is safe, otherwise as JSON, which YAML reads alike."""
    text = str(value)
    plain = re.fullmatch(r"[A-Za-z/~][A-Za-z0-9_./+~-]*", text) and text.lower() not in (
        "true", "false", "yes", "no", "on", "off", "null", "y", "n",
    )  # fmt: skip
    if isinstance(value, int) or plain:
        return text
    # JSON's pairs of surrogates are none of YAML's
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)


def _note(text: str) -> str:
    """What may stand in a comment."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _hosts(found: Seen, way: Way) -> str:
    lines = [
        "# The machines, as an Ansible inventory: `ansible-playbook -i THIS playbooks/site.yml --check` reads it too.",
        "# Host keys are checked against known_hosts and never added: for a new machine log in once by hand.",
        "all:",
    ]
    own = _login(way)
    if not found.node:
        lines += ["  hosts:", f"    {_scalar(found.machine.name)}:", *(f"      {line}" for line in own)]
        return "\n".join(lines) + "\n"
    lines += [
        "  children:",
        "    nodes:   # Proxmox VE hosts",
        "      hosts:",
        f"        {_scalar(found.machine.name)}:",
    ]
    lines += [f"          {line}" for line in own]
    lines += ["    guests:   # their containers that have NVIDIA devices"]
    if not found.guests:
        lines += ["      hosts: {}   # none has; one is added as  ct200: {gpuctl_node: ..., gpuctl_vmid: 200}"]
    else:
        lines.append("      hosts:")
    for guest in found.guests:
        lines += [
            f"        {guest.name}:{'' if guest.running else '   # not running now'}",
            f"          gpuctl_node: {_scalar(found.machine.name)}",
            f"          gpuctl_vmid: {guest.vmid}   # /etc/pve/lxc/{guest.vmid}.conf",
            "          # Through the node's `pct exec`, which needs no sshd in the guest. For SSH, which is faster:",
            f"          # ansible_host: {guest.address or 'ADDRESS'}, ansible_user: root, without the next line.",
            "          ansible_connection: pct",
        ]
    return "\n".join(lines) + "\n"


def _login(way: Way) -> list[str]:
    if way.local:
        return ["ansible_connection: local"]
    lines = [f"ansible_host: {_scalar(way.host)}"]
    lines += [f"ansible_user: {_scalar(way.user)}"] if way.user else []
    lines += [f"ansible_port: {way.port}"] if way.port else []
    lines += [f"ansible_ssh_common_args: {_scalar(way.options)}"] if way.options else []
    lines += ["ansible_become: true   # by `sudo -n`"] if way.sudo else []
    return lines


def _model_file(place: Place | None) -> str:
    lines = [
        "# Weights by name. `path` is where a server finds them. With `stage: true` that is a memory file system,",
        "# which is empty after a reboot and is filled again from `hub` (the Hugging Face cache there) or `source`.",
    ]
    if place is None or not place.models:
        where = f" on {_note(place.name)}" if place else ""
        lines += [f"# None was found{where}. One looks like this, without the #, in place of the {{}}:",
                  "# qwen3-8b:", "#   path: /root/models/Qwen3-8B", "{}"]  # fmt: skip
        return "\n".join(lines) + "\n"
    for model in place.models:
        lines += ["", f"{_scalar(model.name)}:"]
        lines += [f"  hub: {_scalar(model.hub)}"] if model.hub else []
        lines += [f"  path: {_scalar(model.path)}   # {_gigabytes(model.size_bytes)}"]
        if re.match(r"/(run|dev/shm)/", model.path):
            lines.append(
                "  # In memory: gone after a reboot. With `source` (or `hub`) and `stage: true` it is filled again."
            )
    return "\n".join(lines) + "\n"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _servers(place: Place | None, engine: Program | None, models: Sequence[Weights], found: Seen) -> str:
    lines = [
        "# A server is one configuration of an engine; it becomes one systemd unit, gpuctl-<name>.service.",
        "# `use` takes from `defaults`, `for` makes a family, `flags` are the engine's own. See `gpuctl render NAME`.",
    ]
    if place is None or engine is None or not models:
        what = "no engine was found" if engine is None else "no model was found that it serves"
        lines += [
            f"# As yet there is none: {what}{f' on {_note(place.name)}' if place else ''}. It looks like this:",
            '#   "qwen3-8b-tp{{ tp }}":',
            "#     engine: sglang",
            "#     model: qwen3-8b",
            "#     program: [/opt/sglang/bin/python, -m, sglang.launch_server]",
            "#     for: {tp: [1, 2]}",
            '#     flags: {tp-size: "{{ tp }}"}',
            "servers: {}",
        ]
        return "\n".join(lines) + "\n"
    others = [one for one in place.engines if one != engine]
    lines += ["defaults:", f"  {engine.engine}:   # {_note(engine.version) or 'its version is not known'}"]
    lines += [f"    engine: {engine.engine}", f"    program: [{', '.join(map(_scalar, engine.start))}]"]
    lines += [f"    env: {{CUDA_HOME: {_scalar(engine.cuda)}}}"] if engine.cuda else []
    lines += [f"    # also there: {_note(' '.join([one.engine, one.version, *one.start]))}" for one in others]
    lines += ["servers:"]
    flag = {"sglang": "tp-size", "vllm": "tensor-parallel-size"}.get(engine.engine)
    for model in models:
        sizes, note = _tensor_parallel(model, found)
        name = model.name if flag is None else f"{model.name}-tp{{{{ tp }}}}"
        lines += [f"  {json.dumps(name)}:", f"    use: {engine.engine}", f"    model: {_scalar(model.name)}"]
        if flag is not None:
            lines += [f"    for: {{tp: {list(sizes)}}}{note}", f'    flags: {{{flag}: "{{{{ tp }}}}"}}']
    return "\n".join(lines) + "\n"


def _tensor_parallel(model: Weights, found: Seen) -> tuple[list[int], str]:
    """How many GPUs: powers of two that are there and whose memory holds the weights and a fifth more."""
    count = max(1, len(found.gpus))
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= count]
    if not found.gpu_bytes or not model.size_bytes:
        return sizes, ""
    fitting = [size for size in sizes if size * found.gpu_bytes >= 1.2 * model.size_bytes]
    return (fitting, "") if fitting else (sizes[-1:], "   # the weights are larger than the memory of these GPUs")


def _phases(name: str, place: Place | None, serves: bool) -> str:
    lines = [
        "# A phase is what `gpuctl bench PHASE` deploys and measures: servers, and what is asked of each.",
        f"campaign: {_scalar(name)}",
    ]
    example = [
        "first:",
        "  title: a first look",
        f"  target: {_scalar(place.name) if place else 'BOX'}",
        '  servers: ["*"]',
        "  workloads:",
        "    - decode: {max_tokens: [256]}",
        "    - concurrency: {concurrency: [1, 2, 4, 8]}",
    ]
    if serves:
        lines += ["phases:", *(f"  {line}" for line in example)]
    else:
        lines += ["# As yet there is none, for there is no server. It looks like this:"]
        lines += [*(f"#   {line}" for line in example), "phases: {}"]
    return "\n".join(lines) + "\n"
