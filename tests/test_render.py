"""Units as text: what is in them, what systemd says of them, and what cannot stand in them."""

from __future__ import annotations

import json
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl import render
from gpuctl.render import CannotRender, ServerUnit, Tmpfs

BENCH = ServerUnit(
    unit="gpuctl-tp1-ddtree-b15",
    argv=(
        "/opt/sglang/bin/python", "-m", "sglang.launch_server", "--json-model-override-args", '{"a": [1, "$x"]}',
        "--cost", "$5", "--share", "50%", "--path", "C:\\temp", "--template", "{{ a }}\n\t'b'", "--empty", "",
    ),
    env={"CUDA_HOME": "/usr/local/cuda-13.2", "NCCL_P2P_LEVEL": "SYS", "T": '{"enable": false} %d $HOME'},
    title="DDTree, budget 15",
    campaign="qwen36-kimi26",
    mounts=("/run/gpuctl/models",),
)  # fmt: skip
SERVING = ServerUnit(
    unit="gpuctl-serve",
    argv=("/opt/vllm/bin/vllm", "serve", "/run/gpuctl/models/m"),
    user="serve",
    secrets={"HF_TOKEN": "/etc/gpuctl/secrets/hf"},
    folder="/var/lib/serve",
    mounts=("/run/gpuctl/models",),
    after=("gpuctl-stage-m.service",),
    cpus="0-15,32-47",
    numa=("bind", "0"),
    boot=True,
)


def test_server_for_a_measurement(golden):
    golden("units/gpuctl-tp1-ddtree-b15.service", render.server(BENCH).text)


def test_server_that_comes_back_at_boot(golden):
    golden("units/gpuctl-serve.service", render.server(SERVING).text)


def test_memory_file_system(golden):
    file = render.tmpfs(Tmpfs("/run/gpuctl/models-a", 64 << 30, policy="interleave", huge="within_size"))
    assert file.path == "/etc/systemd/system/run-gpuctl-models\\x2da.mount"
    golden("units/models.mount", file.text)


def test_staging_and_settings_at_boot(golden):
    for file in (
        *render.stage("m", {"model": "/root/m", "to": "/run/gpuctl/models/m"}, "/run/gpuctl/models", "# agent\n"),
        *render.tune([{"name": "kernel.numa_balancing", "file": "/proc/x", "want": "0"}], "# program\n"),
    ):
        golden(f"units/boot/{file.path.rpartition('/')[2]}", file.text)


def test_only_a_model_from_another_machine_waits_for_the_network_at_boot():
    texts = [render.stage("m", {"source": one}, "/run/m", "")[2].text for one in ("/root/m", "ssh://box/m")]
    assert ["network-online.target" in text for text in texts] == [False, True]


def test_secrets_stand_in_no_unit():
    text = render.server(SERVING).text
    assert "LoadCredential=HF_TOKEN:/etc/gpuctl/secrets/hf" in text
    assert 'Environment="HF_TOKEN' not in text


def test_a_file_of_ours_says_so_and_guards_are_passed_on():
    file = render.File("/etc/pve/lxc/200.conf", "arch: amd64\n", was="absent", ours=False)
    assert file.as_vars() == {"path": "/etc/pve/lxc/200.conf", "text": "arch: amd64\n", "was": "absent"}
    assert render.server(BENCH).as_vars()["ours"] == "# gpuctl"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"argv": ("python", "-m", "x")}, "program: python has to be the absolute path"),
        ({"argv": ()}, "program: none has to be"),
        ({"argv": ("/bin/x", "a\x07b")}, "argument: the character U+0007 after 'a' cannot stand in a unit"),
        ({"env": {"A B": "x"}}, "env: 'A B' is no name of a variable"),
        ({"env": {"A": "x\0y"}}, "env A: the character U+0000"),
        ({"unit": "a/b"}, "unit: 'a/b' has to be letters"),
        ({"unit": "a b"}, "unit: 'a b' has to be letters"),
        ({"mounts": ("/run/a b",)}, "mount: '/run/a b' has to be an absolute path"),
        ({"mounts": ("/run/../etc",)}, "mount: '/run/../etc' has to be an absolute path"),
        ({"folder": "relative"}, "folder: 'relative' has to be"),
        ({"secrets": {"T": "/a%b"}}, "T: '/a%b' has to be"),
        ({"secrets": {"T": "/a"}, "env": {"T": "x"}}, "env T: given both openly and as a secret"),
        ({"cpus": "0-"}, "cpus: '0-' has to be numbers"),
        ({"numa": ("bnd", "0")}, "numa: 'bnd' is no policy"),
        ({"numa": ("bind", "x")}, "numa: 'x' has to be numbers"),
        ({"title": "a\x1bb"}, "title: the character U+001B"),
    ],
)
def test_what_cannot_stand_in_a_unit_is_refused_in_one_line(change, said):
    with pytest.raises(CannotRender) as caught:
        render.server(ServerUnit(**{"unit": "gpuctl-x", "argv": ("/bin/true",), **change}))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change", [{"size_bytes": 0}, {"policy": "numa"}, {"huge": "yes"}, {"path": "run"}, {"policy": "bind:0 x"}]
)
def test_a_memory_file_system_that_cannot_be(change):
    with pytest.raises(CannotRender):
        render.tmpfs(Tmpfs(**{"path": "/run/m", "size_bytes": 1, **change}))


words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40) | st.text(
    st.sampled_from(list("\"'\\$%{}[]()<>|&;*?~#!`^:=-@+ \t\n/aé")), max_size=20
)


@given(words)
def test_a_word_for_a_shell_comes_through_a_shell(word):
    import shlex

    assert shlex.split(render.shell_word(word)) == [word]


@given(st.lists(st.sampled_from([*"abcZ09:_.-~@+,=", "ab"]), min_size=1, max_size=12).map("".join))
@settings(max_examples=30, deadline=None)
def test_mount_units_are_named_as_systemd_demands(part):
    path = f"/run/{part}"
    try:
        name = render.mount_unit_name(path)
    except CannotRender:
        assert ":" in part or part in (".", "..")
        return
    said = subprocess.run(
        ["systemd-escape", "--path", "--suffix=mount", path], capture_output=True, text=True, check=True
    )
    assert name == said.stdout.strip()


def verified(tmp_path, *files):
    """What systemd-analyze has to say; nothing is well."""
    paths = []
    for file in files:
        path = tmp_path / file.path.rpartition("/")[2]
        path.write_text(file.text)
        paths.append(str(path))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *paths], capture_output=True, text=True, check=False
    )
    return (done.stdout + done.stderr).strip()


def test_systemd_has_nothing_to_say_of_them(tmp_path):
    stage = render.stage("m", {}, "/run/gpuctl/models", "")[2:]
    bench = ServerUnit(**{**vars(BENCH), "argv": ("/bin/true", *BENCH.argv[1:])})
    serving = ServerUnit(**{**vars(SERVING), "argv": ("/bin/true",), "user": "root", "folder": "/tmp"})
    assert verified(tmp_path, render.server(bench)) == ""
    assert verified(tmp_path, *stage, render.server(serving), render.tmpfs(Tmpfs("/run/gpuctl/models", 1 << 20))) == ""
    assert verified(tmp_path, render.tune([], "")[2]) == ""


def test_systemd_speaks_up_where_something_is_wrong(tmp_path):
    file = render.server(ServerUnit("gpuctl-x", ("/bin/true",)))
    assert "Unknown key" in verified(tmp_path, render.File(file.path, file.text.replace("OOMPolicy", "OOMPolcy")))
    assert "not executable" in verified(tmp_path, render.server(ServerUnit("gpuctl-y", ("/opt/none",))))


@given(st.lists(words, max_size=30), st.lists(words, max_size=20))
@settings(max_examples=8, deadline=None)
def test_systemd_accepts_any_words_that_are_not_refused(tmp_path_factory, arguments, values):
    def possible(text):
        try:
            render.exec_word(text)
        except CannotRender:
            return False
        return True

    argv = ("/bin/true", *filter(possible, arguments))
    env = {f"V{n}": value for n, value in enumerate(filter(possible, values))}
    text = verified(tmp_path_factory.mktemp("units"), render.server(ServerUnit("gpuctl-x", argv, env)))
    assert text == ""


def test_a_job_for_staging_is_json():
    _, job, *_ = render.stage("m", {"to": "/run/ä"}, "/run/m", "")
    assert json.loads(job.text) == {"to": "/run/ä"}
    assert job.mode == "0600"
