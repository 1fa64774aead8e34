"""How a machine is reached over SSH: what OpenSSH itself makes of its options and of ssh_config.

`ssh -G` and `ssh-keygen -F` are asked instead of reading those files here, so that gpuctl, Ansible and a person at a
shell get the same answer: Include, Match, tokens, hashed names, patterns and revoked keys included.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuctl.transport.contract import Refused

JUMPS = 8  # more hops than this is a loop in ssh_config


@dataclass(frozen=True)
class Hop:
    """One SSH login: where, as whom, with which keys, and which host keys are believed."""

    host: str
    port: int
    user: str
    keys: tuple[str, ...]  # private key files, in the order they are tried
    agent: str | None  # socket of the ssh-agent; "SSH_AUTH_SOCK" means the environment's
    only_keys: bool  # of the agent's keys, only those named in `keys`
    known_hosts: tuple[str, ...]
    key_names: tuple[str, ...]  # names under which known_hosts may list it; the first is the proper one
    proxy_command: str | None

    def __str__(self) -> str:
        return f"{self.user}@{self.host}:{self.port}"


@dataclass(frozen=True)
class KnownKey:
    file: str
    line: int
    type: str
    base64: str
    revoked: bool


def settings(arguments: Sequence[str]) -> dict[str, list[str]]:
    """What `ssh -G` says: keyword in lower case -> its values in order. Raises Refused with OpenSSH's own words."""
    try:
        done = subprocess.run(["ssh", "-G", *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
    except FileNotFoundError:
        raise Refused("the OpenSSH client is missing here: install the package openssh-client") from None
    except subprocess.TimeoutExpired:
        raise Refused("`ssh -G` did not end within 20 s: a `Match exec` in ssh_config hangs") from None
    if done.returncode != 0:
        why = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise Refused(f"ssh does not accept its configuration: {why[0] if why else 'ssh -G failed'}")
    said: dict[str, list[str]] = {}
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        keyword, _, value = line.partition(" ")
        said.setdefault(keyword.lower(), []).append(value)
    return said


def hop(said: Mapping[str, Sequence[str]]) -> Hop:
    """Reads one answer of `ssh -G`."""

    def one(keyword: str, default: str = "") -> str:
        value = said.get(keyword, [default])[0]
        return default if value == "none" else value

    host, port, user = one("hostname"), int(one("port", "22")), one("user")
    alias = one("hostkeyalias")
    # Like OpenSSH: an alias stands alone; a key known for the host on any port is believed on this port too.
    names = (alias,) if alias else (host,) if port == 22 else (f"[{host}]:{port}", host)
    tokens = {"h": host, "p": str(port), "r": user, "n": one("host", host), "d": str(Path.home()), "%": "%"}
    proxy = one("proxycommand")
    files = [*_paths(one("userknownhostsfile")), *_paths(one("globalknownhostsfile"))]
    return Hop(
        host=host,
        port=port,
        user=user,
        keys=tuple(_path(_expand(key, tokens)) for key in said.get("identityfile", []) if key != "none"),
        agent=None if said.get("identityagent") == ["none"] else _path(one("identityagent", "SSH_AUTH_SOCK")),
        only_keys=one("identitiesonly") == "yes",
        known_hosts=tuple(_path(_expand(file, tokens)) for file in files),
        key_names=names,
        proxy_command=_expand(proxy, tokens) if proxy else None,
    )


def chain(arguments: Sequence[str], config: str | None) -> list[Hop]:
    """The hops to a machine, the nearest first, the machine itself last. `arguments` as for ssh."""
    base = ["-F", config] if config else []
    for at, word in enumerate(arguments):
        if word == "--":
            break
        if word.startswith("-F"):
            base = ["-F", word[2:] or arguments[at + 1]]  # what OpenSSH hands on to the jump hosts
    return _chain([*base, *arguments], base, 0)


def _chain(arguments: Sequence[str], base: Sequence[str], depth: int) -> list[Hop]:
    if depth > JUMPS:
        raise Refused("ssh_config makes hosts jump over each other in a circle (ProxyJump)")
    said = settings(arguments)
    jump = said.get("proxyjump", ["none"])[0]
    if jump == "none":
        return [hop(said)]
    first, *others = jump.split(",")
    # As OpenSSH does it: the first jump host follows its own configuration, the later ones are reached through it.
    hops = _chain([*base, *_destination(first)], base, depth + 1)
    hops += [hop(settings([*base, "-o", "ProxyJump=none", *_destination(one)])) for one in others]
    return [*hops, hop(said)]


def known_keys(hop: Hop) -> list[tuple[str, KnownKey]]:
    """(name, key) for each line of the known_hosts files that speaks of this host."""
    return [
        (name, key)
        for name in hop.key_names
        for file in hop.known_hosts
        if Path(file).is_file()
        for key in _find(name, file)
    ]


def _find(name: str, file: str) -> list[KnownKey]:
    done = subprocess.run(
        ["ssh-keygen", "-F", name, "-f", file], stdin=subprocess.DEVNULL, capture_output=True, timeout=20
    )
    found, line, mark = [], 0, ""
    for text in done.stdout.decode("utf-8", "replace").splitlines():
        if said := re.match(r"# Host .* found: line (\d+) ?(\w*)", text):
            line, mark = int(said[1]), said[2]
            continue
        fields = text.removeprefix("@revoked").split()
        if mark != "CA" and len(fields) >= 3:
            found.append(KnownKey(file, line, fields[1], fields[2], mark == "REVOKED"))
    return found


def _destination(hop: str) -> list[str]:
    """`[user@]host[:port]` or an ssh:// URI, as arguments of ssh."""
    user, _, rest = hop.removeprefix("ssh://").rstrip("/").rpartition("@")
    read = re.fullmatch(r"\[([^]]+)\](?::(\d+))?", rest) or re.fullmatch(r"([^:]+)(?::(\d+))?", rest)
    host, port = (read[1], read[2]) if read else (rest, None)
    return [*(["-p", port] if port else []), *(["-l", user] if user else []), "--", host]


def _expand(text: str, tokens: Mapping[str, str]) -> str:
    return re.sub(r"%(.)", lambda m: tokens.get(m[1], m[0]), text)


def _path(text: str) -> str:
    return str(Path(text).expanduser()) if text.startswith("~") else text


def _paths(text: str) -> list[str]:
    """`ssh -G` prints a list of files without quotes: a name with spaces is told by its being there."""
    words, files = text.split(" "), []
    while words:
        whole = next((n for n in range(len(words), 1, -1) if Path(_path(" ".join(words[:n]))).exists()), 1)
        files.append(" ".join(words[:whole]))
        words = words[whole:]
    return [file for file in files if file and file != "none"]
