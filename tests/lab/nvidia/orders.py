"""What `nvidia-double` can be told on a node: the faults of the driver and of the hardware, and their cures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tests.lab.nvidia import files
from tests.lab.nvidia.driver import DYNAMIC, NEEDS, Refused

if TYPE_CHECKING:
    from tests.lab.nvidia.kernel import Kernel


def obey(kernel: Kernel, words: Sequence[str]) -> str:
    """Raises Refused, with the usage when the order is not known."""
    name, arguments = (words[0], list(words[1:])) if words else ("help", [])
    order = ORDERS.get(name)
    if order is None:
        raise Refused(f"no order {name!r}; there are: {', '.join(ORDERS)} and, for nodes, hide, stale, file")
    try:
        return order(kernel, *arguments)
    except TypeError as error:
        raise Refused(f"{name}: {(order.__doc__ or '').splitlines()[0]}") from error


def help_(kernel: Kernel) -> str:
    """help: this."""
    lines = [f"  {(order.__doc__ or '').splitlines()[0]}" for order in ORDERS.values()]
    lines += [
        "  hide PATH: removes a device node of this machine.",
        "  stale PATH [MAJOR]: gives a device node of this machine another major (508).",
        "  file PATH: an empty regular file instead of a device node, as LXC's create=file leaves it.",
    ]
    return "nvidia-double ORDER ...\n" + "\n".join(lines) + "\n"


def status(kernel: Kernel) -> str:
    """status: modules, majors, GPUs and who holds them."""
    driver = kernel.driver
    lines = [f"module {name} {version}" for name, version in driver.loaded.items()]
    lines += [f"major {major} {name}" for major, name in driver.character_devices()]
    for minor, state in driver.states.items():
        held = " ".join(f"{h.name}({h.pid})" for h in state.holders.values())
        words = [f"gpu {minor} {state.gpu.address}", "lost" if state.lost else "present", held]
        lines.append(" ".join(word for word in words if word))
    return "".join(f"{line}\n" for line in lines) or "no module is loaded\n"


def load(kernel: Kernel, module: str) -> str:
    """load MODULE: modprobe of nvidia, nvidia_uvm, nvidia_modeset or nvidia_drm."""
    kernel.driver.load(module)
    kernel.write()
    return ""


def unload(kernel: Kernel, module: str) -> str:
    """unload MODULE: rmmod; refused while it is in use."""
    kernel.driver.unload(module)
    kernel.write()
    return ""


def reload(kernel: Kernel, module: str) -> str:
    """reload MODULE: unload it and what needs it, load it again; the majors are assigned anew."""
    module = module.replace("-", "_")
    order = [m for m in reversed(kernel.driver.loaded) if m == module or module in NEEDS[m]]
    for one in order:
        kernel.driver.unload(one)
    for one in reversed(order or [module]):
        kernel.driver.load(one)
    kernel.write()
    return ""


def renumber(kernel: Kernel, name: str, major: str, when: str = "next") -> str:
    """renumber NAME MAJOR [now]: what /proc/devices calls NAME gets MAJOR at the next load or boot (now: reloads)."""
    known = [n for names in DYNAMIC.values() for n in names]
    if name not in known:
        raise Refused(f"no character device {name!r} of a changing major: there are {', '.join(known)}")
    number = int(major)
    if not (234 <= number <= 254 or 384 <= number <= 511):
        raise Refused(f"the kernel gives majors of 234 to 254 and of 384 to 511, never {number}")
    if number in kernel.driver.registered:
        raise Refused(f"major {number} belongs to another driver of the running kernel")
    kernel.driver.config.majors[name] = number
    kernel.save()
    if when == "now":
        module = next(m for m, names in DYNAMIC.items() if name in names)
        return reload(kernel, module)
    return ""


def lose(kernel: Kernel, minor: str) -> str:
    """lose MINOR: the GPU falls off the bus (Xid 79); the next boot has it again."""
    kernel.driver.lose(int(minor))
    files.refresh(kernel.home / "kernel", kernel.driver)
    return ""


def remove(kernel: Kernel, minor: str) -> str:
    """remove MINOR: the GPU is not on the bus from the next boot on."""
    kernel.driver.config.absent = sorted({*kernel.driver.config.absent, int(minor)})
    kernel.save()
    return ""


def insert(kernel: Kernel, minor: str) -> str:
    """insert MINOR: undoes remove, from the next boot on."""
    kernel.driver.config.absent = [m for m in kernel.driver.config.absent if m != int(minor)]
    kernel.save()
    return ""


def version(kernel: Kernel, wanted: str) -> str:
    """version V: the modules on disk are of this version; loaded ones stay as they are until a reload or boot."""
    kernel.driver.config.driver = wanted
    kernel.save()
    return ""


def cuinit(kernel: Kernel, code: str) -> str:
    """cuinit CODE: cuInit answers CODE although all nodes are well (802, 3, ...); `cuinit 0` undoes it."""
    kernel.driver.cuda_init = int(code) or None
    return ""


def fabric(kernel: Kernel, state: str) -> str:
    """fabric STATE: what NVML says of each GPU's NVLink fabric: 2 in training (cuInit is 802 meanwhile), 0 undoes it."""
    kernel.driver.fabric = int(state)
    kernel.driver.cuda_init = 802 if kernel.driver.fabric in (1, 2) else None
    return ""


def breakuvm(kernel: Kernel) -> str:
    """breakuvm: nvidia-uvm is in its fatal state: every open is EIO until it is reloaded."""
    kernel.driver.uvm_broken = True
    return ""


def xid(kernel: Kernel, minor: str, number: str, *words: str) -> str:
    """xid MINOR NUMBER TEXT...: one line in the kernel log."""
    state = kernel.driver.states.get(int(minor))
    if state is None:
        raise Refused(f"no GPU {minor}")
    kernel.driver.say(f"NVRM: Xid (PCI:{state.gpu.address[:-2]}): {number}, {' '.join(words)}")
    return ""


def log(kernel: Kernel, *words: str) -> str:
    """log [TEXT...]: the driver's part of the kernel log, or one more line of it."""
    if words:
        kernel.driver.say(" ".join(words))
        return ""
    return kernel.driver.kernel_log()


def lsmod(kernel: Kernel) -> str:
    """lsmod: as lsmod prints the driver's modules."""
    text = "Module                  Size  Used by\n"
    for name in reversed(kernel.driver.loaded):
        users = [m for m in kernel.driver.loaded if name in NEEDS[m]]
        text += f"{name:<19} {4 << 20:8d}  {len(users)} {','.join(users)}".rstrip() + "\n"
    return text


def modinfo(kernel: Kernel, module: str, field: str = "") -> str:
    """modinfo MODULE [FIELD]: of the module on disk, as modinfo prints it."""
    if module.replace("-", "_") not in DYNAMIC:
        raise Refused(f"modinfo: ERROR: Module {module} not found.")
    facts = {
        "filename": f"/lib/modules/double/{module}.ko",
        "version": kernel.driver.config.driver,
        "license": "Dual MIT/GPL",
        "depends": ",".join(NEEDS[module.replace("-", "_")]),
        "name": module.replace("-", "_"),
    }
    if field:
        return f"{facts[field]}\n" if field in facts else ""
    return "".join(f"{key + ':':<16}{value}\n" for key, value in facts.items())


ORDERS: dict[str, Callable[..., str]] = {
    "help": help_, "status": status, "load": load, "unload": unload, "reload": reload, "renumber": renumber, "lose": lose,
    "remove": remove, "insert": insert, "version": version, "cuinit": cuinit, "fabric": fabric, "breakuvm": breakuvm, "xid": xid,
    "log": log, "lsmod": lsmod, "modinfo": modinfo,
}  # fmt: skip
