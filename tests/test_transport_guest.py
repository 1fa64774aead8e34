"""An LXC guest through its node. `pct` is a double that says what Proxmox VE's says (PVE/CLI/pct.pm, PVE/LXC.pm)."""

from __future__ import annotations

import os
import signal

import pytest

from gpuctl.transport import Completed, Guest, Local, Refused, Replay, TimedOut, Unreachable
from tests.patience import ends_within

PCT = """#!/bin/sh
# exec VMID [--keep-env 0] -- COMMAND: what runs in the guest runs here, with a clean environment.
[ "$1" = exec ] || exit 9
vmid=$2; shift 2
if [ "$1" = --keep-env ]; then
    [ -e "$PCT_OLD" ] && { echo 'Unknown option: keep-env' >&2; echo '400 unable to parse option' >&2; exit 255; }
    shift 2
fi
[ "$1" = -- ] || exit 9
shift
case $vmid in
    200) exec env -i PATH=/usr/bin:/bin "$@" ;;
    201) echo "container '201' not running!" >&2; exit 255 ;;
    *) echo "Configuration file 'nodes/kpro6/lxc/$vmid.conf' does not exist" >&2; exit 255 ;;
esac
"""


@pytest.fixture
def node(tmp_path, monkeypatch):
    (tmp_path / "pct").write_text(PCT)
    (tmp_path / "pct").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PCT_OLD", str(tmp_path / "old"))
    return Local("kpro6")


def test_input_output_error_and_exit_code_go_through(node):
    got = Guest("ct200", node, 200).run(["sh", "-c", "cat; echo no >&2; exit 3"], stdin=b"hello")
    assert (got.rc, got.stdout, got.stderr) == (3, b"hello", b"no\n")


def test_the_nodes_environment_stays_outside(node, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    assert "SECRET" not in Guest("ct200", node, 200).run(["env"]).text


def test_a_missing_command_is_127_and_a_signal_is_negative(node):
    assert Guest("ct200", node, 200).run(["no-such-command-at-all"]).rc == 127
    assert Guest("ct200", node, 200).run(["sh", "-c", "kill -9 $$"]).rc == -signal.SIGKILL


def test_a_release_without_keep_env_is_served_too(node, tmp_path):
    (tmp_path / "old").touch()
    guest = Guest("ct200", node, 200)
    assert guest.run(["cat"], stdin=b"in").text == "in"
    assert guest.run(["echo", "again"]).text == "again\n"


def test_a_hang_ends_in_time(node):
    with ends_within(5), pytest.raises(TimedOut):
        Guest("ct200", node, 200).run(["sleep", "60"], timeout=0.3)


def test_a_guest_that_does_not_run_is_worth_trying_again(node):
    with pytest.raises(Unreachable, match=r"^ct201: guest 201 on kpro6 is not running; start it there: pct start 201$"):
        Guest("ct201", node, 201).run(["true"])


def test_a_guest_that_does_not_exist_is_not(node):
    with pytest.raises(Refused, match="ct9: guest 9 on kpro6 does not exist"):
        Guest("ct9", node, 9).run(["true"])


def test_a_node_that_is_no_proxmox_node():
    node = Replay("plain", {"pct *": Completed(127, b"", b"sh: 1: pct: not found\n")})
    with pytest.raises(Refused, match="is plain a Proxmox VE node"):
        Guest("ct200", node, 200).run(["true"])


def test_what_the_nodes_transport_says_goes_through():
    node = Replay("kpro6", {"*": Unreachable("kpro6: Connection refused")})
    with pytest.raises(Unreachable, match="kpro6: Connection refused"):
        Guest("ct200", node, 200).run(["true"])
