"""One server on several machines: started together, failed together, stopped together, and each with the engine's own flags."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuctl import config, hosts, plugins
from gpuctl.engines import Launch
from gpuctl.supervision import Processes, Start, SupervisionError
from gpuctl.together import Crews, ranked
from gpuctl.transport import Local

ROOT = Path(__file__).parents[1]
WAIT = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(300)"]


class Machine:
    """A machine of its own, as far as a supervisor can tell."""

    def __init__(self, folder, name):
        self.supervisor = Processes(Local(name), str(folder / name), python=sys.executable)

    def running(self):
        return [unit.unit for unit in self.supervisor.status()[0] if unit.running]


@pytest.fixture
def machines(tmp_path):
    found = [Machine(tmp_path, name) for name in ("ct200", "ct210")]
    yield found
    for machine in found:
        for unit in machine.running():
            machine.supervisor.stop(unit, grace_s=0)


def crews(machines, *argv):
    head, other = (machine.supervisor for machine in machines)
    return Crews(head, {"ct210": other}, {"u": [("ct210", argv or WAIT)]})


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_it_is_started_and_stopped_everywhere(machines):
    supervisor = crews(machines)
    state = supervisor.start(Start("u", WAIT, {}, "campaign"))
    assert (state.running, [machine.running() for machine in machines]) == (True, [["u"], ["u"]])
    assert supervisor.stop("u", grace_s=1).running is False
    assert [machine.running() for machine in machines] == [[], []]


def test_a_server_of_one_machine_is_on_that_one_only(machines):
    supervisor = crews(machines)
    supervisor.start(Start("alone", WAIT, {}, "campaign"))
    assert [machine.running() for machine in machines] == [["alone"], []]


def test_where_one_cannot_be_started_none_is_left(machines):
    supervisor = crews(machines, "/no/such/engine")
    with pytest.raises(SupervisionError, match="on ct210: /no/such/engine: No such file"):
        supervisor.start(Start("u", WAIT, {}, "campaign"))
    assert [machine.running() for machine in machines] == [[], []]


def test_when_one_ends_all_have_and_its_last_words_are_told(machines):
    supervisor = crews(machines, "sh", "-c", "sleep 1; echo NCCL is unhappy; exit 7")
    supervisor.start(Start("u", WAIT, {}, "campaign"))
    log = []
    watch = supervisor.watch("u", [], log.append)
    assert watch.ended.wait(30)
    assert (watch.exit["status"], watch.exit["machine"], watch.lost) == (7, "ct210", None)
    assert watch.log_tail[-1] == "NCCL is unhappy"
    assert "gpuctl: ct210 ended first; its last lines:\nNCCL is unhappy\n" in "".join(log)
    watch.close()
    supervisor.stop("u", grace_s=1)
    assert [machine.running() for machine in machines] == [[], []]


def test_one_left_behind_on_another_machine_is_found_and_stopped(machines):
    machines[1].supervisor.start(Start("u", WAIT, {}, "campaign"))
    supervisor = crews(machines)
    ((unit,), _) = supervisor.status()
    assert (unit.unit, unit.owner, unit.running) == ("u", "campaign", True)
    supervisor.stop("u", grace_s=1)
    assert machines[1].running() == []


HOSTS = """
all:
  children:
    guests:
      hosts:
        ct200: {ansible_host: 10.0.0.20, gpuctl_node: kpro6, gpuctl_vmid: 200}
        ct210: {ansible_connection: pct, gpuctl_node: kpro6, gpuctl_vmid: 210}
    nodes:
      hosts:
        kpro6: {}
"""


@pytest.mark.parametrize(
    ("engine", "head", "other"),
    [
        ("sglang", "--nnodes 2 --node-rank 0 --dist-init-addr 10.0.0.20:29500", "--nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.20:29500"),
        ("vllm", "--nnodes 2 --node-rank 0 --master-addr 10.0.0.20 --master-port 29500", "--node-rank 1 --master-addr 10.0.0.20 --master-port 29500 --headless"),
    ],
)  # fmt: skip
def test_each_machine_gets_the_engines_own_flags(tmp_path, engine, head, other):
    (tmp_path / "hosts.yml").write_text(HOSTS)
    server = config.Server(engine=engine, model="m", nodes=["ct200", "ct210"])
    module = plugins.get("engines", engine)
    lines = [" ".join(module.argv(one)) for one in ranked(Launch("s", server, "/m"), hosts.load(tmp_path))]
    assert (head in lines[0], other in lines[1], "--headless" in lines[0]) == (True, True, False), lines


def test_an_address_that_others_reach_has_to_be_known(tmp_path):
    (tmp_path / "hosts.yml").write_text(HOSTS)
    server = config.Server(engine="sglang", model="m", nodes=["ct210", "ct200"])
    with pytest.raises(hosts.BadInventory, match="ct210: give gpuctl_address, at which the other machines"):
        ranked(Launch("s", server, "/m"), hosts.load(tmp_path))
    (tmp_path / "hosts.yml").write_text(
        HOSTS.replace("connection: pct,", "connection: pct, gpuctl_address: 'fd00::7',")
    )
    assert ranked(Launch("s", server, "/m"), hosts.load(tmp_path))[1].head == "[fd00::7]:29500"


def test_render_shows_each_machine(tmp_path, golden):
    folder = tmp_path / "i"
    shutil.copytree(ROOT / "inventory/kpro6", folder)
    (folder / "hosts.yml").write_text(HOSTS)
    servers = (folder / "servers.yml").read_text()
    servers += "\n  two:\n    use: [sglang, kimi]\n    flags: {tp-size: 16}\n    nodes: [ct200, ct210]\n"
    (folder / "servers.yml").write_text(servers)
    command = [sys.executable, "-m", "gpuctl", "render", "two", "-i", str(folder)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert shown.returncode == 0, shown.stderr
    golden("render-two-nodes.txt", shown.stdout)
    units = subprocess.run([*command, "--unit"], capture_output=True, text=True, timeout=60, cwd=ROOT).stdout
    assert (units.count("\n# on ct2"), units.count("[Service]")) == (1, 2)
