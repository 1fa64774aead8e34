"""A box back to serving: looked at, healed from the lowest layer up, looked at again.

The loop is the doctor's (doctor/healing.py); what a remedy does to a machine is here: playbooks, models brought to
their place, servers started and asked. `gpuctl restore` heals all layers, `gpuctl bench` all but the servers, which it
starts itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gpuctl import doctor, hosts
from gpuctl.asking import ask
from gpuctl.box import Box
from gpuctl.deploy import mend
from gpuctl.doctor import Healing, Played
from gpuctl.finding import Finding, Layer, Remedy, Severity
from gpuctl.playbook import Step
from gpuctl.transport import Unreachable

Tell = Callable[..., None]
# Asked before a change: the remedy, where it is made, and what it would change.
Allowed = Callable[[Remedy, str, str], bool]


class NotAllowed(Exception):
    """A change is needed that nobody is there to allow. One line that follows the name of the box."""

    def __init__(self, remedy: Remedy, where: str) -> None:
        restarts = f", and a restart of the {remedy.restarts}" if remedy.restarts else ""
        super().__init__(
            f"needs a change: {remedy.playbook}.yml on {where}{restarts}; nobody is there to allow it, --yes does"
        )


class Restorer:
    """Heals one box of an inventory.

    `allowed` is asked before each change, with what it would change; without it everything is allowed, and nothing is
    tried in check mode first. `tell(event, **facts)` hears: looking, found, would, playing, step, mended.
    """

    def __init__(
        self, machines: hosts.Inventory, name: str, *, tell: Tell, allowed: Allowed | None = None, check: bool = False
    ) -> None:
        self.machines, self.machine = machines, machines.machines[name]
        self.tell, self.allowed, self.check = tell, allowed, check
        self.looks = 0
        self.spent: dict[str, float] = {}  # seconds, by what they went to

    def look(self) -> Box:
        """The box as it is now: every machine of it probed once, side by side. Raises TransportError."""
        self.tell("looking", box=self.machine.name)
        with self._timed("looking"):
            (asked,) = ask(self.machines, [self.machine.name])
        self.looks += 1
        if asked.box is None:
            raise Unreachable("; ".join(asked.missing.values()))
        return asked.box

    def play(self, remedy: Remedy) -> Played:
        """Makes one change, with what has to restart for it."""
        where = (self.machine.node if remedy.on == "node" else None) or self.machine.name
        if self.check or self.allowed is not None:
            with self._timed("trying in check mode"):
                would = mend(remedy, self.machines, self.machine, check=True)
            shown = would.diff or ("" if would.well else would.why)
            self.tell("would", remedy=remedy, where=where, shown=shown)
            if self.check:
                return Played(False, False, "only shown, as --check wants")
            if self.allowed is not None and not self.allowed(remedy, where, shown):
                return Played(False, False, "not wanted")
        self.tell("playing", remedy=remedy, where=where)
        with self._timed(remedy.playbook):
            done = mend(remedy, self.machines, self.machine, on_step=self._step)
        return Played(done.well, any(done.changed.values()), done.why)

    def heal(self) -> Healing:
        """Mends what keeps the box from serving, and what would keep it from coming back at the next boot where
        something had to be mended. Raises TransportError, and what `allowed` raises."""
        healing = doctor.heal(self.look(), self.look, self.play, wanted=needed, on_step=self._told)
        if healing.state == "mended":
            assert healing.box is not None
            more = doctor.heal(healing.box, self.look, self.play, on_step=self._told)
            healing = doctor.together(healing, more)
        return healing

    def _told(self, finding: Finding, step: doctor.Step | None) -> None:
        if step is None:
            self.tell("found", box=self.machine.name, finding=finding)
        else:
            self.tell("mended", finding=finding, gone=step.gone, text=step.played.text)

    def _step(self, step: Step) -> None:
        self.tell("step", step=step)

    def _timed(self, what: str) -> _Timed:
        return _Timed(self.spent, what)


def needed(finding: Finding) -> bool:
    """What has to go before the box is as it should be: what stops serving, and settings that a reboot took."""
    return finding.severity is Severity.CRITICAL or (finding.layer is Layer.TUNING and finding.remedy is not None)


class _Timed:
    def __init__(self, spent: dict[str, float], what: str) -> None:
        self.spent, self.what = spent, what

    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.spent[self.what] = self.spent.get(self.what, 0.0) + time.monotonic() - self.began
