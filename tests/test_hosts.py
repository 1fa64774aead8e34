"""Inventories are read as Ansible reads them, and mistakes are told with file, line and key."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl.hosts import BadInventory, load, read, through_node, transports
from gpuctl.transport import Guest, Local, Ssh
from gpuctl.yamltext import NotYaml, parse

ROOT = Path(__file__).parents[1]

EXAMPLE = """\
all:
  vars:
    ansible_user: root
nodes:
  hosts:
    kpro6:
      ansible_host: 10.0.0.6
      ansible_port: 2222
guests:
  vars:
    ansible_ssh_common_args: -F "{{ inventory_dir }}/ssh_config" -o "ProxyJump=bastion"
  hosts:
    ct200: {gpuctl_node: kpro6, gpuctl_vmid: 200, ansible_ssh_private_key_file: ~/.ssh/lab}
    ct202: {gpuctl_node: kpro6, gpuctl_vmid: 202, ansible_connection: pct}
"""


def folder(tmp_path, text, **files):
    (tmp_path / "hosts.yml").write_text(text)
    for name, more in files.items():
        kind, _, host = name.partition("__")
        (tmp_path / kind).mkdir(exist_ok=True)
        (tmp_path / kind / f"{host}.yml").write_text(more)
    return tmp_path


def mistakes(tmp_path, text, **files):
    with pytest.raises(BadInventory) as caught:
        load(folder(tmp_path, text, **files))
    assert all("\n" not in one for one in caught.value.mistakes)
    return [one.replace(f"{tmp_path}/", "") for one in caught.value.mistakes]


def test_nodes_guests_and_how_to_reach_them(tmp_path):
    inventory = load(folder(tmp_path, EXAMPLE))
    kpro6, ct200, ct202 = inventory.machines.values()
    assert (kpro6.kind, kpro6.host, kpro6.port, kpro6.user, kpro6.node) == ("node", "10.0.0.6", 2222, "root", None)
    assert (ct200.kind, ct200.host, ct200.node, ct200.vmid) == ("guest", "ct200", "kpro6", 200)
    assert ct200.key == str(Path("~/.ssh/lab").expanduser())
    assert ct200.options == ("-F", f"{tmp_path}/ssh_config", "-o", "ProxyJump=bastion")
    assert ct202.connection == "pct"
    ways = transports(inventory)
    assert [type(ways[name]) for name in ("kpro6", "ct200", "ct202")] == [Ssh, Ssh, Guest]
    assert ways["ct202"].node is ways["kpro6"]
    assert isinstance(through_node(ct200, ways), Guest)


def test_the_machine_itself(tmp_path):
    inventory = load(folder(tmp_path, "all: {hosts: {here: {ansible_connection: local}}}"))
    assert inventory.machines["here"].kind == "machine"
    assert isinstance(transports(inventory)["here"], Local)


def test_choosing_by_name_by_group_and_nothing(tmp_path):
    inventory = load(folder(tmp_path, EXAMPLE))

    def names(*wanted):
        return [machine.name for machine in inventory.chosen(wanted)]

    assert names() == names("all") == ["ct200", "ct202"]
    assert names("nodes", "ct202", "kpro6") == ["kpro6", "ct202"]
    with pytest.raises(BadInventory, match="no machine and no group ct9; there are: kpro6, ct200, ct202"):
        names("ct9")


def test_variables_beside_the_inventory_win_over_it_group_by_group(tmp_path):
    inventory = load(
        folder(
            tmp_path,
            EXAMPLE,
            group_vars__all="ansible_user: ada\n",
            group_vars__guests="ansible_user: bob\n",
            host_vars__ct200="ansible_user: eve\n",
        )
    )
    assert [machine.user for machine in inventory.machines.values()] == ["ada", "eve", "bob"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "hosts.yml: has to be a mapping of groups"),
        ("- a\n- b\n", "hosts.yml: has to be a mapping of groups"),
        ("nodes: {hosts: }\n", "hosts.yml: no machine in it"),
        ("nodes:\n  hosts:\n    a: 3\n", "hosts.yml:3: a has to be a mapping of variables"),
        ("nodes:\n  host:\n    a:\n", "hosts.yml:2: group nodes has hosts, vars and children, no host"),
        ("nodes:\n  hosts:\n    a:\n    a:\n", "hosts.yml:4: nodes.hosts.a is there twice"),
        ("nodes: {hosts: {a: {ansible_port: 70000}}}\n", "hosts.yml:1: a: ansible_port: 70000 is no number from"),
        ("guests:\n  hosts:\n    a: {gpuctl_vmid: 200}\n", "hosts.yml:3: a: gpuctl_node and gpuctl_vmid belong"),
        (
            "guests: {hosts: {a: {gpuctl_vmid: 200, gpuctl_node: b}}}\n",
            "hosts.yml:1: a: gpuctl_node: no machine b in this",
        ),
        ("guests: {hosts: {a: {gpuctl_vmid: 9, gpuctl_node: a}}}\n", "gpuctl_vmid: 9 is no number from 100 to"),
        ("all: {hosts: {a: {ansible_connection: winrm}}}\n", "a: ansible_connection: winrm is not known"),
        ("all: {hosts: {a: {ansible_connection: pct}}}\n", "a: ansible_connection: pct needs gpuctl_node and"),
        ("all: {hosts: {a: {ansible_password: x}}}\n", "a: ansible_password: gpuctl logs in by key"),
        ("all: {hosts: {a: {ansible_host: '{{ nope }}'}}}\n", "a: ansible_host: 'nope' is undefined"),
        ("all: {hosts: {a: {ansible_host: '{{ ansible_host }}'}}}\n", "the template refers to itself"),
        (
            'all: {hosts: {a: {ansible_ssh_common_args: "-o \'x"}}}\n',
            "a: ansible_ssh_common_args: No closing quotation",
        ),
        ("all: {hosts: {a: {ansible_ssh_common_args: -o StrictHostKeyChecking=no}}}\n", "host keys are always checked"),
        ("all: {hosts: {a: {ansible_host_key_checking: false}}}\n", "host keys are always checked"),
        ("a: {children: {b: {children: {a: }}}}\n", "is inside itself"),
        ("all: {hosts: {'a b': }}\n", "a b is no name of a machine"),
        ("all: {hosts: {'ct[01:100]': }}\n", "ct[01:100] is no name of a machine"),
        ("all: {hosts: {'ct[1:99999999999]': }}\n", "ct[1:99999999999] is no name of a machine"),
        (
            "all: {hosts: {a: {gpuctl_servs: x}}}\n",
            "hosts.yml:1: a: gpuctl_servs: no variable of gpuctl's; did you mean 'gpuctl_serves'?",
        ),
        ("all: [\n", "hosts.yml:1: a `[` opens here and is not closed"),
        (
            "all: {hosts: {a: !!python/object:os.system {}}}\n",
            "hosts.yml:1: the tag `!python/object:os.system` is not known",
        ),
    ],
)
def test_a_mistake_is_told_with_its_place(tmp_path, text, said):
    assert any(said in one for one in mistakes(tmp_path, text)), mistakes(tmp_path, text)


def test_all_mistakes_are_told_at_once(tmp_path):
    text = "nodes:\n  hosts:\n    a: {ansible_port: x}\nguests:\n  hosts:\n    b: {gpuctl_node: c, gpuctl_vmid: 7}\n"
    said = [one.partition("hosts.yml:")[2] for one in mistakes(tmp_path, text)]
    assert said == [
        "3: a: ansible_port: 'x' is no number from 1 to 65535",
        "6: b: gpuctl_vmid: 7 is no number from 100 to 999999999",
        "6: b: gpuctl_node: no machine c in this inventory",
    ]


def test_a_variable_is_told_where_it_stands_and_once_for_a_group(tmp_path):
    text = (
        "guests:\n  vars:\n    gpuctl_serves: {a: 1}\n    ansible_port: x\n  hosts:\n    a:\n      gpuctl_tmpfs:\n"
        "        /run/m:\n          size: 64X\n          numa: bind\n          siz: 64G\n          huge: yes\n    b:\n"
    )
    said = mistakes(
        tmp_path, text, host_vars__b="# of b\nansible_become_user: eve\n", group_vars__all="gpuctl_vmd: 1\n"
    )
    assert said == [
        "group_vars/all.yml:1: a: gpuctl_vmd: no variable of gpuctl's; did you mean 'gpuctl_vmid'?",
        "hosts.yml:4: a: ansible_port: 'x' is no number from 1 to 65535",
        "hosts.yml:3: a: gpuctl_serves: a server, or a list of servers, is expected, not {'a': 1}",
        "hosts.yml:9: a: gpuctl_tmpfs: /run/m: size: '64X' is no size, as 64G",
        "hosts.yml:10: a: gpuctl_tmpfs: /run/m: numa: 'bind'; there are interleave, bind:N, none",
        "hosts.yml:11: a: gpuctl_tmpfs: /run/m: siz: unknown key; did you mean 'size'?",
        "hosts.yml:12: a: gpuctl_tmpfs: /run/m: huge: True; there are never, always, within_size, advise",
        "host_vars/b.yml:2: b: ansible_become_user: eve; gpuctl becomes root",
    ]


def test_ansible_takes_the_folder_of_the_example_and_reads_nothing_else_in_it():
    """`ansible-playbook -i inventory/kpro6`, as playbooks/README.md says: copies of config.json are no inventories."""
    ansible = Path(sys.executable).with_name("ansible-inventory")
    done = subprocess.run(
        [ansible, "-i", "inventory/kpro6", "--graph"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.stderr == ""
    names = re.findall(r"\w+", done.stdout)
    assert names == ["all", "ungrouped", "nodes", "kpro6", "guests", "ct200"]


def test_no_inventory_there(tmp_path):
    with pytest.raises(BadInventory, match=r"no hosts.yml there; `gpuctl init` writes one"):
        load(tmp_path)


def test_two_guests_cannot_be_one(tmp_path):
    text = EXAMPLE.replace("gpuctl_vmid: 202", "gpuctl_vmid: 200")
    assert mistakes(tmp_path, text) == ["hosts.yml:14: ct202: gpuctl_vmid: 200 on kpro6 is ct200 already"]


def test_a_file_that_is_not_text_is_told(tmp_path):
    (tmp_path / "hosts.yml").write_bytes(b"all: \xff\xfe\n")
    with pytest.raises(BadInventory, match="it is not UTF-8"):
        load(tmp_path)


@given(st.text() | st.lists(st.sampled_from([*"{}[]:,-&*!|>'\"#%@`\n\t ", "a", "hosts", "all: ", "\n  "])).map("".join))
def test_any_text_is_read_or_told_in_one_line(text):
    said = []
    try:
        read(parse(text, "hosts.yml"), {}, {}, Path("hosts.yml"))
    except NotYaml as error:
        said = [str(error)]
    except BadInventory as error:
        said = error.mistakes
    assert all("\n" not in one for one in said)


# Held against Ansible itself

names = st.sampled_from(["a", "b", "c", "ct[1:3]", "ct2", "m[08:10]", "x[0:4:2]y"])
groups = st.sampled_from(["nodes", "guests", "g1", "g2", "g3"])
variables = st.dictionaries(
    st.sampled_from(["v1", "v2", "ansible_user", "ansible_group_priority"]), st.integers(1, 9), max_size=3
)
plain = st.dictionaries(st.sampled_from(["v1", "v2", "ansible_user"]), st.integers(1, 9), max_size=3)


def group(children):
    return st.fixed_dictionaries(
        {},
        optional={
            "hosts": st.dictionaries(names, st.none() | plain, max_size=3),
            "vars": variables,
            "children": st.dictionaries(groups, children, max_size=2),
        },
    )


inventories = st.dictionaries(
    groups | st.just("all"), st.recursive(st.none() | group(st.none()), group, max_leaves=6), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(tree=inventories, outside=st.dictionaries(groups | st.just("all"), plain, max_size=2), inside=plain)
def test_variables_are_merged_as_ansible_merges_them(tmp_path_factory, tree, outside, inside):
    from ansible.inventory.manager import InventoryManager
    from ansible.parsing.dataloader import DataLoader
    from ansible.vars.manager import VariableManager

    place = tmp_path_factory.mktemp("inventory")
    folder(
        place,
        yaml.safe_dump(tree),
        **{f"group_vars__{name}": yaml.safe_dump(values) for name, values in outside.items()},
        host_vars__ct2=yaml.safe_dump(inside),
    )
    try:
        ours = load(place)
    except BadInventory as error:
        told = str(error)
        assert "inside itself" in told or "no machine in it" in told, told
        return
    loader = DataLoader()
    theirs = InventoryManager(loader=loader, sources=[str(place / "hosts.yml")])
    manager = VariableManager(loader=loader, inventory=theirs)
    assert set(ours.machines) == {host.name for host in theirs.get_hosts()}
    for host in theirs.get_hosts():
        merged = manager.get_vars(host=host, include_hostvars=False)
        expected = {name: int(merged[name]) for name in ("v1", "v2", "ansible_user") if name in merged}
        assert dict(ours.machines[host.name].vars) == expected, host.name
    for name, members in ours.groups.items():
        assert set(members) == {host.name for host in theirs.get_hosts(pattern=re.sub("^all$", "all", name))}
    for file in sorted(place.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
