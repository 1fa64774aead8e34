"""A simulated box: a node with an NVIDIA driver and one container, which remedies change as they would change a real one.

What it models is what the checks of device nodes and containers read: numbers, nodes, the configuration, the rules in
force, and what opening a node and cuInit then answer (as measured on real GPUs, tests/ground_truth).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from gpuctl.box import Box, Snapshot, Wanted
from gpuctl.doctor import Played
from gpuctl.facts import lxc
from gpuctl.finding import Remedy

VMID = 200
CONF = f"/etc/pve/lxc/{VMID}.conf"
UVM, CTL, TOOLS = "/dev/nvidia-uvm", "/dev/nvidiactl", "/dev/nvidia-uvm-tools"


@dataclass
class World:
    gpus: int = 2
    uvm: int | None = 511  # major of nvidia-uvm, None while its module is not loaded
    conf: str = ""
    user: str | None = None  # whom the service runs as, besides root
    pve: str = "9.0.3"
    node_unit: bool = True  # makes the device nodes before guests start
    host: dict[str, tuple[int, int]] = field(default_factory=dict)  # nodes of the node: path -> number
    inside: dict[str, tuple] = field(
        default_factory=dict
    )  # nodes of the guest: ("char", major, minor, mode) or ("file",)
    rules: lxc.Rules | None = None
    running: bool = False
    unprivileged: bool = False  # as it was started
    starts: int = 0
    played: list[Remedy] = field(default_factory=list)
    deaf: frozenset[str] = frozenset()  # playbooks that succeed and change nothing
    # above CUDA: what `gpuctl restore` looks after
    serves: bool = False  # the box is to serve a model from memory
    source: str = "complete"  # where the model comes from: complete | metadata only (a hub has the rest) | absent
    staged: str = ""  # the copy in memory: staged | partial | corrupt; empty: none
    mounted: bool = False
    server: str = "inactive"  # active | hung | inactive | failed
    at_boot: bool = False  # units that mount, stage and start it
    tuned: bool | None = None  # None: no settings are kept
    wedged: bool = False  # the settings do not take

    def numbers(self):
        found = {CTL: (195, 255), **{f"/dev/nvidia{n}": (195, n) for n in range(self.gpus)}}
        if self.uvm is not None:
            found.update({UVM: (self.uvm, 0), TOOLS: (self.uvm, 1)})
        return found

    # -- what happens to it --

    def boot(self, uvm):
        """The node boots: another number, no nodes but those the unit makes; the guest is started."""
        self.uvm = uvm
        self.host = {}
        if self.node_unit:
            self.make_nodes()
        else:
            self.uvm = None
            self.host = dict(self.numbers())
        self.start()

    def make_nodes(self, uvm=None):
        if self.uvm is None:
            self.uvm = uvm or 509
        self.host = self.numbers()

    def start(self):
        """Starts or restarts the guest as Proxmox does: devN by name, mount entries by what is there."""
        self.starts += 1
        self.running = False
        self.inside, conf = {}, lxc.parse(self.conf)
        devices = conf.devices().values()
        if any(device.path not in self.host for device in devices) or lxc.malformed_rules(conf):
            return
        self.memory_is_lost()
        passed = {device.path: ("c", *self.host[device.path]) for device in devices}
        for device in devices:
            self.inside[device.path] = ("char", *self.host[device.path], device.mode)
        for mount in lxc.nvidia_mounts(conf):
            if mount.source in self.host:
                self.inside[mount.target] = ("char", *self.host[mount.source], 0o666)
            elif "create=file" in mount.options:
                self.inside[mount.target] = ("file",)
        self.rules = lxc.rules_of(conf, passed)
        self.unprivileged = conf.unprivileged
        self.running = True
        if self.at_boot:
            self.mounted, self.staged = True, "staged" if self.source == "complete" else ""
            self.start_server()

    def memory_is_lost(self):
        self.mounted, self.staged = False, ""
        self.server = "inactive"

    def start_server(self):
        """As an engine does: it ends without a model or without CUDA."""
        works = self.running and self.staged == "staged" and self.cuda(bool(self.user))["cuInit"] == 0
        self.server = "active" if works else "failed"

    # -- what it answers --

    def open(self, path, user=False):
        node = self.inside.get(path)
        if node is None:
            return "ENOENT"
        if node[0] == "file":
            return "OK"
        _, major, minor, mode = node
        if not self.rules.allows("c", major, minor):
            return "EPERM"
        if user and mode & 0o006 != 0o006:
            return "EACCES"
        return "OK" if (major, minor) in self.numbers().values() else "ENXIO"

    def good(self, path, user):
        node = self.inside.get(path)
        return (
            node is not None
            and node[0] == "char"
            and self.open(path, user) == "OK"
            and node[1:3] == self.numbers().get(path)
        )

    def cuda(self, user):
        cards = sum(self.good(f"/dev/nvidia{n}", user) for n in range(self.gpus))
        if not self.good(CTL, user) or not cards:
            return {"cuInit": 100}
        if not self.good(UVM, user):
            return {"cuInit": 999}
        return {"cuInit": 0, "cuDeviceGetCount": cards}

    def box(self):
        devices = ["Character devices:", "  1 mem", "195 nvidia", "195 nvidiactl", "226 drm"]
        devices += [f"{self.uvm} nvidia-uvm"] if self.uvm is not None else []
        information = {
            f"/proc/driver/nvidia/gpus/0000:0{n}:00.0/information": f"Model: NVIDIA H200\nBus Location: 0000:0{n}:00.0\n"
            f"Device Minor: {n}\n"
            for n in range(self.gpus)
        }
        shared = {
            "/proc/devices": "\n".join(devices) + "\n",
            "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\n",
            **information,
        }
        node = {
            "machine": "kpro6",
            "role": "node",
            "probe": {"version": 1, "euid": 0},
            "files": {**shared, CONF: self.conf},
            "nodes": {
                path: {"mode": 0o20666, "uid": 0, "gid": 0, "rdev": "{}:{}".format(*self.host[path])}
                if path in self.host
                else {"error": "ENOENT"}
                for path in {**self.numbers(), UVM: None}
            },
            "packages": {"lines": [f"ii  pve-manager {self.pve}"]},
            "units": {
                "pve-guests.service": {"LoadState": "loaded"},
                "nvidia-persistenced.service": {"LoadState": "loaded"},
            },
            "service": {"env": {}},
            "guests": {str(VMID): {"cgroup": f"/sys/fs/cgroup/lxc/{VMID}/ns" if self.running else None}},
        }
        if self.tuned is not None:
            state = "active" if self.tuned else "failed"
            node["units"]["gpuctl-tune.service"] = {"UnitFileState": "enabled", "ActiveState": state}
        if self.node_unit:
            node["files"]["/etc/systemd/system/gpuctl-nvidia-devices.service"] = (
                "[Unit]\nBefore=pve-guests.service\n[Service]\nExecStart=/usr/bin/nvidia-modprobe -c 0 -u\n"
            )
        wanted = Wanted("ct200", VMID, "kpro6", user=self.user)
        if not self.running:
            return Box(Snapshot.absent("ct200 does not run"), Snapshot(node), wanted)
        views = {"root": {**self.cuda(False), "dlopen": "OK"}}
        if self.user:
            views["user"] = {**self.cuda(True), "dlopen": "OK"}
        paths = {**self.numbers(), UVM: None, **self.inside}
        guest = {
            "machine": "ct200",
            "role": "guest",
            "probe": {"version": 1, "euid": 0},
            "files": {**shared, "/run/systemd/container": "lxc\n", "/proc/self/uid_map": self.uid_map()},
            "nodes": {path: self.node_inside(path) for path in paths},
            "open": {
                path: {"root": self.open(path)} | ({"user": self.open(path, True)} if self.user else {})
                for path in paths
            },
            "cuda": views,
            "service": {"env": {}} | ({"user": self.user, "uid": 999, "groups": [999]} if self.user else {}),
            "stat": {"/usr/bin/nvidia-modprobe": {"error": "ENOENT"}},
        }
        if self.serves:
            state = self.staged or self.source
            mount = "/run/gpuctl/models" if self.mounted else None
            guest["models"] = {"qwen": {"path": "/run/gpuctl/models/q", "state": state, "mount": mount}}
            active = {"hung": "active"}.get(self.server, self.server)
            health = {"active": 200, "hung": "timeout"}.get(self.server, "refused")
            guest["serving"] = {"gpuctl-x.service": {"ActiveState": active, "health": health, "since_s": 5000}}
        return Box(Snapshot(guest), Snapshot(node), wanted)

    def uid_map(self):
        return "0 100000 65536\n" if self.unprivileged else "0 0 4294967295\n"

    def node_inside(self, path):
        node = self.inside.get(path)
        if node is None:
            return {"error": "ENOENT"}
        if node[0] == "file":
            return {"mode": 0o100000, "uid": 0, "gid": 0, "size": 0}
        return {"mode": 0o20000 | node[3], "uid": 0, "gid": 0, "rdev": f"{node[1]}:{node[2]}"}

    # -- what mends it --

    def play(self, remedy: Remedy) -> Played:
        self.played.append(remedy)
        if remedy.playbook in self.deaf:
            return Played(True, False)
        values = remedy.vars
        if remedy.playbook == "container":
            if values["conf_path"] != CONF or hashlib.sha256(self.conf.encode()).hexdigest() != values["conf_sha256"]:
                return Played(False, False, f"{CONF} was changed by somebody else meanwhile")
            self.conf = values["conf_text"]
            if self.running:
                added = tuple((lxc.parse_rule(rule), None) for rule in values["live_rules"])
                self.rules = lxc.Rules((*self.rules.rules, *added), self.rules.default)
            if values["restart"] or not self.running:
                self.start()
                if not self.running:
                    return Played(False, True, "pct start 200: the container does not start")
        elif remedy.playbook == "devices":
            self.make_nodes()
            self.node_unit = self.node_unit or values["permanent"]
        elif remedy.playbook == "tune":
            self.tuned = not self.wedged
            return Played(self.tuned, True, "" if self.tuned else "power_limit: it did not take")
        elif remedy.playbook == "tmpfs":
            self.mounted = True
        elif remedy.playbook == "stage":
            if self.source == "absent":
                return Played(False, False, "qwen: nothing to stage it from")
            assert self.mounted, "nothing goes into what is no memory file system"
            self.source = self.staged = "complete"
            self.staged = "staged"
        elif remedy.playbook == "server":
            self.start_server()
            if self.server != "active":
                return Played(False, True, "gpuctl-x died")
        else:
            raise AssertionError(remedy)
        return Played(True)


def conf(
    *, unprivileged=False, devn=False, rules=(), paths=(CTL, UVM, "/dev/nvidia0", "/dev/nvidia1"), mode="0666", extra=()
):
    """A configuration in one of the styles people use."""
    lines = ["# the inference guest", "arch: amd64", "hostname: ct200"]
    lines += ["unprivileged: 1"] if unprivileged else []
    if devn:
        lines += [f"dev{n}: {path}" + (f",mode={mode}" if mode else "") for n, path in enumerate(paths)]
    lines += [f"lxc.cgroup2.devices.allow: c {rule} rwm" for rule in rules]
    if not devn:
        lines += [f"lxc.mount.entry: {p} {p[1:]} none bind,optional,create=file" for p in paths]
    return "\n".join([*lines, *extra]) + "\n"
