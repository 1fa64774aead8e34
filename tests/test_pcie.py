"""PCI Express read from configurations: the same that lspci reads, and nothing breaks on odd bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuctl.box import Snapshot
from gpuctl.facts import pci, pcie

KPRO6 = Snapshot(json.loads((Path(__file__).parent / "machines/kpro6.json").read_text()))


def function(config, **attributes):
    device = pci.Device("0000:23:00.0", 0x10DE, 0x2BB5, 0x030200, "nvidia")
    return pcie.read_function(device, {"config": config, **attributes})


def test_a_gpu_at_rest_behind_a_switch():
    """lspci says of the port above: MaxPayload 256 bytes, MaxReadReq 128 bytes, 32GT/s, x16, ReqRedir+ CmpltRedir+."""
    tree = KPRO6[pcie.TREE]
    gpu, port = tree["0000:23:00.0"], tree["0000:22:00.0"]
    assert (gpu.port, gpu.parent, gpu.root, gpu.numa) == (pcie.Port.ENDPOINT, port.address, "pci0000:20", 0)
    assert (gpu.speed, gpu.width, gpu.speed_max, gpu.width_max) == (2.5, 16, 32.0, 16)
    assert (gpu.max_payload, gpu.max_read_request) == (256, 512)
    assert (port.port, port.max_payload, port.max_read_request) == (pcie.Port.DOWNSTREAM, 256, 128)
    assert port.acs is not None
    assert port.acs.redirects
    assert tree[tree[port.parent].parent].port is pcie.Port.ROOT_PORT


def config(**words):
    raw = bytearray(0x200)
    raw[0x06], raw[0x34] = 0x10, 0x40
    raw[0x40], raw[0x42] = 0x10, words.get("kind", 6) << 4
    raw[0x48:0x4A] = words.get("control", 0).to_bytes(2, "little")
    raw[0x100:0x104] = (0x000D | 1 << 16).to_bytes(4, "little")
    raw[0x104:0x106] = words.get("can", 0x5F).to_bytes(2, "little")
    raw[0x106:0x108] = words.get("acs", 0).to_bytes(2, "little")
    return raw.hex()


@pytest.mark.parametrize(
    ("control", "payload", "read"), [(0x0930, 256, 128), (0x2930, 256, 512), (0x5000, 128, 4096), (0x20, 256, 128)]
)
def test_sizes_in_the_device_control_register(control, payload, read):
    got = function(config(control=control))
    assert (got.max_payload, got.max_read_request) == (payload, read)


@pytest.mark.parametrize(("acs", "redirects"), [(0x1D, True), (0x04, True), (0x08, True), (0x11, False), (0, False)])
def test_redirection_by_access_control(acs, redirects):
    got = function(config(acs=acs))
    assert got.port is pcie.Port.DOWNSTREAM
    assert got.acs is not None
    assert got.acs.redirects is redirects


def test_what_root_alone_may_read_is_not_known():
    got = function({"error": "EACCES"}, current_link_speed="16.0 GT/s PCIe", current_link_width="8")
    assert (got.port, got.max_read_request, got.speed, got.width) == (None, None, 16.0, 8)


@given(st.binary(max_size=300))
def test_odd_configurations_break_nothing(raw):
    function(raw.hex())


@given(st.text())
def test_odd_text_breaks_nothing(text):
    function(text, current_link_speed=text, current_link_width=text, path=text, numa_node=text)
