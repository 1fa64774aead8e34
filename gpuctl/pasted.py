"""Text that people paste: a terminal with prompts and outputs, or loose lines. Pure."""

from __future__ import annotations

import re
import shlex
from typing import Any

from gpuctl.facts import nodes
from gpuctl.facts.env import parse_env

_PROGRAMS = frozenset(
    "nvidia-smi ls cat dmesg lsmod lspci stat uname id env printenv export pct pveversion pvesh dkms modinfo modprobe "
    "mokutil ldconfig systemctl journalctl mount findmnt bpftool strace ulimit python python3 ollama docker podman "
    "nvidia-container-cli nvidia-ctk nvidia-modprobe nvidia-debugdump dpkg apt apt-cache rpm readlink find grep "
    "lxc-start lxc-cgroup lxc-info lxc-attach lxc-ls lxc qm free ps hostname hostnamectl cut awk head tail zcat ldd "
    "which getfacl dcgmi rocm-smi vllm sglang test echo egrep sh bash timeout clinfo ffmpeg rmmod insmod mknod "
    "systemd-detect-virt lsof fuser nvcc deviceQuery ./deviceQuery whoami getent sysctl prlimit aa-status".split()
)
INSIDE = re.compile(r"^(?:pct exec|lxc-attach -n)\s+(\d+)(?:\s+--keep-env[ =]\d)?\s+(?:--\s+)?(.+)$")
_PROMPT = re.compile(
    r"^\s*(?:\([\w.-]+\)\s*)?(?:\[?(?P<user>[\w.-]+)@(?P<host>[\w.-]+)[^\n$#]{0,80}?\]?\s*[$#]|[$#%❯>])\s+(?P<line>\S.*?)\s*$"
)

_LISTING = re.compile(r"(?:[#$] )?ls(?: -\w+)*(?: /dev/[\w/*-]*)+")  # a line of its own, its prompt perhaps eaten


def command_of(line: str) -> str | None:
    """A command line without its prompt, sudo and blanks; None where it is none that is known."""
    found = _PROMPT.match(line)
    text = " ".join((found.group("line") if found else line).split())
    text = re.sub(r"^(?:sudo|doas|time|LC_ALL=C|LANG=C)\s+(?:-\w\s+)*", "", text)
    word = text.split()[0] if text else ""
    if word.rpartition("/")[2] in _PROGRAMS or word in _PROGRAMS:
        head = word.rpartition("/")[2]
        return head + text[len(word) :]
    return None


def has_prompts(text: str) -> bool:
    for line in text.splitlines():
        found = _PROMPT.match(line)
        # `# cat is ...` is a comment in YAML; `$ cat` and `root@x:~# cat` are prompts
        if found and (found.group("user") or line.lstrip()[0] in "$❯%") and command_of(line) is not None:
            return True
    return False


def parse(text: str) -> dict[str, Any] | None:
    """A pasted terminal -> the keys of a snapshot document; None for text with nothing in it."""
    if not text.strip():
        return None
    if not has_prompts(text):
        document: dict[str, Any] = {"errors": text.splitlines()}
        shown = [path for path in nodes.parse_ls(text) if path.startswith("/dev/nvidia")]
        if shown:  # where nobody says what was asked for, a node that is not among them may be there
            asked = (line.strip() for line in text.splitlines())
            listing = next((line for line in asked if _LISTING.fullmatch(line)), f"ls -l {' '.join(shown)}")
            document["commands"] = {listing: text}
        return document
    hosts: dict[str, dict[str, str]] = {}
    loose: list[str] = []
    host, command, output = "", "", [""]
    for line in [*text.splitlines(), "$ echo"]:
        found = _PROMPT.match(line)
        known = command_of(line) if found else None
        if known is None or found is None:
            (output if command else loose).append(line)
            continue
        if command:
            commands = hosts.setdefault(host, {})
            commands[command] = (commands[command] + "\n" if command in commands else "") + "\n".join(output)
        host, command, output = found.group("host") or "", known, []
    document = {"errors": [line for line in loose if line.strip()]} if any(line.strip() for line in loose) else {}
    node = [name for name, commands in hosts.items() if name and any(_of_node(c) for c in commands)]
    others = [name for name in hosts if name not in node and name]
    if len(node) == 1 and len(others) == 1:
        both = hosts.get("", {})
        return {
            **document,
            "node": {"machine": node[0], "commands": hosts[node[0]]},
            "guest": {"machine": others[0], "commands": {**hosts[others[0]], **both}},
        }
    merged: dict[str, str] = {}
    for commands in hosts.values():
        merged.update(commands)
    if len(hosts) == 1 and next(iter(hosts)):
        document["machine"] = next(iter(hosts))
    return {**document, "commands": merged}


def _of_node(command: str) -> bool:
    return bool(re.match(r"(pct|pveversion|pvesh|qm)\b", command) or "/etc/pve/" in command)


def sections_of(command: str, stdout: str, stderr: str) -> dict[str, Any]:
    """What a command's output says of other sections: files it printed, the environment."""
    words = command.split()
    if words[0] in ("cat", "head", "tail", "zcat", "grep", "egrep", "less"):
        paths = [word for word in words[1:] if word.startswith("/") and "|" not in word]
        text = stdout if stdout.strip() else stderr
        if len(paths) == 1 and "*" not in paths[0]:
            return {"files": {paths[0]: text}} if _shows(command, paths[0], text) else {}
        if paths and all("/proc/driver/nvidia/gpus" in path for path in paths):
            return {"files": {"/proc/driver/nvidia/gpus/*/information": text}}
        if len(paths) > 1 and "*" not in command:
            return {"files": _several(paths, text)}
    if words[0] in ("env", "printenv", "export"):
        if len(words) == 1 or "|" in words:
            return {"env": parse_env(stdout.replace("\0", "\n"))}
        if words[0] == "printenv" and len(words) == 2:
            return {"env": {words[1]: stdout.strip()}}
    if words[0] == "echo" and re.fullmatch(r"\$\{?(\w+)\}?", words[-1].strip('"')) and len(words) == 2:
        name = re.sub(r"[${}\"]", "", words[1])
        return {"env": {name: stdout.strip()}}
    if words[0] == "uname" and words[1:] == ["-r"]:
        return {"files": {"/proc/sys/kernel/osrelease": stdout}}
    return {}


# What a look at part of a file must have shown, were it there, before the part may stand for the file: NVIDIA's rows.
_ROWS = {"/proc/devices": "511 nvidia-uvm", "/proc/modules": "nvidia 1000000 1 - Live"}
_RULE, _ENTRY = "lxc.cgroup2.devices.allow: c 195:* rwm", "dev0: /dev/nvidia0"


def _shows(command: str, path: str, text: str) -> bool:
    """Would it have shown what NVIDIA has in the file? `grep 195 /proc/devices` says nothing of nvidia-uvm."""
    program = command.split()[0]
    conf = path.startswith("/etc/pve/") and path.endswith(".conf")
    if program not in ("grep", "egrep", "head", "tail") or not (path in _ROWS or conf) or _is_error(text):
        return True
    if program in ("head", "tail"):
        return conf and program == "head"
    try:
        words = shlex.split(command.split("|")[0] if "'" not in command and '"' not in command else command)
    except ValueError:
        return False
    pattern = next((word for word in words[1:] if not word.startswith("-")), "").replace("\\|", "|")
    try:
        matches = re.compile(pattern, re.I if re.search(r" -\w*i", command) else 0).search
    except re.error:
        return False
    if conf:
        return bool(matches(_RULE)) and bool(matches(_ENTRY) or "devices.allow" in text)
    return bool(matches(_ROWS[path]))


def _is_error(text: str) -> bool:
    return text.lstrip().startswith(("grep:", "egrep:", "head:", "tail:"))


def _several(paths: list[str], text: str) -> dict[str, str]:
    """`cat a b` of one-line files: a line each."""
    lines = text.splitlines()
    return dict(zip(paths, lines, strict=True)) if len(lines) == len(paths) else {}
