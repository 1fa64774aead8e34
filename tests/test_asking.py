"""Many boxes are asked side by side: one that hangs or refuses delays no other, and is told."""

from __future__ import annotations

import pytest

from gpuctl import hosts
from gpuctl.asking import ask, asking
from tests.sshd import Sshd, make_key


@pytest.fixture
def machine(tmp_path):
    sshd = Sshd(tmp_path / "sshd")
    yield sshd
    sshd.stop()


def inventory(folder, **machines):
    text = "all:\n  hosts:\n"
    for name, variables in machines.items():
        text += f"    {name}:\n" + "".join(f"      {key}: {value}\n" for key, value in variables.items())
    (folder / "hosts.yml").write_text(text)
    return hosts.load(folder)


def over(sshd):
    return {
        "ansible_host": "127.0.0.1",
        "ansible_port": sshd.port,
        "ansible_user": sshd.user,
        "ansible_ssh_private_key_file": sshd.key,
        "ansible_ssh_common_args": f"-o UserKnownHostsFile={sshd.known_hosts}",
    }


def test_a_machine_that_hangs_delays_no_other_and_is_named(tmp_path, machine):
    boxes = inventory(tmp_path, hangs=over(machine), here={"ansible_connection": "local"})
    machine.freeze()
    waited = []
    answers = asking(boxes, ["all"], on_wait=waited.append)
    first = next(answers)
    answers.close()
    assert first.name == "here"
    assert first.box is not None
    assert "hangs" in waited[0]  # on a busy machine this one, too, may have to be waited for


def test_a_machine_nobody_knows_the_key_of_is_not_trusted_and_the_others_are_asked(tmp_path, machine):
    other = make_key(tmp_path / "other")
    machine.known_hosts.write_text(
        machine.known_line().replace(machine.known_line().split()[2], other.with_suffix(".pub").read_text().split()[1])
    )
    boxes = inventory(tmp_path, changed=over(machine), here={"ansible_connection": "local"})
    changed, here = ask(boxes, ["all"])
    assert here.box is not None
    assert changed.box is None
    assert "host key" in changed.missing["changed"]


def test_boxes_come_in_the_order_of_the_inventory(tmp_path):
    boxes = inventory(tmp_path, **{f"box{n}": {"ansible_connection": "local"} for n in (3, 1, 2)})
    assert [asked.name for asked in ask(boxes, ["all"])] == ["box3", "box1", "box2"]
