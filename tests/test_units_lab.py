"""Units and playbooks on machines with a real systemd: every word arrives as it was meant, and a second run changes nothing."""

from __future__ import annotations

import json
import os
import re
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


def test_a_model_is_tried_five_times_and_its_server_has_failed_only_when_that_gave_up(inventory, machines):
    """What is placed for the boot, but for a model that never comes and tries that come sooner."""
    way = machines["ct200"]
    text = render.stage("never", {}, "/run", "")[2].text
    for before, after in (("/usr/bin/python3 /usr/local/lib/gpuctl/stage.py", "/bin/false"), ("Sec=30", "Sec=2")):
        assert before in text
        text = text.replace(before, after)
    text = re.sub("StandardInput=.*\n", "", text)
    server = ServerUnit("gpuctl-waits", ("/bin/sleep", "1000"), boot=True, after=("gpuctl-stage-never.service",))
    note = render.failed_note()
    for path, content in (
        ("/etc/systemd/system/gpuctl-stage-never.service", text),
        (render.server(server).path, render.server(server).text),
        (note.path, note.text),
    ):
        way.run(["sh", "-c", 'cat > "$1"', "sh", path], stdin=content.encode())
    script = (
        "systemctl daemon-reload; systemctl enable -q gpuctl-waits; systemctl start --no-block gpuctl-waits; sleep 1; "
        "echo then: $(ls /var/lib/gpuctl/failed 2>/dev/null); "
        "until [ $(systemctl is-active gpuctl-stage-never) = failed ] && [ -e /var/lib/gpuctl/failed/gpuctl-waits.service ]; "
        "do sleep 0.2; done; cd /var/lib/gpuctl/failed; grep -o '[a-z-]*$' *; "
        "journalctl -b -u gpuctl-stage-never -o cat | grep -c 'code=exited'"
    )
    said = way.run(["sh", "-c", script], timeout=120).text.splitlines()
    assert said == ["then:", "gpuctl-stage-never.service:exit-code", "gpuctl-waits.service:dependency", "5"]


def changed(outcome):
    assert outcome.well, outcome.why
    return dict(outcome.changed)


HERE = ["ct200", "ct202", "kpro7"]


def test_all_is_placed_found_in_place_the_next_time_and_taken_away(inventory, machines):
    """Check mode says what the run then does; a second run changes nothing; the same for taking it away."""
    unit = ServerUnit("gpuctl-x", ("/bin/sleep", "1000"), {"T": "{{ not_a_template }}"}, campaign="c")
    wanted = [{"name": "numa", "file": "/etc/knobs/numa", "want": "0"}]
    program = asset("playbooks", "library", "settle.py").read_text()
    node = machines["kpro7"]
    node.run(["sh", "-c", "mkdir -p /etc/knobs; echo 1 > /etc/knobs/numa"])

    def tmpfs(megabytes):
        return [render.tmpfs(Tmpfs("/run/gpuctl/test-models", megabytes << 20)).as_vars()]

    def site(undo=False, check=False):
        given = {
            "server_files": [render.server(unit).as_vars()],
            "server_state": "started",
            "tmpfs_files": tmpfs(8),
            "settings": wanted,
            "tune_files": [file.as_vars() for file in render.tune(wanted, program)],
            "undo": undo,
        }
        return play("site", inventory, HERE, given, check=check)

    would = site(check=True)
    done = site()
    assert changed(would).keys() == changed(done).keys() == set(HERE)
    assert "-numa = 1\n+numa = 0\n" in done.diff
    assert changed(site()) == {}

    guests = [machines["ct200"], machines["ct202"]]
    for way in guests:
        assert way.run(["systemctl", "is-active", "gpuctl-x"]).text == "active\n"
        assert "T={{ not_a_template }}" in way.run(["systemctl", "cat", "gpuctl-x"]).text
        way.run(["sh", "-c", "echo model > /run/gpuctl/test-models/m"])
    assert node.run(["systemctl", "is-enabled", "gpuctl-devices"]).text == "enabled\n"
    node.run(["sh", "-c", "echo 1 > /etc/knobs/numa; systemctl restart gpuctl-tune"])  # as a boot does
    assert node.run(["cat", "/etc/knobs/numa"]).text == "0\n"

    assert changed(play("tmpfs", inventory, ["ct200"], {"tmpfs_files": tmpfs(16)})).keys() == {"ct200"}
    assert machines["ct200"].run(["cat", "/run/gpuctl/test-models/m"]).text == "model\n"
    assert "size=16384k" in machines["ct200"].run(["grep", "test-models", "/proc/mounts"]).text

    assert set(changed(site(undo=True))) == set(HERE)
    assert changed(site(undo=True)) == {}
    for way in guests:
        assert way.run(["systemctl", "is-active", "gpuctl-x"]).text == "inactive\n"
        assert way.run(["test", "-e", render.server(unit).path]).rc == 1
        assert way.run(["grep", "-c", "test-models", "/proc/mounts"]).text == "0\n"
    assert node.run(["cat", "/etc/knobs/numa"]).text == "1\n"


def test_a_setting_that_cannot_be_set_is_named(inventory, machines):
    bad = play("tune", inventory, ["kpro7"], {"settings": [{"name": "numa", "file": "/nowhere", "want": "0"}]})
    assert "numa: /nowhere: No such file or directory" in bad.why


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


def test_the_playbooks_work_alone(inventory):
    command = [Path(sys.executable).with_name("ansible-playbook"), "-i", inventory, asset("playbooks", "site.yml")]
    env = {**os.environ, "ANSIBLE_CONFIG": str(asset("ansible.cfg"))}
    done = subprocess.run([*command, "--check", "--diff"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpuctl-devices.service" in done.stdout
