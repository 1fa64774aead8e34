"""python -m tests.lab.nvidia ROOT -- COMMAND...: runs COMMAND as a machine that has the driver of the double."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.lab.nvidia.kernel import run


def main(arguments: list[str]) -> int:
    if len(arguments) < 3 or arguments[1] != "--":
        print(__doc__, file=sys.stderr)
        return 2
    try:
        return run(Path(arguments[0]), arguments[2:])
    except (RuntimeError, ValueError, OSError) as error:
        print(f"nvidia double: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
