"""What the user writes: the shipped inventories hold, and every mistake is told with its place, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl import config, plugins
from gpuctl.cells import of_phase
from gpuctl.yamltext import NotYaml, parse

ROOT = Path(__file__).parents[1]
WORKLOADS = {name: plugins.get("workloads", name).Parameters for name in plugins.names("workloads")}

GOOD = {
    "hosts.yml": "all:\n  hosts:\n    local:\n      ansible_connection: local\n",
    "models.yml": "tiny:\n  path: models/tiny.gguf\n",
    "servers.yml": "servers:\n  plain:\n    engine: llamacpp\n    model: tiny\n",
    "phases.yml": "phases:\n  demo:\n    servers: [plain]\n    workloads:\n      - decode: {max_tokens: [8]}\n",
}


def load(folder: Path, **files: str) -> config.Inventory:
    for name, text in {**GOOD, **{f"{k}.yml": v for k, v in files.items()}}.items():
        (folder / name).write_text(text)
    return config.load(folder, engines=plugins.names("engines"), workloads=WORKLOADS, multi_node=("sglang", "vllm"))


def mistakes(folder: Path, **files: str) -> list[str]:
    with pytest.raises(config.ConfigError) as error:
        load(folder, **files)
    return [line.removeprefix(f"{folder}/") for line in error.value.mistakes]


@pytest.mark.parametrize("name", ["kpro6", "local"])
def test_a_shipped_inventory_holds(name):
    inventory = config.load(ROOT / "inventory" / name, engines=plugins.names("engines"), workloads=WORKLOADS)
    assert inventory.phases


def test_the_campaign_is_all_there():
    inventory = config.load(ROOT / "inventory" / "kpro6", engines=plugins.names("engines"), workloads=WORKLOADS)
    assert set(inventory.phases) == {"tp1", "tp4", "tp8", "k26"}
    for tp in (1, 4, 8):
        for method in ("auto", "linear", *(f"ddtree-b{b}" for b in (8, 12, 15, 16, 32, 64))):
            assert f"tp{tp}-{method}" in inventory.servers
    flags = inventory.servers["tp4-ddtree-b15"].flags
    assert flags["tp-size"] == 4
    assert flags["speculative-num-draft-tokens"] == 16


def test_a_family_is_every_combination(tmp_path):
    text = (
        "defaults:\n  base: {engine: sglang, model: tiny, flags: {a: 1, b: 2}}\n"
        "servers:\n  'tp{{ tp }}-{{ m }}':\n    for: {tp: [1, 2], m: [x, y]}\n    use: base\n"
        "    flags: {tp: '{{ tp * 2 }}', b: null, t: 'v{{ tp }}'}\n"
    )
    inventory = load(tmp_path, servers=text, phases=GOOD["phases.yml"].replace("plain", "tp*"))
    assert list(inventory.servers) == ["tp1-x", "tp1-y", "tp2-x", "tp2-y"]
    assert inventory.servers["tp2-x"].flags == {"a": 1, "b": None, "tp": 4, "t": "v2"}


def test_all_mistakes_of_all_files_at_once(tmp_path):
    told = mistakes(
        tmp_path,
        models="tiny:\n  pth: x\n",
        servers="servers:\n  plain:\n    engine: llamacp\n    model: tyni\n    port: eighty\n",
        phases="phases:\n  demo:\n    servers: [nothing]\n    workloads:\n      - decod: {}\n",
    )
    assert told == [
        "models.yml:1: tiny.path: missing",
        "models.yml:2: tiny.pth: unknown key; did you mean 'path'?",
        "servers.yml:5: servers.plain.port: a whole number is expected, not text 'eighty'",
        "phases.yml:5: phases.demo.workloads.0.decod: no workload 'decod'; did you mean 'decode'?",
    ]


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ({"servers": "servers:\n  plain:\n    engine: llamacp\n    model: tiny\n"}, "servers.yml:3: servers.plain.engine: no engine 'llamacp'; did you mean 'llamacpp'?"),
        ({"servers": "servers:\n  plain:\n    engine: llamacpp\n    model: tinny\n"}, "servers.yml:4: servers.plain.model: no model 'tinny'; did you mean 'tiny'?"),
        ({"servers": "servers:\n  plain:\n    engine: external\n"}, "servers.yml:2: servers.plain.url: engine external needs the url where the server answers"),
        ({"servers": "servers:\n  plain:\n    engine: llamacpp\n    model: tiny\n    use: bse\n"}, "servers.yml:5: servers.plain.use: no defaults 'bse'; there are none"),
        ({"servers": "servers:\n  'a{{ x }}':\n    engine: llamacpp\n    model: tiny\n"}, "servers.yml:2: servers.a{{ x }}: 'x' is undefined; `for` gives: nothing"),
        ({"servers": "servers:\n  a:\n    for: {tp: [1, 2]}\n    engine: llamacpp\n    model: tiny\n"}, "servers.yml:2: servers.a: a second server named 'a'; put what differs into the name"),
        ({"servers": "servers:\n  plain: {engine: llamacpp, model: tiny}\n  plain: {engine: sglang, model: tiny}\n"}, "servers.yml:3: plain: a second time; it stands on line 2 already"),
        ({"phases": "phases:\n  demo:\n    servers: [plan]\n    workloads: []\n"}, "phases.yml:3: phases.demo.servers.0: no server 'plan' in servers.yml; did you mean 'plain'?"),
        ({"phases": "phases:\n  demo:\n    servers: [plain]\n    baseline: other\n    workloads: []\n"}, "phases.yml:4: phases.demo.baseline: 'other' is not one of the phase's servers"),
        ({"phases": "phases:\n  demo:\n    servers: [plain]\n    workloads:\n      - context: {tokens: [1]}\n"}, "phases.yml:5: phases.demo.workloads.0.context.tokens.0: 1 is not from 64 to 10,000,000"),
        ({"phases": "phases:\n  demo:\n    servers: [plain]\n    workloads:\n      - decode: {prompts: [fob]}\n"}, "phases.yml:5: phases.demo.workloads.0.decode.prompts.0: no prompt 'fob'; did you mean 'fib'?"),
        ({"models": "tiny: [\n"}, "models.yml:1: a `[` opens here and is not closed"),
        ({"models": "- a\n"}, "models.yml:1: a mapping of names is expected, not a list"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_its_place(tmp_path, files, line):
    assert line in mistakes(tmp_path, **files)


@pytest.mark.parametrize(
    ("files", "only"),
    [
        # what stands in `defaults` is told there, and once
        ({"servers": "defaults:\n  base:\n    engine: lamacpp\n    modle: tiny\nservers:\n  plain: {use: base}\n  b: {use: base}\n"},
         "servers.yml:4: defaults.base.modle: unknown key; did you mean 'model'?"),
        ({"servers": "defaults:\n  base:\n    engine: lamacpp\n    model: tiny\nservers:\n  plain: {use: base}\n  b: {use: base}\n"},
         "servers.yml:3: defaults.base.engine: no engine 'lamacpp'; did you mean 'llamacpp'?"),
        ({"servers": "defaults:\n  base: {engine: llamacpp, model: tiny}\nservers:\n  plain: {use: base, flags: {c: [{a: 1}]}}\n"},
         "servers.yml:4: servers.plain.flags.c: text, a number, true or false, or a list of these is expected, not a list [{'a': 1}]"),
        # a mistake draws no others behind it
        ({"models": "tiny:\n  path: a.gguf\n  stage: maybe\n"}, "models.yml:3: tiny.stage: true or false is expected, not text 'maybe'"),
        ({"models": "tiny: {path: ''}\n"}, "models.yml:1: tiny.path: it is empty"),
        ({"models": "tiny: [\n"}, "models.yml:1: a `[` opens here and is not closed"),
        ({"servers": "servers:\n\tplain: {}\n"}, "servers.yml:2: a tab where blanks are needed: YAML is indented by blanks"),
        ({"servers": "servers:\n  plain:\n    use: bas\n"}, "servers.yml:3: servers.plain.use: no defaults 'bas'; there are none"),
        ({"servers": "servers:\n  plain: {engine: llamacpp, model: tiny, port: 99999}\n"},
         "servers.yml:2: servers.plain.port: at most 65535 is expected, not 99999"),
        ({"servers": "servers:\n  plain: {engine: llamacpp, model: tiny, title: '{{ nope }}'}\n"},
         "servers.yml:2: servers.plain: 'nope' is undefined; `for` gives: nothing"),
        ({"phases": "campaign: ../../demo\n" + GOOD["phases.yml"]},
         "phases.yml:1: campaign: a name of letters, digits, dot, dash, underscore is expected, not '../../demo'"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_once_where_it_stands(tmp_path, files, only):
    assert mistakes(tmp_path, **files) == [only]


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        ("decode: {max_tokens: [-5]}", "max_tokens.0: -5 is not from 1 to 10,000,000"),
        ("concurrency: {concurrency: [1, 4000000000]}", "concurrency.1: 4,000,000,000 is not from 1 to 65,535"),
        ("concurrency: {rounds: 0}", "rounds: 0 is not from 1 to 1,000"),
        ("context: {tokens: [1000000000000]}", "tokens.0: 1,000,000,000,000 is not from 64 to 10,000,000"),
        ("agentic: {turns: 99999999999}", "turns: 99,999,999,999 is not from 1 to 10,000"),
        ("concurrency: {concurrency: [65535], rounds: 1000}", "concurrency x rounds: 65,535,000 is not from 1 to"),
        ("agentic: {turns: 10000, words_per_turn: 1000000}", "turns x words_per_turn x concurrency: 10,000,000,000 is"),
    ],
)
def test_absurd_numbers_are_refused_before_texts_are_made_of_them(tmp_path, workload, said):
    (line,) = mistakes(tmp_path, phases=GOOD["phases.yml"].replace("decode: {max_tokens: [8]}", workload))
    assert said in line


WORKLOADS_OF_DEMO = "phases.demo.workloads."


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        ("decode: {max_tokns: [256]}", ["0.decode.max_tokns: unknown key; did you mean 'max_tokens'?"]),
        ("decode: {max_tokens: [8], servrs: plain}", ["0.decode.servrs: unknown key; did you mean 'servers'?"]),
        ("decode: {x: 1}", ["0.decode.x: unknown key; there are: prompts, max_tokens, servers"]),
        ("decode: {1: 1, x: 1}", [
            "0.decode.1: unknown key; there are: prompts, max_tokens, servers",
            "0.decode.x: unknown key; there are: prompts, max_tokens, servers",
        ]),
        ("context: {tokns: [3000], max_tokens: 0}", [
            "0.context.tokns: unknown key; did you mean 'tokens'?",
            "0.context.max_tokens: 0 is not from 1 to 10,000,000",
        ]),
        ("agentic: {turn: 3}", ["0.agentic.turn: unknown key; did you mean 'turns'?"]),
        ("decode: {max_tokens: 256}", ["0.decode.max_tokens: a list is expected, not a number 256; write [256]"]),
        ("decode: {max_tokens: ['256']}", [
            "0.decode.max_tokens.0: a whole number is expected, not text '256'; write 256"
        ]),
        ("agentic: {turns: 6.0}", ["0.agentic.turns: a whole number is expected, not a number 6.0; write 6"]),
        ("agentic: {turns: true}", ["0.agentic.turns: a whole number is expected, not true"]),
        ("agentic: 6", ["0.agentic: a mapping is expected, not a number 6"]),
        ("concurrency: {concurrency: [0, -1, 1e9, x]}", [
            "0.concurrency.concurrency.0: 0 is not from 1 to 65,535",
            "0.concurrency.concurrency.1: -1 is not from 1 to 65,535",
            "0.concurrency.concurrency.2: a whole number is expected, not text '1e9'; write 1000000000",
            "0.concurrency.concurrency.3: a whole number is expected, not text 'x'",
        ]),
        ("decode: {max_tokens: []}", ["0.decode.max_tokens: it is empty"]),
        ("concurrency: {prompts: []}", ["0.concurrency.prompts: it is empty"]),
        ("decode: {servers: []}", ["0.decode.servers: a server of the phase, or a list of them, is expected, not []"]),
        ("decode: {servers: 5}", ["0.decode.servers: a server of the phase, or a list of them, is expected, not 5"]),
        ("decode: {servers: [plain, plan]}", [
            "0.decode.servers: none of the phase's servers is 'plan'; did you mean 'plain'?"
        ]),
        ("decode", ["0: each item names one workload, as in `- decode: {max_tokens: [256]}`"]),
        ("{decode: {}, context: {}}", ["0: each item names one workload, as in `- decode: {max_tokens: [256]}`"]),
    ],
)  # fmt: skip
def test_what_a_phase_asks_is_checked_to_the_last_value(tmp_path, workload, said):
    phases = GOOD["phases.yml"].replace("decode: {max_tokens: [8]}", workload)
    assert mistakes(tmp_path, phases=phases) == [f"phases.yml:5: {WORKLOADS_OF_DEMO}{one}" for one in said]


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("program: vllm", "program: a list is expected, not text 'vllm'; write [vllm]"),
        ("cpus: 3", "cpus: text is expected, not a number 3; write '3'"),
        ("port: '80'", "port: a whole number is expected, not text '80'; write 80"),
        ("ready_within_s: 1e3", "ready_within_s: a number is expected, not text '1e3'; write 1000"),
        ("env: {A: [1]}", "env.A: text, a number, true or false is expected, not a list [1]"),
        (
            "flags: {a: [[1]]}",
            "flags.a: text, a number, true or false, or a list of these is expected, not a list [[1]]",
        ),
        ("env: {1: x}", "env.1: a name is text: write '1'"),
    ],
)
def test_a_wrong_type_is_told_with_what_would_be_right(tmp_path, server, said):
    told = mistakes(tmp_path, servers=f"servers:\n  plain: {{engine: llamacpp, model: tiny, {server}}}\n")
    assert told == [f"servers.yml:2: servers.plain.{said}"]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["fib", "plain"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
keys = st.sampled_from(["prompts", "max_tokens", "tokens", "turns", "concurrency", "rounds", "servers", "self", ""])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(WORKLOADS)), st.dictionaries(keys | st.integers(0, 9), values, max_size=3))
def test_a_workload_is_refused_in_a_line_or_can_be_asked(tmp_path_factory, workload, parameters):
    phases = {"phases": {"demo": {"servers": ["plain"], "workloads": [{workload: parameters}]}}}
    try:
        inventory = load(tmp_path_factory.mktemp("inventory"), phases=yaml.safe_dump(phases, allow_unicode=True))
    except config.ConfigError as error:
        assert all("\n" not in line and ": phases.demo.workloads.0" in line for line in error.mistakes)
        return
    cells = of_phase(inventory.phases["demo"], lambda name: plugins.get("workloads", name))
    assert cells["plain"]


def test_each_phase_is_looked_at_whatever_is_wrong_with_another(tmp_path):
    phases = (
        "phases:\n  one:\n    titel: x\n    servers: [plain]\n    workloads:\n      - decode: {max_tokns: [1]}\n"
        "  two:\n    servers: []\n    workloads: []\n"
        "  three:\n    servers: [plain]\n    basline: plain\n    reps: '3'\n    workloads:\n      - agentic: {turns: x}\n"
    )
    assert mistakes(tmp_path, phases=phases) == [
        "phases.yml:3: phases.one.titel: unknown key; did you mean 'title'?",
        "phases.yml:6: phases.one.workloads.0.decode.max_tokns: unknown key; did you mean 'max_tokens'?",
        "phases.yml:8: phases.two.servers: it is empty: no server would be asked; there are: plain",
        "phases.yml:9: phases.two.workloads: it is empty: nothing would be asked; "
        "as in `- decode: {max_tokens: [256]}`",
        "phases.yml:12: phases.three.basline: unknown key; did you mean 'baseline'?",
        "phases.yml:13: phases.three.reps: a whole number is expected, not text '3'; write 3",
        "phases.yml:15: phases.three.workloads.0.agentic.turns: a whole number is expected, not text 'x'",
    ]


def test_an_unknown_key_like_no_other_is_answered_with_all_there_are(tmp_path):
    (line,) = mistakes(tmp_path, servers="servers:\n  plain: {engine: llamacpp, model: tiny, zzz: 1}\n")
    head, _, names = line.partition("there are: ")
    assert head == "servers.yml:2: servers.plain.zzz: unknown key; "
    assert names.split(", ") == [*config.Server.model_fields, "use", "for"]


def test_missing_files_are_told_together(tmp_path):
    with pytest.raises(config.ConfigError) as error:
        config.load(tmp_path, engines=(), workloads={})
    assert len(error.value.mistakes) == 4


@given(st.text(max_size=200))
def test_no_text_breaks_the_reader(text):
    try:
        document = parse(text, "file.yml")
    except NotYaml as error:
        assert "\n" not in str(error)
        return
    assert document.at("no", "such", "key").startswith("file.yml:")
    assert document.value == yaml.safe_load(text) or document.value != document.value  # .nan is a value as well


@settings(max_examples=40, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=12,
    )
)
def test_no_structure_breaks_the_checker(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("inventory")
    text = yaml.safe_dump(value, allow_unicode=True)
    for name in ("models", "servers", "phases"):
        try:
            load(folder, **{name: text})
        except config.ConfigError as error:
            assert all("\n" not in line for line in error.mistakes)


TWO = "all:\n  hosts:\n    ct200: {}\n  children:\n    more:\n      hosts:\n        ct210: {}\n"


def test_a_server_may_run_on_several_machines(tmp_path):
    text = "servers:\n  s: {engine: sglang, model: tiny, nodes: [ct200, ct210], meet: '10.0.0.1:5000'}\n"
    phases = GOOD["phases.yml"].replace("plain", "s")
    assert load(tmp_path, hosts=TWO, servers=text, phases=phases).servers["s"].nodes == ["ct200", "ct210"]


MACHINES = """\
all:
  hosts:
    local:
      ansible_connection: local
      gpuctl_serves: [plian, theirs, broken]
      gpuctl_tmpfs:
        /run/models: {size: 1G}
        /run/model: {}
        /srv: {siz: 1G}
"""


def test_what_hosts_yml_and_phases_say_of_each_other_and_of_servers_and_models_is_checked(tmp_path):
    told = mistakes(
        tmp_path,
        hosts=MACHINES.replace(", broken]", "]").replace("siz:", "size:"),
        models="tiny: {path: /run/models/tiny, stage: true}\n",
        servers=GOOD["servers.yml"] + "  theirs: {engine: external, url: 'http://h:1'}\n",
        phases=GOOD["phases.yml"].replace("    servers", "    target: loca\n    servers"),
    )
    assert told == [
        "hosts.yml:5: local: gpuctl_serves: no server 'plian' in servers.yml; did you mean 'plain'?",
        "hosts.yml:5: local: gpuctl_serves: theirs is somebody else's (url), and cannot be started",
        "hosts.yml:8: local: gpuctl_tmpfs: /run/model: no model of models.yml with `stage: true` lies there; "
        "did you mean '/run/models'?",
        "hosts.yml:9: local: gpuctl_tmpfs: /srv: no model of models.yml with `stage: true` lies there",
        "phases.yml:3: phases.demo.target: no machine 'loca' in hosts.yml; did you mean 'local'?",
    ]


def test_mistakes_of_hosts_yml_are_told_with_the_others_and_draw_no_others(tmp_path):
    told = mistakes(
        tmp_path,
        hosts=MACHINES,
        servers=GOOD["servers.yml"] + "  broken: {engine: vllm, modl: tiny}\n",
        phases=GOOD["phases.yml"].replace("    servers", "    target: loca\n    servers"),
    )
    assert told == [
        "hosts.yml:9: local: gpuctl_tmpfs: /srv: siz: unknown key; did you mean 'size'?",
        "servers.yml:5: servers.broken.modl: unknown key; did you mean 'model'?",
    ]


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("engine: sglang, nodes: [ct200, ct21]", "nodes.1: no machine 'ct21' in hosts.yml; did you mean 'ct210'?"),
        ("engine: sglang, nodes: [ct200, ct200]", "nodes.1: ct200 a second time: a machine has one part of a server"),
        (
            "engine: llamacpp, nodes: [ct200, ct210]",
            "nodes: llamacpp runs on one machine; over several run sglang and vllm",
        ),
        ("engine: sglang, nodes: [ct200], meet: 'a:1'", "meet: only a server with several nodes needs it"),
        ("engine: sglang, nodes: [ct200, ct210], meet: nowhere", "meet: host:port is expected"),
    ],
)
def test_what_cannot_run_on_several_machines_is_named(tmp_path, server, said):
    found = mistakes(tmp_path, hosts=TWO, servers=f"servers:\n  plain: {{model: tiny, {server}}}\n")
    assert [line for line in found if said in line], found
