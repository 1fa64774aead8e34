"""Running one of gpuctl/agent/*.py on a machine that has only python3."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

AGENTS = Path(__file__).parents[1] / "agent"

# The first line of stdin says how long the program is, then comes the program, then the job it reads. It finds its own
# text as __program__: stage.py sends itself on to the machine a model comes from.
_BOOTSTRAP = (
    "import sys;b=sys.stdin.buffer;n=int(b.readline());p=b.read(n);"
    "exec(compile(p,sys.argv[1],'exec'),{'__name__':'__main__','__program__':p})"
)


def agent(name: str, job: Mapping[str, Any], *, python: str = "python3") -> tuple[list[str], bytes]:
    """Command and stdin that run gpuctl/agent/<name>.py on a machine that has only python3.

    The program travels on stdin (an argument is capped at 128 KiB and shows in ps), the job follows it as JSON.
    """
    program = (AGENTS / f"{name}.py").read_bytes()
    stdin = f"{len(program)}\n".encode() + program + json.dumps(job).encode() + b"\n"
    return [python, "-c", _BOOTSTRAP, f"{name}.py"], stdin
