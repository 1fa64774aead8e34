"""Reaching a machine: one method, `run`, whichever the way.

`Local` is this machine, `Ssh` a machine over SSH, `Guest` an LXC guest through its node, `Replay` saved answers.
`each` asks many side by side; `Tunnel` brings a port of a machine here. Commands are argument vectors; whoever needs a
shell says `["sh", "-c", ...]` and quotes with `shlex`.
"""

from gpuctl.transport.agents import AGENTS, agent
from gpuctl.transport.contract import (
    Completed,
    Refused,
    TimedOut,
    Transport,
    TransportError,
    Unreachable,
)
from gpuctl.transport.guest import Guest
from gpuctl.transport.local import Local
from gpuctl.transport.replay import Replay
from gpuctl.transport.sidebyside import each
from gpuctl.transport.ssh import Ssh
from gpuctl.transport.tunnel import Tunnel

__all__ = [
    "AGENTS",
    "Completed",
    "Guest",
    "Local",
    "Refused",
    "Replay",
    "Ssh",
    "TimedOut",
    "Transport",
    "TransportError",
    "Tunnel",
    "Unreachable",
    "agent",
    "each",
]
