"""pvesh: the few calls that a node's own units, and tools that want JSON, make."""

from __future__ import annotations

import json
import sys

from . import guests


def main() -> int:
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    match words[:2]:
        case ["create", "/nodes/localhost/startall"]:
            return guests.start_all()
        case ["create", "/nodes/localhost/stopall"]:
            return guests.stop_all()
        case ["get", "/nodes/localhost/lxc"]:
            rows = []
            for vmid in guests.vmids():
                keys = guests.load(vmid).main.keys
                state = "running" if guests.running(vmid) else "stopped"
                name = keys.get("hostname", f"CT{vmid}")
                rows.append({"vmid": str(vmid), "name": name, "status": state, "type": "lxc"})
            print(json.dumps(rows))
            return 0
    print(f"No '{words[0] if words else ''}' handler defined for '{' '.join(words[1:2])}'", file=sys.stderr)
    return 255
