"""The NVIDIA driver of a node: another major, another version, a module or a GPU that is gone."""

from __future__ import annotations

from tests.lab.lab import Lab
from tests.lab.layout import Guest, machine
from tests.lab.nvidia.install import install_libraries
from tests.lab.roots import shift


def renumber_uvm(lab: Lab, node: str = "kpro6", major: int = 511, *, now: bool = False) -> None:
    """Give nvidia-uvm another major at the node's next boot, as when another module loads before it."""
    lab.check(node, ["nvidia-double", "renumber", "nvidia-uvm", str(major), *(["now"] if now else [])])


def unload_module(lab: Lab, node: str = "kpro6", module: str = "nvidia_uvm", *, undo: bool = False) -> None:
    """Take a module of the driver out of the node's kernel. What is asked of it then, nobody answers."""
    lab.check(node, ["modprobe", *([] if undo else ["-r"]), module])


def lose_gpu(lab: Lab, node: str = "kpro6", gpu: int = 0) -> None:
    """Let a GPU fall off the bus (Xid 79); the node's next boot has it again."""
    lab.check(node, ["nvidia-double", "lose", str(gpu)])


def remove_gpu(lab: Lab, node: str = "kpro6", gpu: int = 0, *, undo: bool = False) -> None:
    """Take a GPU out of the node, from the next boot on."""
    lab.check(node, ["nvidia-double", "insert" if undo else "remove", str(gpu)])


def break_uvm(lab: Lab, node: str = "kpro6") -> None:
    """Put nvidia-uvm into its fatal state: every open fails until the module is reloaded."""
    lab.check(node, ["nvidia-double", "breakuvm"])


def update_driver(lab: Lab, node: str = "kpro6", version: str = "595.84") -> None:
    """Put modules of another version on the node's disk: loaded at the next boot, and guests' libraries stay behind."""
    lab.check(node, ["nvidia-double", "version", version])
    install_libraries(lab.root(node), version)


def mismatch_libraries(lab: Lab, machine_: str, version: str = "595.84") -> None:
    """Give a machine libcuda and libnvidia-ml of another version than the node's module has."""
    one = machine(machine_)
    root = lab.root(one.name)
    install_libraries(root, version)
    if isinstance(one, Guest) and not one.privileged:
        shift(root, root.parent / "upper")


def answer_cuinit(lab: Lab, node: str = "kpro6", code: int = 802, *, undo: bool = False) -> None:
    """Let cuInit answer a code although every device opens, as it does without a fabric manager (802)."""
    lab.check(node, ["nvidia-double", "cuinit", "0" if undo else str(code)])


def train_fabric(lab: Lab, node: str = "kpro6", *, undo: bool = False) -> None:
    """Let NVML say of each GPU that its NVLink fabric is still being trained; cuInit is 802 meanwhile."""
    lab.check(node, ["nvidia-double", "fabric", "0" if undo else "2"])


def forbid_compute(lab: Lab, node: str = "kpro6", *, undo: bool = False) -> None:
    """Set the GPUs' compute mode to PROHIBITED, as somebody did and forgot."""
    lab.check(node, ["nvidia-smi", "-c", "DEFAULT" if undo else "PROHIBITED"])
