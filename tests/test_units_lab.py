"""Units and playbooks on machines with a real systemd: every word arrives as it was meant, and a second run changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuctl import hosts, render
from gpuctl.assets import asset
from gpuctl.playbook import play
from gpuctl.render import ServerUnit, Tmpfs

pytestmark = pytest.mark.lab

SAY = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open('/run/gpuctl-said.json', 'w'))"


@pytest.fixture(scope="module")
def machines(lab):
    ways = hosts.transports(hosts.load(lab.inventory))
    yield ways
    for way in ways.values():
        way.close()


def started(way, unit):
    """What a program was given that was started as this unit: (arguments, environment)."""
    path = render.server(unit).path
    script = (
        f"rm -f /run/gpuctl-said.json; cat > {path} && systemctl daemon-reload && systemctl start {unit.unit} && "
        f"while [ $(systemctl show -P ActiveState {unit.unit}) = active ]; do sleep 0.05; done; cat /run/gpuctl-said.json"
    )
    done = way.run(["sh", "-c", script], stdin=render.server(unit).text.encode(), timeout=30)
    assert done.rc == 0, done.stderr.decode()
    arguments, environment = json.loads(done.stdout)
    return arguments, environment


TABLE = [
    '--json', '{"a":1}', '{"a": 1}', "^foo$", "$5", "${NOPE}", "$NOPE", "50%", "%H", "%%", "C:\\temp", 'a"b"c', "'s q'",
    "> /tmp/x", "*.py", "~/m", "a;b", ";", "", " ", "\\", "\\\\", "\n", "a\tb", "{{ x }}", "é ü 漢字 🎉", "-", "@x", ":x", "+x", "!x", "#x",
]  # fmt: skip


def test_the_words_that_are_known_to_be_hurt(machines):
    env = {f"V{n}": word for n, word in enumerate(TABLE)}
    unit = ServerUnit("gpuctl-words", ("/usr/bin/python3", "-c", SAY, *TABLE), env)
    arguments, environment = started(machines["ct200"], unit)
    assert arguments == TABLE
    assert {name: environment.get(name) for name in env} == env


words = st.text(
    st.characters(exclude_categories=["Cs"]).filter(lambda c: c in "\n\t" or (ord(c) >= 32 and ord(c) != 127)),
    max_size=60,
) | st.text(st.sampled_from(list("\"'\\$%{}[]()<>|&;*?~#!`^:=-@+ \t\n/aéxun01")), max_size=30)


@given(arguments=st.lists(words, max_size=200), values=st.lists(words, max_size=100))
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_words_go_through_a_real_systemd_and_come_out_as_they_were(machines, arguments, values):
    env = {f"V{n}": value for n, value in enumerate(values)}
    unit = ServerUnit("gpuctl-words", ("/usr/bin/python3", "-c", SAY, *arguments), env)
    got, environment = started(machines["ct200"], unit)
    assert got == arguments
    assert {name: environment.get(name) for name in env} == env


def test_a_secret_reaches_the_process_and_nothing_else(machines):
    way = machines["ct200"]
    way.run(["sh", "-c", "mkdir -p /etc/gpuctl && umask 077 && printf hf_secret > /etc/gpuctl/hf"])
    argv = ("/usr/bin/python3", "-c", SAY, "$HOME", "a b")
    unit = ServerUnit("gpuctl-secret", argv, secrets={"HF_TOKEN": "/etc/gpuctl/hf"}, user="nobody")
    way.run(["sh", "-c", "rm -f /run/gpuctl-said.json; touch /run/gpuctl-said.json; chmod 666 /run/gpuctl-said.json"])
    file = render.server(unit)
    script = f"cat > {file.path} && systemctl daemon-reload && systemctl start gpuctl-secret; sleep 0.5; cat /run/gpuctl-said.json"
    arguments, environment = json.loads(way.run(["sh", "-c", script], stdin=file.text.encode(), timeout=30).stdout)
    assert arguments == ["$HOME", "a b"]
    assert environment["HF_TOKEN"] == "hf_secret"
    shown = way.run(
        ["sh", "-c", "systemctl show gpuctl-secret; systemctl cat gpuctl-secret; journalctl -u gpuctl-secret"]
    )
    assert "hf_secret" not in shown.text


@pytest.fixture
def inventory(lab, machines):
    """The lab's inventory; what gpuctl placed on its machines is gone before and afterwards."""
    clean = (
        "systemctl stop 'gpuctl-*' run-gpuctl*.mount 2>/dev/null; find /etc/systemd/system -name '*gpuctl*' -delete; "
        "rm -rf /var/lib/gpuctl /etc/gpuctl /usr/local/lib/gpuctl /etc/modules-load.d/gpuctl*; systemctl daemon-reload"
    )

    def wipe():
        for way in machines.values():
            way.run(["sh", "-c", clean], timeout=30)

    wipe()
    yield lab.inventory
    wipe()


def changed(outcome):
    assert outcome.well, outcome.why
    return dict(outcome.changed)


def thrice(playbook, inventory, machines, variables):
    """Check mode says what the run then does; a second run changes nothing."""
    would = play(playbook, inventory, machines, variables, check=True)
    done = play(playbook, inventory, machines, variables)
    assert changed(would).keys() == changed(done).keys() == set(machines)
    assert changed(play(playbook, inventory, machines, variables)) == {}
    assert changed(play(playbook, inventory, machines, variables, check=True)) == {}
    return done


def undone(playbook, inventory, machines, variables):
    variables = {**variables, "undo": True}
    assert set(changed(play(playbook, inventory, machines, variables))) == set(machines)
    assert changed(play(playbook, inventory, machines, variables)) == {}


@pytest.mark.parametrize("guest", ["ct200", "ct202"])
def test_a_server_is_placed_started_stopped_and_taken_away(inventory, machines, guest):
    unit = ServerUnit("gpuctl-x", ("/bin/sleep", "1000"), {"T": "{{ not_a_template }}"}, campaign="c")
    given = {"server_files": [render.server(unit).as_vars()], "server_state": "started"}
    thrice("server", inventory, [guest], given)
    assert machines[guest].run(["systemctl", "is-active", "gpuctl-x"]).text == "active\n"
    assert "T={{ not_a_template }}" in machines[guest].run(["systemctl", "cat", "gpuctl-x"]).text
    undone("server", inventory, [guest], given)
    assert machines[guest].run(["systemctl", "is-active", "gpuctl-x"]).text == "inactive\n"
    assert machines[guest].run(["test", "-e", render.server(unit).path]).rc == 1


def test_a_unit_that_systemd_does_not_accept_is_not_placed(inventory, machines):
    file = render.server(ServerUnit("gpuctl-x", ("/opt/none/python",)))
    got = play("server", inventory, ["ct200"], {"server_files": [file.as_vars()]})
    assert "gpuctl-x.service: Command /opt/none/python is not executable" in got.why
    assert machines["ct200"].run(["test", "-e", file.path]).rc == 1


def test_a_unit_of_that_name_that_is_not_ours_is_left_alone(inventory, machines):
    file = render.server(ServerUnit("gpuctl-theirs", ("/bin/true",)))
    machines["ct200"].run(["sh", "-c", f"echo '[Unit]' > {file.path}"])
    got = play("server", inventory, ["ct200"], {"server_files": [file.as_vars()]})
    assert "is there already and not ours" in got.why
    assert machines["ct200"].run(["cat", file.path]).text == "[Unit]\n"
    machines["ct200"].run(["rm", file.path])


def test_a_memory_file_system_is_mounted_grows_with_what_is_in_it_and_goes(inventory, machines):
    def given(megabytes):
        return {"tmpfs_files": [render.tmpfs(Tmpfs("/run/gpuctl/test-models", megabytes << 20)).as_vars()]}

    way = machines["ct200"]
    thrice("tmpfs", inventory, ["ct200"], given(8))
    way.run(["sh", "-c", "echo model > /run/gpuctl/test-models/m"])
    thrice("tmpfs", inventory, ["ct200"], given(16))
    assert way.run(["cat", "/run/gpuctl/test-models/m"]).text == "model\n"
    assert "size=16384k" in way.run(["grep", "test-models", "/proc/mounts"]).text
    undone("tmpfs", inventory, ["ct200"], given(16))
    assert way.run(["grep", "-c", "test-models", "/proc/mounts"]).text == "0\n"


def test_settings_are_set_read_back_set_again_at_boot_and_undone(inventory, machines):
    way = machines["kpro7"]
    way.run(["sh", "-c", "mkdir -p /etc/knobs; echo 1 > /etc/knobs/numa"])
    wanted = [{"name": "numa", "file": "/etc/knobs/numa", "want": "0"}]
    program = asset("playbooks", "library", "settle.py").read_text()
    files = [file.as_vars() for file in render.tune(wanted, program)]
    given = {"settings": wanted, "tune_files": files}
    done = thrice("tune", inventory, ["kpro7"], given)
    assert "-numa = 1\n+numa = 0\n" in done.diff
    way.run(["sh", "-c", "echo 1 > /etc/knobs/numa; systemctl start gpuctl-tune"])  # as a boot does
    assert way.run(["cat", "/etc/knobs/numa"]).text == "0\n"
    undone("tune", inventory, ["kpro7"], given)
    assert way.run(["cat", "/etc/knobs/numa"]).text == "1\n"
    bad = play("tune", inventory, ["kpro7"], {"settings": [{**wanted[0], "file": "/nowhere"}]})
    assert "numa: /nowhere: No such file or directory" in bad.why


def test_device_nodes_are_made_at_boot(inventory, machines):
    thrice("devices", inventory, ["kpro6", "kpro7"], {})
    assert machines["kpro6"].run(["systemctl", "is-enabled", "gpuctl-devices"]).text == "enabled\n"
    undone("devices", inventory, ["kpro6", "kpro7"], {})


def test_the_playbooks_work_alone(inventory):
    command = [Path(sys.executable).with_name("ansible-playbook"), "-i", inventory, asset("playbooks", "site.yml")]
    env = {**os.environ, "ANSIBLE_CONFIG": str(asset("ansible.cfg"))}
    done = subprocess.run([*command, "--check", "--diff"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpuctl-devices.service" in done.stdout
