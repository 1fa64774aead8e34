"""What is said of a server before its unit is placed; against saved answers of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuctl import deploy, hosts
from gpuctl.config import Server
from gpuctl.playbook import Outcome
from gpuctl.supervision import NoRoom, Start, SupervisionError
from gpuctl.transport import Completed, Replay

BOX = hosts.Inventory(Path("/nowhere"), {"box": hosts.Machine("box", "machine")}, {})


def placed(start, server=None, **answers):
    """Names of what was told of NCCL; the unit is in place already."""
    server = server or Server(engine="sglang", model="m")
    text = deploy.unit_of(start, server).text.encode()
    known = {
        "cat *": text,
        "systemctl show*": b"NeedDaemonReload=no\nUnitFileState=static\n",
        "sh -c 'home=*": b"",
        **answers,
    }
    told = []
    way = Replay("box", known)
    deploy.placer(
        BOX, BOX.machines["box"], way, {start.unit: server}, on_trap=lambda unit, trap: told.append(trap.summary)
    )(start)
    return told


def start(**env):
    return Start("gpuctl-s", ("/opt/python", "-m", "x"), env, "c")


def test_nothing_is_said_of_what_is_well():
    assert placed(start(NCCL_P2P_LEVEL="SYS")) == []


def test_a_silent_trap_is_told_and_one_that_ends_nccl_stops_it():
    assert placed(start(NCCL_P2P_LEVEL="sys")) == [
        "NCCL_P2P_LEVEL=sys is ignored: levels are compared letter by letter"
    ]
    with pytest.raises(SupervisionError, match="gpuctl-s: NCCL_ALGO=Tree leaves"):
        placed(start(NCCL_ALGO="Tree"))


def test_the_machines_own_nccl_conf_is_read_too():
    said = b"== /etc/nccl.conf\nNCCL_IB_DISABLE=1\nNCCL_DEBUG = INFO\n== /root/.nccl.conf\nNCCL_PROTO\n"
    assert placed(start(), **{"sh -c 'home=*": said}) == [
        "/etc/nccl.conf line 2 sets a variable 'NCCL_DEBUG ' to ' INFO': NCCL keeps the spaces",
        "/root/.nccl.conf line 1 has no `=` and is skipped: NCCL_PROTO",
    ]


def test_what_the_server_or_the_users_own_file_sets_wins_over_the_machines_nccl_conf():
    said = b"== /root/.nccl.conf\nNCCL_ALGO=Ring\n\n== /etc/nccl.conf\nNCCL_ALGO=Tree\nNCCL_P2P_LEVEL=sys\n"
    assert placed(start(NCCL_P2P_LEVEL="SYS"), **{"sh -c 'home=*": said}) == []
    with pytest.raises(SupervisionError, match=r"gpuctl-s: /etc/nccl.conf: NCCL_ALGO=Tree leaves"):
        placed(start(), **{"sh -c 'home=*": said.replace(b"NCCL_ALGO=Ring", b"")})


def test_a_user_and_the_files_of_secrets_are_looked_for_first():
    server = Server(engine="sglang", model="m", user="serve")
    assert placed(start(), server, **{"sh -c '[[] -z*": b""}) == []
    with pytest.raises(SupervisionError, match="gpuctl-s: user: there is no user serve on box; useradd --system serve"):
        placed(start(), server, **{"sh -c '[[] -z*": b"user\n"})


def test_cpus_are_tried_before_they_are_used():
    server = Server(engine="sglang", model="m", cpus="0-3")
    assert placed(start(), server, **{"python3 -c*": b""}) == []
    refused = Completed(1, b"", b"not allowed here: 2,3\n")
    with pytest.raises(SupervisionError, match=r"cpus: 0-3 is refused on box: not allowed here: 2,3; see cpuset.cpus"):
        placed(start(), server, **{"python3 -c*": refused})
    assert "CPUAffinity=0-3" in deploy.unit_of(start(), server).text


@pytest.mark.parametrize("full", [b"/etc\n", b""], ids=["still full", "a block is free again"])
def test_a_disk_without_room_is_no_failure_of_the_server(monkeypatch, full):
    why = "box: failed at: Place the units: writing: No space left on device"
    monkeypatch.setattr(deploy, "play", lambda *_, **__: Outcome(why, (), {}, 1.0))
    with pytest.raises(NoRoom, match=r"box: the disk( with /etc)? is full; make room there"):
        placed(start(), **{"cat *": b"another", "sh -c 'for d in*": full})


def test_a_server_that_was_started_at_boot_and_is_not_any_more_is_told(monkeypatch):
    monkeypatch.setattr(deploy, "play", lambda *_, **__: Outcome("", (), {}, 1.0))
    server = Server(engine="sglang", model="m")
    at_boot = deploy.unit_of(start(), server, boot=True).text.encode()
    for there, lost in ((at_boot, ["gpuctl-s"]), (b"[Unit]\n[Service]\n", [])):
        told = []
        way = Replay("box", {"cat *": there, "sh -c 'home=*": b""})
        deploy.placer(BOX, BOX.machines["box"], way, {"gpuctl-s": server}, on_boot_lost=told.append)(start())
        assert told == lost
