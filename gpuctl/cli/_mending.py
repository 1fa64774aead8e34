"""Healing as it goes, in lines: what was seen, what is done about it, and what another look says."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from gpuctl.finding import Finding, Remedy
    from gpuctl.playbook import Step

STILL_S = 20.0  # without a terminal, a line of progress no more often than this


def allow(remedy: Remedy, where: str, shown: str) -> bool:
    """Asks whoever sits at the terminal. Raises NotAllowed where nobody does, and when the answer is no."""
    from gpuctl.restore import NotAllowed

    if not sys.stdin.isatty():
        raise NotAllowed(remedy, where)
    if not click.confirm("make this change, and go on?", err=True):
        raise NotAllowed(remedy, where, "it was not allowed")
    return True


class Mending:
    """Prints the events of a Restorer. `live`: what goes by may be shown on one line of the terminal."""

    def __init__(self, line: Callable[[str], Any], *, live: bool) -> None:
        self.print, self.live = line, live
        self._said = 0.0

    def tell(self, event: str, **facts: Any) -> None:
        handler = getattr(self, f"on_{event}", None)
        if handler is not None:
            handler(**facts)

    def passing(self, text: str) -> None:
        """What goes by: one line that is written over, or none."""
        if self.live:
            click.echo(f"\r\033[K  {text}"[:200], err=True, nl=False)

    def _clear(self) -> None:
        if self.live:
            click.echo("\r\033[K", err=True, nl=False)

    def on_looking(self, box: str) -> None:
        self.passing(f"looking at {box} ...")

    def on_found(self, box: str, finding: Finding) -> None:
        self._clear()
        self.print(f"  SAW  {finding.layer.name}: {finding.summary}")

    def on_would(self, remedy: Remedy, where: str, shown: str) -> None:
        self._clear()
        self.print(f"  {does(remedy, where)} would change:")
        for line in shown.splitlines() or ["nothing"]:
            self.print(f"    {line}")

    def on_playing(self, remedy: Remedy, where: str) -> None:
        self.print(f"  DOES {does(remedy, where)}")

    def on_step(self, step: Step) -> None:
        self.passing(f"{step.task} ...")

    def on_stage(self, server: str, stage: str) -> None:
        self.passing(f"{stage} ...")

    def on_dying(self, server: str, why: str) -> None:
        self._clear()
        self.print(f"  {server} is going down{f': {why}' if why else ''}")

    def on_progress(self, row: Mapping[str, Any]) -> None:
        """Of staging: bytes, rate and time left."""
        from gpuctl.agent.stage import size_of

        if row.get("type") != "progress":
            return
        text = f"{row.get('what', 'staging')}: {size_of(row.get('bytes') or 0)} of {size_of(row.get('of') or 0)}"
        text += f", {size_of(row['rate'])}/s" if row.get("rate") else ""
        text += f", {row['eta_s']:.0f} s left" if row.get("eta_s") is not None else ""
        self.passing(text)
        if not self.live and time.monotonic() - self._said >= STILL_S:
            self._said = time.monotonic()
            self.print(f"  {text}")

    def on_mended(self, finding: Finding, gone: bool, text: str) -> None:
        self._clear()
        self.print("  GONE, as another look shows" if gone else f"  STILL THERE{f': {text}' if text else ''}")


def does(remedy: Remedy, where: str) -> str:
    """A remedy as a person would call it."""
    values = remedy.vars
    if remedy.playbook == "stage":
        return f"model {values['model']} into memory on {where}"
    if remedy.playbook == "server":
        how = "waits for" if values.get("wait") else "starts anew" if values.get("anew") else "starts"
        return f"{how} {values['unit']} on {where}"
    if remedy.playbook == "tmpfs":
        return f"tmpfs.yml and stage.yml on {where}"
    restarts = f", and the {remedy.restarts} restarts" if remedy.restarts else ""
    return f"{remedy.playbook}.yml on {where}{restarts}"


_PARTS = {"download": "downloading", "moving": "staging", "engine start": "starting the engine"}


def seconds(spent: Mapping[str, float], took: float, looks: int) -> str:
    """How long it took, and what of that was beyond moving the model and starting the engine."""
    from gpuctl.restore import overhead

    said = "one look" if looks == 1 else f"{looks} looks"
    parts = [f"{spent[key]:.1f} s {word}" for key, word in _PARTS.items() if key in spent]
    if not parts:
        return f"{said}, {took:.1f} s"
    return f"{said}, {took:.1f} s: {', '.join(parts)}, {overhead(spent, took):.1f} s beyond that"
