"""One server on several machines by the engine's own multi-node flags: started, failed and stopped together.

The first machine is the head: it answers requests, and its log is the server's log. No scheduler of ours: each machine
has its unit (or process) as every other server, and the engine joins them.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from gpuctl import background, hosts
from gpuctl.engines import Launch
from gpuctl.supervision import Listener, Start, SupervisionError, Supervisor, UnitState, Watch
from gpuctl.transport import TransportError

T = TypeVar("T")
MEETING_PORT = 29500  # of the head, where the machines of a server find each other; torch.distributed's own default
LAST_LINES = 60  # of a machine that ended first, for the log and whoever reads it


def ranked(launch: Launch, machines: hosts.Inventory) -> tuple[Launch, ...]:
    """The launch on each of the server's machines, the head's first; as it is where it has one. Raises BadInventory."""
    nodes = launch.server.nodes
    if len(nodes) < 2:
        return (launch,)
    head, *_ = machines.chosen(nodes)
    meet = launch.server.meet
    if meet is None:
        address = hosts.address(head)
        meet = f"[{address}]:{MEETING_PORT}" if ":" in address else f"{address}:{MEETING_PORT}"
    return tuple(replace(launch, rank=rank, ranks=len(nodes), head=meet) for rank in range(len(nodes)))


class Crews(Supervisor):
    """A machine's supervisor for servers of which some run on others as well.

    `crews`: unit -> the machines beside the head, each with its command line there.
    """

    def __init__(
        self,
        head: Supervisor,
        others: Mapping[str, Supervisor],
        crews: Mapping[str, Sequence[tuple[str, Sequence[str]]]],
    ) -> None:
        super().__init__(head.transport, head.folder, python=head.python)
        self._head, self._others, self._crews = head, others, crews
        self._together: dict[str, Together] = {}

    def start(self, server: Start) -> UnitState:
        if server.unit not in self._crews:
            return self._head.start(server)
        crew = self._crews[server.unit]
        members = [self._head, *(self._others[name] for name, _ in crew)]
        self._together[server.unit] = Together(members, [server.argv, *(argv for _, argv in crew)])
        return self._together[server.unit].start(server)

    def status(self, ports: Sequence[int] = ()) -> tuple[list[UnitState], dict[int, Listener]]:
        """Units of all machines, each once: as the head has it, or as it still runs on another one."""
        units, listening = self._head.status(ports)
        found = {unit.unit: unit for unit in units}
        for other in self._others.values():
            for unit in other.status()[0]:
                if unit.unit not in found or (unit.running and not found[unit.unit].running):
                    found[unit.unit] = unit
        return list(found.values()), listening

    def stop(self, unit: str, grace_s: float = 10) -> UnitState | None:
        together = self._together.get(unit) or Together([self._head, *self._others.values()], ())
        return together.stop(unit, grace_s)

    def watch(self, unit: str, health: Sequence[str], on_log: Callable[[str], None]) -> Watch:
        return self._together.get(unit, self._head).watch(unit, health, on_log)


class Together(Supervisor):
    """`members`: the supervisor of each machine, the head's first; `argvs`: the command line of each."""

    def __init__(self, members: Sequence[Supervisor], argvs: Sequence[Sequence[str]]) -> None:
        head = members[0]
        super().__init__(head.transport, head.folder, python=head.python)
        self.members = tuple(members)
        self.argvs = tuple(argvs)
        self._starting: list[Future[None]] = []

    def start(self, server: Start) -> UnitState:
        """All at the same time. When one cannot be started the others are stopped again. Raises SupervisionError."""
        numbers = {member: number for number, member in enumerate(self.members)}
        found = self._side_by_side(lambda m: m.start(replace(server, argv=self.argvs[numbers[m]])), starts=True)
        for one in found:
            if isinstance(one, Exception) and not isinstance(one, SupervisionError | TransportError):
                raise one
        wrong = [(member, one) for member, one in zip(self.members, found, strict=True) if isinstance(one, Exception)]
        if not wrong:
            return _only(found[0])
        self.stop(server.unit)
        member, error = wrong[0]
        where = member.transport.name
        said = str(error)
        raise SupervisionError(said if where in said else f"on {where}: {said}") from None

    def status(self, ports: Sequence[int] = ()) -> tuple[list[UnitState], dict[int, Listener]]:
        return self.members[0].status(ports)

    def stop(self, unit: str, grace_s: float = 10) -> UnitState | None:
        """Everywhere, also where the others cannot be reached any more. Returns how the head's ended."""
        background.ended(self._starting, timeout=180)  # one that is just being started would be found by nobody
        found = self._side_by_side(lambda m: m.stop(unit, grace_s))
        return _only(found[0])

    def watch(self, unit: str, health: Sequence[str], on_log: Callable[[str], None]) -> Watch:
        """Follows all: ready when the head is, ended as soon as one of them has."""
        taking = threading.Lock()

        def take(text: str) -> None:
            with taking:
                on_log(text)

        head = self.members[0].watch(unit, health, take)
        # health is asked of the head: the others answer nobody
        watches = [head, *(member.watch(unit, (), lambda _: None) for member in self.members[1:])]
        whole = _Whole(log_tail=head.log_tail, progress_at=time.monotonic())
        whole.watches = watches

        def follow() -> None:
            while not whole._closed.is_set():
                ended = next((n for n, one in enumerate(watches) if one.ended.is_set()), None)
                whole.progress_at = max(one.progress_at for one in watches)
                whole.health = head.health
                if ended is not None:
                    self._tell_end(whole, ended, take)
                    return
                if head.ready.is_set():
                    whole.ready.set()
                time.sleep(0.1)

        threading.Thread(target=follow, name=f"watch {unit} on {len(watches)} machines", daemon=True).start()
        return whole

    def _tell_end(self, whole: _Whole, number: int, take: Callable[[str], None]) -> None:
        first, name = whole.watches[number], self.members[number].transport.name
        if number:
            tail = list(first.log_tail)[-LAST_LINES:]
            take("".join(f"{line}\n" for line in (f"gpuctl: {name} ended first; its last lines:", *tail)))
            whole.log_tail.extend(tail)
        whole.exit = {**(first.exit or {}), "machine": name} if first.lost is None else None
        whole.lost = first.lost
        whole.ended.set()

    def _side_by_side(self, work: Callable[[Supervisor], T], *, starts: bool = False) -> list[T | Exception]:
        """work(member) of all at once, in their order; an error in place of an answer."""
        found: list[Any] = [None] * len(self.members)

        def one(number: int, member: Supervisor) -> None:
            try:
                found[number] = work(member)
            except Exception as error:  # noqa: BLE001 - it goes to the thread that asked
                found[number] = error

        works: list[Future[None]] = []
        if starts:
            self._starting = works
        for number, member in enumerate(self.members):
            background.begin(functools.partial(one, number, member), member.transport.name, works)
        background.ended(works)
        return found


class _Whole(Watch):
    watches: list[Watch]

    def close(self) -> None:
        super().close()
        for one in self.watches:
            one.close()


def _only(found: T | Exception) -> T:
    if isinstance(found, Exception):
        raise found
    return found
