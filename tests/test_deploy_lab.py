"""Servers brought to guests as units, over SSH and by the node's pct exec alone, and what is refused before anything is placed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuctl import deploy, hosts
from gpuctl.config import Server
from gpuctl.finding import Remedy
from gpuctl.supervision import Start, SupervisionError, Units

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def machines(lab):
    return hosts.load(lab.inventory)


@pytest.fixture(scope="module")
def ways(machines):
    found = hosts.transports(machines)
    yield found
    for way in found.values():
        way.run(["sh", "-c", "rm -f /etc/systemd/system/gpuctl-t*.service; systemctl daemon-reload"])
        way.close()


def units(machines, ways, name, **server):
    servers = {"gpuctl-t": Server(engine="sglang", **server)}
    steps = []
    place = deploy.placer(machines, machines.machines[name], ways[name], servers, on_step=steps.append)
    return Units(ways[name], place), place, steps


@pytest.mark.parametrize("guest", ["ct200", "ct202"])
def test_a_server_is_placed_and_started_and_found_in_place_the_next_time(machines, ways, guest):
    supervisor, place, steps = units(machines, ways, guest)
    start = Start(
        "gpuctl-t", ["python3", "-c", "import time; print('up', flush=True); time.sleep(100)"], {"A": "{{ b }}"}, "c"
    )
    state = supervisor.start(start)
    assert (state.running, state.owner) == (True, "c")
    assert supervisor.stop("gpuctl-t").running is False
    assert [step.task for step in steps if step.state == "changed"] == ["Place the units"]
    steps.clear()
    place(start)
    assert steps == []  # no Ansible for what is there
    assert 'ExecStart=:"/usr/bin/python3"' in ways[guest].run(["systemctl", "cat", "gpuctl-t"]).text
    place(Start("gpuctl-t", ["python3", "-V"], {}, "c"))
    assert "-V" in ways[guest].run(["systemctl", "cat", "gpuctl-t"]).text


ODD = r"""
import sys
out = sys.stdout.buffer
out.write(b"bad \xff\xfe bytes\n" + b"x" * 100_000 + b" end of a long line\n" + b"\x1b[31mred\x1b[0m \x01\n")
"""


@pytest.mark.parametrize("start", [1, 2])
def test_a_log_of_odd_bytes_and_long_lines_arrives_whole_though_it_is_over_at_once(machines, ways, start):
    """And the second time without the words of the first, which stand in the journal under the same unit."""
    supervisor, _, _ = units(machines, ways, "ct200")
    supervisor.start(Start("gpuctl-t", ["python3", "-c", ODD], {}, "c"))
    if start == 2:  # systemd has forgotten it before anybody looks
        known = 'until test -z "$(systemctl show --property InvocationID --value gpuctl-t)"; do sleep 0.1; done'
        assert ways["ct200"].run(["timeout", "60", "sh", "-c", known]).rc == 0
    log = []
    watch = supervisor.watch("gpuctl-t", [], log.append)
    try:
        assert watch.ended.wait(60), "".join(log)[-200:]
    finally:
        watch.close()
        supervisor.stop("gpuctl-t")
    # systemd forgets a unit that ended well, at once or a moment later: that is no condition that was not met
    forgotten = {"status": None, "signal": None, "why": "it ended without a failure, as systemd has it"}
    assert watch.exit in (forgotten, {"status": 0, "signal": None, "why": "success"})
    lines = "".join(log).splitlines()
    assert lines[0] == "bad \ufffd\ufffd bytes"
    assert lines[1] == "x" * 100_000 + " end of a long line"
    assert lines[2].startswith("\x1b[31mred")
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("argv", "env", "server", "said"),
    [
        (["no-such-engine"], {}, {}, "ct200: there is no program no-such-engine; give its whole path"),
        (["/opt/none/python"], {}, {}, "is not executable"),
        (["python3", "a\x07"], {}, {}, "gpuctl-t: argument: the character U+0007"),
        (["python3"], {"NCCL_PROTO": "LL64"}, {}, "gpuctl-t: NCCL_PROTO=LL64: NCCL does not know LL64"),
        (["python3"], {}, {"numa": "--membind=77"}, "gpuctl-t: `numactl --membind=77` is refused on ct200"),
        (["python3"], {}, {"user": "nobodythere"}, "gpuctl-t: user: there is no user nobodythere on ct200; useradd"),
        (
            ["python3"],
            {},
            {"secrets": {"T": "/no/token"}},
            "gpuctl-t: secrets: T: /no/token is no file that can be read",
        ),
        (["python3"], {}, {"cpus": "0,900"}, "gpuctl-t: cpus: 0,900 is refused on ct200: not allowed here: 900"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_placed(machines, ways, argv, env, server, said):
    ways["ct200"].run(["rm", "-f", "/etc/systemd/system/gpuctl-t.service"])
    supervisor, _, _ = units(machines, ways, "ct200", **server)
    with pytest.raises(SupervisionError) as caught:
        supervisor.start(Start("gpuctl-t", argv, env, "c", server.get("secrets", {})))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ways["ct200"].run(["test", "-e", "/etc/systemd/system/gpuctl-t.service"]).rc == 1


def test_what_systemd_could_not_do_for_a_unit_is_said_in_its_words(ways):
    unit = "[Service]\nType=exec\nUser=nobodythere\nExecStart=/bin/true\n"
    put = "cat > /etc/systemd/system/gpuctl-t.service; systemctl daemon-reload"
    ways["ct200"].run(["sh", "-c", put], stdin=unit.encode())
    with pytest.raises(SupervisionError) as caught:
        Units(ways["ct200"], lambda start: None).start(Start("gpuctl-t", ["/bin/true"], {}, "c"))
    assert str(caught.value).endswith("error code: Failed to determine user credentials: No such process")


def test_a_remedy_for_the_node_goes_to_the_node_of_the_guest(machines):
    remedy = Remedy("devices", {"permanent": False}, on="node")
    done = deploy.mend(remedy, machines, machines.machines["ct200"], check=True)
    assert done.well, done.why
    assert {step.machine for step in done.steps} == {"kpro6"}
    lost = hosts.Machine("ct9", "guest")
    assert "its node is not in the inventory" in deploy.mend(remedy, machines, lost).why


def test_an_inventory_is_written_by_asking_a_node(lab, tmp_path):
    def gpuctl(*words):
        return subprocess.run(
            [sys.executable, "-m", "gpuctl", *words], cwd=tmp_path, capture_output=True, text=True, timeout=110,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )  # fmt: skip

    done = gpuctl("init", "-F", str(lab.state / "ssh/config"), "kpro6")
    assert done.returncode == 0, done.stderr
    assert "kpro6: a Proxmox VE node, 8 GPUs" in done.stdout
    assert "ct200: engines: sglang 0.5.11" in done.stdout
    rendered = gpuctl("render", "qwen3.6-27b-tp4", "-i", "kpro6")
    assert "--tp-size 4" in rendered.stdout
    seen = gpuctl("status", "-i", "kpro6", "-t", "ct200")  # through the node, as it was written down
    assert "8 x 96 GiB" in seen.stdout, seen.stderr
