"""`gpuctl plan`: what a phase will hold, said before anything is deployed; by what is stated, told and remembered."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gpuctl import cells, config, plugins, surveying
from gpuctl.cli import main
from gpuctl.memory import Verdict
from gpuctl.planning import known as knowing
from gpuctl.planning import servers as planning
from gpuctl.planning.known import Gpu, Known
from gpuctl.planning.servers import History
from gpuctl.transport import Local
from tests.lab.engines.install import install, write_model

ROOT = Path(__file__).parents[1]
WORKLOADS = {name: plugins.get("workloads", name).Parameters for name in plugins.names("workloads")}
CARD = Gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887)


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def call(capsysbinary):
    """Calls gpuctl; returns its exit status, stdout and stderr."""

    def run(*words):
        with pytest.raises(SystemExit) as done:
            main([str(word) for word in words])
        printed = capsysbinary.readouterr()
        return done.value.code or 0, printed.out.decode(), printed.err.decode()

    return run


@pytest.fixture
def inventory(tmp_path):
    """The example inventory, to change: `change(file, old, new)`."""
    folder = tmp_path / "inventory"
    shutil.copytree(ROOT / "inventory/kpro6", folder)

    def change(name: str, *pairs: tuple[str, str]) -> Path:
        text = (folder / name).read_text()
        for old, new in pairs:
            assert old in text
            text = text.replace(old, new)
        (folder / name).write_text(text)
        return folder

    return change


def told(text: str) -> dict:
    return json.loads(text)


# Without any machine


@pytest.mark.parametrize("name", ["tp1", "tp4", "k26", "tp1-linear"])
def test_the_example_is_planned_without_any_machine(call, golden, name):
    code, out, err = call("plan", name, "-i", "kpro6", "--offline")
    assert (code, err) == (0, "")
    golden(f"plan-{name}.txt", out)


@pytest.mark.parametrize("phase", ["tp1", "tp4", "tp8", "k26"])
def test_every_server_of_the_example_can_work_and_no_cell_is_refused(call, phase):
    code, out, _ = call("plan", phase, "-i", "kpro6", "--offline", "--json")
    found = told(out)
    assert (code, found["verdict"], found["asked"]) == (0, "fits", False)
    assert found["seconds"] > 60
    outcomes = {cell["outcome"] for server in found["servers"] for cell in server["cells"]}
    assert outcomes == {"measured"}
    for server in found["servers"]:
        terms = {term["name"]: term["bytes"] for term in server["memory"]["terms"]}
        assert sum(terms.values()) == pytest.approx(server["gpu"]["total_bytes"], rel=1e-6)


def test_the_campaign_with_eight_requests_is_refused_for_the_true_reason(call, inventory):
    folder = inventory("servers.yml", ("{{ 4 if tp == 1 else 8 }}", "8"))
    code, out, _ = call("plan", "tp1-linear", "-i", folder, "--offline")
    assert code == 1
    assert "2 recurrent-state slots, one request needs 4: 2 // 4 = 0" in out
    assert "8 requests x 16 draft tokens x 146.8 MiB = 18.35 GiB" in out
    assert "the engine would say: max_running_request is zero" in out
    assert "change: --max-running-requests 7 (was 8): 2 requests at once" in out
    code, out, _ = call("plan", "tp1", "-i", folder, "--offline", "--json")
    bad = {server["server"]: server for server in told(out)["servers"] if server["verdict"] == "impossible"}
    assert (code, list(bad)) == (1, ["tp1-linear"])
    assert bad["tp1-linear"]["memory"]["cause"] == "state-slots-starved"
    assert {cell["outcome"] for cell in bad["tp1-linear"]["cells"]} == {"impossible"}


def test_a_prompt_beyond_the_window_is_foreseen_as_a_400(call, inventory):
    folder = inventory(
        "phases.yml", ("tokens: [3000, 30000], max_tokens: 256", "tokens: [3000, 32700], max_tokens: 256")
    )
    code, out, _ = call("plan", "tp1", "-i", folder, "--offline")
    assert code == 1
    assert "context/32700: refused: 32700 + 256 tokens exceed the window of 32768: HTTP 400" in out


@pytest.mark.parametrize("engine", ["sglang", "vllm", "llamacpp"])
def test_one_request_is_not_several(call, inventory, engine):
    flag = {"sglang": "max-running-requests: 1", "vllm": "max-num-seqs: 1", "llamacpp": "parallel: 1"}[engine]
    text = OTHERS[engine].replace("max-num-seqs: 8, ", "") % flag
    folder = served(inventory("servers.yml"), text)
    for more in ((), ("--requests", 8)):
        _, out, _ = call("plan", "mine", "-i", folder, "--offline", *more)
        assert "1 request" in out
        assert " 1 requests" not in out
        assert " 1 slots" not in out


def test_the_command_of_the_readme_shows_both_what_fits_and_what_does_not(call):
    words = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("gpuctl plan "))
    assert "what fits and why the rest does not" in words
    code, out, _ = call(*words.partition("   ")[0].split()[1:])
    assert (code, " fits " in out, "CANNOT" in out) == (1, True, True)


def test_more_requests_than_a_server_runs_are_foreseen_as_limited_and_are_no_failure(call, inventory):
    folder = inventory("phases.yml", ("concurrency: [1, 2, 4, 8], prompts", "concurrency: [1, 12], prompts"))
    code, out, _ = call("plan", "tp4", "-i", folder, "--offline", "--json")
    (auto, *_) = told(out)["servers"]
    assert (code, auto["verdict"]) == (1, "limited")
    assert [c["why"] for c in auto["cells"] if c["outcome"] == "limited"] == ["8 of 12 requests run at once"]
    assert auto["memory"]["change"]["flag"] == "--max-running-requests"


def test_what_is_asked_for_beside_the_cells(call):
    code, out, _ = call("plan", "tp4-auto", "-i", "kpro6", "--offline", "--requests", 8, "--context", 100256, "--json")
    memory = told(out)["servers"][0]["memory"]
    assert (code, memory["fits"]) == (0, [{"context": 100256, "requests": 8, "limit": "requests"}])
    code, out, _ = call("plan", "tp4-auto", "-i", "kpro6", "--offline", "--requests", 9, "--context", 140000)
    assert code == 1
    assert "140000 tokens exceed the window of 131072" in out


def test_another_release_divides_the_same_memory_otherwise(call):
    numbers = {}
    for version in ("0.5.11", "0.5.16", "0.5.23"):
        _, out, _ = call("plan", "tp1-ddtree-b15", "-i", "kpro6", "--offline", "--engine-version", version, "--json")
        memory = told(out)["servers"][0]["memory"]
        numbers[version] = (memory["state_slots"], memory["requests"])
    assert numbers == {"0.5.11": (24, 4), "0.5.16": (8, 1), "0.5.23": (4, 0)}


@pytest.mark.parametrize(
    ("file", "old", "new", "code", "says"),
    [
        ("models.yml", "  config: models/qwen3.6-27b.json\n", "", 3, "`config:` in models.yml names a copy of its config.json"),
        ("models.yml", "models/qwen3.6-27b.json", "nowhere.json", 2, "nowhere.json: No such file or directory (models.yml"),
        ("models.yml", "models/qwen3.6-27b.json", "phases.yml", 3, "its configuration cannot be read"),
        ("hosts.yml", "count: 8, ", "", 2, "gpuctl_gpus: count, name and memory_mib are expected"),
        ("hosts.yml", "{count: 8, name: NVIDIA RTX PRO 6000 Blackwell Server Edition, memory_mib: 97887}", "", 3,
         "`gpuctl_gpus: {count: 1, name: ..., memory_mib: ...}` in hosts.yml states them"),
        ("hosts.yml", "count: 8", "count: 2", 1, "4 GPUs are asked for, 2 are there"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_said_and_how_to_say_it(call, inventory, file, old, new, code, says):
    folder = inventory(file, (old, new))
    found, out, err = call("plan", "tp4", "-i", folder, "--offline")
    assert found == code
    assert says in out + err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("memory_mib: 97887", "memory_mib: 0", "memory_mib: '0' is no whole number from 256 to 4194304"),
        ("memory_mib: 97887", "memory_mib: 99999999999999999999999", "memory_mib: '99999999999999999999999' is no whole"),
        ("memory_mib: 97887", "memory_mib: true", "memory_mib: 'True' is no whole number"),
        ("count: 8", "count: -8", "count: '-8' is no whole number from 1 to 1024"),
        ("count: 8", "count: 0", "count: '0' is no whole number"),
        ("count: 8", "count: 1.5", "count: '1.5' is no whole number"),
        ("count: 8", "count: 100000000", "count: '100000000' is no whole number"),
        ("name: NVIDIA RTX PRO 6000 Blackwell Server Edition", "name: ''", "name: '' is no name of a GPU"),
        ("name: NVIDIA RTX PRO 6000 Blackwell Server Edition", "name: [a]", "is no name of a GPU"),
        ("count: 8", "count: 8, memory: 1", "memory: unknown key; did you mean 'memory_mib'?"),
        ("{count: 8, name: NVIDIA RTX PRO 6000 Blackwell Server Edition, memory_mib: 97887}", "8",
         "count, name and memory_mib are expected"),
    ],
)  # fmt: skip
def test_absurd_gpus_are_one_line_with_their_place_before_anything_is_planned(call, inventory, old, new, says):
    folder = inventory("hosts.yml", (old, new))
    code, out, err = call("plan", "tp1", "-i", folder, "--offline")
    assert (code, out, err.count("\n")) == (2, "", 1)
    line = next(
        n for n, text in enumerate((folder / "hosts.yml").read_text().splitlines(), 1) if " gpuctl_gpus:" in text
    )
    assert f"hosts.yml:{line}: ct200: gpuctl_gpus: " in err
    assert says in err


def served(folder: Path, server: str) -> Path:
    """An inventory with one server more, as servers.yml has it."""
    with (folder / "servers.yml").open("a") as file:
        file.write(f"\n  {server}\n")
    return folder


OTHERS = {
    "sglang": "mine: {use: [sglang, qwen], flags: {%s}}",
    "vllm": "mine: {engine: vllm, model: qwen3.6-27b, flags: {max-model-len: 4096, max-num-seqs: 8, %s}}",
    "llamacpp": "mine: {engine: llamacpp, model: qwen3.6-27b, flags: {ctx-size: 4096, %s}}",
}


@pytest.mark.parametrize(
    ("engine", "flags", "says", "advice"),
    [
        ("sglang", "mem-fraction-static: abc", "--mem-fraction-static is 'abc': a number above 0 and at most 1", ""),
        ("sglang", "mem-fraction-static: '0,75'", "--mem-fraction-static is '0,75': ", "--mem-fraction-static 0.75"),
        ("sglang", "mem-fraction-static: 75", "--mem-fraction-static is '75': ", ""),
        ("sglang", "mem-fraction-static: nan", "--mem-fraction-static is 'nan': ", ""),
        ("sglang", "mem-fraction-static: true", "--mem-fraction-static has no value: ", ""),
        ("sglang", "tp-size: 0", "--tp-size is '0': a whole number of at least 1 is expected", ""),
        ("sglang", "tp-size: abc", "--tp-size is 'abc': ", ""),
        ("sglang", "tp-size: 1.5", "--tp-size is '1.5': ", ""),
        ("sglang", "tp-size: 2.0", "--tp-size is '2.0': ", "--tp-size 2"),
        ("sglang", "tp-size: -1", "--tp-size is '-1': ", ""),
        ("sglang", "tp-size: [1, 2]", "--tp-size is '1 2': ", ""),
        ("sglang", "context-length: 32k", "--context-length is '32k': ", "--context-length 32768 (or 32000)"),
        ("sglang", "context-length: 0", "--context-length is '0': ", ""),
        ("sglang", "context-length: -5", "--context-length is '-5': ", ""),
        ("sglang", "max-running-requests: lots", "--max-running-requests is 'lots': a whole number of at least 1 is", ""),
        ("sglang", "cuda-graph-bs: [1, two]", "--cuda-graph-bs is 'two': ", ""),
        ("vllm", "gpu-memory-utilization: 90%", "--gpu-memory-utilization is '90%': ", ""),
        ("vllm", "gpu_memory_utilization: 90", "--gpu-memory-utilization is '90': ", ""),
        ("vllm", "tensor_parallel_size: 0", "--tensor-parallel-size is '0': ", ""),
        ("vllm", "pipeline-parallel-size: many", "--pipeline-parallel-size is 'many': ", ""),
        ("vllm", "max-num-batched-tokens: 1.5K", "--max-num-batched-tokens is '1.5K': ", ""),
        ("vllm", "speculative-config: {method: mtp, num_speculative_tokens: some}",
         "--speculative-config.num_speculative_tokens is 'some': ", ""),
        ("llamacpp", "ubatch-size: big", "--ubatch-size is 'big': ", ""),
        ("llamacpp", "parallel: 0", "--parallel is '0': a whole number of at least 1 or -1 is expected", ""),
        ("llamacpp", "gpu-layers: most", "--gpu-layers is 'most': ", ""),
        ("llamacpp", "cache_reuse: 1, ubatch_size: 1k", "--ubatch-size is '1k': ", ""),
    ],
)  # fmt: skip
def test_a_value_that_is_no_number_cannot_work(call, inventory, engine, flags, says, advice):
    folder = served(inventory("servers.yml"), OTHERS[engine] % flags)
    code, out, err = call("plan", "mine", "-i", folder, "--offline")
    assert (code, err) == (1, "")
    assert "CANNOT" in out
    assert says in out
    assert advice in out
    assert "absent" not in out
    assert "window" not in out
    phases = folder / "phases.yml"
    phases.write_text(phases.read_text().replace("servers: [tp1-auto,", "servers: [mine, tp1-auto,"))
    code, out, _ = call("plan", "tp1", "-i", folder, "--offline", "--json")
    mine = told(out)["servers"][0]
    assert (code, mine["verdict"], mine["memory"]["cause"]) == (1, "impossible", "bad-argument")
    assert {cell["outcome"] for cell in mine["cells"]} == {"impossible"}


@pytest.mark.parametrize(
    ("engine", "flags", "says"),
    [
        ("sglang", "mem-fracton-static: 0.8", "--mem-fracton-static: not known offline; did you mean --mem-fraction-static?"),
        ("sglang", "mem_fraction_static: 0.8", "--mem_fraction_static: not known offline; did you mean --mem-fraction-static?"),
        ("sglang", "mem-frac: 0.8", "--mem-frac: not known offline; did you mean --mem-fraction-static?"),
        ("sglang", "speculative-ddtree-budgt: 8", "did you mean --speculative-ddtree-budget?"),
        ("vllm", "gpu-memory-utilisation: 0.8", "did you mean --gpu-memory-utilization?"),
        ("llamacpp", "cache-type-kk: f16", "did you mean --cache-type-k?"),
    ],
)  # fmt: skip
def test_a_name_that_is_not_known_is_told_and_is_not_called_wrong(call, inventory, engine, flags, says):
    folder = served(inventory("servers.yml"), OTHERS[engine] % flags)
    code, out, _ = call("plan", "mine", "-i", folder, "--offline")
    assert (code, "mine: " in out, says in out) == (0, True, True)
    phases = folder / "phases.yml"
    phases.write_text(phases.read_text().replace("servers: [tp1-auto,", "servers: [mine, tp1-auto,"))
    _, out, _ = call("plan", "tp1", "-i", folder, "--offline")
    assert f"warning: --{flags.partition(':')[0]}: not known offline" in out


@pytest.mark.parametrize(
    ("engine", "flags", "says"),
    [
        ("sglang", "kv-cache-dtype: fp8_e4m", "--kv-cache-dtype fp8_e4m: not known offline; did you mean fp8_e4m3?"),
        ("sglang", "mamba-ssm-dtype: bfloat", "--mamba-ssm-dtype bfloat: not known offline; did you mean bfloat16?"),
        ("vllm", "kv_cache_dtype: fp9", "--kv-cache-dtype fp9: not known offline; did you mean fp8?"),
        ("llamacpp", "cache-type-k: q8", "--cache-type-k q8: not known offline; did you mean q8_0?"),
    ],
)
def test_a_word_that_is_not_known_is_told_and_how_it_is_planned(call, inventory, engine, flags, says):
    folder = served(inventory("servers.yml"), OTHERS[engine] % flags)
    code, out, _ = call("plan", "mine", "-i", folder, "--offline")
    assert (code, f"warning: {says}" in out, "It is planned as if" in out) == (0, True, True)


@pytest.mark.parametrize(
    ("engine", "flags", "says"),
    [
        ("sglang", "quantum-tunnel: true", "note     flags not known offline, and not checked: --quantum-tunnel"),
        ("vllm", "quantum-tunnel: true, warp: 9", "note     flags not known offline, and not checked: --quantum-tunnel, --warp"),
        ("vllm", "gpu_memory_utilization: 0.8, no_enable_prefix_caching: true", None),
        ("llamacpp", "n_gpu_layers: 99, no-mmap: true", None),
    ],
)  # fmt: skip
def test_a_name_that_is_like_none_is_a_note(call, inventory, engine, flags, says):
    code, out, _ = call("plan", "mine", "-i", served(inventory("servers.yml"), OTHERS[engine] % flags), "--offline")
    assert code == 0
    assert says in out if says else "not known" not in out


@pytest.mark.parametrize(
    ("engine", "flags", "window"),
    [
        ("vllm", "max-model-len: 32k", 32000),
        ("vllm", "max_model_len: 32K", 32768),
        ("vllm", "max-model-len: 25.6k", 25600),
        ("vllm", "max-model-len: auto, gpu-memory-utilization: 0.65", None),
        ("llamacpp", "ctx-size: 0, parallel: -1, gpu-layers: auto", 262144),
        ("sglang", "chunked-prefill-size: -1", 32768),
    ],
)
def test_what_an_engine_takes_beside_numbers(call, inventory, engine, flags, window):
    text = OTHERS[engine].replace("max-model-len: 4096, ", "").replace("ctx-size: 4096, ", "") % flags
    _, out, _ = call("plan", "mine", "-i", served(inventory("servers.yml"), text), "--offline", "--json")
    memory = told(out)["servers"][0]["memory"]
    assert memory["verdict"] == "fits"
    assert memory["context"] == window or (window is None and 4096 < memory["context"] < 262144)
    assert all(term["bytes"] >= 0 for term in memory["terms"])


def test_a_server_that_no_phase_has_yet_is_planned_for_the_machine_of_the_phases(call, inventory):
    starved = "\n  starved: {use: [sglang, qwen, dflash], flags: {tp-size: 1, max-running-requests: 8}}\n"
    folder = inventory("servers.yml")
    (folder / "servers.yml").write_text((folder / "servers.yml").read_text() + starved)
    code, said, _ = call("plan", "starved", "-i", folder, "--offline")
    assert (code, "without ct200" in said, "2 // 4 = 0" in said) == (1, True, True)


def test_a_name_that_is_neither_phase_nor_server(call):
    code, _, err = call("plan", "tp3", "-i", "kpro6", "--offline")
    assert (code, err.count("\n")) == (2, 1)
    assert "no phase and no server 'tp3'; did you mean 'tp8'?" in err or "did you mean 'tp" in err


def test_a_machine_that_cannot_be_reached_is_planned_by_what_is_stated(call, inventory):
    folder = inventory(
        "hosts.yml", ("ct200:\n", "ct200:\n          ansible_host: 127.0.0.1\n          ansible_port: 1\n")
    )
    code, out, _ = call("plan", "tp1", "-i", folder)
    assert code == 0
    assert "planned without ct200 (ct200: " in out
    assert "stated in the inventory" in out


def test_the_embedded_default_is_planned_before_its_model_is_written(call):
    code, out, _ = call("plan", "demo", "--json")
    found = told(out)
    assert (code, found["verdict"], found["asked"]) == (0, "fits", True)
    assert found["servers"][0]["memory"]["requests"] == 4
    assert found["servers"][0]["gpu"]["name"] == "the machine's memory"
    assert "its own --help" in found["servers"][0]["flags_checked_against"]


@pytest.mark.parametrize("program", ["nosuchprog", "/opt/nowhere/llama-server"])
def test_a_program_that_the_machine_does_not_have_is_said_and_nothing_is_done_about_time(call, tmp_path, program):
    folder = tmp_path / "local"
    shutil.copytree(ROOT / "inventory/local", folder)
    servers = (folder / "servers.yml").read_text()
    words = '["{python}", -m, gpuctl.agent.llama_server]'
    assert words in servers
    (folder / "servers.yml").write_text(servers.replace(words, f"[{program}]"))
    code, out, _ = call("plan", "plain", "-i", folder)
    assert code == 1
    assert "plain: one token a step: CANNOT" in out
    assert f"The server cannot be started there: {program}: not found" in out
    assert "  time " not in out
    code, out, _ = call("plan", "demo", "-i", folder, "--json")
    found = told(out)
    assert (code, found["verdict"]) == (1, "impossible")
    assert {server["memory"]["cause"] for server in found["servers"]} == {"program-missing"}
    assert {cell["outcome"] for server in found["servers"] for cell in server["cells"]} == {"impossible"}
    code, out, _ = call("bench", "demo", "-i", folder, "--check")
    assert code == 1
    assert f"  plain cannot be started there: {program}: not found" in out
    code, out, _ = call("bench", "demo", "-i", folder, "--check", "--json")
    assert (code, told(out)["verdict"], list(told(out)["missing"])) == (1, "impossible", ["plain", "ngram"])


def test_a_server_that_cannot_work_has_no_time(call, inventory):
    folder = inventory("servers.yml", ("{{ 4 if tp == 1 else 8 }}", "8"))
    _, out, _ = call("plan", "tp1-linear", "-i", folder, "--offline")
    assert "CANNOT" in out
    assert "nothing is left to do" not in out


# What a machine tells, with the double of three releases installed


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """Installations and models as a machine has them."""
    root = tmp_path_factory.mktemp("machine")
    for release in ("0.5.11", "0.5.16", "0.5.23"):
        install(root, release)
    fork = install(root, "0.5.11", prefix="/opt/fork", fork=True)
    lies = next(fork.glob("lib/python3/site-packages/sglang-*/METADATA"))
    lies.write_text(lies.read_text().replace("Version: 0.5.11", "Version: 0.5.99"))
    for name in ("Qwen3.6-27B", "Qwen3.6-27B-DFlash"):
        write_model(root, f"/models/{name}", name)
    for program in root.glob("opt/*/bin/python"):  # they name their place inside the guest
        program.write_text(program.read_text().replace("PYTHONPATH=/", f"PYTHONPATH={root}/"))
    return root


def asked(machine: Path, server: str, program: Path, inventory: Path, **flags) -> tuple:
    """A server of the example with another program and flags; what its machine told, with eight GPUs."""
    known = config.load(inventory, engines=plugins.names("engines"), workloads=WORKLOADS)
    wanted = known.server(server)
    wanted = wanted.model_copy(
        update={"program": [str(program), "-m", "sglang.launch_server"], "flags": {**wanted.flags, **flags}}
    )
    launch = surveying.launch_of(replace(known, servers={**known.servers, server: wanted}), server,
                             surveying.Target("box", Local("box"), "python3"))  # fmt: skip
    launch = replace(launch, model=str(machine / "models/Qwen3.6-27B"),
                     draft=launch.draft and str(machine / "models/Qwen3.6-27B-DFlash"))  # fmt: skip
    pairs = knowing.engines_of([launch])
    answer = knowing.ask(Local("box"), pairs, "box", inventory)
    return known, launch, pairs, replace(answer, gpus=(CARD,) * 8)


def planned(machine, server, program, inventory, **flags):
    known, launch, pairs, answer = asked(machine, server, program, inventory, **flags)
    by_server = cells.of_phase(
        known.phase(server.partition("-")[0]), lambda name: plugins.get("workloads", name), [server]
    )
    return planning.plan_server(launch, pairs[0][1], by_server[server], known, answer, History())


EXAMPLE = ROOT / "inventory/kpro6"


def test_a_fork_is_planned_by_its_source_whatever_its_number_says(machine):
    found = planned(machine, "tp1-ddtree-b15", machine / "opt/fork/bin/python", EXAMPLE)
    assert "rules A (read from the installed source)" in found.plan.rules
    assert (found.plan.verdict, found.plan.state_slots) == (Verdict.FITS, 24)
    assert [f.id for f in found.plan.findings] == []  # its --help knows DDTREE


@pytest.mark.parametrize(("release", "rules"), [("0.5.11", "A"), ("0.5.16", "B"), ("0.5.23", "C")])
def test_the_generation_comes_from_what_is_installed(machine, release, rules):
    found = planned(machine, "tp1-auto", machine / f"opt/sglang-{release}/bin/python", EXAMPLE)
    assert f"rules {rules} (read from the installed source)" in found.plan.rules
    assert found.flags_from == "its own --help (asked now)"


@pytest.mark.parametrize(
    ("release", "flags", "cause", "says"),
    [
        ("0.5.23", {"mamba-scheduler-strategy": "extra_buffer"}, "unknown-flag", "called --mamba-radix-cache-strategy here"),
        ("0.5.23", {"cuda-graph-max-bs": 8}, "ambiguous-flag", "--cuda-graph-max-bs-decode"),
        ("0.5.16", {"max-num-seqs": 8}, "unknown-flag", "called --max-running-requests here"),
        ("0.5.16", {"attention-backend": "flash3"}, "bad-choice", "Did you mean"),
        ("0.5.16", {"speculative-algorithm": "EAGLE3", "speculative-eagle-topk": 1}, "speculative-three-or-none",
         "all three"),
        ("0.5.16", {"context-length": 300000}, "context-exceeds-model", "262144"),
        ("0.5.16", {"tp-size": 3}, "tp-not-divisible", "--tp-size 1 or 2 or 4 or 8"),
    ],
)  # fmt: skip
def test_flags_that_the_installed_version_refuses_are_foreseen(machine, release, flags, cause, says):
    found = planned(machine, "tp1-auto", machine / f"opt/sglang-{release}/bin/python", EXAMPLE, **flags)
    assert (found.plan.verdict, found.plan.cause) == (Verdict.IMPOSSIBLE, cause)
    assert says in str(found.plan.change)


def test_what_a_machine_told_is_remembered_with_the_flags_of_that_very_version(machine):
    program = machine / "opt/sglang-0.5.16/bin/python"
    _, _, pairs, answer = asked(machine, "tp1-auto", program, EXAMPLE)
    again = knowing.recall("box", EXAMPLE, pairs)
    assert again is not None
    assert again.basis.startswith("remembered from 20")
    assert again.help_of(*pairs[0]) == answer.help_of(*pairs[0]) != ""
    assert knowing.recall("another", EXAMPLE, pairs) is None
    assert knowing.recall("box", ROOT / "inventory/local", pairs) is None  # another inventory's box of that name
    flags = Path(knowing.cache() / "flags")
    before = {path: path.stat().st_mtime_ns for path in flags.iterdir()}
    asked(machine, "tp1-auto", program, EXAMPLE)
    assert {path: path.stat().st_mtime_ns for path in flags.iterdir()} == before  # not asked twice
    # another text of the file that defines the flags is another version, whatever its number
    source = machine / "opt/sglang-0.5.16/lib/python3/site-packages/sglang/srt/server_args.py"
    source.write_text("# changed\n")
    asked(machine, "tp1-auto", program, EXAMPLE)
    assert len(list(flags.iterdir())) == len(before) + 1


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"schema": "other/1"}', b'{"schema": "gpuctl.capacity/1", "asked": 1}']
)
def test_a_damaged_memory_of_a_machine_is_as_none(machine, damage):
    program = machine / "opt/sglang-0.5.16/bin/python"
    _, _, pairs, _ = asked(machine, "tp1-auto", program, EXAMPLE)
    (file,) = (knowing.cache() / "machines").iterdir()
    file.write_bytes(damage)
    assert knowing.recall("box", EXAMPLE, pairs) is None


def test_weights_that_are_dummies_do_not_make_a_large_model_small(machine):
    found = planned(machine, "tp1-auto", machine / "opt/sglang-0.5.16/bin/python", EXAMPLE)
    weights = next(term.bytes for term in found.plan.terms if term.name == "weights")
    assert weights / (1 << 30) == pytest.approx(51.2, abs=0.2)
    assert any("planned by the configuration instead" in note for note in found.plan.notes)


def test_only_gpus_that_the_server_sees_count():
    known = Known("box", "", gpus=(CARD, replace(CARD, total_mib=24576), CARD))
    assert planning.visible(known, {"CUDA_VISIBLE_DEVICES": "1"}) == (replace(CARD, total_mib=24576),)
    assert planning.visible(known, {"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert planning.visible(known, {"CUDA_VISIBLE_DEVICES": "0,9"}) == (CARD,)
    assert len(planning.visible(known, {}) or ()) == 3


def test_memory_that_others_hold_is_told_and_counts_when_asked_to():
    known = Known("box", "", gpus=(replace(CARD, free_mib=53000), replace(CARD, free_mib=97250)))
    assert planning.held(known, 2) == ("GPU 0: 43.8 GiB are held now",)
    assert planning.held(known, 1)[0].startswith("GPU 0")


def test_a_thin_miss_is_told_but_not_refused(machine):
    """An estimate of what is free is wrong by some: a server that fails by less is started, and shows it."""
    known, launch, pairs, answer = asked(machine, "tp1-linear", machine / "opt/sglang-0.5.11/bin/python", EXAMPLE,
                                         **{"max-running-requests": 8})  # fmt: skip
    question, _ = planning.question_of(launch, pairs[0][1], known, answer)
    assert question is not None
    refused = planning.refusal(question, "sglang")
    assert refused is not None
    failure = planning.refused(refused)
    assert failure.kind == "refused"
    assert "2 // 4 = 0" in failure.summary
    assert "--force" in failure.advice
    assert failure.finding is not None
    assert failure.finding["id"] == "state-slots-starved"
    thin = replace(question, argv=tuple("6" if word == "8" else word for word in question.argv))
    assert planning.refusal(thin, "sglang") is None
