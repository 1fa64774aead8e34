"""Starts, watches, asks and stops one server: a unit of systemd, or a process where there is none (or none we may use).

A job is one JSON object on stdin, answers are JSON lines on stdout. Operations:
  start   {dir, unit, argv, env, cwd, secrets, owner}   -> {"started": state} | {"error": ...}
  status  {dir, unit?, ports?}                          -> {"units": [state...], "listeners": {port: process}}
  watch   {dir, unit, health: [url...], every_s}       -> {"log"}*, {"beat", "health"}*, {"exit"}   until it ends
  ask     {requests: [{method, url, body, headers, timeout_s}]} -> {"answers": [...]}
  stop    {dir, unit, grace_s, killed_s}                -> {"stopped": state, "left": [process...]}
With "systemd": true the unit file is there already, and `dir` is not used: start and stop are systemctl's, the log is
the journal of this start (by its invocation id), the state is what `systemctl show` says.

A keeper process stays as the server's parent: it outlives whoever asked, writes the exit status by rename, and
leaves nothing of the server behind. Every process of a server carries GPUCTL_UNIT=<dir>/<unit> in its environment,
so that it is found again after everything else is forgotten. Standard library only, Python 3.9.
"""

import codecs
import ctypes
import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from urllib.parse import urlsplit

MARK = "GPUCTL_UNIT"


def say(**answer):
    try:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        os._exit(0)  # whoever asked is gone


def read(path, binary=False):
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return None
    return data if binary else data.decode("utf-8", "replace")


def write(path, text):
    """By rename, so that a reader sees the old text or the new one."""
    draft = "%s.%d" % (path, os.getpid())
    with open(draft, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def boot_id():
    return (read("/proc/sys/kernel/random/boot_id") or "").strip()


def start_time(pid):
    """Ticks since boot at which the process started (field 22 of stat); None when it is gone or a zombie."""
    stat = read("/proc/%d/stat" % pid)
    if stat is None:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def folder(job):
    return os.path.join(os.path.expanduser(job["dir"]), job["unit"])


def state(path):
    """What is known of a unit: `running` is whether that very process is alive, not one that took its number."""
    try:
        known = json.loads(read(os.path.join(path, "state.json")) or "")
    except ValueError:
        return None
    ended = read(os.path.join(path, "exit.json"))
    alive = known.get("boot") == boot_id() and start_time(known["pid"]) == known["start"]
    known["running"] = alive
    known["exit"] = None
    if not alive:
        try:
            known["exit"] = json.loads(ended or "")
        except ValueError:
            known["exit"] = {"status": None, "signal": None, "why": "the machine or the keeper went away"}
    return known


def members(path):
    """Every process of the unit: those with the mark in their environment, and what descends from them.

    A program that gives itself a title (SGLang's schedulers, by setproctitle) writes it over its environment.
    """
    mark = ("%s=%s" % (MARK, path)).encode()
    found, parents = set(), {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and start_time(int(name)) is not None:
            pid = int(name)
            environment = read("/proc/%d/environ" % pid, binary=True)
            if environment and mark in environment.split(b"\0"):
                found.add(pid)
            else:
                parents[pid] = parent(pid)
    new = found
    while new:
        new = {pid for pid, above in parents.items() if above in new and pid not in found}
        found |= new
    return sorted(found)


def adopted():
    """What came to us, the keeper, when its parent ended."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and parent(int(name)) == os.getpid()]


def parent(pid):
    stat = read("/proc/%d/stat" % pid)
    return None if stat is None else int(stat[stat.rindex(")") + 2 :].split()[1])


def signal_name(number):
    try:
        return signal.Signals(number).name
    except ValueError:  # most of the real-time ones have none
        return "signal %d" % number


def kill(pids, number):
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            pass


# ---------------------------------------------------------------- start


def start(job):
    path = folder(job)
    os.makedirs(path, exist_ok=True)
    os.chmod(path, 0o700)
    # Held until the server is known to be there, by the keeper too: who stops in the middle of a start waits for it,
    # and does not find nothing a moment before there is something.
    starting = open(os.path.join(path, "starting"), "w")
    fcntl.flock(starting, fcntl.LOCK_EX)
    known = state(path)
    if known and known["running"]:
        return say(error="runs already", state=known)
    stale = members(path)
    if stale:
        return say(error="left-over processes of an earlier start: %s" % stale)
    for name in ("exit.json", "state.json"):
        try:
            os.unlink(os.path.join(path, name))
        except FileNotFoundError:
            pass
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(reader)
            try:
                keep(job, path, writer, starting)
            finally:
                os._exit(0)
        os._exit(0)
    os.close(writer)
    os.wait()
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    say(**(json.loads(answer) if answer else {"error": "the keeper died"}))


def keep(job, path, writer, starting):
    """The keeper: parent of the server until it ends."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # what escapes from its parents comes to us and not to PID 1: prctl(PR_SET_CHILD_SUBREAPER)
    ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)
    log = os.open(os.path.join(path, "log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    environment = dict(os.environ)
    environment.update({str(key): str(value) for key, value in job.get("env", {}).items()})
    environment[MARK] = path
    try:
        for key, file in (job.get("secrets") or {}).items():
            with open(os.path.expanduser(file)) as secret:
                environment[key] = secret.read().strip()
        server = subprocess.Popen(
            job["argv"],
            stdin=nothing,
            stdout=log,
            stderr=log,
            env=environment,
            cwd=os.path.expanduser(job["cwd"]) if job.get("cwd") else None,
            preexec_fn=defaults,
        )
    except OSError as error:
        where = error.filename or job["argv"][0]
        os.write(writer, json.dumps({"error": "%s: %s" % (where, error.strerror)}).encode())
        return
    known = {
        "unit": job["unit"],
        "owner": job.get("owner"),
        "pid": server.pid,
        "start": start_time(server.pid) or 0,
        "boot": boot_id(),
        "keeper": os.getpid(),
        "argv": job["argv"],
        "time": time.time(),
    }
    write(os.path.join(path, "state.json"), json.dumps(known))
    os.write(writer, json.dumps({"started": known}).encode())
    os.close(writer)
    starting.close()
    status = None
    while status is None:  # reap everything that comes to us, until the server itself ends
        try:
            pid, raw = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        except InterruptedError:
            continue
        if pid == server.pid:
            status = raw
    ended = {"status": None, "signal": None, "time": time.time()}
    if status is not None and os.WIFSIGNALED(status):
        ended["signal"] = signal_name(os.WTERMSIG(status))
        ended["status"] = -os.WTERMSIG(status)
    elif status is not None:
        ended["status"] = os.WEXITSTATUS(status)
    write(os.path.join(path, "exit.json"), json.dumps(ended))
    kill(members(path) + adopted(), signal.SIGKILL)


def defaults():
    """In the child: a session of its own, and the signals as a program expects them."""
    os.setsid()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)


# ---------------------------------------------------------------- stop


def stop(job):
    path = folder(job)
    if os.path.isdir(path):
        with open(os.path.join(path, "starting"), "w") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
    pids = members(path)
    known = state(path)
    if known and known["running"] and known["pid"] not in pids:
        pids.append(known["pid"])
    kill([known["pid"]] if known and known["running"] else pids, signal.SIGTERM)
    deadline = time.monotonic() + job.get("grace_s", 10)
    while time.monotonic() < deadline and members(path):
        time.sleep(0.02)
    left, deadline = members(path), time.monotonic() + job.get("killed_s", 60)
    while left and time.monotonic() < deadline:
        kill(left, signal.SIGKILL)
        time.sleep(0.02)
        left = members(path)
    for _ in range(0 if left else 100):  # the keeper writes the exit status right after
        known = state(path)
        if known is None or os.path.exists(os.path.join(path, "exit.json")) or start_time(known["keeper"]) is None:
            break
        time.sleep(0.02)
    say(stopped=state(path), left=[undying(pid) for pid in left])


def undying(pid):
    """A process that SIGKILL does not end: what it is, and in which of the kernel's functions it waits."""
    stat = read("/proc/%d/stat" % pid) or ""
    name = stat[stat.find("(") + 1 : stat.rfind(")")]
    waits = (read("/proc/%d/wchan" % pid) or "").strip("0\n ")
    return {"pid": pid, "name": name, "state": stat[stat.rfind(")") + 2 :][:1], "waits": waits}


# ---------------------------------------------------------------- status


def unit_of(pid):
    """The unit a process belongs to: by its mark or the nearest ancestor's (see `members`), or by its cgroup."""
    above = pid
    while above:
        mark = re.search(MARK + r"=([^\0]*)", read("/proc/%d/environ" % above) or "")
        if mark:
            return mark[1]
        above = parent(above)
    mark = re.search(r"/([^/\n]+)\.service\b", read("/proc/%d/cgroup" % pid) or "")
    return mark[1] if mark else None


def listeners(ports):
    """{port: {"pid", "command", "unit"}} of who listens; pid None when the process may not be looked at."""
    inodes = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (read(table) or "").splitlines()[1:]:
            fields = line.split()
            port = int(fields[1].rsplit(":", 1)[1], 16)
            if fields[3] == "0A" and port in ports:
                inodes["socket:[%s]" % fields[9]] = port
    found = {port: {"pid": None, "command": None, "unit": None} for port in inodes.values()}
    for name in os.listdir("/proc") if inodes else []:
        if not name.isdigit():
            continue
        try:
            handles = os.listdir("/proc/%s/fd" % name)
        except OSError:
            continue
        for handle in handles:
            try:
                port = inodes.get(os.readlink("/proc/%s/fd/%s" % (name, handle)))
            except OSError:
                continue
            if port is not None and found[port]["pid"] is None:
                command = (read("/proc/%s/cmdline" % name) or "").replace("\0", " ").strip()
                found[port] = {"pid": int(name), "command": command[:300], "unit": unit_of(int(name))}
    return found


def status(job):
    base = os.path.expanduser(job["dir"])
    names = [job["unit"]] if job.get("unit") else sorted(os.listdir(base)) if os.path.isdir(base) else []
    units = [known for known in (state(os.path.join(base, name)) for name in names) if known]
    say(units=units, listeners={str(k): v for k, v in listeners(set(job.get("ports", []))).items()})


# ---------------------------------------------------------------- watch


def activity(pids):
    """Signs of life of the whole unit: bytes read, resident bytes, and which processes there are (compilers come and
    go); CPU ticks for whoever wonders: a rank that waits for others in vain computes all the time."""
    ticks = reads = resident = 0
    for pid in pids:
        stat = read("/proc/%d/stat" % pid)
        if stat:
            fields = stat[stat.rindex(")") + 2 :].split()
            ticks += int(fields[11]) + int(fields[12])
            resident += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        moved = re.search(r"^rchar: (\d+)$", read("/proc/%d/io" % pid) or "", re.M)
        reads += int(moved[1]) if moved else 0
    return {"cpu_ticks": ticks, "read_bytes": reads, "resident_bytes": resident, "pids": sorted(pids)}


def health(urls):
    """HTTP status of the first URL that the server knows, or the name of the error that connecting gave."""
    answer = None
    for url in urls:
        found = one({"method": "GET", "url": url, "timeout_s": 5, "limit": 1000})
        answer = found.get("status") or found.get("error")
        if answer != 404:
            break
    return answer


def watch(job):
    """Follows the log, says how alive the server is until it is healthy, then only that we are here, then its end."""
    unit = SystemdUnit(job) if job.get("systemd") else OwnUnit(job)
    urls = job.get("health") or []
    last_beat, ready = 0.0, not urls
    while True:
        running = unit.running()  # asked first: what it wrote before its end is read after
        data = unit.more()
        if data:
            say(log=data)
        elif not running:
            return say(exit=unit.ended())
        now = time.monotonic()
        if not data or now - last_beat >= 0.5:
            answer = None if ready else health(urls)
            if answer == 200 or now - last_beat >= 0.5:
                say(beat={} if ready else activity(unit.pids()), health=answer)
                last_beat = now
            ready = ready or answer == 200
            if running:
                time.sleep(job.get("every_s", 0.25))


class OwnUnit:
    """A server of `start`: its log is a file."""

    def __init__(self, job):
        self.path = folder(job)
        self.offset = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def running(self):
        known = state(self.path)
        return bool(known and known["running"])

    def more(self):
        try:
            with open(os.path.join(self.path, "log"), "rb") as file:
                file.seek(self.offset)
                data = file.read(1 << 20)
        except OSError:
            data = b""
        self.offset += len(data)
        return self.decoder.decode(data)

    def pids(self):
        return members(self.path)

    def ended(self):
        known = None
        for _ in range(50):  # the exit status follows the death by a moment
            known = state(self.path)
            if known is None or os.path.exists(os.path.join(self.path, "exit.json")):
                break
            if start_time(known["keeper"]) is None:
                break
            time.sleep(0.02)
        return known["exit"] if known else {"why": "no such unit"}


# ---------------------------------------------------------------- systemd

SHOWN = (
    "Id LoadState ActiveState Result MainPID ExecMainPID ExecMainCode ExecMainStatus InvocationID ControlGroup "
    "FragmentPath ConditionResult ConditionTimestampMonotonic AssertResult AssertTimestampMonotonic"
).split()


def systemctl(*words):
    try:
        done = subprocess.run(
            ["systemctl", "--no-pager", *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=120
        )
    except FileNotFoundError:
        return 127, "", "there is no systemctl on this machine"
    except subprocess.TimeoutExpired:
        return 124, "", "systemctl %s did not end" % " ".join(words)
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


def shown(*units):
    """What `systemctl show` says of each unit."""
    _, out, _ = systemctl("show", *["--property=" + name for name in SHOWN], *units)
    blocks = out.strip().split("\n\n")
    return [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in blocks]


CONDITIONS = ("Condition", "Assert")


def unit_state(facts):
    """A unit in the same words as a supervised process."""
    owner = re.search(r"^# gpuctl campaign: (.*)$", read(facts.get("FragmentPath", "")) or "", re.M)
    running = facts.get("ActiveState") in ("active", "activating", "reloading", "deactivating")
    pid = int(facts.get("MainPID") or 0) or int(facts.get("ExecMainPID") or 0)
    ended = None
    if not running:
        code, status = int(facts.get("ExecMainCode") or 0), int(facts.get("ExecMainStatus") or 0)
        ended = {"status": None, "signal": None, "why": facts.get("Result") or facts.get("ActiveState")}
        if code == 1:  # CLD_EXITED
            ended["status"] = status
        elif code in (2, 3):  # CLD_KILLED, CLD_DUMPED
            ended["status"] = -status
            ended["signal"] = signal_name(status)
        # One that was never asked says "no" as well.
        if any(facts.get(k + "Result") == "no" and facts.get(k + "TimestampMonotonic") != "0" for k in CONDITIONS):
            ended["why"] = "a condition of the unit was not met"
        if facts.get("Result") == "oom-kill":
            ended["why"] = "oom-kill"
    return {
        "unit": facts["Id"].replace(".service", ""),
        "owner": owner[1] if owner else None,
        "pid": pid,
        "start": (start_time(pid) or 0) if pid else 0,
        "boot": boot_id(),
        "running": running,
        "exit": ended,
        "invocation": facts.get("InvocationID"),
    }


def start_unit(job):
    name = job["unit"] + ".service"
    systemctl("reset-failed", name)  # a unit that failed too often refuses to start until this
    code, _, err = systemctl("start", name)
    (facts,) = shown(name)
    if code:
        lines = [line for line in err.strip().splitlines() if not line.startswith(("See ", "Hint"))]
        words = lines[0] if lines else "systemctl start ended with %d" % code
        return say(error=": ".join([words.rstrip("."), *why_not(name, facts.get("InvocationID"))]))
    return say(started=unit_state(facts))


def journal(*words):
    """What the journal has, journald's backlog waited for; nothing where it cannot be asked."""
    try:
        subprocess.run(["journalctl", "--sync"], stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
        asked = ["journalctl", "--quiet", "--no-pager", *words]
        return subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, timeout=120).stdout
    except (OSError, subprocess.SubprocessError):
        return b""


def last_invocation(name):
    """The id of the last start, out of the journal: systemd has forgotten a unit that ended well at once."""
    try:
        entry = json.loads(journal("--output=json", "--lines=1", "--unit=" + name))
    except ValueError:
        return None
    # the program's own words are under the one name, what systemd says of it under the other
    return entry.get("_SYSTEMD_INVOCATION_ID") if entry.get("_PID") != "1" else entry.get("INVOCATION_ID")


def why_not(name, invocation):
    """systemd's own words, in the journal, of what it could not do for a unit before its program ran: at most one."""
    if not invocation:
        return []
    # what the process that became the program says is under the other name
    either = ("INVOCATION_ID=" + invocation, "+", "_SYSTEMD_INVOCATION_ID=" + invocation)
    told = journal("--output=cat", "--lines=50", *either).decode("utf-8", "replace")
    lines = [line[len(name) + 2 :] for line in told.splitlines() if line.startswith(name + ": Failed ")]
    # the first one says why ("Failed to set up credentials: No such file"), the next at which step
    return [line for line in lines if not line.startswith("Failed with result")][:1]


def status_of_units(job):
    names = [job["unit"] + ".service"] if job.get("unit") else ["gpuctl-*.service"]
    units = [unit_state(f) for f in shown("--all", *names) if f.get("LoadState") not in (None, "not-found", "masked")]
    say(units=units, listeners={str(k): v for k, v in listeners(set(job.get("ports", []))).items()})


def stop_unit(job):
    name = job["unit"] + ".service"
    systemctl("stop", name)
    (facts,) = shown(name)
    say(stopped=unit_state(facts))


def with_us():
    """In the child: it ends when we do. prctl(PR_SET_PDEATHSIG, SIGKILL)"""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


class SystemdUnit:
    """A unit of systemd: its log is the journal of this start."""

    def __init__(self, job):
        self.name = job["unit"] + ".service"
        (self.facts,) = shown(self.name)
        self.pid = int(self.facts.get("MainPID") or 0)
        self.began = start_time(self.pid) if self.pid else None
        self.partial = b""
        self.cursor = None  # of the last entry that was read
        self.ask = ["--output=json", "--all", "--no-tail", "--unit=" + self.name]
        # without it the words of earlier starts would be read
        invocation = self.facts.get("InvocationID") or last_invocation(self.name)
        if invocation:
            self.ask.append("_SYSTEMD_INVOCATION_ID=" + invocation)
        self.journal = subprocess.Popen(
            ["journalctl", "--quiet", *self.ask, "--follow"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=with_us,
        )
        os.set_blocking(self.journal.stdout.fileno(), False)

    def running(self):
        if self.pid and start_time(self.pid) == self.began:
            return True  # cheap: nothing is run beside a measurement
        (self.facts,) = shown(self.name)
        if int(self.facts.get("MainPID") or 0) not in (0, self.pid):
            self.pid = int(self.facts["MainPID"])
            self.began = start_time(self.pid)
        return self.facts.get("ActiveState") in ("active", "activating", "reloading", "deactivating")

    def more(self):
        if self.journal is None:
            return ""
        try:
            data = self.journal.stdout.read(1 << 20) or b""
        except OSError:
            data = b""
        if data or (self.pid and start_time(self.pid) == self.began):
            return self.texts(data)
        # The process has ended and journald may be behind with its last words, which say why: they are waited for.
        self.journal.kill()
        self.journal.wait()
        self.journal = None
        self.partial = b""
        since = ["--after-cursor=" + self.cursor] if self.cursor else []
        return self.texts(journal(*self.ask, *since))

    def texts(self, data):
        *lines, self.partial = (self.partial + data).split(b"\n")
        found = []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            self.cursor = entry.get("__CURSOR", self.cursor)
            found.append(message(entry))
        return "".join(found)

    def pids(self):
        group = "/sys/fs/cgroup" + self.facts.get("ControlGroup", "/nowhere")
        found = []
        for where, _, _ in os.walk(group):
            found += [int(pid) for pid in (read(os.path.join(where, "cgroup.procs")) or "").split()]
        return found

    def ended(self):
        (self.facts,) = shown(self.name)
        end = unit_state(self.facts)["exit"]
        if end and end["why"] == "success" and end["status"] is None and end["signal"] is None:
            # systemd forgets a unit that ended well; one that failed stays until somebody looked at it
            end["why"] = "it ended without a failure, as systemd has it"
        return end


def message(entry):
    """The text of a journal entry: a string, or a list of bytes when it is not UTF-8; long ones too (--all)."""
    text = entry.get("MESSAGE")
    if isinstance(text, list):
        text = bytes(part if isinstance(part, int) else 63 for part in text).decode("utf-8", "replace")
    # journald cuts a line at 48 kB (LineMax=) and says so
    return "" if text is None else text if entry.get("_LINE_BREAK") == "line-max" else text + "\n"


# ---------------------------------------------------------------- ask


def one(request):
    """One HTTP request, by hand over a socket: no proxies, no redirects, no surprise."""
    import http.client

    parts = urlsplit(request["url"])
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=request.get("timeout_s", 10))
    try:
        target = (parts.path or "/") + ("?" + parts.query if parts.query else "")
        body = request.get("body")
        headers = dict(request.get("headers") or {})
        if body is not None and not isinstance(body, str):
            body = json.dumps(body)
            headers.setdefault("Content-Type", "application/json")
        connection.request(request.get("method", "GET"), target, body.encode() if body else None, headers)
        response = connection.getresponse()
        data = response.read(request.get("limit", 4 << 20))
        return {"status": response.status, "body": data.decode("utf-8", "replace")}
    except socket.timeout:
        return {"error": "timeout"}
    except ConnectionRefusedError:
        return {"error": "refused"}
    except (OSError, http.client.HTTPException, ValueError) as error:
        name = errno.errorcode.get(getattr(error, "errno", None) or 0)
        return {"error": "%s: %s" % (name or type(error).__name__, error)}
    finally:
        connection.close()


def ask(job):
    say(answers=[one(request) for request in job["requests"]])


def main():
    line = sys.stdin.buffer.readline()
    job = json.loads(line)
    own = {"start": start, "stop": stop, "status": status, "watch": watch, "ask": ask}
    units = {**own, "start": start_unit, "stop": stop_unit, "status": status_of_units}
    (units if job.get("systemd") else own)[job["op"]](job)


if __name__ == "__main__":
    main()
