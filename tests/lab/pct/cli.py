"""pct: the commands gpuctl and a person at the node use, with the options, texts and exit codes of the real one.

Options are written `-name VALUE`, `--name VALUE` or `--name=VALUE`, anywhere before `--`, as Getopt::Long takes them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

from . import conf as grammar
from . import guests, hotplug
from .conf import Conf, ConfError, Section
from .guests import Failure

USAGE = {
    "list": "pct list",
    "config": "pct config <vmid> [OPTIONS]",
    "pending": "pct pending <vmid>",
    "set": "pct set <vmid> [OPTIONS]",
    "status": "pct status <vmid> [OPTIONS]",
    "start": "pct start <vmid> [OPTIONS]",
    "stop": "pct stop <vmid> [OPTIONS]",
    "shutdown": "pct shutdown <vmid> [OPTIONS]",
    "reboot": "pct reboot <vmid> [OPTIONS]",
    "exec": "pct exec <vmid> [<extra-args>] [OPTIONS]",
    "unlock": "pct unlock <vmid>",
}
# Changed at once in a guest that runs, limits in its cgroup too, and a new devN is plugged in; the rest waits in
# [pve:pending]. (The real one also rewires a changed netN and mounts a new mpN.)
AT_ONCE = frozenset({"onboot", "startup", "protection", "hostname", "hookscript", "cores", "tags", "lock"})
LIMITS = frozenset({"memory", "swap", "cpulimit", "cpuunits"})


@dataclass
class Arguments:
    vmid: int
    options: dict[str, str]
    rest: list[str]

    def flag(self, name: str, default: bool = False) -> bool:
        if name not in self.options:
            return default
        value = self.options[name]
        if value in ("", "1") or value.lower() in ("on", "yes", "true"):
            return True
        if value == "0" or value.lower() in ("off", "no", "false"):
            return False
        raise BadOption("unable to parse boolean option", "")


class BadOption(Exception):
    """The command line is wrong: HTTP's 400, with the usage after it."""

    def __init__(self, text: str, command: str, errors: dict[str, str] | None = None) -> None:
        super().__init__(text)
        self.command = command
        self.errors = errors or {}


def main(argv: list[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in COMMANDS:
        what = f"unknown command 'pct {words[0]}'" if words else "no command specified"
        print(f"ERROR: {what}", file=sys.stderr)
        print("USAGE: pct <COMMAND> [ARGS] [OPTIONS]\n", file=sys.stderr)
        print("".join(f"       {line}\n" for line in USAGE.values()), end="", file=sys.stderr)
        return 255
    command, words = words[0], words[1:]
    try:
        COMMANDS[command](command, words)
    except BadOption as error:
        print(f"400 {error}", file=sys.stderr)
        for key, text in error.errors.items():
            print(f"{key}: {text}", file=sys.stderr)
        print(USAGE[command], file=sys.stderr)
        return 255
    except Failure as error:
        print(error, file=sys.stderr)
        return error.code
    except ConfError as error:
        print(error, file=sys.stderr)
        return 255
    except BrokenPipeError:
        return 141
    return 0


def parse(command: str, words: list[str], known: dict[str, str]) -> Arguments:
    """`known`: option -> what it takes: "flag" (value optional) or "value"."""
    options: dict[str, str] = {}
    rest: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        if word == "--":
            rest += words
            break
        said = re.fullmatch(r"--?([A-Za-z][\w-]*)(?:=(.*))?", word, re.DOTALL)
        if not said:
            rest.append(word)
            continue
        name, value = said[1], said[2]
        kind = known.get(name) or ("value" if command == "set" and grammar.known(name) else None)
        if kind is None:
            print(f"Unknown option: {name}", file=sys.stderr)
            raise BadOption("unable to parse option", command)
        if value is None:
            if kind == "value":
                if not words:
                    print(f"Option {name} requires an argument", file=sys.stderr)
                    raise BadOption("unable to parse option", command)
                value = words.pop(0)
            else:
                value = words.pop(0) if words and re.fullmatch("[01]|on|off|yes|no|true|false", words[0]) else ""
        options[name] = f"{options[name]},{value}" if name in ("delete", "revert") and name in options else value
    if not rest:
        raise BadOption("not enough arguments", command)
    vmid = rest.pop(0)
    if not re.fullmatch(r"[1-9][0-9]{2,8}", vmid):
        text = (
            f"type check ('integer') failed - got '{vmid}'"
            if not vmid.isdecimal()
            else "invalid format - value does not look like a valid VM ID"
        )
        raise BadOption("Parameter verification failed.", command, {"vmid": text})
    if rest and command != "exec":
        raise BadOption("too many arguments", command)
    return Arguments(int(vmid), options, rest)


def list_guests(command: str, words: list[str]) -> None:
    if words:
        raise BadOption("too many arguments", command)
    rows = [(vmid, guests.load(vmid).main.keys) for vmid in guests.vmids()]
    row = "{:<10} {:<10} {:<12} {:<20}".format
    if rows:
        print(row("VMID", "Status", "Lock", "Name"))
    for vmid, keys in rows:
        status = "running" if guests.running(vmid) else "stopped"
        print(row(vmid, status, keys.get("lock", ""), keys.get("hostname", f"CT{vmid}")))


def config(command: str, words: list[str]) -> None:
    said = parse(command, words, {"current": "flag", "snapshot": "value"})
    current, snapshot = said.flag("current"), said.options.get("snapshot")
    if snapshot is not None and current:
        both = "cannot use 'snapshot' parameter with 'current'"
        raise BadOption("Parameter verification failed.", command, {"snapshot": both, "current": both})
    conf = guests.load(said.vmid)
    if snapshot is not None:
        if snapshot not in conf.snapshots:
            raise Failure(f"snapshot '{snapshot}' does not exist")
        section = conf.snapshots[snapshot]
    else:
        section = conf.main if current else grammar.with_pending(conf)
    keys = dict(section.keys)
    if section.description:
        keys["description"] = grammar.encode(section.description)
    if section.environment:
        keys["env"] = "\0".join(section.environment)
    for key in sorted(keys):
        print(f"{key}: {keys[key]}")
    for key, value in section.lxc:
        print(f"{key}: {value}")


def pending(command: str, words: list[str]) -> None:
    said = parse(command, words, {})
    conf = guests.load(said.vmid)
    current, new = _printed(conf.main), _printed(conf.pending)
    deleted = grammar.delete_list(new.pop("delete", ""))
    for key in sorted({*current, *new, *deleted}):
        if key in current and key in deleted:
            print(f"del {key}: {current[key]}")
        elif key in current:
            print(f"cur {key}: {current[key]}")
            if key in new:
                print(f"new {key}: {new[key]}")
        elif key in new:
            print(f"new {key}: {new[key]}")


def _printed(section: Section) -> dict[str, str]:
    keys = dict(section.keys)
    if section.description:
        keys["description"] = grammar.encode(section.description)
    return keys


def set_options(command: str, words: list[str]) -> None:
    said = parse(command, words, {"delete": "value", "revert": "value", "digest": "value", "description": "value"})
    options = dict(said.options)
    digest = options.pop("digest", "")
    if not options:
        raise Failure("no options specified")
    delete, revert = (grammar.delete_list(options.pop(name, "")) for name in ("delete", "revert"))
    wrong = {}
    for key, value in options.items():
        try:
            if key != "description":
                options[key] = grammar.check(key, value)
        except ConfError as error:
            wrong[key] = f"invalid format - {error}" if str(error).startswith(("format", "inv", "dup")) else str(error)
    for name, keys in (("delete", delete), ("revert", revert)):
        for key in keys:
            if not (grammar.known(key) or key == "description"):
                wrong[name] = f"unknown option '{key}'"
            elif key in options:
                wrong[name] = f"you can't use '-{key}' and '-{name} {key}' at the same time"
    if wrong:
        raise BadOption("Parameter verification failed.", command, wrong)
    with guests.locked(said.vmid):
        conf = guests.load(said.vmid)
        guests.check_lock(conf)
        if digest and digest != conf.digest:
            raise Failure("detected modified configuration - file changed by other user? Try again.")
        _change(said.vmid, conf, options, delete, revert)
        guests.save(said.vmid, conf)
        guests.write_lxc_config(said.vmid, guests.load(said.vmid))


def _change(vmid: int, conf: Conf, options: dict[str, str], delete: list[str], revert: list[str]) -> None:
    """Into pending first; from there at once, or by hot-plug, or at the next start."""
    new = conf.pending.keys
    doomed = set(grammar.delete_list(new.get("delete", "")))
    for key in revert:
        new.pop(key, None)
        doomed.discard(key)
    for key in delete:
        if key in ("memory", "rootfs", "ostype"):
            raise Failure(f"unable to delete required option '{key}'")
        if key == "unprivileged":
            raise Failure("unable to delete read-only option: 'unprivileged'")
        if key == "description":
            conf.main.description = ""
        elif key in conf.main.keys or key in new:
            new.pop(key, None)
            doomed.add(key)
        else:
            print(f"cannot delete '{key}' - not set in current configuration!", file=sys.stderr)
    if "description" in options:
        conf.main.description = options.pop("description")
    for key, value in options.items():
        if key == "unprivileged":
            raise Failure("unable to modify read-only option: 'unprivileged'")
        if re.fullmatch(r"dev\d+", key):
            device = grammar.device(value)
            if "path" not in device:
                raise Failure(f"Path is not defined for passthrough device {key}")
            guests.ask_device(device["path"])
        new[key] = value
        doomed.discard(key)
    for key in [key for key in new if key != "delete" and conf.main.keys.get(key) == new[key]]:
        del new[key]
    doomed = {key for key in doomed if key in conf.main.keys}
    new.pop("delete", None)
    if doomed:
        new["delete"] = ",".join(sorted(doomed))
    touched = frozenset({*options, *delete})
    if not guests.running(vmid):
        grammar.apply_pending(conf, touched)
        return
    now = {key for key in touched if key in AT_ONCE or key in LIMITS}
    if now & LIMITS:
        guests.limit(vmid, {**conf.main.keys, **new})
    for key in sorted(touched & set(new)):
        if re.fullmatch(r"dev\d+", key) and key not in conf.main.keys:
            try:
                hotplug.add(vmid, conf, grammar.device(new[key]))
            except (Failure, ConfError) as error:
                text = f"unable to hotplug {key}: {error}"
                raise BadOption("Parameter verification failed.", "set", {key: text}) from None
            now.add(key)
    if now:
        grammar.apply_pending(conf, frozenset(now))


def status(command: str, words: list[str]) -> None:
    said = parse(command, words, {"verbose": "flag"})
    conf = guests.load(said.vmid)
    state = "running" if guests.running(said.vmid) else "stopped"
    if not said.flag("verbose"):
        print(f"status: {state}")
        return
    facts = {
        "cpus": conf.main.keys.get("cores") or str(os.cpu_count()),
        "maxmem": str(int(conf.main.keys.get("memory", "512")) * 1024**2),
        "name": conf.main.keys.get("hostname", f"CT{said.vmid}"),
        "status": state,
        "type": "lxc",
        "vmid": str(said.vmid),
    }
    if state == "running":
        facts["pid"] = str(guests.init_pid(said.vmid))
    if "lock" in conf.main.keys:
        facts["lock"] = conf.main.keys["lock"]
    for key in sorted(facts):
        print(f"{key}: {facts[key]}")


def start(command: str, words: list[str]) -> None:
    said = parse(command, words, {"skiplock": "flag", "debug": "flag"})
    if guests.running(said.vmid):
        raise Failure(f"CT {said.vmid} already running")
    with guests.locked(said.vmid):
        conf = guests.load(said.vmid)
        if conf.main.keys.get("template") == "1":
            raise Failure("you can't start a CT if it's a template")
        if not said.flag("skiplock"):
            guests.check_lock(conf)
        guests.start(said.vmid, conf, debug=said.flag("debug"))


def stop(command: str, words: list[str]) -> None:
    said = parse(command, words, {"skiplock": "flag", "overrule-shutdown": "flag"})
    _must_run(said.vmid)
    with guests.locked(said.vmid):
        conf = guests.load(said.vmid)
        if not said.flag("skiplock"):
            guests.check_lock(conf)
        guests.stop(said.vmid, kill=True)


def shutdown(command: str, words: list[str]) -> None:
    said = parse(command, words, {"timeout": "value", "forceStop": "flag"})
    _must_run(said.vmid)
    timeout = _integer(said, "timeout", 60)
    with guests.locked(said.vmid):
        guests.check_lock(guests.load(said.vmid))
        guests.stop(said.vmid, kill=False, timeout=timeout, kill_after=said.flag("forceStop"))


def reboot(command: str, words: list[str]) -> None:
    said = parse(command, words, {"timeout": "value"})
    guests.load(said.vmid)
    _must_run(said.vmid)
    guests.reboot(said.vmid, _integer(said, "timeout", None))


def execute(command: str, words: list[str]) -> None:
    said = parse(command, words, {"keep-env": "flag"})
    guests.load(said.vmid)
    if not guests.running(said.vmid):
        raise Failure(f"container '{said.vmid}' not running!")
    if not said.rest:
        raise Failure("missing command at /usr/share/perl5/PVE/CLI/pct.pm line 241.")
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        os.environ.pop(name, None)
    kept = "--keep-env" if said.flag("keep-env", default=True) else "--clear-env"
    sys.stdout.flush()
    os.execvp("lxc-attach", ["lxc-attach", "-n", str(said.vmid), kept, "--", *said.rest])


def unlock(command: str, words: list[str]) -> None:
    said = parse(command, words, {})
    with guests.locked(said.vmid):
        conf = guests.load(said.vmid)
        if conf.main.keys.pop("lock", None) is None:
            raise Failure("no lock found trying to remove lock")
        guests.save(said.vmid, conf)


def _must_run(vmid: int) -> None:
    if not guests.running(vmid):
        raise Failure(f"CT {vmid} not running")


def _integer(said: Arguments, name: str, default: int | None) -> int | None:
    value = said.options.get(name)
    if value is None:
        return default
    if not value.isdecimal():
        errors = {name: f"type check ('integer') failed - got '{value}'"}
        raise BadOption("Parameter verification failed.", "", errors)
    return int(value)


COMMANDS: dict[str, Callable[[str, list[str]], None]] = {
    "list": list_guests,
    "config": config,
    "pending": pending,
    "set": set_options,
    "status": status,
    "start": start,
    "stop": stop,
    "shutdown": shutdown,
    "reboot": reboot,
    "exec": execute,
    "unlock": unlock,
}
