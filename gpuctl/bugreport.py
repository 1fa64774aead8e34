"""NVIDIA's nvidia-bug-report.log -> a snapshot document. Pure.

The collector writes blocks between rulers of underscores. A block is a file (`*** /proc/driver/nvidia/./version`, a
`*** ls:` line of it, its text), a file that is not there (`*** /proc/pci does not exist`), or a command with its output
(`/usr/bin/nvidia-smi --query`, `dmesg:`).
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_RULER = re.compile(r"^_{20,}\s*$")
_COMMANDS = frozenset("nvidia-smi lspci dmesg journalctl lsmod dkms uname ldconfig systemctl mokutil ls".split())
_KERNEL = re.compile(r"NVRM|nvidia-nvlink|nvidia-uvm|nvidia-modeset|nvidia-drm|nouveau|vfio-pci|[Xx]id")


def is_one(text: str) -> bool:
    return re.search(r"Start of NVIDIA bug report log file", text[:4000]) is not None


def parse(text: str) -> dict[str, Any]:
    """Files, commands (with what `ls` shows of the nodes) and the kernel log, as far as the report has them."""
    files: dict[str, Any] = {}
    commands: dict[str, Any] = {}
    listing: list[str] = []
    log: list[str] = []
    document: dict[str, Any] = {"source": "nvidia-bug-report.log"}
    for block in _blocks(text):
        head = next(line for line in block if line.strip()).strip()
        body = block[next(i for i, line in enumerate(block) if line.strip()) + 1 :]
        for line in block:
            shown = re.match(r"^(?:\*\*\* ls: )?([bc-][-rwxsSt]{9}\S*\s.*?/dev/nvidia\S*)\s*$", line)
            if shown:
                listing.append(shown.group(1))
        absent = re.match(r"^\*\*\* (/\S+) does not exist", head)
        unreadable = re.match(r"^\*\*\* (/\S+) is not readable", head)
        file = re.match(r"^\*\*\* (/\S+)$", head)
        command = re.match(r"^(?:/\S*/)?([\w.-]+)(( .*?)?):?$", head)
        if absent:
            files[posixpath.normpath(absent.group(1))] = {"error": "ENOENT"}
        elif unreadable:
            files[posixpath.normpath(unreadable.group(1))] = {"error": "EACCES"}
        elif file:
            path = posixpath.normpath(file.group(1))
            content = "\n".join(line for line in body if not line.startswith("*** ls:")).strip("\n")
            if content and not path.startswith("/dev/"):
                files[path] = content + "\n"
            if re.match(r"/var/log/(dmesg|messages|syslog|kern)", path):
                log += body
        elif command and command.group(1) in ("dmesg", "journalctl"):
            log += [line for line in body if command.group(1) == "dmesg" or _KERNEL.search(line)]
        elif command and command.group(1) in _COMMANDS:
            line = " ".join((command.group(1) + command.group(2)).split()).replace("--query", "-q")
            if line != "nvidia-smi -q --unit":
                commands[line] = "\n".join(body).strip("\n")
        elif head.startswith("Scanning kernel log files"):
            log += [line for line in body if _KERNEL.search(line)]
    for key, pattern in (("taken", r"^Date: (.+)$"), ("collector", r"^nvidia-bug-report\.sh Version: (\S+)")):
        found = re.search(pattern, text[:6000], re.M)
        if found:
            document[key] = found.group(1)
    uname = re.search(r"^uname: (\S+) (\S+) (\S+).*$", text[:6000], re.M)
    if uname:
        commands["uname -a"] = uname.group(0).removeprefix("uname: ")
        document["machine"] = uname.group(2)
        files.setdefault("/proc/sys/kernel/osrelease", uname.group(3))
    if listing:
        commands["ls -l /dev/nvidia*"] = "\n".join(dict.fromkeys(listing))
    lines = list(dict.fromkeys(line for line in log if line.strip()))
    if lines:
        document["kernel_log"] = {"lines": lines, "of": len(lines)}
    return {**document, "files": files, "commands": commands}


def _blocks(text: str) -> list[list[str]]:
    """Lines between the rulers; blocks with nothing in them are left out."""
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        if _RULER.match(line):
            blocks.append([])
        else:
            blocks[-1].append(line)
    return [block for block in blocks if any(line.strip() for line in block)]
