"""What leaves a machine in a saved snapshot names nobody, and is diagnosed as the true one."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from gpuctl import doctor, redaction
from gpuctl.box import Box, Snapshot
from tests.world import World, conf

UUID = "dc5b3ea6-2254-97bd-23cf-2666f12aab1e"
GUEST = {
    "schema": "gpuctl.snapshot/1",
    "machine": "rosalind",
    "role": "guest",
    "probe": {"version": 1, "euid": 0},
    "files": {
        "/proc/sys/kernel/hostname": "rosalind\n",
        "/proc/sys/kernel/random/boot_id": "3f0f2d4c-9c6d-4c0e-8a4f-1e4b4b2f7a11\n",
        "/proc/cmdline": "root=UUID=3f0f2d4c-9c6d-4c0e-8a4f-1e4b4b2f7a12 ip=10.20.30.40",
        "/proc/mounts": "nas01.lab.example.com:/export /mnt nfs4 rw,addr=fd12:3456:789a::20 0 0\n",
        "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Thu\n",
        "/proc/devices": "195 nvidia\n511 nvidia-uvm\n",
    },
    "nvml": {"root": {"nvmlInit": 0, "gpus": [{"index": 0, "name": "NVIDIA H200", "uuid": f"GPU-{UUID}", "serial": "1653924098150",
                                              "bus": "00000000:00:06.0", "vbios": "96.00.A5.00.1A"}]}},
    "cuda": {"root": {"dlopen": "OK", "cuInit": 100}},
    "service": {"env": {"CUDA_VISIBLE_DEVICES": f"GPU-{UUID[:-4]}0000", "HF_HOME": "/home/grace/.cache", "PATH": "/usr/bin"}},
    "commands": {"id": "uid=0(root) mail grace@company.org", "nvidia-smi -L": f"GPU 0: NVIDIA H200 (UUID: GPU-{UUID})"},
    "kernel_log": {"lines": ["[1.0] eth0: bc:24:11:00:aa:01 up on rosalind"], "of": 1},
    "errors": ["Authorization: hf_abcdefghijkl", "api_key=sk-aaaabbbbccccddddeeee", "see https://github.com/x/y"],
}  # fmt: skip
NODE = {
    "machine": "kpro6.lab.example.com",
    "role": "node",
    "probe": {"version": 1, "euid": 0},
    "files": {
        "/etc/pve/lxc/200.conf": "arch: amd64\nhostname: rosalind\nnet0: name=eth0,bridge=vmbr0,hwaddr=BC:24:11:00:AA:01,ip=10.20.30.41/24\n"
        "lxc.environment: HF_TOKEN=hf_abcdefghijkl\n",
    },
    "commands": {"pct list": {"rc": 0, "stdout": "VMID       Status     Lock         Name\n200        running                 rosalind\n", "stderr": ""}},
}  # fmt: skip


def test_nothing_that_names_somebody_is_left():
    text, told = doctor.saved([Snapshot(GUEST), Snapshot(NODE)])
    for secret in ("rosalind", "kpro6", "lab.example.com", "10.20.30", "bc:24:11", "BC:24:11", UUID, "1653924098150", "hf_abc",
                   "sk-aaaa", "grace", "fd12:3456", "3f0f2d4c"):  # fmt: skip
        assert secret not in text, secret
    for kept in (
        "580.95.05",
        "96.00.A5.00.1A",
        "511 nvidia-uvm",
        "00000000:00:06.0",
        "NVIDIA H200",
        "github.com",
        "/usr/bin",
    ):
        assert kept in text, kept
    kinds = " ".join(told)
    for kind in ("host names", "addresses", "UUIDs", "serial number", "tokens", "MAC address", "home folder", "e-mail"):
        assert kind in kinds, told


def test_the_same_value_has_the_same_mask_in_both_machines():
    (guest, node), _ = redaction.mask([GUEST, NODE])
    assert guest["machine"] in node["files"]["/etc/pve/lxc/200.conf"]
    uuid = guest["nvml"]["root"]["gpus"][0]["uuid"]
    assert uuid in guest["commands"]["nvidia-smi -L"]
    assert guest["service"]["env"]["CUDA_VISIBLE_DEVICES"] != uuid


def test_a_masked_box_has_the_same_diagnosis(tmp_path):
    def findings(box):
        return [(finding.id, finding.severity, finding.certainty) for finding in doctor.diagnose(box).all]

    for text in (conf(rules=("195:*", "509:*")), conf(devn=True, mode="", unprivileged=True)):
        world = World(conf=text, user="sglang")
        world.boot(511)
        box = world.box()
        saved, _ = doctor.saved(box.snapshots)
        path = tmp_path / "box.json"
        path.write_text(saved)
        assert findings(doctor.box_from(doctor.read_snapshots(path))) == findings(box)
    path.write_text(doctor.saved([Snapshot(GUEST)])[0])
    assert findings(doctor.box_from(doctor.read_snapshots(path))) == findings(Box(Snapshot(GUEST)))


def test_what_is_saved_unmasked_comes_back_as_it_was(tmp_path):
    path = tmp_path / "box.json"
    path.write_text(doctor.saved([Snapshot(GUEST), Snapshot(NODE)], masked=False)[0])
    guest, node = doctor.read_snapshots(path)
    assert guest.document == GUEST
    assert node.document == NODE


@given(
    st.recursive(
        st.text() | st.integers() | st.none(), lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=10
    )
)
def test_masking_survives_anything_and_repeats_itself(value):
    once, _ = redaction.mask([{"machine": "rosalind", "x": value}])
    again, _ = redaction.mask([{"machine": "rosalind", "x": value}])
    assert once == again
    json.dumps(once)


def test_versions_and_device_numbers_are_no_addresses():
    text = "12.550.54.15 195:255 511:0 0000:41:00.0 13.580.159.04 10:11:12 libcuda.so.580.95.05 nvidia.conf pve-guests.service"
    (masked,), told = redaction.mask([{"x": text}])
    assert masked["x"] == text
    assert told == []
