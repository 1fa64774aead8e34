"""Masks what names people and machines in a snapshot: names, addresses, serials, UUIDs, tokens. Pure.

The same value gets the same mask everywhere in what is masked together, so that a diagnosis of the masked snapshot is
the diagnosis of the true one: a UUID in CUDA_VISIBLE_DEVICES still is, or is not, one of the GPUs'.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|xox[a-z]-[\w-]{10,}|AKIA[0-9A-Z]{12,}|"
    r"glpat-[\w-]{16,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"
)
_SECRET = re.compile(r"(?i)\b(\w*(?:password|passwd|secret|token|api[_-]?key)\w*\s*[=:]\s*)([^\s\"',;]{4,})")
_HEX = "[0-9a-fA-F]"
_UUID = re.compile(rf"\b(GPU-|MIG-(?:GPU-)?)?({_HEX}{{8}})-({_HEX}{{4}})-({_HEX}{{4}})-({_HEX}{{4}})-({_HEX}{{12}})\b")
_IPV4 = re.compile(r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.]*\w)")
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9a-fA-F]{1,4}:){3,7}(?::|[0-9a-fA-F]{1,4})(?::[0-9a-fA-F]{1,4})*(?![\w:])|"
                   r"(?<![\w:.])(?:[0-9a-fA-F]{1,4}:){1,6}:(?:[0-9a-fA-F]{1,4}:?){1,6}(?![\w:])")  # fmt: skip
_MAC = re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}(?![\w:])")
_EMAIL = re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.]*\w")
_DOMAIN = re.compile(
    r"\b(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)+(?:com|net|org|io|ai|dev|edu|gov|local|lan|internal|home|intern|corp|de|at|ch|eu|"
    r"fr|uk|nl|us|cn|jp|ru|br)\b(?!\.)",
    re.I,
)
_HOME = re.compile(r"(/home/)([A-Za-z0-9._-]+)")
_SERIAL = re.compile(r"(?i)(serial(?: number)?\s*:\s*)([0-9A-Z]{6,})")
_KEPT_ADDRESSES = ("127.0.0.1", "0.0.0.0", "255.255.255.255", "8.8.8.8")  # noqa: S104 - addresses of nobody
_PUBLIC = ("nvidia.com", "github.com", "huggingface.co", "proxmox.com", "debian.org", "kernel.org", "ubuntu.com")
# Words that are names of machines on some networks and mean something else in every snapshot.
_COMMON = frozenset(
    "local localhost root none lxc node guest host machine debian ubuntu linux nvidia cuda proxmox pve server gpu vm "
    "box container test default user admin service the this".split()
)


def mask(documents: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Masked copies, and one line for each kind of thing that was masked: `2 host names: host1, host2`."""
    masker = _Masker()
    for document in documents:
        masker.learn(document)
    masked = [masker.value(document, ()) for document in documents]
    return masked, masker.told()


class _Masker:
    def __init__(self) -> None:
        self.masks: dict[str, dict[str, str]] = {}
        self.names: dict[str, str] = {}
        self._names: re.Pattern[str] | None = None

    def of(self, kind: str, value: str, make: Callable[[int], str]) -> str:
        """The mask of a value, a new one at its first sight."""
        known = self.masks.setdefault(kind, {})
        if value not in known:
            known[value] = make(len(known) + 1)
        return known[value]

    # -- names of machines: found first, then masked everywhere --

    def learn(self, document: Mapping[str, Any]) -> None:
        found = [document.get("machine"), document.get("node_name")]
        files = document.get("files", {})
        for path, text in files.items() if isinstance(files, Mapping) else ():
            if not isinstance(text, str):
                continue
            if path in ("/proc/sys/kernel/hostname", "/etc/hostname"):
                found.append(text)
            elif path.endswith(".conf"):
                found += re.findall(r"(?m)^(?:hostname|searchdomain):\s*(\S+)", text)
        commands = document.get("commands", {})
        listing = commands.get("pct list") if isinstance(commands, Mapping) else None
        text = listing.get("stdout", "") if isinstance(listing, Mapping) else listing or ""
        found += [words[-1] for words in (line.split() for line in str(text).splitlines()[1:]) if len(words) > 2]
        for name in found:
            word = str(name or "").strip()
            if len(word) >= 3 and word.lower() not in _COMMON and not word.isdigit() and re.fullmatch(r"[\w.-]+", word):
                short = word.split(".")[0]
                mask_name = self.of("host name", short, lambda n: f"host{n}")
                self.names[short] = mask_name
                if short != word:
                    self.names[word] = f"{mask_name}.example.net"
        for inner in ("guest", "node"):
            if isinstance(document.get(inner), Mapping):
                self.learn(document[inner])
        ordered = sorted(self.names, key=len, reverse=True)
        if ordered:
            self._names = re.compile(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, ordered))})(?![\w-])")

    # -- values --

    def value(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            return {self.text(str(key), path): self.value(each, (*path, str(key))) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(each, path) for each in value]
        if isinstance(value, str):
            if path and path[-1] == "serial" and value.strip():
                return self.of("serial number", value, lambda n: f"SERIAL-{n}")
            if path and path[-1] in ("config", "xlated"):  # bytes of registers and instructions
                return value
            return self.text(value, path)
        return value

    def text(self, text: str, path: tuple[str, ...]) -> str:
        text = _TOKEN.sub(lambda m: self.of("token", m.group(0), lambda n: f"TOKEN-{n}"), text)
        text = _SECRET.sub(self._secret, text)
        text = _SERIAL.sub(lambda m: m.group(1) + self.of("serial number", m.group(2), lambda n: f"SERIAL-{n}"), text)
        text = _EMAIL.sub(lambda m: self.of("e-mail address", m.group(0), lambda n: f"person{n}@example.net"), text)
        text = _UUID.sub(self._uuid, text)
        text = _MAC.sub(lambda m: self.of("MAC address", m.group(0).lower(), lambda n: f"02:00:00:00:00:{n:02x}"), text)
        text = _IPV4.sub(self._ipv4, text)
        text = _IPV6.sub(self._ipv6, text)
        text = _DOMAIN.sub(self._domain, text)
        text = _HOME.sub(lambda m: m.group(1) + self.of("home folder", m.group(2), lambda n: f"user{n}"), text)
        if self._names is not None:
            text = self._names.sub(lambda m: self.names[m.group(0)], text)
        return text

    def _secret(self, found: re.Match[str]) -> str:
        value = found.group(2)
        if value.startswith(("(not", "TOKEN-")) or value.lower() in ("none", "true", "false", "null"):
            return found.group(0)
        return found.group(1) + self.of("token", value, lambda n: f"TOKEN-{n}")

    def _uuid(self, found: re.Match[str]) -> str:
        prefix, core = found.group(1) or "", "-".join(found.groups()[1:]).lower()
        return prefix + self.of("UUID", core, lambda n: f"{n:08x}-0000-4000-8000-{n:012x}")

    def _ipv4(self, found: re.Match[str]) -> str:
        value = found.group(0)
        if value in _KEPT_ADDRESSES:
            return value
        return self.of("address", value, lambda n: f"192.0.2.{n}" if n < 255 else f"198.51.{n // 250}.{n % 250}")

    def _ipv6(self, found: re.Match[str]) -> str:
        value = found.group(0)
        if value in ("::1", "::") or re.fullmatch(r"(?:[0-9a-f]{2,4}:){2}[0-9a-f]{2}", value):
            return value
        return self.of("address", value.lower(), lambda n: f"2001:db8::{n:x}")

    def _domain(self, found: re.Match[str]) -> str:
        value = found.group(0)
        if value.lower().endswith((*_PUBLIC, "example.net")) or value in self.names:
            return value
        return self.of("domain name", value.lower(), lambda n: f"name{n}.example.net")

    def told(self) -> list[str]:
        lines = []
        for kind, masks in self.masks.items():
            shown = ", ".join(list(masks.values())[:3]) + (", ..." if len(masks) > 3 else "")
            plural = kind + ("es" if kind.endswith("ss") else "s") if len(masks) != 1 else kind
            lines.append(f"{len(masks)} {plural} ({shown})")
        return lines
