#!/usr/bin/python3
"""Ansible module: places whole files that were rendered elsewhere, all of them or none.

By hand: `place.py JOB.json [--check]`. Standard library only, Python 3.9.
"""

import contextlib
import glob
import grp
import hashlib
import json
import os
import pwd
import re
import subprocess
import sys
import tempfile

try:
    from ansible.module_utils.basic import AnsibleModule
except ImportError:  # run by hand or at boot
    AnsibleModule = None

DOCUMENTATION = r"""
module: place
short_description: Places whole files, all of them or none
description:
  - Each file is compared, guarded, backed up, written beside its place and renamed. When one cannot be written, those
    written before are put back. What was there before is kept, and C(undo) puts it back.
options:
  files:
    type: list
    required: true
    description: >-
      Each has C(path) and C(text) (or C(absent) true), and may have C(mode) ("0644"), C(owner), C(group),
      C(was) (SHA-256 of the text it was made from, or C(absent): otherwise nothing is placed),
      C(ours) (a text that the file has to have if it is there already: otherwise it is somebody else's),
      C(secret) (true: no differences are shown), C(brief) (true: only that it changes).
  verify:
    type: bool
    description: systemd-analyze reads the units among the files first; what it says of them ends it.
  units:
    type: bool
    description: >-
      systemd is told of what changes, and each unit is started at boot, or not, as its [Install] section says (systemd
      itself cannot disable one that lost it).
  forget:
    type: bool
    description: >-
      Earlier failures of these services are forgotten, systemd's count of them and the note that gpuctl-failed@ left;
      one that failed too often is refused until then.
  needs:
    type: dict
    description: Paths that have to be there, each with what to say when it is not.
  undo:
    type: bool
    description: Puts back what was there before these files were placed the first time.
  state:
    type: path
    description: Where backups and the list of what was placed are kept.
"""

STATE = "/var/lib/gpuctl/placed"


ARGUMENTS = {
    "files": {"type": "list", "elements": "dict", "default": []},
    "verify": {"type": "bool", "default": False},
    "units": {"type": "bool", "default": False},
    "forget": {"type": "bool", "default": False},
    "needs": {"type": "dict", "default": {}},
    "undo": {"type": "bool", "default": False},
    "state": {"type": "path"},
}


class Failed(Exception):
    pass


def sha256(data):
    return "absent" if data is None else hashlib.sha256(data).hexdigest()


def read(path):
    """Bytes of a regular file; None where there is nothing."""
    if os.path.islink(path):
        raise Failed("%s is a symbolic link; it is left alone" % path)
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Failed("%s cannot be read: %s" % (path, error.strerror)) from None


def owner_of(path):
    try:
        seen = os.stat(path)
    except OSError:
        return None
    return seen.st_mode & 0o7777, seen.st_uid, seen.st_gid


def wanted_owner(entry, before):
    """(mode, uid, gid), None for what is left as it is."""
    mode = int(str(entry["mode"]), 8) if entry.get("mode") is not None else (before[0] if before else 0o644)
    try:
        uid = pwd.getpwnam(entry["owner"]).pw_uid if entry.get("owner") else (before[1] if before else None)
        gid = grp.getgrnam(entry["group"]).gr_gid if entry.get("group") else (before[2] if before else None)
    except KeyError as error:
        raise Failed("%s: %s" % (entry["path"], str(error.args[0]))) from None
    return mode, uid, gid


def put(path, data, owner):
    """Writes beside and renames; data None removes."""
    if data is None:
        os.unlink(path)
        return
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o755, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".gpuctl-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        mode, uid, gid = owner
        # /etc/pve is a file system that owns its files itself and lets nobody change that.
        try:
            os.chmod(temporary, mode)
            if uid is not None or gid is not None:
                os.chown(temporary, -1 if uid is None else uid, -1 if gid is None else gid)
        except PermissionError:
            if os.geteuid() != 0:
                raise
        os.rename(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


class Journal:
    """What was placed, and what was there before."""

    def __init__(self, folder):
        self.folder = folder
        self.file = os.path.join(folder, "journal.json")
        try:
            with open(self.file, encoding="utf-8") as file:
                self.entries = json.load(file)
        except FileNotFoundError:
            self.entries = {}
        except (OSError, ValueError) as error:
            raise Failed("%s cannot be read: %s" % (self.file, error)) from None

    def placed(self, path, before, before_owner, after):
        known = self.entries.get(path)
        if known and self.is_ours(path, before):
            # Undo leads to what was there before us, not to our last version. That one is known still: what is noted
            # here may not come to be.
            known.update(placed=sha256(after), earlier=sha256(before))
        else:
            backup = None
            if before is not None:
                backup = os.path.join(self.folder, "%s.%s" % (path.strip("/").replace("/", "_"), sha256(before)[:16]))
                put(backup, before, (0o600, None, None))
            self.entries[path] = {"placed": sha256(after), "backup": backup, "owner": before_owner}

    def is_ours(self, path, data):
        entry = self.entries[path]
        return sha256(data) in (entry["placed"], entry.get("earlier"))

    def before(self, path):
        """(bytes or None, owner) from before us."""
        entry = self.entries[path]
        if entry["backup"] is None:
            return None, None
        data = read(entry["backup"])
        if data is None:
            raise Failed("%s: its backup %s is gone" % (path, entry["backup"]))
        return data, entry["owner"]

    def save(self):
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        put(self.file, (json.dumps(self.entries, indent=1, sort_keys=True) + "\n").encode(), (0o600, None, None))


def planned(entry, journal, undo):
    """(path, now, now_owner, then, then_owner) or None where nothing is to do."""
    path = entry["path"]
    if not os.path.isabs(path) or os.path.normpath(path) != path:
        raise Failed("%s is no absolute path" % path)
    now, now_owner = read(path), owner_of(path)
    if undo:
        if path not in journal.entries:
            return None
        then, then_owner = journal.before(path)
        if then == now:
            return None
        if not journal.is_ours(path, now):
            where = journal.entries[path]["backup"] or "nothing"
            raise Failed("%s was changed by somebody since; it is left alone (before us: %s)" % (path, where))
        return path, now, now_owner, then, tuple(then_owner) if then_owner else None
    then = None if entry.get("absent") else entry["text"].encode()
    then_owner = None if then is None else wanted_owner(entry, now_owner)
    same_owner = now_owner is None or then_owner is None or not differs(now_owner, then_owner)
    if then == now and same_owner:
        return None
    if then != now:
        if entry.get("ours") and now is not None and entry["ours"].encode() not in now:
            raise Failed("%s is there already and not ours; it is left alone" % path)
        if entry.get("was") and sha256(now) != entry["was"]:
            raise Failed("%s was changed by somebody meanwhile; nothing is placed" % path)
    return path, now, now_owner, then, then_owner


def differs(now, then):
    return any(wish is not None and wish != seen for seen, wish in zip(now, then))


def lines(data):
    return "not there" if data is None else "%d lines, SHA-256 %s" % (data.count(b"\n"), sha256(data)[:12])


def shown(data):
    return "" if data is None else data.decode("utf-8", "replace")


UNITS = (".service", ".mount", ".timer", ".target", ".path", ".socket")


def verify(entries):
    """What systemd-analyze says of these units, put side by side in a folder; it says nothing of good ones."""
    units = [entry for entry in entries if entry["path"].endswith(UNITS) and not entry.get("absent")]
    if not units:
        return
    with tempfile.TemporaryDirectory(prefix="gpuctl-verify-") as folder:
        names = [os.path.basename(entry["path"]) for entry in units]
        for entry, name in zip(units, names):
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write(entry["text"])
        command = ["systemd-analyze", "verify", "--man=no", *(os.path.join(folder, name) for name in names)]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        except FileNotFoundError:
            raise Failed("there is no systemd-analyze here") from None
        except subprocess.TimeoutExpired:
            raise Failed("systemd-analyze verify did not end within 60 s") from None
        said = (done.stdout + done.stderr).decode("utf-8", "replace").splitlines()
    # It also reads the units ours depend on, and complains of those of the distribution.
    about_ours = [line.replace(folder + "/", "") for line in said if any(name in line for name in names)]
    if about_ours:
        raise Failed("systemd does not accept it: %s" % "; ".join(about_ours))


def exposure(entries):
    """What `systemd-analyze security` says of each service, in one line: {path: words}. Where it cannot: nothing."""
    found = {}
    for entry in entries:
        if not entry["path"].endswith(".service") or entry.get("absent"):
            continue
        with tempfile.TemporaryDirectory(prefix="gpuctl-score-") as folder:
            name = os.path.join(folder, os.path.basename(entry["path"]))
            with open(name, "w", encoding="utf-8") as file:
                file.write(entry["text"])
            command = ["systemd-analyze", "security", "--offline=true", "--no-pager", name]
            try:
                done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
            except (OSError, subprocess.TimeoutExpired):
                continue
        score = re.search(r"(Overall exposure level)[^:]*: *([\d.]+ \w+)", done.stdout.decode("utf-8", "replace"))
        if score:
            found[entry["path"]] = "systemd calls its exposure %s (0 is best)" % score.group(2)
    return found


def run(job):
    for path, otherwise in (job.get("needs") or {}).items():
        if not os.path.exists(path):
            raise Failed(otherwise)
    if job.get("verify") and not job.get("undo"):
        verify(job["files"])
    journal = Journal(job.get("state") or STATE)
    undo, check = bool(job.get("undo")), bool(job.get("check"))
    plans = [(entry, plan) for entry in job["files"] for plan in [planned(entry, journal, undo)] if plan]
    scores = {} if undo or not job.get("verify") or not plans else exposure([entry for entry, _ in plans])
    diff = []
    for entry, (path, now, now_owner, then, then_owner) in plans:
        header = {"before_header": path, "after_header": path}
        if now == then:
            before, after = ("mode %o owner %s:%s\n" % owner for owner in (now_owner, then_owner))
            diff.append({"before": before, "after": after, **header})
        elif entry.get("secret"):
            diff.append({"prepared": "%s changes; it is a secret\n" % path})
        elif entry.get("brief"):
            diff.append({"prepared": "%s: %s -> %s\n" % (path, lines(now), lines(then))})
        else:
            diff.append({"before": shown(now), "after": shown(then), **header})
        if path in scores:
            diff.append({"prepared": "%s: %s\n" % (os.path.basename(path), scores[path])})
    missing, left = boot(job["files"], journal, undo) if job.get("units") else ([], [])
    diff += [{"prepared": "%s is started at boot\n" % name} for name in missing]
    diff += [{"prepared": "%s goes: it is not for the boot any more\n" % link} for link in left]
    notes = failed_notes(job["files"], os.path.dirname(journal.folder)) if job.get("forget") else []
    diff += [{"prepared": "%s goes: the note of an earlier failure\n" % note} for note in notes]
    if not check:
        if plans:
            carry_out([plan for _, plan in plans], journal, undo)
        for path in (*left, *notes):
            os.unlink(path)
        if missing:
            systemctl("not started at boot", "--no-reload", "enable", *missing)
        if job.get("units") and (plans or left or missing or unread(job["files"])):
            systemctl("systemd does not take note of it", "daemon-reload")
        if job.get("forget") and not undo:
            forget(job["files"])
    return {
        "changed": bool(plans or missing or left or notes),
        "diff": diff,
        "placed": [plan[0] for _, plan in plans],
        "backups": {path: journal.entries[path]["backup"] for _, (path, *_) in plans if path in journal.entries},
    }


def units_of(entries, kinds=UNITS):
    """(folder, name, entry) of each unit that can be asked for and started: a template is none."""
    for entry in entries:
        folder, name = os.path.split(entry["path"])
        if name.endswith(kinds) and "@." not in name:
            yield folder, name, entry


def boot(entries, journal, undo):
    """(units that are to be started at boot and are not, links that start at boot what is not to be)."""
    missing, left = [], []
    for folder, name, entry in units_of(entries):
        if undo and entry["path"] not in journal.entries and os.path.exists(entry["path"]):
            continue  # not ours
        stays = not undo and not entry.get("absent")
        wanted = {os.path.join(folder, one, name) for one in installed_in(entry["text"])} if stays else set()
        there = {
            link
            for kind in ("wants", "requires")
            for link in glob.glob(os.path.join(glob.escape(folder), "*." + kind, glob.escape(name)))
            if os.path.islink(link)
        }
        missing += [name] if wanted - there else []
        left += sorted(there - wanted)
    return missing, left


def installed_in(text):
    """The folders in which a unit's [Install] section has it linked, as multi-user.target.wants."""
    install = re.search(r"^\[Install\]$(.*?)(?=^\[|\Z)", text, re.M | re.S)
    found = re.findall(r"^(Wanted|Required)By=(.*)$", install.group(1), re.M) if install else []
    kinds = {"Wanted": "wants", "Required": "requires"}
    return {"%s.%s" % (target, kinds[how]) for how, targets in found for target in targets.split()}


def failed_notes(entries, folder):
    """The notes that services left when they gave up."""
    notes = [os.path.join(folder, "failed", name) for _, name, _ in units_of(entries, ".service")]
    return [note for note in notes if os.path.exists(note)]


def forget(entries):
    """systemd's count of failed starts. It does not know a unit that never failed: that is as good."""
    names = [name for _, name, _ in units_of(entries, ".service")]
    if names:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                ["systemctl", "reset-failed", *names], stdin=subprocess.DEVNULL, capture_output=True, timeout=30
            )


def unread(entries):
    """Whether systemd has not read one of these units since it was changed."""
    names = [name for _, name, _ in units_of(entries)]
    if not names:
        return False
    try:
        shown = subprocess.run(
            ["systemctl", "show", "--property=NeedDaemonReload", *names],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return b"=yes" in shown.stdout


def systemctl(otherwise, *words):
    try:
        done = subprocess.run(["systemctl", *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=90)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed("placed, but %s: %s" % (otherwise, error)) from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise Failed("placed, but %s: %s" % (otherwise, said[0] if said else done.returncode))


def carry_out(plans, journal, undo):
    done = []
    try:
        for path, now, now_owner, then, then_owner in plans:
            if read(path) != now:
                raise Failed("%s was changed by somebody meanwhile" % path)
            if not undo and now != then:
                journal.placed(path, now, now_owner, then)
                journal.save()  # before the file: a backup too many is no harm, one too few is
            put(path, then, then_owner or (0o644, None, None))
            done.append((path, now, now_owner))
            if undo:
                del journal.entries[path]
        if undo:
            journal.save()
    except (OSError, Failed) as error:
        words = "%s: %s" % (path, error.strerror) if isinstance(error, OSError) else str(error)
        stay = []
        for put_already, now, now_owner in reversed(done):
            try:
                put(put_already, now, now_owner or (0o644, None, None))
            except OSError as again:
                stay.append("%s is changed all the same (%s)" % (put_already, again.strerror))
        raise Failed("%s; %s" % (words, "; ".join(stay) or "nothing is placed")) from None


def main():
    if AnsibleModule is not None and len(sys.argv) == 1:
        module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
        answer = answered({**module.params, "check": module.check_mode})
        module.fail_json(**answer) if answer.get("failed") else module.exit_json(**answer)
    words = sys.argv[1:]
    with open(next(word for word in words if not word.startswith("-")), encoding="utf-8") as file:
        job = json.load(file)
    answer = answered({**job, "check": "--check" in words})
    print(json.dumps(answer))
    return 1 if answer.get("failed") else 0


def answered(job):
    try:
        return run(job)
    except Failed as error:
        return {"failed": True, "msg": str(error)}
    except OSError as error:
        return {"failed": True, "msg": "%s: %s" % (error.filename or "writing", error.strerror)}


if __name__ == "__main__":
    sys.exit(main())
