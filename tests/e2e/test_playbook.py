"""Playbooks through the real Ansible: what a run says is what happened."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from pathlib import Path

import pytest
from sshd import Sshd

from gpuctl.assets import asset
from gpuctl.playbook import play
from tests.patience import ends_within, wait_until

HOSTS = "all: {hosts: {here: {ansible_connection: local}, there: {ansible_connection: local}}}\n"


@pytest.fixture
def book(tmp_path, monkeypatch):
    """`book(tasks)` makes playbooks/x.yml, with a variable `place` for files, and returns an inventory."""
    monkeypatch.setattr(
        "gpuctl.playbook.asset",
        lambda *parts: asset(*parts) if parts[0] == "ansible.cfg" else tmp_path.joinpath(*parts),
    )
    (tmp_path / "playbooks").mkdir()
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory/hosts.yml").write_text(HOSTS)
    (tmp_path / "inventory/servers.yml").write_text("defaults: {}\nservers: {}\n")

    def make(tasks, hosts="all"):
        lines = "\n".join(f"    {line}" for line in tasks.splitlines())
        (tmp_path / "playbooks/x.yml").write_text(f"- hosts: {hosts}\n  gather_facts: false\n  tasks:\n{lines}\n")
        return tmp_path / "inventory"

    return make


def test_what_would_change_is_shown_then_done_then_nothing_is_left_to_do(book, tmp_path):
    inventory = book("- name: Write\n  ansible.builtin.copy: {dest: '{{ out }}', content: '{{ text }}', mode: '0600'}")
    given = {"out": f"{tmp_path}/out", "text": "T={{ not_for_ansible }} {% endraw %} {# %}\n"}
    seen = []
    would = play("x", inventory, ["here"], given, check=True, on_step=seen.append)
    assert would.well
    assert would.changed == {"here": 1}
    assert "+T={{ not_for_ansible }} {% endraw %} {# %}" in would.diff
    assert not (tmp_path / "out").exists()
    assert [(step.machine, step.task, step.state) for step in seen] == [("here", "Write", "changed")]
    done = play("x", inventory, ["here"], given)
    assert (done.well, done.changed, done.diff) == (True, {"here": 1}, would.diff)
    assert (tmp_path / "out").read_text() == given["text"]
    again = play("x", inventory, ["here"], given)
    assert (again.well, again.changed, again.diff) == (True, {}, "")


def test_a_failed_task_is_told_with_its_machine_and_words(book):
    inventory = book("- name: Load the module\n  ansible.builtin.command: sh -c 'echo no such module >&2; exit 3'")
    got = play("x", inventory, ["here"])
    assert got.why == "here: failed at: Load the module: no such module"
    assert not got.well


def test_a_machine_that_cannot_be_reached_is_no_success(book):
    inventory = book("- ansible.builtin.ping:")
    (inventory / "hosts.yml").write_text(
        HOSTS.replace("there: {", "there: {ansible_ssh_common_args: -F /dev/null, ").replace(
            "local}}}", "ssh, ansible_host: 127.0.0.1, ansible_port: 1}}}"
        )
    )
    got = play("x", inventory, ["here", "there"])
    assert got.why.startswith("there: cannot be reached: ")
    assert "Connection refused" in got.why


@pytest.mark.parametrize(
    ("machines", "hosts", "said"),
    [
        (["nobody"], "all", "did not run: .*nobody"),
        (["here", "nobody"], "all", "did not touch nobody"),
        (["here"], "there", "did not run|did not touch here"),
        ([], "all", "no machine is meant"),
    ],
)
def test_a_run_that_leaves_out_a_machine_is_no_success(book, machines, hosts, said):
    got = play("x", book("- ansible.builtin.ping:", hosts), machines)
    assert not got.well
    assert re.search(said, got.why), got.why


def test_an_empty_inventory_and_a_missing_playbook_are_no_success(book):
    inventory = book("- ansible.builtin.ping:")
    got = play("nope", inventory, ["here"])
    assert "nope.yml could not be found" in got.why
    (inventory / "hosts.yml").write_text("all: {hosts: {}}\n")
    assert not play("x", inventory, ["here"]).well


def test_it_ends_in_time_and_says_where_it_was(book):
    inventory = book("- name: Wait for ever\n  ansible.builtin.command: sleep 60")
    for limit in (2.5, 10, 30):  # on a busy machine it takes a while until the task has begun
        with ends_within(limit + 3.5):
            got = play("x", inventory, ["here"], timeout=limit)
        if "it was at" in got.why:
            break
    assert got.why == f"playbook x did not end within {limit:g} s; it was at: Wait for ever"
    assert not running(inventory), "its task does not go on"


def test_it_can_be_cancelled(book):
    stop = threading.Event()
    inventory = book("- name: Wait for ever\n  ansible.builtin.command: sleep 60")
    threading.Timer(1.5, stop.set).start()
    got = play("x", inventory, ["here"], cancelled=stop.is_set)
    assert got.why.startswith("playbook x was cancelled")
    assert not running(inventory)


def test_a_fault_of_ours_ends_it_and_is_not_hidden(book):
    def fault(step):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        play("x", book("- ansible.builtin.ping:"), ["here"], on_step=fault)


def test_neither_our_environment_nor_what_it_was_given_is_left_anywhere(book, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    found = []

    def look(step):
        files = [file for file in (tmp_path / "tmp").rglob("*") if file.is_file()]
        found.extend((file, file.stat().st_mode & 0o077, b"hf_secret" in file.read_bytes()) for file in files)

    inventory = book(
        "- name: Environment\n"
        "  ansible.builtin.command: printenv HF_TOKEN\n"
        "  failed_when: false\n"
        "  register: printed\n"
        "- ansible.builtin.assert: {that: printed.rc == 1}"
    )
    got = play("x", inventory, ["here"], {"token_file": "/etc/hf"}, on_step=look)
    assert got.well, got.why
    assert found
    assert not any(readable or secret for _, readable, secret in found), found
    assert list((tmp_path / "tmp").iterdir()) == []


def test_over_ssh_with_the_host_key_checked(book, tmp_path):
    sshd = Sshd(tmp_path / "sshd")
    try:
        inventory = book("- name: Who\n  ansible.builtin.command: echo {{ inventory_hostname }}\n  changed_when: true")
        master = tmp_path / "master"  # its own: others beside us use theirs
        (inventory / "hosts.yml").write_text(
            "all: {hosts: {machine: {ansible_ssh_common_args: "
            f"-F {sshd.config} -o StrictHostKeyChecking=no, ansible_control_path: {master}}}}}}}\n"
        )
        got = play("x", inventory, ["machine"])
        assert got.well, got.why
        assert got.changed == {"machine": 1}
        sshd.known_hosts.write_text("")
        assert os.system(f"ssh -o ControlPath={master} -O exit x 2>/dev/null") == 0
        got = play("x", inventory, ["machine"])
        assert got.why.startswith("machine: cannot be reached: ")
        assert "Host key verification failed" in got.why
        assert sshd.known_hosts.read_text() == ""
    finally:
        sshd.stop()


BEGIN = "- name: Begin\n  ansible.builtin.shell: 'echo > {{ mark }}; sleep 100'"


def running(inventory):
    """Processes of Ansible that are at work with this inventory."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"ansible-playbook" in (words := line.read_bytes()) and str(inventory).encode() in words:
                found.append(line.parent.name)
    return found


def test_ctrl_c_ends_it_before_anything_else_happens(book, tmp_path):
    inventory, mark = book(BEGIN), tmp_path / "mark"

    def interrupt():
        wait_until(mark.exists)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        play("x", inventory, ["here"], {"mark": str(mark)})
    assert not running(inventory)


def test_killed_with_us_it_ends_too(book, tmp_path):
    """Left alone, it would go on changing machines beside the next run, or wait for a terminal that is gone."""
    inventory, mark = book(BEGIN), tmp_path / "mark"
    ours = os.fork()
    if ours == 0:
        play("x", inventory, ["here"], {"mark": str(mark)})
        os._exit(0)
    assert wait_until(mark.exists)
    assert running(inventory)
    os.kill(ours, signal.SIGKILL)
    os.waitpid(ours, 0)
    assert wait_until(lambda: not running(inventory), seconds=20), running(inventory)
