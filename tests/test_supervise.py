"""Servers without systemd: their end is known, nothing of them is left, and one is never taken for another."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpuctl import render
from gpuctl.supervision import Processes, Start, SupervisionError, Units
from gpuctl.transport import Completed, Local
from tests.patience import ends_within, wait_until


@pytest.fixture
def supervisor(tmp_path):
    supervisor = Processes(Local(), str(tmp_path / "servers"), python=sys.executable)
    yield supervisor
    units, _ = supervisor.status()
    for unit in units:
        supervisor.stop(unit.unit, grace_s=0)


def start(supervisor, *argv, unit="u", **more):
    return supervisor.start(Start(unit, argv, more.pop("env", {}), "test", **more))


def ended(supervisor, unit="u"):
    for _ in range(200):
        (state,) = [u for u in supervisor.status()[0] if u.unit == unit]
        if not state.running:
            return state
        time.sleep(0.02)
    raise AssertionError("still running")


@pytest.mark.parametrize(
    ("script", "status", "name"),
    [("exit 0", 0, None), ("exit 7", 7, None), ("kill -KILL $$", -9, "SIGKILL"), ("kill -ILL $$", -4, "SIGILL"), ("kill -40 $$", -40, "signal 40")],
)  # fmt: skip
def test_how_it_ended_is_known(supervisor, script, status, name):
    start(supervisor, "sh", "-c", script)
    state = ended(supervisor)
    assert (state.exit_status, state.signal) == (status, name)


def test_a_program_that_is_not_there_is_an_error(supervisor):
    with pytest.raises(SupervisionError, match="/no/such: No such file"):
        start(supervisor, "/no/such")


def test_stopping_leaves_nothing_behind_whatever_it_does_about_signals(supervisor, tmp_path):
    # ignores TERM, has a child of its own session that ignores everything it can
    script = "trap '' TERM HUP INT; setsid sh -c \"trap '' TERM; sleep 300\" & sleep 300"
    start(supervisor, "sh", "-c", script)
    time.sleep(0.3)
    with ends_within(5):
        state = supervisor.stop("u", grace_s=0.5)
    assert not state.running
    mark = f"GPUCTL_UNIT={tmp_path}".encode()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                assert mark not in file.read()


@pytest.mark.parametrize("how", ["it is stopped", "its parent dies"])
def test_a_process_that_lost_its_environment_belongs_to_the_server(supervisor, tmp_path, how):
    # as setproctitle leaves SGLang's schedulers
    script = f"env -i sh -c 'echo $$ > {tmp_path}/child; exec sleep 300' & sleep 300"
    state = start(supervisor, "sh", "-c", script)
    file = tmp_path / "child"
    assert wait_until(lambda: file.exists() and file.read_text().strip())
    child = int(file.read_text())
    if how == "it is stopped":
        supervisor.stop("u", grace_s=5)
    else:
        os.kill(state.pid, signal.SIGKILL)
    assert wait_until(lambda: gone(child))


def gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


@pytest.fixture
def frozen(tmp_path):
    """A folder whose file system is frozen: who writes there hangs in the kernel, like a process in a driver that is stuck."""
    if os.geteuid() != 0:
        pytest.skip("freezes a file system: needs root")
    image, folder = tmp_path / "image", tmp_path / "frozen"
    folder.mkdir()
    image.write_bytes(bytes(8 << 20))
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, folder], check=False, capture_output=True).returncode:
        pytest.skip("no loop device here")
    try:
        subprocess.run(["fsfreeze", "--freeze", folder], check=True)
        yield folder
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", folder], check=False, capture_output=True)
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_process_that_cannot_be_killed_is_named_and_not_waited_for_for_ever(supervisor, frozen):
    pid = start(supervisor, "sh", "-c", f"echo > {frozen}/file").pid
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "D", 10)
    supervisor.killed_s = 0.5
    with pytest.raises(
        SupervisionError, match=rf"process {pid} \(sh\) .* hangs in the kernel \(state D, waits in \w+\)"
    ):
        supervisor.stop("u", grace_s=0)
    subprocess.run(["fsfreeze", "--unfreeze", frozen], check=True)
    assert not supervisor.stop("u").running


def test_it_outlives_whoever_started_it(supervisor):
    state = start(supervisor, "sleep", "30")
    assert os.getsid(state.pid) != os.getsid(0)
    assert supervisor.status()[0][0].running


def test_a_killed_keeper_does_not_hide_the_server(supervisor, tmp_path):
    start(supervisor, "sleep", "30")
    keeper = json.loads((tmp_path / "servers/u/state.json").read_text())["keeper"]
    os.kill(keeper, signal.SIGKILL)
    time.sleep(0.1)
    assert supervisor.status()[0][0].running
    assert not supervisor.stop("u").running


def test_another_process_with_the_same_number_is_not_taken_for_it(supervisor, tmp_path):
    start(supervisor, "sleep", "30")
    path = tmp_path / "servers/u/state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "start": state["start"] - 1}))
    assert not supervisor.status()[0][0].running


def test_starting_twice_is_refused(supervisor):
    start(supervisor, "sleep", "30")
    with pytest.raises(SupervisionError, match="runs already"):
        start(supervisor, "sleep", "30")


def test_secrets_reach_the_server_and_no_file(supervisor, tmp_path):
    (tmp_path / "key").write_text("s3cr3t-value\n")
    start(supervisor, "sh", "-c", 'test "$HF_TOKEN" = s3cr3t"-"value', secrets={"HF_TOKEN": str(tmp_path / "key")})
    assert ended(supervisor).exit_status == 0
    for path in (tmp_path / "servers").glob("**/*"):
        assert path.is_dir() or b"s3cr3t-value" not in path.read_bytes()


def test_watching_sees_the_log_and_the_end(supervisor):
    start(supervisor, "sh", "-c", "echo one; sleep 0.5; printf 'tw\\377o'; exit 3")
    heard = []
    watch = supervisor.watch("u", [], heard.append)
    assert watch.ended.wait(10)
    assert "".join(heard) == "one\ntw\ufffdo"
    assert watch.exit["status"] == 3
    assert list(watch.log_tail) == ["one", "tw\ufffdo"]


def test_watching_ends_when_it_is_closed(supervisor):
    start(supervisor, "sleep", "30")
    before = threading.active_count()
    watch = supervisor.watch("u", [], lambda text: None)
    watch.close()
    for _ in range(100):
        if threading.active_count() <= before:
            break
        time.sleep(0.05)
    assert threading.active_count() <= before


@pytest.mark.parametrize("wrapped", [(), ("sh", "-c", 'env -i "$@"; true', "sh")])  # the second has lost its mark
def test_who_listens_on_a_port(supervisor, wrapped):
    code = "import socket,time; s=socket.socket(); s.bind(('127.0.0.1',0)); s.listen(); print(s.getsockname()[1], flush=True); time.sleep(30)"
    heard = []
    start(supervisor, *wrapped, sys.executable, "-c", code)
    watch = supervisor.watch("u", [], heard.append)
    while not "".join(heard).endswith("\n"):
        time.sleep(0.02)
    port = int("".join(heard))
    watch.close()
    _, listening = supervisor.status([port])
    assert supervisor.owns(listening[port], "u")
    assert not supervisor.owns(listening[port], "other")


def test_a_unit_is_given_the_time_to_stop_that_its_file_grants_it():
    grants = int(re.search(r"TimeoutStopSec=(\d+)", render.server(render.ServerUnit("u", ("/bin/true",))).text)[1])

    class Machine:
        name = "box"

        def run(self, argv, *, stdin=b"", timeout=None, on_stdout=None):
            assert timeout > grants + 30, "the campaign would end because a server takes its time"
            return Completed(0, b'{"stopped": null}', b"")

    assert Units(Machine(), lambda start: None).stop("u") is None
