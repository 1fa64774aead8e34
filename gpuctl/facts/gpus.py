"""How fast a GPU's memory and arithmetic are: from what its driver tells, or from what its maker states. Pure data.

The driver's numbers win: bandwidth is 2 x highest memory clock x width of the bus (an H200 tells 3,201 MHz and 6,016
bit: 4.81 TB/s, of which a matrix times a vector reads 3.94). The table is for planning without the machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Speed:
    """Of one GPU."""

    bandwidth_bytes_s: float
    flops: float | None  # dense bf16 with fp32 sums; None: not known
    source: str


# (pattern of the name that nvidia-smi prints, GB/s, dense bf16 TFLOP/s), the more particular first. Source of both: the
# maker's data sheets and architecture papers.
_STATED = (
    (r"G?B300", 8000, 2500),
    (r"G?B200", 8000, 2250),
    (r"GH200.*(?:144|HBM3e)", 4900, 989),
    (r"GH200", 4000, 989),
    (r"H200", 4800, 989),
    (r"H100 NVL", 3900, 835),
    (r"H100 PCIe", 2039, 756),
    (r"H(?:100|800)", 3352, 989),
    (r"H20\b", 4000, 148),
    (r"A100.*40GB", 1555, 312),
    (r"A(?:100|800)", 2039, 312),
    (r"RTX PRO 6000", 1792, 503.8),
    (r"RTX PRO 5000", 1344, None),
    (r"RTX 6000 Ada", 960, 364),
    (r"RTX 5000 Ada", 576, 261),
    (r"RTX A6000", 768, 155),
    (r"RTX A5000", 768, 111),
    (r"RTX 5090", 1792, 209.5),
    (r"RTX 5080", 960, 112.6),
    (r"RTX 4090", 1008, 165.2),
    (r"RTX 4080", 717, 97.5),
    (r"RTX 3090", 936, 71),
    (r"L40S", 864, 362),
    (r"L40", 864, 181),
    (r"\bL4\b", 300, 121),
    (r"\bA40\b", 696, 149.7),
    (r"\bA30\b", 933, 165),
    (r"\bA10G?\b", 600, 125),
    (r"GB10", 273, 125),
    (r"V100.*32GB|V100S", 1134, 125),
    (r"V100", 900, 125),
    (r"\bT4\b", 320, 65),
)  # fmt: skip


def speed(name: str, *, bus_bits: int | None = None, memory_mhz: float | None = None) -> Speed | None:
    """Of the GPU of that name; with what its driver tells of its memory, where it was asked. None: not known."""
    stated = next(((gb, tera) for pattern, gb, tera in _STATED if re.search(pattern, name, re.I)), None)
    flops = stated[1] * 1e12 if stated is not None and stated[1] is not None else None
    if bus_bits and memory_mhz:
        told = 2 * memory_mhz * 1e6 * bus_bits / 8
        return Speed(told, flops, f"2 x {memory_mhz:g} MHz x {bus_bits} bit, as its driver tells")
    if stated is None:
        return None
    return Speed(stated[0] * 1e9, flops, f"the maker states {stated[0]:,} GB/s for {name}")
