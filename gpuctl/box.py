"""A snapshot is every raw answer of one machine at one moment; a box is a guest with its node. Pure.

The format is docs/snapshot.md; `gpuctl/agent/probe.py` writes it, `gpuctl.snapshots` also reads what people type.
A fact reads a snapshot once; what cannot be read is `Unknown`, with the reason, and never an error of the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

SCHEMA = "gpuctl.snapshot/1"

T = TypeVar("T")
D = TypeVar("D")


class Unknown(Exception):
    """The snapshot does not say. The message is the reason, for a person."""


@dataclass(frozen=True, eq=False)
class Fact(Generic[T]):
    """One thing to know of a machine.

    `ask` names the answers it is read from: ("file", "/proc/devices"), ("command", "nvidia-smi"), ("section", "cuda").
    `parse` gets the snapshot and returns the value or raises Unknown.
    """

    ask: tuple[tuple[str, str], ...]
    parse: Callable[[Snapshot], T]


@dataclass(frozen=True)
class Output:
    """What a command answered. `rc` is None where only its text is known (a report typed by hand)."""

    stdout: str
    stderr: str = ""
    rc: int | None = None

    @property
    def text(self) -> str:
        return "\n".join(part for part in (self.stdout.rstrip("\n"), self.stderr.rstrip("\n")) if part)


class Snapshot:
    """All raw answers of one machine at one moment.

    `snapshot[FACT]` parses once and raises Unknown; `snapshot.get(FACT, default)` does not raise.
    """

    def __init__(self, document: Mapping[str, Any], *, source: str = "") -> None:
        self.document = document
        self.source = source  # the file it was read from, for messages
        self._parsed: dict[int, tuple[bool, Any]] = {}

    @classmethod
    def absent(cls, reason: str) -> Snapshot:
        """A machine that was not asked, or did not answer: every fact of it is Unknown(reason)."""
        return cls({"absent": reason})

    @property
    def present(self) -> bool:
        return "absent" not in self.document

    @property
    def reason(self) -> str:
        """Why there is nothing to read, for an absent snapshot."""
        return str(self.document.get("absent", ""))

    @property
    def name(self) -> str:
        kind = {"guest": "the guest", "node": "the node"}.get(str(self.role), "this machine")
        return str(self.document.get("machine") or kind)

    @property
    def role(self) -> str | None:
        """guest | node | machine, where the snapshot says so."""
        role = self.document.get("role")
        return None if role is None else str(role)

    def __getitem__(self, fact: Fact[T]) -> T:
        if id(fact) not in self._parsed:
            try:
                if not self.present:
                    raise Unknown(self.reason)
                self._parsed[id(fact)] = (True, fact.parse(self))
            except Unknown as unknown:
                self._parsed[id(fact)] = (False, str(unknown))
            except (TypeError, AttributeError, ValueError, LookupError) as error:  # a shape nobody documented
                names = ", ".join(name for _, name in fact.ask)
                self._parsed[id(fact)] = (False, f"{names}: not in the shape of docs/snapshot.md ({error})")
        known, value = self._parsed[id(fact)]
        if not known:
            raise Unknown(value)
        answer: T = value
        return answer

    def get(self, fact: Fact[T], default: D = None) -> T | D:  # type: ignore[assignment]
        try:
            return self[fact]
        except Unknown:
            return default

    # -- raw answers, for facts --

    def section(self, name: str) -> Any:
        """A whole section; raises Unknown where nobody asked, or where asking failed as a whole."""
        if not self.present:
            raise Unknown(self.reason)
        if name not in self.document:
            why = self.document.get("unanswered", {}).get(name)
            raise Unknown(f"{name}: {why or 'not in the snapshot'}")
        value = self.document[name]
        if isinstance(value, Mapping) and set(value) == {"error"}:
            raise Unknown(f"{name}: {value['error']}")
        return value

    def has(self, name: str) -> bool:
        return name in self.document

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A section that is a mapping; empty where the snapshot has none."""
        value = self.document.get(name)
        return value if isinstance(value, Mapping) else {}

    def file(self, path: str) -> str:
        """Text of a file; raises Unknown where it was not read or could not be."""
        answer = self.mapping("files").get(path)
        if answer is None:
            raise Unknown(f"{path}: {self.reason or 'not in the snapshot'}")
        if isinstance(answer, Mapping):
            raise Unknown(f"{path}: {answer.get('error')}")
        return str(answer)

    def file_error(self, path: str) -> str | None:
        """The errno name that reading the file gave (ENOENT: known not to be there); None where read or not asked."""
        answer = self.mapping("files").get(path)
        return str(answer.get("error")) if isinstance(answer, Mapping) else None

    def files(self, prefix: str, suffix: str = "") -> dict[str, str]:
        """All files read under a prefix, path -> text."""
        return {
            path: answer
            for path, answer in self.mapping("files").items()
            if path.startswith(prefix) and path.endswith(suffix) and isinstance(answer, str)
        }

    def output(self, *names: str) -> Output:
        """What the first of these commands that was run answered; raises Unknown."""
        commands = self.mapping("commands")
        reason = "not in the snapshot"
        for name in names:
            answer = commands.get(name)
            if isinstance(answer, str):
                return Output(answer)
            if isinstance(answer, Mapping):
                if "error" in answer:
                    reason = str(answer["error"])
                    continue
                rc = answer.get("rc")
                return Output(str(answer.get("stdout", "")), str(answer.get("stderr", "")), rc)
        raise Unknown(f"{names[0]}: {self.reason or reason}")

    def command_error(self, name: str) -> str | None:
        """Why a command gave nothing: ENOENT where the program is not there, "hang" where it did not end."""
        answer = self.mapping("commands").get(name)
        return str(answer["error"]) if isinstance(answer, Mapping) and "error" in answer else None


@dataclass(frozen=True)
class Wanted:
    """What the inventory says of a box, as far as a diagnosis needs it. Everything may be unknown."""

    name: str = ""
    vmid: int | None = None
    node: str = ""
    user: str | None = None  # whom the service runs as
    unit: str | None = None  # its systemd unit
    gpus: int | None = None  # how many GPUs the guest is meant to have
    extra: Mapping[str, Any] = field(default_factory=dict)


class Box:
    """A guest with its node; or one machine that is both.

    guest   where CUDA has to start: the container, or the machine itself
    node    the Proxmox VE node; absent for a machine that is none's guest, or where nobody asked it
    """

    def __init__(self, guest: Snapshot, node: Snapshot | None = None, wanted: Wanted | None = None) -> None:
        self.guest = guest
        self.node = node if node is not None else Snapshot.absent("no snapshot of the node")
        self.wanted = wanted or Wanted()

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        found = (self.guest,) if self.guest is self.node else (self.guest, self.node)
        return tuple(s for s in found if s.present)

    def kernel(self, fact: Fact[T]) -> T:
        """A fact that node and guest share, for they share the kernel (/proc/devices, the loaded module, its log).

        The guest is asked first: its answer is what the failing process sees. Raises Unknown with both reasons.
        """
        reasons = []
        for snapshot in (self.guest, self.node):
            try:
                return snapshot[fact]
            except Unknown as unknown:
                reasons.append(str(unknown))
        raise Unknown("; ".join(dict.fromkeys(reasons)))

    def get_kernel(self, fact: Fact[T], default: D = None) -> T | D:  # type: ignore[assignment]
        try:
            return self.kernel(fact)
        except Unknown:
            return default
