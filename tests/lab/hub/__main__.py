"""`python -m tests.lab.hub FOLDER`: serves FOLDER/<owner>/<name> as repositories until it is stopped."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

from tests.lab.hub import Hub
from tests.lab.hub.faults import KINDS


def main() -> int:
    kinds = "\n".join(f"  {kind:<10} {what}" for kind, what in KINDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.hub",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f'faults, with --url: \'[{{"kind": "stall", "match": "*.safetensors", "after": 1048576, "times": 1}}]\', [] heals\n{kinds}',
    )
    parser.add_argument("folder", type=Path, nargs="?", help="holds <owner>/<name>/ for each repository")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="default: any free one")
    parser.add_argument("--url", help="of a hub that runs: set its faults and end")
    parser.add_argument("--faults", metavar="JSON", help="a list of faults")
    arguments = parser.parse_args()
    if arguments.url:
        return _set(arguments.url, arguments.faults or "[]")
    if arguments.folder is None or not arguments.folder.is_dir():
        print(f"no folder {arguments.folder}: give one that holds <owner>/<name>/", file=sys.stderr)
        return 2
    with Hub(arguments.host, arguments.port) as hub:
        for folder in sorted(arguments.folder.glob("*/*")):
            if folder.is_dir():
                name = f"{folder.parent.name}/{folder.name}"
                print(f"{name}  {hub.commit(name, folder)}")
        if arguments.faults:
            hub.faults.replace(json.loads(arguments.faults))
        print(f"HF_ENDPOINT={hub.url} HF_HUB_DISABLE_XET=1", flush=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: hub.ending.set())
        hub.ending.wait()
    return 0


def _set(url: str, faults: str) -> int:
    request = urllib.request.Request(url.rstrip("/") + "/-/faults", faults.encode(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            print(answer.read().decode())
    except urllib.error.HTTPError as error:
        print(json.loads(error.read())["error"], file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
