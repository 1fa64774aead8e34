"""Changing machines: Ansible playbooks through ansible-runner, told truthfully.

A run went well when every machine that was meant has been processed and none failed or was unreachable. (ansible-runner
calls an empty inventory "successful" and has no statistics for a playbook that is missing or was cancelled.)

Secrets travel as paths of files. What Ansible is given and what it says lies in a folder only we can read, and is
gone when the run is over; of the environment it gets what it needs to log in, and nothing else.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuctl import background
from gpuctl.assets import asset

GRACE_S = 5.0  # for Ansible, to end its workers
# What of our environment reaches Ansible.
PASSED = frozenset({"HOME", "USER", "LOGNAME", "SHELL", "TZ", "TMPDIR", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR"})


@dataclass(frozen=True)
class Step:
    """What happened to one machine in one task. `state`: ok | changed | skipped | failed | unreachable | waiting."""

    task: str
    machine: str
    state: str
    message: str = ""
    diff: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `why` is empty when it went well, otherwise one line."""

    why: str
    steps: tuple[Step, ...]  # all but the skipped ones
    changed: Mapping[str, int]  # machine -> tasks that changed something (in check mode: would)
    seconds: float

    @property
    def well(self) -> bool:
        return not self.why

    @property
    def diff(self) -> str:
        return "".join(step.diff for step in self.steps)


def play(
    playbook: str,
    inventory: Path,
    machines: Sequence[str],
    variables: Mapping[str, Any] | None = None,
    *,
    check: bool = False,
    tags: Sequence[str] = (),
    timeout: float = 900.0,
    on_step: Callable[[Step], None] = lambda step: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Runs playbooks/<playbook>.yml for exactly these machines of an inventory (folder or file).

    `check` changes nothing and shows in `changed` and `diff` what would. `timeout` in seconds. An error of `on_step`
    and Ctrl-C end Ansible and are raised. Never raises for what goes wrong on the machines: that is Outcome.why.
    """
    import ansible_runner

    started = time.monotonic()
    if not machines:
        return Outcome("no machine is meant", (), {}, 0.0)
    listener = _Listener(on_step)
    stop = threading.Event()
    asked: list[float] = []  # when it was asked to end, in seconds since it began

    def ends(pid: Path) -> bool:
        """What ansible-runner asks all the time. True kills the process of Ansible, but not its workers, which would go
        on with their task: so it is asked to end first, and ends them."""
        took = time.monotonic() - started
        if not asked and (stop.is_set() or listener.broken is not None or took > timeout or cancelled()):
            with contextlib.suppress(OSError, ValueError):  # not there yet, or not any more
                os.kill(int(pid.read_text()), signal.SIGTERM)
            asked.append(took)
        return bool(asked) and took - asked[0] > GRACE_S

    file = asset("playbooks", f"{playbook}.yml")
    with _private_folder() as folder:
        given, pid = folder / "variables.json", folder / "pid"
        for file_of_ours in (given, pid):
            file_of_ours.touch(mode=0o600)
        given.write_text(json.dumps(_for_ansible(variables or {})), encoding="utf-8")
        words = ["--diff", "-e", f"@{given}", *(["--check"] if check else [])]
        words += ["--tags", ",".join(tags)] if tags else []
        runner = ansible_runner.interface.init_runner(
            private_data_dir=str(folder),
            project_dir=str(file.parent),
            playbook=str(file),
            inventory=str(inventory.resolve()),
            limit=",".join(machines),
            cmdline=shlex.join(words),
            quiet=True,
            settings={"pexpect_timeout": 0.2, "suppress_output_file": True},
            event_handler=listener.take,
            cancel_callback=functools.partial(ends, pid),
        )
        runner.config.env = _environment(runner.config.env)
        runner.config.command = [*_ending_with_us(pid), *runner.config.command]
        works: list[Future[Any]] = []
        try:
            running = background.begin(runner.run, f"playbook {playbook}", works)
            background.ended(works)
        finally:
            stop.set()
            background.ended(works, timeout=15)
    if listener.broken is not None:
        raise listener.broken
    running.result(timeout=0)
    took = time.monotonic() - started
    if asked:
        late = asked[0] > timeout
        why = f"playbook {playbook} did not end within {timeout:g} s" if late else f"playbook {playbook} was cancelled"
        if listener.task:
            why += f"; it was at: {listener.task}"
    else:
        why = _judged(playbook, machines, listener, runner.rc)
    return Outcome(why, tuple(listener.steps), dict((listener.stats or {}).get("changed", {})), took)


def _judged(playbook: str, machines: Sequence[str], listener: _Listener, rc: int | None) -> str:
    """Why the run did not go well; empty where it did."""
    failed = [step for step in listener.steps if step.state in ("failed", "unreachable")]
    if failed:
        # After the first failure only what mends it runs there, and says how it came out.
        first = [step for step in failed if step.machine == failed[0].machine][-1]
        others = len({step.machine for step in failed}) - 1
        more = f" (and {others} more)" if others else ""
        what = "cannot be reached" if first.state == "unreachable" else f"failed at: {first.task}"
        return f"{first.machine}: {what}{more}: {first.message}"
    if listener.stats is None:
        return f"playbook {playbook} did not run: {listener.complaint or f'ansible-playbook ended with {rc}'}"
    for kind, word in (("dark", "cannot be reached"), ("failures", "failed")):
        if listener.stats.get(kind):
            return f"{', '.join(sorted(listener.stats[kind]))}: {word}"
    left_out = [name for name in machines if name not in listener.stats.get("processed", {})]
    if left_out:
        return f"playbook {playbook} did not touch {', '.join(left_out)}: {listener.complaint or 'no play is for it'}"
    if rc != 0:
        return f"playbook {playbook} ended with {rc}: {listener.complaint}"
    return ""


class _Listener:
    """Reads ansible-runner's events."""

    def __init__(self, on_step: Callable[[Step], None]) -> None:
        self.steps: list[Step] = []
        self.stats: dict[str, Any] | None = None
        self.task = ""
        self.broken: BaseException | None = None
        self._on_step = on_step
        self._said: list[str] = []
        self._items: dict[tuple[str, str], list[str]] = {}

    def take(self, event: Mapping[str, Any]) -> bool:
        """False: the event is not kept on disk. Errors are kept for later: raised here, some would be swallowed."""
        try:
            self._read(event)
        except BaseException as error:  # noqa: BLE001 - it goes to the thread that asked
            self.broken = self.broken or error
        return False

    @property
    def complaint(self) -> str:
        """What Ansible printed outside of any task, as one line."""
        text = " ".join(" ".join(_plain(one).split()) for one in self._said)
        found = re.search(r"(?:\[ERROR\]|ERROR!|\[WARNING\]):? *:? *(.*)", text)
        return (found[1] if found else text)[:400].strip()

    def _read(self, event: Mapping[str, Any]) -> None:
        kind, data = str(event.get("event")), event.get("event_data") or {}
        result = data.get("res") or {}
        task, machine = str(data.get("task") or data.get("name") or ""), str(data.get("host") or "")
        if kind == "playbook_on_task_start":
            self.task = task
        elif kind == "playbook_on_stats":
            self.stats = {key: value for key, value in data.items() if isinstance(value, dict)}
        elif kind in ("runner_item_on_ok", "runner_item_on_failed"):
            self._items.setdefault((task, machine), []).append(_diff(result))
        elif kind == "runner_retry":
            self._say(Step(task, machine, "waiting", f"attempt {result.get('attempts', '')}".strip()))
        elif kind == "runner_on_unreachable":
            self._keep(Step(task, machine, "unreachable", _message(result)))
        elif kind == "runner_on_failed" and not data.get("ignore_errors"):
            self._keep(Step(task, machine, "failed", _message(result), self._diffs(task, machine, result)))
        elif kind == "runner_on_ok":
            state = "changed" if result.get("changed") else "ok"
            self._keep(Step(task, machine, state, "", self._diffs(task, machine, result)))
        elif kind == "runner_on_skipped":
            self._items.pop((task, machine), None)
            self._say(Step(task, machine, "skipped"))
        elif kind in ("verbose", "error", "warning", "system_warning", "deprecated"):
            self._said.append(str(event.get("stdout", "")))

    def _diffs(self, task: str, machine: str, result: Mapping[str, Any]) -> str:
        return "".join(self._items.pop((task, machine), [])) or _diff(result)

    def _keep(self, step: Step) -> None:
        self.steps.append(step)
        self._say(step)

    def _say(self, step: Step) -> None:
        self._on_step(step)


def _message(result: Mapping[str, Any]) -> str:
    """The words of a failed task, as one line."""
    for failed in result.get("results") or ():
        if failed.get("failed"):
            return _message(failed)
    for key in ("msg", "stderr", "module_stderr", "reason", "stdout", "censored"):
        words = " ".join(_plain(str(result.get(key) or "")).split())
        if words and words not in ("non-zero return code", "MODULE FAILURE"):
            return words[:4000]  # what a half-done job left is told whole
    return "no reason given"


def _diff(result: Mapping[str, Any]) -> str:
    """The differences a task reports, as a unified diff or as the module wrote them."""
    import difflib

    found = result.get("diff")
    text = []
    for one in found if isinstance(found, list) else [found] if found else []:
        if "prepared" in one:
            text.append(str(one["prepared"]).rstrip("\n") + "\n")
        if "before" not in one and "after" not in one:
            continue
        before, after = (_lines(one.get(side)) for side in ("before", "after"))
        if before == after:
            continue
        old, new = (str(one.get(f"{side}_header") or side) for side in ("before", "after"))
        text.extend(difflib.unified_diff(before, after, old, new))
    return "".join(line if line.endswith("\n") else line + "\n" for line in text)


def _lines(value: Any) -> list[str]:
    if isinstance(value, str):
        lines = value.splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += "\n"
        return lines
    return [] if value is None else (json.dumps(value, indent=1, sort_keys=True) + "\n").splitlines(keepends=True)


def _for_ansible(value: Any) -> Any:
    """Ansible fills in what looks like a template, in variables too: a unit with {{ }} in it is nothing for that."""
    if isinstance(value, str):
        if not re.search(r"\{[{%#]", value):
            return value
        return f"{{{{ '{base64.b64encode(value.encode()).decode()}' | b64decode }}}}"
    if isinstance(value, Mapping):
        return {str(name): _for_ansible(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_for_ansible(inner) for inner in value]
    return value


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _environment(prepared: Mapping[str, str]) -> dict[str, str]:
    """What ansible-playbook gets: what ansible-runner set, what we set, and of ours only what logging in needs."""
    passed = {name: value for name, value in os.environ.items() if name in PASSED}
    by_runner = {name: value for name, value in prepared.items() if os.environ.get(name) != value}
    bin_folder = str(Path(sys.executable).parent)
    return {
        **passed,
        **by_runner,
        # ansible-runner looks for ansible-playbook on PATH only.
        "PATH": os.pathsep.join([bin_folder, os.environ.get("PATH", os.defpath)]),
        "LC_ALL": "C.UTF-8",
        "ANSIBLE_CONFIG": str(asset("ansible.cfg")),
        "ANSIBLE_FORCE_COLOR": "0",
        "ANSIBLE_NOCOLOR": "1",
        "PYTHONWARNINGS": "ignore",
    }


def _ending_with_us(pid: Path) -> list[str]:
    """Words before a command that note its process, and end it when we are killed: an ansible-playbook whose terminal
    is gone never ends."""
    setpriv = shutil.which("setpriv")  # of util-linux
    noted = ["sh", "-c", 'echo $$ >"$0" && exec "$@"', str(pid)]
    return [*noted, setpriv, "--pdeathsig", "TERM", "--"] if setpriv else noted


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder for one run: in memory where the session has such a place, readable by us alone, gone afterwards."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    where = runtime if runtime and os.access(runtime, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="gpuctl-play-", dir=where))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
