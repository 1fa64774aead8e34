"""A model's files: lost, cut short, changed, or only half there. PATH is a folder on the machine."""

from __future__ import annotations

from tests.lab.lab import Lab

# Weights are what a loader reads; everything else counts as metadata. Links lead into the cache of a hub.
_WEIGHTS = """
import os, sys
path, found = sys.argv[1], []
for folder, _, files in os.walk(path, followlinks=True):
    found += [os.path.join(folder, f) for f in files if f.endswith((".safetensors", ".gguf", ".bin", ".pt"))]
found = [f for f in found if os.path.exists(f) and f != "training_args.bin"]
if not found:
    sys.exit(f"no weights under {path}")
largest = max(found, key=os.path.getsize)
"""


def wipe_tmpfs(lab: Lab, machine_: str, path: str = "/run/gpuctl/models") -> None:
    """Empty a folder in memory, as a restart does."""
    lab.check(machine_, ["find", path, "-mindepth", "1", "-delete"])


def fill_tmpfs(lab: Lab, machine_: str, path: str = "/run/gpuctl/models", *, undo: bool = False) -> None:
    """Make a mounted tmpfs full: not a page is left."""
    if undo:
        size = "50%"
    else:
        blocks, free, unit = lab.check(machine_, ["stat", "-f", "-c", "%b %f %S", path]).split()
        size = str(max((int(blocks) - int(free)) * int(unit), int(unit)))  # size=0 would mean: no limit
    lab.check(machine_, ["mount", "-n", "-o", f"remount,size={size}", path])
    if not undo:  # the one page that size=0 cannot take away
        lab.run(
            machine_, ["sh", "-c", 'head -c 4096 /dev/zero > "$1/.full" 2>/dev/null || rm -f "$1/.full"', "sh", path]
        )


def truncate_model(lab: Lab, machine_: str, path: str, *, bytes_: int = 1) -> str:
    """Cut bytes off the end of the largest weight file. Returns its path."""
    script = _WEIGHTS + f"os.truncate(largest, max(0, os.path.getsize(largest) - {bytes_}))\nprint(largest)"
    return lab.check(machine_, ["python3", "-c", script, path]).strip()


def flip_bit(lab: Lab, machine_: str, path: str) -> str:
    """Flip one bit in the middle of the largest weight file; size and names stay. Returns its path."""
    script = _WEIGHTS + (
        "with open(largest, 'r+b') as f:\n"
        "    f.seek(os.path.getsize(largest) * 3 // 4)\n"
        "    byte = f.read(1)[0]\n"
        "    f.seek(-1, 1)\n"
        "    f.write(bytes([byte ^ 1]))\n"
        "print(largest)"
    )
    return lab.check(machine_, ["python3", "-c", script, path]).strip()


def remove_weights(lab: Lab, machine_: str, path: str) -> str:
    """Delete the weights and what they link to, and leave the metadata. Returns the paths, one a line."""
    script = _WEIGHTS + "for f in found:\n    os.unlink(os.path.realpath(f))\n    print(f)"
    return lab.check(machine_, ["python3", "-c", script, path]).strip()
