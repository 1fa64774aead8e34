"""The picture of a machine: what hangs where, what is not as it should be, and nothing invented."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gpuctl.box import Snapshot, Unknown
from gpuctl.topology import as_svg, as_text, topology

DOCUMENT = json.loads((Path(__file__).parent / "machines/kpro6.json").read_text())


def machine(change=lambda document: None):
    document = json.loads(json.dumps(DOCUMENT))
    change(document)
    return topology(Snapshot(document))


def notes(change):
    return " | ".join(machine(change).notes)


def gpu(document, number):
    return document["nvml"]["root"]["gpus"][number]


def set_link(document, address, *, speed=None, width=None):
    """Writes the link status register of a function."""
    device = document["pci"]["devices"][address]
    raw = bytearray.fromhex(device["config"])
    status = int.from_bytes(raw[0x68 + 0x12 : 0x68 + 0x14], "little")
    status = (status & ~0xF | speed) if speed else status
    status = (status & ~0x3F0 | width << 4) if width else status
    raw[0x68 + 0x12 : 0x68 + 0x14] = status.to_bytes(2, "little")
    device["config"] = raw.hex()


def test_eight_gpus_over_two_numa_nodes(golden):
    golden("topology/kpro6.txt", as_text(machine()))


def test_as_a_drawing(golden):
    golden("topology/kpro6.svg", as_svg(machine()))


def test_boxes_of_the_drawing_lie_in_it_and_beside_each_other():
    root = ElementTree.fromstring(as_svg(machine()))
    boxes = [
        tuple(float(box.get(key)) for key in ("x", "y", "width", "height"))
        for box in root.iter("{http://www.w3.org/2000/svg}rect")
        if box.get("class") in ("gpu", "port", "wrong")
    ]
    assert len(boxes) == 24
    assert all(
        x >= 0 and x + w <= float(root.get("width")) and y + h <= float(root.get("height")) for x, y, w, h in boxes
    )
    for n, (x, y, w, h) in enumerate(boxes):
        for a, b, c, d in boxes[n + 1 :]:
            assert x + w <= a or a + c <= x or y + h <= b or b + d <= y


def words_of(root):
    """(x from, x to, y, text) of each text of a drawing, with letters that are wider than they are."""
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        wide = 6.2 * len(text.text)
        x, y = float(text.get("x")), float(text.get("y"))
        start = x - {"middle": wide / 2, "end": wide}.get(text.get("text-anchor"), 0)
        yield start, start + wide, y, text.text


def test_words_of_the_drawing_stay_in_their_boxes_and_in_the_picture():
    def other(document):
        gpu(document, 0)["name"] = "NVIDIA with a name that is longer than any box could be wide"
        set_link(document, "0000:24:00.0", width=8)

    for change in (lambda document: None, other):
        root = ElementTree.fromstring(as_svg(machine(change)))
        words = list(words_of(root))
        assert all(start >= 0 and end <= float(root.get("width")) and y < float(root.get("height"))
                   for start, end, y, _ in words)  # fmt: skip
        for box in root.iter("{http://www.w3.org/2000/svg}rect"):
            if box.get("class") not in ("gpu", "port", "wrong"):
                continue
            x, y, w, h = (float(box.get(key)) for key in ("x", "y", "width", "height"))
            inside = [(a, b, at, text) for a, b, at, text in words if y < at < y + h and x <= a < x + w]
            assert len(inside) >= 3
            assert [text for a, b, _, text in inside if b > x + w] == []


def test_the_ways_between_gpus_are_in_the_drawing_too():
    words = [text for _, _, _, text in words_of(ElementTree.fromstring(as_svg(machine())))]
    assert (words.count("PIX"), words.count("NODE"), words.count("SYS")) == (8, 16, 32)
    assert "peer-to-peer: every pair, the driver says" in words


def test_a_gpu_at_rest_is_not_slow_and_one_at_work_is():
    assert "works at" not in notes(lambda document: None)
    assert "GPU 0 (0000:23:00.0) works at x16 2.5 of 32 GT/s" in notes(lambda d: gpu(d, 0).update(pstate=0))


def test_a_gpu_of_which_nobody_says_whether_it_rests_is_not_called_slow():
    found = machine(lambda document: document["nvml"]["root"].clear())
    assert not [note for note in found.notes if "works at" in note]
    assert "x16 2.5 of 32 GT/s   read" in as_text(found)


def test_what_nvml_told_a_user_counts_where_root_was_not_asked():
    asked_by_user = machine(lambda document: document.update(nvml={"user": document["nvml"]["root"]}))
    assert as_text(asked_by_user) == as_text(machine())


def test_a_narrow_link_is_told_also_at_rest():
    said = notes(lambda document: set_link(document, "0000:24:00.0", width=8))
    assert "GPU 1 (0000:24:00.0) runs x8 of x16 2.5 of 32 GT/s (at rest): seat the card anew" in said


def test_ports_that_redirect_are_told():
    assert "12 ports send traffic between GPUs through the CPU (ACS redirection)" in notes(lambda document: None)


def test_pairs_without_peer_to_peer_are_told():
    def deny(document):
        for pair in document["nvml"]["root"]["pairs"]:
            if pair["a"] == 0:
                pair["p2p_read"] = 1

    assert "no peer-to-peer between GPU 0 and GPU 1, GPU 0 and GPU 2" in notes(deny)
    assert "not every pair" in as_text(machine(deny))


def test_without_nvml_the_tree_says_the_way_and_nothing_is_said_of_peers():
    found = machine(lambda document: document.pop("nvml"))
    assert found.between == machine().between
    text = as_text(found)
    assert "peer-to-peer" not in text
    assert "GPU " in text


def test_nvlink_is_told_with_its_number():
    def link(document):
        for number in (0, 1):
            gpu(document, number)["nvlinks"] = [{"state": 1}] * 4
        for pair in document["nvml"]["root"]["pairs"]:
            if (pair["a"], pair["b"]) == (0, 1):
                pair["p2p_nvlink"] = 0

    found = machine(link)
    assert found.between["0000:23:00.0", "0000:24:00.0"] == "NV4"
    assert "NV: NVLink, and how many" in as_text(found)


def test_what_root_alone_may_read_is_said_to_be_missing():
    def unreadable(document):
        for device in document["pci"]["devices"].values():
            device["config"] = {"error": "EACCES"}

    assert "the configuration of 24 functions was not readable: ask as root" in notes(unreadable)


def test_a_virtual_machine_with_one_numa_node_has_its_gpus_there():
    def one(document):
        for device in document["pci"]["devices"].values():
            device["numa_node"] = "-1"
        document["files"] = {"/sys/devices/system/node/node0/cpulist": "0-31\n"}

    text = as_text(machine(one))
    assert "1 NUMA node\n" in text
    assert "not known" not in text
    assert text.index("NUMA 0   CPUs 0-31") < text.index("GPU 7")


def test_a_machine_that_does_not_know_its_numa_nodes():
    def unknown(document):
        for device in document["pci"]["devices"].values():
            device["numa_node"] = "-1"
        document["files"] = {}

    text = as_text(machine(unknown))
    assert "NUMA node not known" in text
    assert re.search(r"GPU 7", text)


def test_an_iommu_is_told():
    assert "the IOMMU is on" in notes(lambda d: d["pci"]["devices"]["0000:23:00.0"].update(iommu_group="17"))


LSPCI = "01:00.0 3D controller [0302]: NVIDIA Corporation GH100 [H200] [10de:2335] (rev a1)\n\tKernel driver in use: nvidia\n"


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({}, "not in the snapshot"),
        ({"pci": {"devices": {}}}, "no NVIDIA GPU on the PCI bus"),
        ({"commands": {"lspci -nnk": {"rc": 0, "stdout": LSPCI}}}, "lspci alone does not tell it"),
    ],
)
def test_no_tree_is_not_known(document, said):
    with pytest.raises(Unknown, match=said):
        topology(Snapshot(document))


def test_a_bus_without_gpus():
    with pytest.raises(Unknown, match="no NVIDIA GPU"):
        machine(lambda d: [device.update(vendor="0x1002") for device in d["pci"]["devices"].values()])
