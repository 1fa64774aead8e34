"""Keeps a campaign going over what happens to its box: waits for it, says what happened, has it healed.

Whoever measures asks `away` after every failure, and `recover` when the failure has to do with the machine and not with
what was measured. Wrong verdicts are worse than slow ones: a machine on its way down or up is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuctl.facts import boot
from gpuctl.facts.boot import IN_WORDS, RESTARTS, BoxBoot, Happened, happened, parse_identity, whole
from gpuctl.store import Run
from gpuctl.transport import Guest, Refused, Transport, TransportError, Unreachable, each
from gpuctl.waiting import reached

Tell = Callable[..., None]  # tell(event, **facts), as in serving

WITHIN_S = 1800.0  # a server with a terabyte of memory takes many minutes to its login
ASK_S = 15.0
STARTING_S = 180.0  # a unit that hangs while booting holds up no longer than this
NODE_S = 90.0  # the guest answers and its node does not: so long is the node waited for
OFF_S = 10.0  # the node says that the guest does not run, and says so again after this
ROUNDS = 3


class Stopped(Exception):
    """The campaign cannot go on now; the same command goes on later. One line. `stuck`: something has to be mended."""

    def __init__(self, message: str, *, stuck: bool = False) -> None:
        super().__init__(message)
        self.stuck = stuck


@dataclass(frozen=True)
class Ways:
    """How a box is reached: its guest (or itself), and its node where it has one."""

    name: str
    guest: Transport
    node: Transport | None = None
    vmid: int | None = None


@dataclass(frozen=True)
class Seen:
    """One look: the boot as far as it was read, and why it is not to be relied on yet (empty: it is)."""

    boot: BoxBoot
    why: str = ""
    starting: bool = False  # that is why: its systemd has not finished starting
    no_node: str = ""  # why the node did not answer


def look(ways: Ways) -> Seen:
    """Asks guest and node side by side who they are. Raises Refused; a machine that does not answer is a `why`."""

    def ask(way: Transport) -> tuple[boot.Boot, bool, str]:
        done = way.run(["sh", "-c", boot.IDENTITY], timeout=ASK_S)
        try:
            return parse_identity(done.text)
        except ValueError as error:
            raise Unreachable(f"{way.name}: {error}") from None

    asked = [ways.guest, *([ways.node] if ways.node is not None else [])]
    answers = each(asked, ask, timeout=4 * ASK_S)
    guest = answers[ways.guest.name]
    node = answers[ways.node.name] if ways.node is not None else None
    # While a node boots, its `pct` does not know its guests yet.
    booting = isinstance(ways.guest, Guest) and not (isinstance(node, tuple) and node[2] in ("running", "degraded"))
    if isinstance(guest, Refused) and not (booting and not isinstance(node, Refused)):
        raise guest
    if isinstance(node, Refused):
        raise node
    on_node = node[0] if isinstance(node, tuple) else None
    no_node = str(node) if isinstance(node, TransportError) else ""
    if isinstance(guest, TransportError):
        return Seen(BoxBoot(None, on_node), str(guest), no_node=no_node)
    identity, container, state = guest
    found = BoxBoot(identity, on_node, container)
    if state == "stopping" or (isinstance(node, tuple) and node[2] == "stopping"):
        return Seen(found, f"{ways.name if state == 'stopping' else f'the node of {ways.name}'} is going down")
    starting = state in ("starting", "initializing")
    return Seen(found, f"{ways.name} is still starting" if starting else "", starting, no_node)


class Guard:
    """Watches over one box for one campaign. `heal(happened)` mends the box; it returns what it did, a line each, and
    raises Stopped where that does not help."""

    def __init__(
        self,
        ways: Ways,
        run: Run,
        tell: Tell,
        heal: Callable[[Happened | None], list[Mapping[str, Any]]],
        *,
        within_s: float = WITHIN_S,
        first: bool = True,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`first`: the box that is measured on, and not a further one of a server over several machines."""
        self.ways, self.run, self.tell, self.heal, self._first = ways, run, tell, heal, first
        self.within_s, self._sleep, self._clock = within_s, sleep, clock
        self.known: BoxBoot | None = None

    def begin(self, *, check: bool = False, started: Callable[[], None] = lambda: None) -> Happened | None:
        """Knows the box from now on. One that was not healed to the end in this boot (it started anew since, gpuctl was
        killed in the middle of it, or it was not seen yet) is healed first (not with `check`). One that this campaign
        knows is waited for (not with `check`). `started` is called when the box is known, and before anything is said
        of it. Raises TransportError when it cannot be reached."""
        seen, before = look(self.ways), self._last()
        if seen.boot.guest is None:
            if check or before is None:
                raise Unreachable(seen.why)
            self._know(before)
            started()
            return self.recover(seen.why, lambda: None)
        self._know(seen.boot)
        started()
        if check:
            return None
        what = happened(before, seen.boot) if before is not None else None
        if what in RESTARTS:
            self.run.event("started_anew", box=self.ways.name, happened=str(what))
            self.tell("started_anew", box=self.ways.name, happened=what)
        tended = self._last("tended")
        if tended is None or happened(tended, seen.boot) in RESTARTS:
            try:
                self.tend(what)
            except Refused:
                raise
            except TransportError as error:
                return self.recover(str(error), lambda: None)
        return what

    def _last(self, name: str = "") -> BoxBoot | None:
        """The boot of this box at the campaign's last event; at the last one of that name which is of this box."""
        for event in reversed(self.run.events()):
            known = event.get("boot")
            other = name and (event.get("event"), event.get("box")) != (name, self.ways.name)
            if other or not isinstance(known, Mapping):
                continue
            for stored in (known, *(known.get("others") or ())):
                if stored.get("box") == self.ways.name:
                    return boot.from_json(stored)
        return None

    def _know(self, now: BoxBoot) -> None:
        self.known = whole(now, self.known)
        assert self.known is not None
        mine = {"box": self.ways.name, **self.known.as_json()}
        before = self.run.boot or {}
        others = [one for one in before.get("others", ()) if one["box"] != self.ways.name]
        if self._first:
            self.run.boot = {**mine, **({"others": others} if others else {})}
        else:
            self.run.boot = {**before, "others": [*others, mine]}

    def away(self) -> str:
        """Why the box is not there as it was: it does not answer, started anew, or is going down. Empty: it is.

        Asked after every cell, so of the guest alone; `recover` asks its node as well.
        """
        try:
            seen = look(replace(self.ways, node=None))
        except Refused as error:
            return str(error)
        if seen.why and not seen.starting:
            return seen.why
        what = happened(self.known, seen.boot) if self.known else Happened.UNKNOWN
        return f"{self.ways.name}: {IN_WORDS[what]}" if what in RESTARTS else ""

    def recover(self, why: str, serves: Callable[[], bool | None]) -> Happened:
        """Waits until the box is back, says what happened, and has it healed. `why`: what `away` said, or what broke.

        `serves`: asks whether the server's process is still the same. Raises Stopped and Refused.
        """
        name, began = self.ways.name, self._clock()
        self.run.event("machine_away", box=name, why=why)
        self.tell("away", box=name, why=why, waited_s=0.0, within_s=self.within_s)
        known = self.known  # also in the second round: what the first did not finish is still to be healed
        for _ in range(ROUNDS):
            seen = self._wait(began)
            before = known or seen.boot
            what = happened(before, seen.boot)
            if what is Happened.UNKNOWN and seen.boot.guest is not None:
                try:
                    what = happened(before, seen.boot, serves=serves())
                except TransportError:
                    continue
            self._know(seen.boot)
            away_s = round(self._clock() - began, 1)
            self.run.event("machine_back", box=name, happened=str(what), away_s=away_s)
            self.tell("back", box=name, happened=what, away_s=away_s)
            try:
                if what is not Happened.NETWORK:
                    self.tend(what)  # which may restart the guest: it is known anew then
            except Refused:
                raise
            except TransportError as error:
                self.tell("away", box=name, why=str(error), waited_s=self._clock() - began, within_s=self.within_s)
                continue
            return what
        raise Stopped(
            f"{name} went away {ROUNDS} times while it was healed; look what ails it: gpuctl doctor -t {name}"
        )

    def tend(self, what: Happened | None, *, same: bool = False) -> list[Mapping[str, Any]]:
        """Has a box healed that is there; what was done. Raises TransportError, also where it went away meanwhile, and
        Stopped. `same`: also where it started anew meanwhile, by whomever; `recover` then says so."""
        done = self.heal(what)
        for step in done:
            self.run.event("healed", box=self.ways.name, **step)
        seen = look(self.ways)
        if seen.boot.guest is None or (seen.why and not seen.starting):
            raise Unreachable(seen.why)
        if same and self.known is not None and (now := happened(self.known, seen.boot)) in RESTARTS:
            raise Unreachable(f"{self.ways.name}: {IN_WORDS[now]}")
        self._know(seen.boot)
        self.run.event("tended", box=self.ways.name)
        return done

    def _wait(self, began: float) -> Seen:
        """Until the box is there and settled; with a guest that its node says is off, without the guest."""
        state = {"back": 0.0, "off": 0.0}

        def work() -> Seen:
            seen, now = look(self.ways), self._clock()
            if seen.boot.guest is None:
                state["back"] = 0.0
                if seen.boot.node is not None and self._is_off():
                    state["off"] = state["off"] or now
                    if now - state["off"] >= OFF_S:
                        return replace(seen, why="")
                else:
                    state["off"] = 0.0
                raise Unreachable(seen.why)
            state["back"] = state["back"] or now
            since = now - state["back"]
            if seen.why and not (seen.starting and since >= STARTING_S):
                raise Unreachable(seen.why)
            if seen.no_node and self.known is not None and self.known.node is not None and since < NODE_S:
                raise Unreachable(seen.no_node)
            return seen

        def told(error: Unreachable) -> None:
            waited = self._clock() - began
            self.tell("away", box=self.ways.name, why=str(error), waited_s=waited, within_s=self.within_s)

        try:
            return reached(work, within=self.within_s, on_wait=told, at_most=2.0, sleep=self._sleep)
        except Unreachable as error:
            raise Stopped(
                f"{self.ways.name} did not come back within {self.within_s / 60:g} minutes: {error}"
            ) from None

    def _is_off(self) -> bool:
        """Whether the node, when it is up, says that the guest does not run."""
        if self.ways.node is None or self.ways.vmid is None:
            return False
        script = 'systemctl is-system-running 2>/dev/null | grep -q -e starting -e stopping || pct status "$1"'
        try:
            done = self.ways.node.run(["sh", "-c", script, "sh", str(self.ways.vmid)], timeout=ASK_S)
        except TransportError:
            return False
        return "stopped" in done.text


class Guards:
    """The guards of a phase's boxes: of the one it is measured on, and of those that servers run on beside it."""

    def __init__(self, guards: Sequence[Guard]) -> None:
        self._guards = {guard.ways.name: guard for guard in guards}

    def _of(self, names: Sequence[str]) -> list[Guard]:
        return [self._guards[name] for name in names] if names else list(self._guards.values())

    def begin(self, *, check: bool = False, started: Callable[[], None] = lambda: None) -> None:
        """As `Guard.begin`, of all; each calls `started`."""
        for guard in self._guards.values():
            guard.begin(check=check, started=started)

    def away(self, names: Sequence[str]) -> str:
        """Why the first of these boxes that is not there as it was is not. Empty: all are. No names: all boxes."""
        return next((why for guard in self._of(names) if (why := guard.away())), "")

    def recover(self, why: str, serves: Callable[[], bool | None], names: Sequence[str]) -> Happened:
        """Has each of these boxes that is away waited for and healed; where none says that it is, the first.

        What happened: that a box started anew counts before all else. `serves` is of the first box's server.
        """
        guards = self._of(names)
        away = [(guard, said) for guard in guards if (said := guard.away())] or [(guards[0], why)]
        found = [guard.recover(said, serves if guard is guards[0] else lambda: None) for guard, said in away]
        return next((what for what in found if what in RESTARTS), found[0])

    def tend(self, what: Happened | None, names: Sequence[str], *, same: bool = False) -> list[Mapping[str, Any]]:
        """As `Guard.tend`, of each of these."""
        return [step for guard in self._of(names) for step in guard.tend(what, same=same)]
