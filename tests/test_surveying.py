"""What a result is valid for: a change that could change a number is seen, wherever it hides."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from sse_server import plain, serving

from gpuctl import cells, config, plugins, surveying
from gpuctl.cells import Cell
from gpuctl.config import Server
from gpuctl.engines import Launch
from gpuctl.records import CellId
from gpuctl.serving import NoKey, key_of
from gpuctl.transport import Local

ENGINES = {name: plugins.get("engines", name) for name in plugins.names("engines")}


def survey(*launches):
    known = config.Inventory(Path("inventory"), "test", {}, {}, {})
    target = surveying.Target("here", Local("here"), sys.executable, base=Path.cwd())
    return surveying.ask_survey(target, {launch.name: launch for launch in launches}, known)


def parts(launch):
    module = plugins.get("workloads", "decode")
    point = next(module.points(module.Parameters()))
    cell = Cell(CellId("p", launch.name, "decode", point.name), point, 3, module.requests)
    found = surveying.fingerprint(cell, launch, ENGINES[launch.server.engine], survey(launch))
    return json.loads(json.dumps(found))


def launch(engine="llamacpp", model=None, **server):
    return Launch("s", Server(engine=engine, model="m", **server), model, python=sys.executable)


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def vllm(tmp_path):
    """A vLLM in an environment of its own, as far as its Python tells; not the one that PATH names python3."""
    site = tmp_path / "venv/lib/site"
    python = executable(tmp_path / "venv/bin/python", f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')

    def installed(version):
        shutil.rmtree(site, ignore_errors=True)
        (site / f"vllm-{version}.dist-info").mkdir(parents=True)
        (site / f"vllm-{version}.dist-info/METADATA").write_text(f"Name: vllm\nVersion: {version}\n")

    installed("0.11.0")
    return python, executable(tmp_path / "bin/vllm", f"#!{python}\nimport vllm\n"), installed


@pytest.mark.parametrize(
    "started",
    [
        lambda python, script: {"program": [python, "-m", "vllm"]},
        lambda python, script: {"program": [script]},
        lambda python, script: {"program": ["numactl", "-N", "0", script]},
        lambda python, script: {"program": ["env", "A=1", "nice", "-n", "5", python, "-m", "vllm"]},
        lambda python, script: {"env": {"PATH": f"{Path(script).parent}:/usr/bin:/bin"}},  # `vllm`, found on its PATH
    ],
)
def test_a_new_version_of_the_engine_is_seen_however_it_is_started(vllm, started):
    python, script, install = vllm
    server = launch("vllm", **started(python, script))
    before = parts(server)
    assert before["engine"]["vllm"] == "0.11.0"
    install("0.12.0")
    assert cells.differences(before, parts(server)) == "engine vllm 0.11.0 -> 0.12.0"


def test_a_script_whose_first_line_would_be_too_long_names_its_python_in_the_second(vllm, tmp_path):
    python, _, _ = vllm
    script = executable(tmp_path / "long/vllm", f"""#!/bin/sh\n'''exec' "{python}" "$0" "$@"\n' '''\nimport vllm\n""")
    assert parts(launch("vllm", program=[script]))["engine"]["vllm"] == "0.11.0"


def test_a_binary_that_was_built_anew_is_seen_and_so_are_its_libraries(tmp_path):
    program = tmp_path / "llama/llama-server"
    library = tmp_path / "llama/libggml-cuda.so"
    executable(program, "\x7fELF one")
    library.write_text("one")
    server = launch(program=[str(program)])
    before = parts(server)
    assert parts(server) == before
    library.write_text("two")
    of_library = parts(server)
    assert cells.differences(before, of_library).startswith("engine binary ")
    executable(program, "\x7fELF two")
    assert cells.differences(of_library, parts(server)).startswith("engine binary ")


def test_what_is_missing_behind_a_wrapper_is_not_called_the_wrapper(tmp_path):
    error = parts(launch(program=["numactl", "--cpunodebind=0", f"{tmp_path}/no-such"]))["engine"]["error"]
    assert error == f"numactl --cpunodebind=0 {tmp_path}/no-such: not found"


def test_a_program_that_is_not_there_is_said(tmp_path):
    assert parts(launch(program=[f"{tmp_path}/llama-server"]))["engine"]["error"].endswith("llama-server: not found")


def test_each_part_of_a_split_model_counts(tmp_path):
    files = [tmp_path / f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for file in files:
        file.write_text("weights")
    server = launch(model=str(files[0]))
    before = parts(server)["model"]
    files[2].write_text("others!")
    assert parts(server)["model"] != before
    files[1].unlink()
    assert survey(server)["models"][str(files[0])]["error"] == f"{files[1]}: No such file or directory"


@pytest.mark.parametrize("bound", [{"numa": "--membind=0"}, {"cpus": "0-3"}, {"user": "llm"}])
def test_what_a_server_is_bound_to_counts(bound):
    free, tied = parts(launch()), parts(launch(**bound))
    ((key, value),) = bound.items()
    assert cells.differences(free, tied) == f"{key} nothing -> {value}"


def test_a_secret_is_in_no_fingerprint_and_its_change_is_seen():
    def kept(secret):
        flags = {"api-key": secret, "max-num-seqs": 8, "max-num-batched-tokens": 512}
        found = parts(launch("vllm", flags=flags, env={"HF_TOKEN": secret, "OMP_NUM_THREADS": "4"}))
        assert secret not in json.dumps(found)
        return found

    before = kept("hunter2hunter2")
    assert before["environment"]["OMP_NUM_THREADS"] == "4"
    assert before["argv"][-4:] == ["--max-num-seqs", "8", "--max-num-batched-tokens", "512"]
    assert kept("hunter2hunter2") == before
    assert {"argv", "environment"} == {key for key, part in kept("hunter3hunter3").items() if part != before[key]}


def test_what_somebody_elses_server_serves_counts():
    def theirs(server):
        return Launch("s", Server(engine="external", url=server.url), python=sys.executable)

    serving_other = json.dumps({"data": [{"id": "other", "max_model_len": 4096}]}).encode()
    with serving(lambda _request: plain("404 Not Found", b"")) as server:
        before = parts(theirs(server))
        assert parts(theirs(server)) == before
        assert before["model"] == "double"
        server.models = serving_other
        assert (
            cells.differences(before, parts(theirs(server))) == "model double -> other, engine context nothing -> 4096"
        )


@pytest.mark.parametrize("text", [None, b"", b"two words", b"\xff\xfe"])
def test_a_key_that_cannot_be_read_is_one_line_with_its_place(tmp_path, text):
    file = tmp_path / "key"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(NoKey, match=r"/key: .*\(api_key_file\)$"):
        key_of(Server(engine="external", url="http://127.0.0.1:1", api_key_file=str(file)))
    file.write_text("k3y\n")
    assert key_of(Server(engine="external", url="http://127.0.0.1:1", api_key_file=str(file))) == "k3y"
