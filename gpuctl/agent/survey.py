"""What a result depends on and a server cannot tell: which model files lie there, which packages are installed.

Job (JSON on stdin): {"models": [path...], "programs": [{"words": [word...], "path": its PATH, "packages": [name...]}]}
Answer (one JSON line): {"models": {path: {...}}, "programs": [{package: version, ...}...], "machine": {...}}

A program is the words that start an engine, wrappers like numactl included. One of Python is named by the versions of
its packages: of the Python among the words, or of the one that a script's first line names. Another one is named by the
digest of its file and of the libraries that came with it.

A model is named by its files: size, and for each a digest, from the best source that is cheap: the name of the blob a
Hugging Face cache links to (it is the SHA-256 of a weight file), the MANIFEST.json of a staged copy, the SHA-256 of a
file up to 256 MiB, else the SHA-256 of a mebibyte at its start, middle and end with its size ("sampled").
Standard library only, Python 3.9. Changes nothing.
"""

import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

WHOLE = 256 << 20
PIECE = 1 << 20
WEIGHTS = re.compile(r"\.(safetensors|gguf|bin|pt|json|model|txt|jinja|tiktoken|py)$")


def digest(path, size):
    blob = os.path.basename(os.path.realpath(path))
    if os.path.islink(path) and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", blob):
        return "blob:" + blob[:32]
    summary = hashlib.sha256()
    with open(path, "rb") as file:
        if size <= WHOLE:
            for piece in iter(lambda: file.read(PIECE), b""):
                summary.update(piece)
            return "sha256:" + summary.hexdigest()[:32]
        for offset in (0, size // 2, size - PIECE):
            file.seek(offset)
            summary.update(file.read(PIECE))
    return "sampled:" + summary.hexdigest()[:32]


def parts(path):
    """The files that are loaded with this one: all parts of a model that llama.cpp has split; [""]: it alone."""
    split = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", os.path.basename(path))
    if not split:
        return [""]
    return ["%s-%05d-of-%s.gguf" % (split[1], n, split[2]) for n in range(1, int(split[2]) + 1)]


def model(path):
    path = os.path.expanduser(path)
    try:
        if os.path.isdir(path):
            try:
                with open(os.path.join(path, "MANIFEST.json")) as file:
                    known = {entry["path"]: entry["sha256"] for entry in json.load(file)["files"]}
            except (OSError, ValueError, KeyError, TypeError):
                known = {}
            names = sorted(n for n in os.listdir(path) if WEIGHTS.search(n) and n != "MANIFEST.json")
        else:
            known, names = {}, parts(path)
            path = os.path.dirname(path) if len(names) > 1 else path
        files, total = [], 0
        for name in names:
            full = os.path.join(path, name) if name else path
            size = os.stat(full).st_size
            total += size
            source = "manifest:" + known[name][:32] if known.get(name) else digest(full, size)
            files.append([name or os.path.basename(path), size, source])
    except OSError as error:
        return {"error": "%s: %s" % (error.filename or path, error.strerror)}
    id = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]
    return {"id": id, "files": len(files), "bytes": total, "sources": sorted({f[2].split(":")[0] for f in files})}


_ASK = """
import importlib.metadata as m, json, sys
found = {"python": sys.version.split()[0]}
for name in sys.argv[1:]:
    try:
        d = m.distribution(name)
        found[name] = d.version
        origin = json.loads(d.read_text("direct_url.json") or "{}")
        commit = (origin.get("vcs_info") or {}).get("commit_id")
        if commit:
            found[name] += " @ " + commit[:12]
    except Exception:
        pass
print(json.dumps(found))
"""


WRAPPERS = {"numactl", "taskset", "nice", "ionice", "chrt", "env", "stdbuf", "setsid", "nohup", "time", "timeout"}


def program(words, path, packages):
    """What that program is: versions of packages, or {"binary": digest}; {"error"} where it cannot be found."""
    try:
        for word in words:
            name = os.path.basename(word)
            found = (
                None if word.startswith("-") or name in WRAPPERS else shutil.which(os.path.expanduser(word), path=path)
            )
            if not found:
                continue
            python = found if name.startswith("python") else interpreter(found)
            if python:
                return versions(shutil.which(python, path=path) or python, packages)
            return {"binary": binary(found)}
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"error": "%s: %s" % (words[0], error)}
    # behind numactl and its options, which word is the program is not known
    return {"error": "%s: not found" % (" ".join(words) if os.path.basename(words[0]) in WRAPPERS else words[0])}


def interpreter(path):
    """The Python that a script names in its first line, or, where that would be too long a line, in its second."""
    with open(path, "rb") as file:
        if file.read(2) != b"#!":
            return None
        head = b"".join(file.readline(4096) for _ in range(2)).decode("utf-8", "replace")
    found = re.search(r"(/[^\s\"']*/python[\d.]*)(?=[\s\"'])|\benv (?:-S )?(python[\d.]*)", head)
    return found and (found[1] or found[2])


def binary(path):
    """Digest of a program's file and of the libraries beside it, or beside it in ../lib where they are the engine's."""
    real = os.path.realpath(path)
    here = os.path.dirname(real)
    libraries = glob.glob(os.path.join(here, "lib*.so*"))
    libraries += [path for kind in ("llama", "ggml", "mtmd") for path in glob.glob(here + "/../lib/lib%s*.so*" % kind)]
    files = [real, *sorted({os.path.realpath(library) for library in libraries})]
    told = [[os.path.basename(file), digest(file, os.stat(file).st_size)] for file in files]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def versions(python, names):
    done = subprocess.run([python, "-c", _ASK, *names], stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    return json.loads(done.stdout)


def read(path):
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return None


def gpus():
    """Model and UUID as the driver tells them in /proc, and what nvidia-smi says of power and clocks. Opens no device
    node that is not there: without the driver in the kernel nvidia-smi, which mends nodes, is not asked."""
    found = []
    for path in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information")):
        told = dict(re.findall(r"^(Model|GPU UUID|Video BIOS):\s*(.*)$", read(path) or "", re.M))
        found.append({"pci": path.split("/")[-2], "model": told.get("Model"), "uuid": told.get("GPU UUID")})
    if found and os.path.exists("/dev/nvidiactl"):
        asked = "pci.bus_id,power.limit,clocks.max.sm,clocks.max.mem,ecc.mode.current,compute_mode,mig.mode.current"
        command = ["nvidia-smi", "--query-gpu=" + asked, "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
            for line in done.stdout.decode("utf-8", "replace").splitlines():
                values = [value.strip() for value in line.split(",")]
                for gpu in found:
                    if values[0].lower()[-12:] == gpu["pci"].lower()[-12:]:
                        gpu.update(zip(asked.split(",")[1:], values[1:]))
        except (OSError, subprocess.SubprocessError):
            pass
    return found


def chosen(text):
    """The word in brackets: `always [madvise] never` is madvise."""
    found = re.search(r"\[(\w+)\]", text or "")
    return found[1] if found else None


def tuning():
    """Settings of the kernel that change a number, as they are now. What cannot be read is None."""
    cpus = sorted(glob.glob("/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"))
    return {
        "numa_balancing": read("/proc/sys/kernel/numa_balancing"),
        "governor": sorted({str(read(path)) for path in cpus}) or None,
        "transparent_hugepage": chosen(read("/sys/kernel/mm/transparent_hugepage/enabled")),
        "swappiness": read("/proc/sys/vm/swappiness"),
    }


def machine():
    cpu = re.search(r"^(?:model name|Model)\s*:\s*(.*)$", read("/proc/cpuinfo") or "", re.M)
    return {
        "kernel": os.uname().release,
        "processor": cpu[1] if cpu else os.uname().machine,
        "cores": len(os.sched_getaffinity(0)),
        "boot_id": read("/proc/sys/kernel/random/boot_id"),
        "pid1_start": ((read("/proc/1/stat") or "").rpartition(")")[2].split() + [None] * 20)[19],
        "driver": read("/sys/module/nvidia/version"),
        "gpus": gpus(),
        "tuning": tuning(),
        "systemd": os.path.isdir("/run/systemd/system") and os.geteuid() == 0,
    }


def main():
    job = json.loads(sys.stdin.buffer.readline())
    answer = {
        "models": {path: model(path) for path in job.get("models", [])},
        "programs": [program(one["words"], one["path"], one["packages"]) for one in job.get("programs", [])],
        "machine": machine(),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
