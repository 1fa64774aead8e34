"""One look at a machine, light enough to repeat beside a measurement: since when it is up, units, models, GPU memory.

Job (JSON on stdin): {"models": [path...]}
Answer (one JSON line):
  now, started        epoch seconds; `started` of PID 1, a container's too
  boot_id
  units               [{what systemctl show says, "since"}...] or {"error"}; without systemd, supervised processes
  failed              {unit: the note it left when it gave up}
  models              {path: {"bytes" (null: not there), "manifest"}}
  gpus                [{"index", "name", "memory_used_mib", "memory_total_mib"}...] or {"error"}
  nodes               {path: errno's name or "OK"}
No CUDA is started and nothing is changed. Standard library only, Python 3.9.
"""

import errno
import glob
import json
import os
import subprocess
import sys
import time

NOTES = "/var/lib/gpuctl/failed"
SHOWN = (
    "Id,LoadState,ActiveState,SubState,Result,UnitFileState,ActiveEnterTimestampMonotonic,StateChangeTimestampMonotonic"
)


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def command(argv, seconds):
    """(text, None) or (None, why not)."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds)
    except FileNotFoundError:
        return None, "there is no %s" % argv[0]
    except subprocess.TimeoutExpired:
        return None, "%s did not end within %d s" % (argv[0], seconds)
    except OSError as error:
        return None, "%s: %s" % (argv[0], error.strerror)
    if done.returncode:
        words = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
        return None, words[0] if words else "%s ended with %d" % (argv[0], done.returncode)
    return done.stdout.decode("utf-8", "replace"), None


def started():
    """When PID 1 started. Ticks since boot and the clock since boot are the kernel's own, in containers too."""
    stat = read("/proc/1/stat")
    try:
        ticks = int(stat.rpartition(")")[2].split()[19])
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (AttributeError, IndexError, ValueError, OSError):
        return None


def units():
    text, why = command(["systemctl", "show", "--all", "--property", SHOWN, "gpuctl-*.service", "gpuctl-*.mount"], 10)
    if why:
        return {"error": why}
    found = []
    for block in text.strip().split("\n\n"):
        unit = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if unit.get("Id") and unit.get("LoadState") not in ("not-found", "masked"):
            since = unit.pop("ActiveEnterTimestampMonotonic", "0"), unit.pop("StateChangeTimestampMonotonic", "0")
            at = since[0] if unit.get("ActiveState") == "active" else since[1]
            # systemd's monotonic clock stands still while the machine sleeps: near enough for "since"
            unit["since"] = time.time() - time.monotonic() + int(at) / 1e6 if at.isdigit() and at != "0" else None
            found.append(unit)
    return found


def processes():
    """Servers kept by supervise.py that run, in the words of systemctl."""
    boot = (read("/proc/sys/kernel/random/boot_id") or "").strip()
    found = []
    for path in sorted(glob.glob(os.path.expanduser("~/.local/state/gpuctl/servers/*/state.json"))):
        try:
            known = json.loads(read(path))
            ticks = (read("/proc/%d/stat" % known["pid"]) or "").rpartition(")")[2].split()
            if known["boot"] == boot and ticks and ticks[0] not in "ZX" and int(ticks[19]) == known["start"]:
                found.append({"Id": known["unit"], "ActiveState": "active", "since": known.get("time")})
        except (ValueError, KeyError, TypeError):
            continue
    return found


def notes():
    """What units that gave up at boot have left: one line each."""
    try:
        names = sorted(os.listdir(NOTES))
    except OSError:
        return {}
    return {name: " ".join((read(os.path.join(NOTES, name)) or "").split())[:200] for name in names}


def model(path):
    path = os.path.expanduser(path)
    if not os.path.isdir(path):
        try:
            return {"bytes": os.stat(path).st_size, "manifest": False}
        except OSError:
            return {"bytes": None, "manifest": False}
    total = 0
    for name in glob.glob(os.path.join(glob.escape(path), "*")):
        try:
            total += os.stat(name).st_size if os.path.isfile(name) else 0
        except OSError:
            pass
    return {"bytes": total, "manifest": os.path.isfile(os.path.join(path, "MANIFEST.json"))}


def gpus():
    """What nvidia-smi says; not asked without a driver and its node, which it would make."""
    if read("/proc/driver/nvidia/version") is None:
        return []
    if not os.path.exists("/dev/nvidiactl"):
        return {"error": "there is no /dev/nvidiactl"}
    asked = "index,name,memory.used,memory.total"
    text, why = command(["nvidia-smi", "--query-gpu=" + asked, "--format=csv,noheader,nounits"], 20)
    if why:
        return {"error": why}
    found = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == 4 and values[0].isdigit():
            used, total = (int(value) if value.isdigit() else None for value in values[2:])
            found.append(
                {"index": int(values[0]), "name": values[1], "memory_used_mib": used, "memory_total_mib": total}
            )
    return found


def nodes():
    """Whether the nodes that CUDA needs can be opened; those that are there. Opening them does nothing to a GPU."""
    found = {}
    if read("/proc/driver/nvidia/version") is None:
        return found
    for path in ("/dev/nvidiactl", "/dev/nvidia-uvm"):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
            found[path] = "OK"
        except OSError as error:
            found[path] = errno.errorcode.get(error.errno, str(error.errno))
    return found


def main():
    job = json.loads(sys.stdin.buffer.readline())
    answer = {
        "now": time.time(),
        "started": started(),
        "boot_id": (read("/proc/sys/kernel/random/boot_id") or "").strip(),
        "units": units() if os.path.isdir("/run/systemd/system") else processes(),
        "failed": notes(),
        "models": {path: model(path) for path in job.get("models", [])},
        "gpus": gpus(),
        "nodes": nodes(),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
