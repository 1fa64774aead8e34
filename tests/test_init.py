"""A first inventory: what it says of a machine, that every verb can read it, and that it takes nothing away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpuctl import config, hosts, plugins
from gpuctl.box import Snapshot
from gpuctl.firstinventory import LOOK, Place, Program, Seen, Way, Weights, files, seen
from tests.sshd import Sshd

CONF = "arch: amd64\nhostname: ct200\nnet0: name=eth0,ip=10.0.0.20/24\nlxc.cgroup2.devices.allow: c 195:* rwm\n"
PRINTED = """engine\tsglang-0.5.11\t/opt/sglang/
guest\t200
model\t55600000000\t/root/.cache/huggingface/hub/models--Qwen--Qwen3.6-27B/snapshots/57a417fb
model\t1100000000\t/root/models/Qwen3.6-27B-DFlash
model\t595000000000\t/root/models/Kimi-K2.6
model\t420000000000\t/run/gpuctl/models/Big Model (q4)
engine\tsglang-0.5.11\t/opt/sglang-ddtree/
engine\tsglang-0.5.11\t/opt/sglang/
engine\tvllm-0.22.0\t/opt/vllm/
cuda\tnvcc\t/usr/local/cuda
"""


def snapshot(role="node", printed=PRINTED, gpus=8):
    nvml = {"gpus": [{"name": "RTX PRO 6000", "memory_bytes": {"total": 97_887 << 20}} for _ in range(gpus)]}
    return Snapshot(
        {
            "machine": "kpro6",
            "role": role,
            "files": {"/etc/pve/lxc/200.conf": CONF, "/etc/pve/lxc/201.conf": CONF, "/etc/pve/lxc/300.conf": "arch: amd64\n"},
            "commands": {" ".join(LOOK): {"rc": 0, "stdout": printed, "stderr": ""}},
            "nvml": {"root": nvml},
        }
    )  # fmt: skip


def read(folder: Path, texts):
    """As every verb reads it; raises what a person would be told."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
    workloads = {name: plugins.get("workloads", name).Parameters for name in plugins.names("workloads")}
    return hosts.load(folder), config.load(folder, engines=plugins.names("engines"), workloads=workloads)


def test_a_node_brings_its_guests_with_gpus_and_what_lies_in_them(golden, tmp_path):
    found = seen(snapshot(), "kpro6")
    texts = files(found, Way(host="kpro6.example.org", user="admin", port=2222, sudo=True))
    golden("init-kpro6.txt", "".join(f"==> {name}\n{text}" for name, text in texts.items()))
    machines, known = read(tmp_path / "i", texts)
    assert (machines.machines["ct200"].connection, machines.machines["ct201"].vmid) == ("pct", 201)
    assert "ct300" not in machines.machines
    assert {server.env["CUDA_HOME"] for server in known.servers.values()} == {"/usr/local/cuda"}, "where nvcc is"
    # 595 GB fit on eight cards and on no fewer; a draft model is no server
    assert sorted(known.servers) == ["big-model-q4-tp8", "kimi-k2.6-tp8"] + [f"qwen3.6-27b-tp{n}" for n in (1, 2, 4, 8)]
    assert known.phases["first"].target == "ct200"


def test_a_machine_with_nothing_on_it_gets_examples_to_uncomment(tmp_path):
    texts = files(seen(snapshot("machine", "", 0), "box"), Way(local=True))
    machines, known = read(tmp_path / "i", texts)
    assert machines.machines["box"].connection == "local"
    assert (known.servers, known.phases) == ({}, {})
    assert "# As yet there is none: no engine was found on box" in texts["servers.yml"]


words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30)


@given(
    path=words.map(lambda text: f"/models/{text}"),
    hub=st.none() | words,
    program=st.tuples(st.sampled_from(["sglang", "vllm", "llamacpp"]), words, st.tuples(words, words)),
    name=st.sampled_from(["on", "1", "010", "null", "b-1", "0x1F", "a.b", "1e3"]),
)
@settings(max_examples=20)
def test_whatever_names_and_paths_there_are_the_inventory_can_be_read(tmp_path_factory, path, hub, program, name):
    first, second = Weights(path, 10**9, hub), Weights("/m/x.gguf", 5)
    assume(first.name != second.name)  # a look brings each name once
    place = Place(name, models=(first, second), engines=(Program(*program),))
    texts = files(Seen(place, False, ("G",), 10**10), Way(host=name, user=name, options='-F "/a b"'))
    machines, known = read(tmp_path_factory.mktemp("init"), texts)
    assert list(machines.machines) == [name]
    assert path in {model.path for model in known.models.values()}
    assert known.campaign == name


def gpuctl(cwd, *words, home=None):
    return subprocess.run(
        [sys.executable, "-m", "gpuctl", *words], cwd=cwd, capture_output=True, text=True, timeout=90,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "HOME": str(home or cwd)},
    )  # fmt: skip


def test_it_asks_a_machine_over_ssh_and_never_overwrites(tmp_path):
    model = tmp_path / "home/models/tiny-1b"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"x" * 1000)
    sshd = Sshd(tmp_path / "sshd", lines=(f"SetEnv HOME={tmp_path / 'home'}",))
    try:
        done = gpuctl(tmp_path, "init", "-F", str(sshd.config), "machine", "--json")
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert (told["folder"], told["verdict"]) == ("inventory/machine", "well")
        before = {path.name: path.read_text() for path in (tmp_path / "inventory/machine").iterdir()}
        assert f'ansible_ssh_common_args: "-F {sshd.config}"' in before["hosts.yml"]
        again = gpuctl(tmp_path, "init", "-F", str(sshd.config), "machine")
        assert (again.returncode, again.stderr.count("\n")) == (2, 1)
        assert "is there already, and nothing is overwritten" in again.stderr
        assert {path.name: path.read_text() for path in (tmp_path / "inventory/machine").iterdir()} == before
        asked = gpuctl(tmp_path, "doctor", "-i", "machine")  # the login that was written down is the one that works
        assert asked.returncode in (0, 1, 3)
        assert "cannot" not in asked.stderr
        sshd.known_hosts.write_text("")
        new = gpuctl(tmp_path, "init", "-F", str(sshd.config), "machine", "--into", "other")
        assert new.returncode == 3
        assert "is not known" in new.stderr
        assert "log in once by hand: ssh -p" in new.stderr
        assert [path.name for path in tmp_path.iterdir() if "other" in path.name] == []
        assert sshd.known_hosts.read_text() == ""
    finally:
        sshd.stop()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["a b"], 2, "is no machine: [user@]host[:port], or local"),
        (["root@box:99999"], 2, "is no machine"),
        (["-oProxyCommand=x"], 2, "No such option"),
        (["--", "-oProxyCommand=x"], 2, "is no machine"),
        (["box", "-F", "/nonexistent"], 2, "no such file"),
        (["nowhere.invalid"], 3, "nowhere"),
        (["ssh://root@127.0.0.1:9"], 3, "refused"),
    ],
)
def test_a_mistake_is_a_line_and_nothing_is_written(tmp_path, words, code, said):
    done = gpuctl(tmp_path, "init", *words)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("asking ")]
    assert (done.returncode, len(lines), "Traceback" in done.stderr) == (code, 1, False), done.stderr
    assert said in lines[0]
    assert list(tmp_path.iterdir()) == []
