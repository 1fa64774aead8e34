"""The lab itself: machines that start, restart and reboot like the real ones, and nothing left when it goes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpuctl import hosts
from tests.lab.layout import GUESTS, MACHINES, NODES

pytestmark = pytest.mark.lab


def test_every_machine_has_systemd_and_an_identity_of_its_own(lab):
    boots = {one.name: lab.boot_id(one.name) for one in MACHINES}
    assert all(boots.values())
    assert len(set(boots.values())) == len(MACHINES)
    for one in MACHINES:
        assert lab.check(one.name, ["cat", "/proc/1/comm"]) == "systemd\n"
        assert lab.check(one.name, ["uname", "-n"]).strip() == one.name
        assert lab.run(one.name, ["systemctl", "is-system-running"]).stdout.strip() == "running"


def test_machines_are_reached_over_ssh_by_name_and_only_with_the_key_known_in_advance(lab):
    for one in (*NODES, *(guest for guest in GUESTS if guest.sshd)):
        done = lab.ssh(one.name, "uname", "-n")
        assert (done.returncode, done.stdout.strip()) == (0, one.name), done.stderr


def test_ansible_reads_the_inventory_that_the_lab_wrote(lab):
    ansible = Path(sys.executable).with_name("ansible-inventory")
    said = subprocess.run([ansible, "-i", lab.inventory / "hosts.yml", "--list"], capture_output=True, check=True)
    hosts = json.loads(said.stdout)
    assert hosts["nodes"]["hosts"] == [node.name for node in NODES]
    assert hosts["guests"]["hosts"] == [guest.name for guest in GUESTS]
    assert hosts["_meta"]["hostvars"]["ct202"]["gpuctl_vmid"] == 202


def test_ansible_comes_in_over_ssh_with_what_the_inventory_says(lab):
    ansible = Path(sys.executable).with_name("ansible")
    reached = [one.name for one in MACHINES if one.name != "ct202"]
    command = [
        ansible,
        "-i",
        lab.inventory / "hosts.yml",
        ",".join(reached),
        "--one-line",
        "-m",
        "ansible.builtin.ping",
    ]
    said = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert sorted(line.split()[0] for line in said.stdout.splitlines() if "SUCCESS" in line) == sorted(reached), said


def test_gpuctl_reaches_every_machine_of_the_inventory_the_one_without_sshd_through_its_node(lab):
    ways = hosts.transports(hosts.load(lab.inventory))
    try:
        seen = {name: way.run(["uname", "-n"], timeout=20).text.strip() for name, way in ways.items()}
    finally:
        for way in ways.values():
            getattr(way, "close", lambda: None)()
    assert seen == {one.name: one.name for one in MACHINES}
