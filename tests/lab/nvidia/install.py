"""Puts the double into the file system of a node or a guest, as NVIDIA's packages put theirs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.lab.nvidia.build import built
from tests.lab.nvidia.driver import Config
from tests.lab.nvidia.kernel import HOME

NODE_FILES = Path(__file__).parent / "node"
LIBRARIES = f"usr/lib/{os.uname().machine}-linux-gnu"
TOOLKIT = "usr/local/cuda-13.2"
KMOD = ("modprobe", "rmmod", "insmod", "lsmod", "modinfo")


def install_libraries(root: Path, version: str) -> None:
    """libcuda and libnvidia-ml of this version, instead of those of any other: the user-space half of a driver."""
    place = root / LIBRARIES
    for name in ("libcuda.so", "libnvidia-ml.so"):
        for old in place.glob(f"{name}*"):
            old.unlink()
        _put(built()[name], place / f"{name}.{version}", 0o644)
        (place / f"{name}.1").symlink_to(f"{name}.{version}")
        (place / name).symlink_to(f"{name}.1")
    (root / "etc").mkdir(exist_ok=True)
    subprocess.run(["ldconfig", "-r", str(root)], check=True, stdin=subprocess.DEVNULL, capture_output=True)


def install_guest(root: Path, version: str | None = None, toolkit: bool = True) -> None:
    """The user-space half: libraries, nvidia-smi, nvidia-modprobe, nvidia-persistenced.

    `version`: None for that of a fresh node; another one than the node's kernel half has is a mismatch. `toolkit`: also
    CUDA's folder with the stub and the compat library, neither of them on the loader's path.
    """
    version = version or Config().driver
    for name, mode in (("nvidia-smi", 0o755), ("nvidia-modprobe", 0o4755), ("nvidia-persistenced", 0o755)):
        _put(built()[name], root / "usr/bin" / name, mode)
    _put(built()["nvidia-double"], root / "usr/bin/nvidia-double", 0o755)
    install_libraries(root, version)
    if toolkit:
        stubs, compat = root / TOOLKIT / "lib64/stubs", root / TOOLKIT / "compat"
        for name in ("libcuda.so", "libcuda.so.1"):
            _put(built()["libcuda-stub.so"], stubs / name, 0o644)
        other = f"libcuda.so.{version.split('.')[0]}.45.04"  # of the same branch, as a toolkit of the day has it
        _put(built()["libcuda.so"], compat / other, 0o644)
        _link(compat / "libcuda.so.1", other)
        _link(compat / "libcuda.so", "libcuda.so.1")
        _link(root / "usr/local/cuda", "cuda-13.2")
    (root / HOME / "kernel").mkdir(parents=True, exist_ok=True)
    (root / HOME / "real/module").mkdir(parents=True, exist_ok=True)


def install_node(root: Path, config: Config | None = None, uvm_at_boot: bool = True, persistence: bool = True) -> None:
    """Both halves: what a guest gets and what makes the node its kernel's. The driver itself is no file: it is the
    process the node is started under, `driver_command`.

    `uvm_at_boot`: modules-load.d and the udev rules of the usual guides; without, nvidia-uvm and its nodes come with
    the first program that wants them. `persistence`: nvidia-persistenced is enabled.
    """
    config = config or Config()
    install_guest(root, config.driver)
    home = root / HOME
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.json").write_text(json.dumps(config.document(), indent=1) + "\n")
    own = root / "usr/lib/nvidia-double"
    for name in ("mount", "guest-mount"):
        _put(NODE_FILES / name, own / name, 0o755)
    for name in KMOD:  # for any other module they still are kmod's
        for place in (root / "usr/sbin" / name, root / "usr/bin" / name):
            if place.is_symlink() and place.readlink().name == "kmod":
                _link(own / name, "/bin/kmod")
                place.unlink()
                place.symlink_to("/usr/bin/nvidia-double")
    units = {"nvidia-double.service": "sysinit.target", "nvidia-rules.service": "multi-user.target"}
    if persistence:
        units["nvidia-persistenced.service"] = "multi-user.target"
    for unit, target in units.items():
        _put(NODE_FILES / unit, root / "usr/lib/systemd/system" / unit, 0o644)
        _link(root / f"etc/systemd/system/{target}.wants" / unit, f"/usr/lib/systemd/system/{unit}")
    if uvm_at_boot:
        _put(NODE_FILES / "70-nvidia.rules", root / "etc/udev/rules.d/70-nvidia.rules", 0o644)
        (root / "etc/modules-load.d").mkdir(parents=True, exist_ok=True)
        (root / "etc/modules-load.d/nvidia.conf").write_text("nvidia\nnvidia_uvm\n")
    _put(NODE_FILES / "nvidia-container-cli", root / "usr/bin/nvidia-container-cli", 0o755)
    hooks = root / "usr/share/lxc/config/common.conf.d"
    hooks.mkdir(parents=True, exist_ok=True)
    (hooks / "50-nvidia-double.conf").write_text("lxc.hook.mount = /usr/lib/nvidia-double/guest-mount\n")


def around_node(name: str, state: Path) -> list[str]:
    """What a node's start command must stand behind; it passes on the exit code. Run in the repository's folder.

    Everything that is to see the driver must descend from that command: a process that enters the node's namespaces
    from outside (nsenter) finds device nodes with nobody behind them.
    """
    return driver_command(state / "disks" / name / "root")


def driver_command(root: Path) -> list[str]:
    return [sys.executable, "-m", "tests.lab.nvidia", str(root), "--"]


def _put(source: Path, target: Path, mode: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    shutil.copyfile(source, target)
    target.chmod(mode)


def _link(at: Path, target: str) -> None:
    at.parent.mkdir(parents=True, exist_ok=True)
    at.unlink(missing_ok=True)
    at.symlink_to(target)
