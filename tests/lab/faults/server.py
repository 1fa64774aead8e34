"""An inference server, or any other unit: dead, or alive and silent."""

from __future__ import annotations

from tests.lab.lab import Lab


def kill_server(lab: Lab, machine_: str, unit: str) -> None:
    """Kill a unit's processes with SIGKILL, as the kernel does when memory runs out."""
    lab.check(machine_, ["systemctl", "kill", "--signal=SIGKILL", unit])


def hang_server(lab: Lab, machine_: str, unit: str, *, undo: bool = False) -> None:
    """Stop a unit's processes from running: they stay, and answer nobody."""
    lab.check(machine_, ["systemctl", "kill", f"--signal={'SIGCONT' if undo else 'SIGSTOP'}", unit])
