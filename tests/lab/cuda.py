"""Whether CUDA starts on a machine of the lab, and what the kernel says when its device is opened."""

from __future__ import annotations

import re

from tests.lab.lab import Lab
from tests.lab.layout import NoLab

UVM = "/dev/nvidia-uvm"
DENIED = "-1 EPERM (Operation not permitted)"  # the device program's word


def opened(lab: Lab, name: str, path: str = UVM) -> str:
    """What open(2) returns there, seen with strace: a file descriptor, or -1 and why."""
    script = f"import os; os.open({path!r}, os.O_RDWR | os.O_CLOEXEC)"
    said = lab.run(name, ["strace", "-f", "-e", "trace=openat", "python3", "-c", script]).stderr
    found = re.search(rf'openat\(AT_FDCWD, "{re.escape(path)}", O_RDWR\|O_CLOEXEC\) = (.*)', said)
    if not found:
        raise NoLab(f"{name}: strace saw no open of {path}: {said.strip()[-200:]}")
    return found[1]


def cuinit(lab: Lab, name: str) -> int:
    """What cuInit(0) answers there."""
    return int(lab.check(name, ["python3", "-c", "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"]))
