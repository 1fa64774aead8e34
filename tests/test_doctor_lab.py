"""The doctor on real containers: each fault is made, named, mended by the playbooks, and gone; mending again does nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpuctl import doctor, hosts, playbook
from gpuctl.asking import ask
from gpuctl.finding import Severity
from tests.lab.faults import conf, devices, driver
from tests.lab.faults.boot import reboot

pytestmark = pytest.mark.lab

CONF = "/etc/pve/lxc/200.conf"
ROOT = Path(__file__).parents[1]


def look(lab, guest="ct200", **eyes):
    (asked,) = ask(hosts.load(lab.inventory), [guest], **eyes)
    assert asked.box is not None, asked.missing
    return asked.box


def heal(lab, guest="ct200", **eyes):
    played = []

    def play(remedy):
        where = "kpro6" if remedy.on == "node" else guest
        outcome = playbook.play(remedy.playbook, lab.inventory, [where], remedy.vars)
        played.append(remedy.playbook)
        return doctor.Played(outcome.well, bool(sum(outcome.changed.values())), outcome.why)

    healing = doctor.heal(look(lab, guest, **eyes), lambda: look(lab, guest, **eyes), play)
    return healing, played


@pytest.fixture(scope="module")
def original(lab_to_break):
    return lab_to_break.check("kpro6", ["cat", CONF])


@pytest.fixture
def box200(lab_to_break, original):
    """The lab with guest 200 as it was at first, running."""
    lab_to_break.run("kpro6", ["nvidia-modprobe", "-c", "0", "-u"])
    major = lab_to_break.check("kpro6", ["awk", '$2 == "nvidia-uvm" {print $1}', "/proc/devices"]).strip()
    started_with(lab_to_break, original.replace("c 509:*", f"c {major}:*"))
    lab_to_break.wait()
    diagnosis = doctor.diagnose(look(lab_to_break))
    assert not [f for f in diagnosis.all if f.severity is Severity.CRITICAL], doctor.render_text(diagnosis)
    return lab_to_break


def started_with(lab, text):
    """Guest 200 with this configuration, started anew if it starts at all."""
    script = f"cat > {CONF} <<'EOT'\n{text}EOT\npct stop 200; pct start 200; sleep 5"
    lab.run("kpro6", ["sh", "-c", script])


KINDS = {
    "no_uvm_rule": "lxc_rule_missing",
    "v1_keys": "lxc_rule_v1",
    "malformed_rule": "lxc_rule_malformed",
    "devn_deny_write": "devn_deny_write",
    "devn_missing": "devn_node_missing",
    "mount_not_optional": "mount_source_missing",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_configuration_is_named_and_mended(box200, kind):
    lab = box200
    started_with(lab, getattr(conf, kind)(lab.check("kpro6", ["cat", CONF])))
    diagnosis = doctor.diagnose(look(lab))
    assert KINDS[kind] == diagnosis.findings[0].id, doctor.render_text(diagnosis)
    healing, _ = heal(lab)
    assert healing.state == "mended", doctor.render_healing(healing)
    assert doctor.diagnose(look(lab)).verdict == "well"
    assert heal(lab)[1] == []


def test_the_command_shows_asks_mends_and_has_nothing_left_to_do(box200):
    lab = box200
    started_with(lab, conf.no_uvm_rule(lab.check("kpro6", ["cat", CONF])))
    broken = lab.check("kpro6", ["cat", CONF])
    command = [sys.executable, "-m", "gpuctl", "doctor", "-i", str(lab.inventory), "-t", "ct200"]

    def gpuctl(*words):
        done = subprocess.run(
            [*command, *words], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=110
        )
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    code, out, _ = gpuctl()
    assert code == 1
    assert "lxc_rule_missing" in out
    code, out, err = gpuctl("--fix")
    assert (code, "--yes says yes" in err) == (2, True)
    code, out, err = gpuctl("--fix", "--check")
    assert code == 1
    assert "+dev0: /dev/nvidia0,mode=0666" in err
    assert "nothing was changed" in out
    assert lab.check("kpro6", ["cat", CONF]) == broken
    code, out, err = gpuctl("--fix", "--yes")
    assert code == 0, out + err
    assert "mended, as a second look shows" in out
    code, out, err = gpuctl("--fix", "--yes")
    assert (code, "container.yml" in err) == (0, False)


def test_a_renumbered_driver_is_named_and_mended_live_and_for_good(box200):
    lab = box200
    driver.renumber_uvm(lab, "kpro6", 511)
    reboot(lab, "kpro6")
    start = lab.check("ct200", ["cut", "-d", " ", "-f22", "/proc/1/stat"])
    diagnosis = doctor.diagnose(look(lab))
    finding = diagnosis.findings[0]
    assert (finding.id, finding.certainty.value) == ("lxc_rule_stale", "proved")
    healing, played = heal(lab)
    assert healing.state == "mended", doctor.render_healing(healing)
    assert played == ["container"]
    assert lab.check("ct200", ["cut", "-d", " ", "-f22", "/proc/1/stat"]) == start, "the guest was restarted"
    driver.renumber_uvm(lab, "kpro6", 507)
    reboot(lab, "kpro6")
    assert doctor.diagnose(look(lab)).verdict == "well"


def test_the_guest_alone_proves_the_refusal(box200):
    lab = box200
    started_with(lab, conf.no_uvm_rule(lab.check("kpro6", ["cat", CONF])))
    box = look(lab)
    alone = doctor.diagnose(doctor.box_from([box.guest]))
    assert [f.id for f in alone.findings if f.severity is Severity.CRITICAL] == ["device_refused"]
    assert "devices.allow" in alone.findings[0].advice


def test_a_service_user_is_shut_out_by_the_usual_devn_entries(box200):
    lab = box200
    started_with(lab, conf.devn_default_mode(lab.check("kpro6", ["cat", CONF])))
    assert doctor.diagnose(look(lab)).verdict == "well"  # as root
    assert doctor.diagnose(look(lab, user="nobody")).findings[0].id == "node_mode"
    healing, _ = heal(lab, user="nobody")
    assert healing.state == "mended", doctor.render_healing(healing)


def test_nodes_that_went_wrong_inside_are_named(box200):
    lab = box200
    for break_it, expected in ((devices.stale_node, "node_stale"), (devices.file_for_node, "node_is_file")):
        break_it(lab, "ct200", "/dev/nvidia-uvm")
        assert doctor.diagnose(look(lab)).findings[0].id == expected
    healing, _ = heal(lab)
    assert healing.state == "mended", doctor.render_healing(healing)


def test_one_gpu_less_is_not_overlooked(box200):
    lab = box200
    devices.file_for_node(lab, "ct200", "/dev/nvidia5")
    found = doctor.diagnose(look(lab))
    assert {"node_is_file", "gpu_count_short"} <= {f.id for f in found.all}


def test_the_doctor_leaves_the_machines_as_they_were(box200):
    lab = box200
    listing = ["sh", "-c", "ls -lR /dev/nvidia*; cat /proc/modules | head -50"]
    lab.run("ct200", ["rm", "-f", "/dev/nvidia-uvm-tools"])
    before = [lab.check(machine, listing) for machine in ("ct200", "kpro6")]
    for _ in range(2):
        look(lab)
    assert [lab.check(machine, listing) for machine in ("ct200", "kpro6")] == before
