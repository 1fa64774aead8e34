"""docs/inventory.md holds every key there is and no other, with the true default, and examples that are taken."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from gpuctl import config, hosts, plugins
from gpuctl.yamltext import parse

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "inventory.md").read_text()
WORKLOADS = {name: plugins.get("workloads", name).Parameters for name in plugins.names("workloads")}
REQUIRED = object()
NOT_GIVEN = object()


def rows(table: str) -> dict[str, tuple[str, dict[str, object]]]:
    """key -> (default as written, the example as YAML)"""
    found = {}
    for line in table.splitlines():
        if line.startswith("| `"):
            key, _, default, _, example = (cell.strip() for cell in line.strip("|").split("|"))
            assert key.strip("`") not in found, key
            found[key.strip("`")] = (default, yaml.safe_load(example.strip("`")))
    return found


def tables() -> dict[str, dict[str, tuple[str, dict[str, object]]]]:
    """Tables by what stands before them: the section's title, or the sentence that names whose they are."""
    found, title = {}, ""
    for part in re.split(r"\n\n", TEXT):
        if part.startswith("|"):
            found[title] = rows(part)
        elif heading := re.match(r"#+ (\S+)|Each (\w+):|`(\w+)`: ", part):
            title = heading[1] or heading[2] or heading[3]
    return found


def fields(kind) -> dict[str, object]:
    """key -> default"""
    if dataclasses.is_dataclass(kind):
        return {
            one.name: one.default if one.default is not dataclasses.MISSING else one.default_factory()
            for one in dataclasses.fields(kind)
        }
    return {
        name: REQUIRED if one.is_required() else one.get_default(call_default_factory=True)
        for name, one in kind.model_fields.items()
    }


KNOWN = {
    "hosts.yml": dict.fromkeys(hosts.OURS),
    "models.yml": fields(config.Model),
    "servers.yml": fields(config._Servers),
    "server": {**fields(config.Server), "use": None, "for": None},
    "phases.yml": fields(config._Phases),
    "phase": fields(config.Phase),
    **{name: fields(kind) for name, kind in WORKLOADS.items()},
}


def test_every_table_is_of_something_that_is_there():
    assert set(tables()) == set(KNOWN)


@pytest.mark.parametrize("table", KNOWN)
def test_every_key_is_told_and_every_key_told_is_there(table):
    assert set(tables()[table]) == set(KNOWN[table])


@pytest.mark.parametrize("table", KNOWN)
def test_defaults_are_true(table):
    from gpuctl.workloads import PROMPTS

    for key, (told, _) in tables()[table].items():
        default = KNOWN[table][key]
        if default is REQUIRED:
            assert told == "required", key
        elif default == list(PROMPTS):
            assert told == "all", key
        elif default is not None:  # else: not given, or in words what happens then
            assert yaml.safe_load(told) == default, key
        else:
            assert told not in ("required", "all", ""), key


@pytest.mark.parametrize("table", KNOWN)
def test_an_example_is_of_its_key(table):
    for key, (_, example) in tables()[table].items():
        assert list(example) == [key]


def test_examples_of_models_servers_and_phases_are_taken():
    for _, example in tables()["models.yml"].values():
        config.Model(**{"path": "/m", **example})
    for key, (_, example) in tables()["server"].items():
        if key not in ("use", "for"):
            config.Server(**{"engine": "vllm", **example})
    for _, example in tables()["phase"].values():
        config.Phase(**{"servers": [], "workloads": [], **example})
    for name, kind in WORKLOADS.items():
        for _, example in tables()[name].values():
            config._checked(kind)(**example)


def blocks() -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", TEXT, re.S)


def test_the_least_of_each_file_is_an_inventory(tmp_path):
    for text in blocks():
        if name := re.match(r"# (\w+\.yml)\n", text):
            (tmp_path / name[1]).write_text(text)
    inventory = config.load(tmp_path, engines=plugins.names("engines"), workloads=WORKLOADS)
    assert list(inventory.phases) == ["first"]


def test_examples_of_machines_are_taken(tmp_path):
    (text,) = (text for text in blocks() if text.startswith("nodes:"))
    variables = {k: v for _, example in tables()["hosts.yml"].values() for k, v in example.items()}
    document = yaml.safe_load(text)
    document["guests"]["hosts"]["ct200"].update(variables)
    found = hosts.read(parse(yaml.safe_dump(document), "hosts.yml"), {}, {}, Path("hosts.yml"))
    assert found.machines["ct200"].vmid == 200
    assert found.machines["ct200"].serves == ("plain",)


def test_what_it_says_of_engines_profiles_and_prompts_is_all_there_is():
    from gpuctl import nccl
    from gpuctl.workloads import PROMPTS

    for name in (*plugins.names("engines"), *nccl.PROFILES, *PROMPTS, *hosts._TMPFS, *hosts._HUGE):
        assert f"`{name}`" in TEXT, name
    source = (ROOT / "gpuctl" / "hosts.py").read_text()
    for name in re.findall(r"`(ansible_\w+)`", TEXT):
        assert f'"{name}"' in source, name


def test_the_readme_leads_there():
    assert "docs/inventory.md" in (ROOT / "README.md").read_text()
