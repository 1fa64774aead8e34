#!/usr/bin/python3
"""Settings of a machine: read, set where they differ, and read back. What did not take has failed.

Three ways to run it, with the same job: as an Ansible module, at boot as `settle.py JOB.json`, by hand with `--check`.
Standard library only, Python 3.9.
"""

import glob
import json
import os
import re
import subprocess
import sys
import tempfile

try:
    from ansible.module_utils.basic import AnsibleModule
except ImportError:  # run by hand or at boot
    AnsibleModule = None

DOCUMENTATION = r"""
module: settle
short_description: Reads settings, sets those that differ, reads them back
options:
  settings:
    type: list
    required: true
    description: >-
      Each has C(name), C(want) and how it is read and set: C(file) (read and written), or C(read) and C(set) (argument
      lists; in C(set), {value} stands for the value). C(pick) (regular expression with one group) finds the value in
      what was read, C(mask) (hexadecimal) leaves the bits that count. C(may_ignore) true: hardware may ignore it, which
      is told and no failure. C(optional) true: where it cannot be read there is nothing to set. C(unless): patterns of
      paths, each with what to say when one of them is there; then it is not set, but for putting back what was before.
  needs:
    type: dict
    description: Paths that have to be there, each with what to say when it is not; nothing is set then.
  undo:
    type: bool
    description: Puts back the values from before the first time.
  state:
    type: path
    description: Where the values from before are kept.
"""

STATE = "/var/lib/gpuctl/settings.json"


ARGUMENTS = {
    "settings": {"type": "list", "elements": "dict", "default": []},
    "needs": {"type": "dict", "default": {}},
    "undo": {"type": "bool", "default": False},
    "state": {"type": "path"},
}


class Failed(Exception):
    pass


def command(argv):
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    except FileNotFoundError:
        raise Failed("%s is not installed" % argv[0]) from None
    except subprocess.TimeoutExpired:
        raise Failed("%s did not end within 30 s" % " ".join(argv)) from None
    if done.returncode != 0:
        words = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
        raise Failed("%s: %s" % (" ".join(argv), words[-1] if words else "exit status %d" % done.returncode))
    return done.stdout.decode("utf-8", "replace")


def seen(setting):
    """The value as it is now. Raises Failed."""
    if "file" in setting:
        try:
            with open(setting["file"], encoding="utf-8") as file:
                text = file.read()
        except OSError as error:
            raise Failed("%s: %s" % (setting["file"], error.strerror)) from None
    else:
        text = command(setting["read"])
    text = text.strip()
    if setting.get("pick"):
        found = re.search(setting["pick"], text)
        if not found:
            raise Failed("not understood: %s" % text[:100])
        text = found.group(1)
    if setting.get("mask"):
        try:
            text = "%0*x" % (len(setting["mask"]), int(text, 16) & int(setting["mask"], 16))
        except ValueError:
            raise Failed("not understood: %s" % text[:100]) from None
    return text


def put(setting, value):
    if "file" in setting:
        try:
            with open(setting["file"], "w", encoding="utf-8") as file:
                file.write(value + "\n")
        except OSError as error:
            raise Failed("%s: %s" % (setting["file"], error.strerror)) from None
    else:
        command([word.replace("{value}", value) for word in setting["set"]])


def settle(setting, want, check, ignores=None):
    """{"name", "seen", "want", "after", "state"}; state: well | changed | ignored | absent | failed.

    `ignores`: the value that the hardware was seen to ignore.
    """
    told = {"name": setting["name"], "seen": None, "want": want, "after": None, "state": "failed"}
    try:
        told["seen"] = told["after"] = seen(setting)
    except Failed as error:
        told.update(state="absent" if setting.get("optional") else "failed", why=str(error))
        return told
    if told["seen"] == want:
        told["state"] = "well"
        return told
    for pattern, otherwise in (setting.get("unless") or {}).items():
        for there in sorted(glob.glob(pattern))[:1]:
            told["why"] = "%s (%s)" % (otherwise, there)
            return told
    if check and ignores == want:
        told.update(state="ignored", why="the hardware ignores it")
        return told
    if check:
        told.update(state="changed", after=want)
        return told
    try:
        put(setting, want)
        told["after"] = seen(setting)
    except Failed as error:
        told["why"] = str(error)
        return told
    if told["after"] == want:
        told["state"] = "changed"
    elif setting.get("may_ignore"):
        told.update(state="ignored", why="the hardware ignores it")
    else:
        told["why"] = "set, and it reads back %s" % told["after"]
    return told


def load(path):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise Failed("%s cannot be read: %s" % (path, error)) from None


def save(path, value):
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o755, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".gpuctl-", dir=folder)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)


def run(job):
    for needed, otherwise in (job.get("needs") or {}).items():
        if not os.path.exists(needed):
            raise Failed(otherwise)
    path, check = job.get("state") or STATE, bool(job.get("check"))
    before = load(path)
    if job.get("undo"):
        wishes = [({**entry["setting"], "unless": {}}, entry["value"]) for entry in before.values()]
    else:
        wishes = [(setting, str(setting["want"])) for setting in job["settings"]]
        if not check:
            fresh = remembered(before, wishes)
            if fresh != before:
                save(path, fresh)  # before anything is set: a value too many is no harm, one too few is
                before = fresh
    told = [settle(setting, want, check, before.get(setting["name"], {}).get("ignores")) for setting, want in wishes]
    failed = [one for one in told if one["state"] == "failed"]
    if not check and job.get("undo"):
        save(path, {one["name"]: before[one["name"]] for one in failed})
    elif not check:
        ignored = {one["name"]: one["want"] for one in told if one["state"] == "ignored" and one["name"] in before}
        known = {name: {**before[name], "ignores": want} for name, want in ignored.items()}
        if any(before[name] != entry for name, entry in known.items()):
            save(path, {**before, **known})
    changed = [one for one in told if one["state"] == "changed"]
    answer = {
        "changed": bool(changed),
        "settings": told,
        # what puts back what this run changed, and no more
        "back": [
            {**setting, "want": one["seen"], "unless": {}}
            for (setting, _), one in zip(wishes, told)
            if one["state"] == "changed"
        ],
        "diff": {
            "before": "".join("%s = %s\n" % (one["name"], one["seen"]) for one in changed),
            "after": "".join("%s = %s\n" % (one["name"], one["after"]) for one in changed),
            "before_header": "settings as they are",
            "after_header": "settings as wanted",
        },
    }
    if failed:
        msg = "; ".join("%s: %s" % (one["name"], one["why"]) for one in failed)
        if changed and not check:
            done = ["%s = %s (was %s)" % (one["name"], one["after"], one["seen"]) for one in changed]
            msg += "; these are set all the same, undo puts them back: " + ", ".join(done)
        answer.update(failed=True, msg=msg)
    return answer


def remembered(before, wishes):
    """`before` with the present value of each setting that is new there."""
    fresh = dict(before)
    for setting, want in wishes:
        if setting["name"] not in fresh:
            try:
                value = seen(setting)
            except Failed:
                continue
            if value != want:
                fresh[setting["name"]] = {"value": value, "setting": setting}
    return fresh


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
        hint = "; this needs root" if isinstance(error, PermissionError) and os.geteuid() != 0 else ""
        return {"failed": True, "msg": "%s: %s%s" % (error.filename, error.strerror, hint)}


if __name__ == "__main__":
    sys.exit(main())
