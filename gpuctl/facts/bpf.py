"""Device programs of control groups: what the kernel really allows, by running the program's instructions.

A cgroup v2 device program gets {access << 16 | type, major, minor} and returns 0 (deny) or 1 (allow); type 1 is a
block, 2 a character device; access bits: 1 mknod, 2 read, 4 write (linux/bpf.h, bpf_cgroup_dev_ctx). Of several
programs on the way to a process all must allow. Instructions come as the kernel holds them (hex), or as
`bpftool prog dump xlated` prints them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from gpuctl.box import Unknown

BLOCK, CHAR = 1, 2
ACCESS = {"m": 1, "r": 2, "w": 4}
MAX_STEPS = 100_000


@dataclass(frozen=True)
class Insn:
    """struct bpf_insn."""

    code: int
    dst: int
    src: int
    off: int
    imm: int


def decode(data: bytes) -> tuple[Insn, ...]:
    """An array of struct bpf_insn. Raises Unknown on a length that is none."""
    if not data or len(data) % 8:
        raise Unknown(f"device program: {len(data)} bytes are no whole number of instructions")
    found = []
    for code, registers, off, imm in struct.iter_unpack("<BBhi", data):
        found.append(Insn(code, registers & 15, registers >> 4, off, imm))
    return tuple(found)


_SIZES = {"u8": 0x10, "u16": 0x08, "u32": 0x00, "u64": 0x18}
_ALU = {"+": 0x00, "-": 0x10, "*": 0x20, "|": 0x40, "&": 0x50, "<<": 0x60, ">>": 0x70, "^": 0xA0, "": 0xB0}
_JUMPS = {"==": 0x10, ">": 0x20, ">=": 0x30, "&": 0x40, "!=": 0x50, "s>": 0x60, "s>=": 0x70, "<": 0xA0, "<=": 0xB0,
          "s<": 0xC0, "s<=": 0xD0}  # fmt: skip
_LINE = re.compile(r"^\s*(\d+):\s*(?:\(([0-9a-f]{2})\)\s*)?(.*?)\s*$")


def parse_dump(text: str) -> tuple[Insn, ...]:
    """Reads `bpftool prog dump xlated`. Raises Unknown where a line is no instruction this knows."""
    lines: dict[int, str] = {}
    codes: dict[int, int] = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        if found and found.group(3):
            index = int(found.group(1))
            lines[index] = found.group(3)
            if found.group(2):
                codes[index] = int(found.group(2), 16)
    if not lines:
        raise Unknown("device program: no instruction in the text")
    last = max(lines)
    insns = []
    for index in range(last + 1):
        if index not in lines:  # the second half of a 16-byte load
            insns.append(Insn(0, 0, 0, 0, 0))
            continue
        insns.append(_parse_insn(lines[index], codes.get(index)))
    return tuple(insns)


def _parse_insn(text: str, code: int | None) -> Insn:
    if text == "exit":
        return Insn(0x95, 0, 0, 0, 0)
    found = re.fullmatch(r"goto pc([+-]\d+)", text)
    if found:
        return Insn(0x05, 0, 0, int(found.group(1)), 0)
    found = re.fullmatch(
        r"if ([rw])(\d+) (s?[<>]=?|[!=]=|&) (?:([rw])(\d+)|(0x[0-9a-f]+|-?\d+)) goto pc([+-]\d+)", text
    )
    if found:
        width, dst, operator, _, src, number, off = found.groups()
        kind = code & 7 if code is not None else (5 if width == "r" else 6)
        base = _JUMPS[operator] | kind
        if src is not None:
            return Insn(base | 8, int(dst), int(src), int(off), 0)
        return Insn(base, int(dst), 0, int(off), _signed(int(number, 0)))
    found = re.fullmatch(r"r(\d+) = \*\((u8|u16|u32|u64) \*\)\(r(\d+) ?([+-]\d+)\)", text)
    if found:
        return Insn(0x61 | _SIZES[found.group(2)], int(found.group(1)), int(found.group(3)), int(found.group(4)), 0)
    found = re.fullmatch(r"([rw])(\d+) (\+|-|\*|\||&|<<|>>|\^|)= (?:([rw])(\d+)|(0x[0-9a-f]+|-?\d+))(?:\s*ll)?", text)
    if found:
        width, dst, operator, _, src, number = found.groups()
        kind = code & 7 if code is not None else (7 if width == "r" else 4)
        if src is not None:
            return Insn(_ALU[operator] | kind | 8, int(dst), int(src), 0, 0)
        return Insn(_ALU[operator] | kind, int(dst), 0, 0, _signed(int(number, 0)))
    raise Unknown(f"device program: instruction not understood: {text}")


def _signed(number: int) -> int:
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >> 31 else number


def run(insns: Sequence[Insn], context: Sequence[int]) -> int:
    """Runs a program on bpf_cgroup_dev_ctx (three 32-bit words); returns the low half of r0.

    Raises Unknown at what a device program has no business with (helper calls, memory other than its context).
    """
    registers = [0] * 11
    memory = struct.pack("<III", *context)
    at, mask64, mask32 = 0, (1 << 64) - 1, (1 << 32) - 1
    pointer = object()
    pointers: dict[int, object] = {1: pointer}
    for _ in range(MAX_STEPS):
        if not 0 <= at < len(insns):
            raise Unknown("device program: runs past its end")
        insn = insns[at]
        if insn.dst > 10 or insn.src > 10:
            raise Unknown("device program: names a register there is not")
        code, kind = insn.code, insn.code & 7
        at += 1
        if code == 0x95:
            return registers[0] & mask32
        if kind == 1 and code & 0xE0 == 0x60:  # load from the context
            if pointers.get(insn.src) is not pointer:
                raise Unknown("device program: reads memory that is not its context")
            size = {0x00: 4, 0x08: 2, 0x10: 1, 0x18: 8}[code & 0x18]
            if not 0 <= insn.off <= len(memory) - size:
                raise Unknown("device program: reads outside its context")
            registers[insn.dst] = int.from_bytes(memory[insn.off : insn.off + size], "little")
            pointers.pop(insn.dst, None)
        elif kind in (4, 7):
            wide, operation = kind == 7, code & 0xF0
            mask = mask64 if wide else mask32
            if operation == 0xB0 and code & 8 and insn.src in pointers and wide:
                pointers[insn.dst] = pointers[insn.src]
                continue
            operand = registers[insn.src] if code & 8 else insn.imm & mask
            registers[insn.dst] = _alu(operation, registers[insn.dst] & mask, operand & mask, mask, 63 if wide else 31)
            pointers.pop(insn.dst, None)
        elif code == 0x18:
            high = insns[at].imm if at < len(insns) else 0
            registers[insn.dst] = (insn.imm & mask32) | (high & mask32) << 32
            pointers.pop(insn.dst, None)
            at += 1
        elif kind in (5, 6):
            operation = code & 0xF0
            if operation == 0x00 and kind == 5:
                at += insn.off
                continue
            if operation in (0x80, 0x90, 0x00):
                raise Unknown("device program: calls a helper")
            bits = 64 if kind == 5 else 32
            mask = (1 << bits) - 1
            left = registers[insn.dst] & mask
            right = (registers[insn.src] if code & 8 else insn.imm) & mask
            if _jump(operation, left, right, bits):
                at += insn.off
        else:
            raise Unknown(f"device program: opcode 0x{code:02x} not understood")
    raise Unknown("device program: does not end")


def _alu(operation: int, left: int, right: int, mask: int, shift: int) -> int:
    if operation == 0x00:
        result = left + right
    elif operation == 0x10:
        result = left - right
    elif operation == 0x20:
        result = left * right
    elif operation == 0x40:
        result = left | right
    elif operation == 0x50:
        result = left & right
    elif operation == 0x60:
        result = left << (right & shift)
    elif operation == 0x70:
        result = left >> (right & shift)
    elif operation == 0xA0:
        result = left ^ right
    elif operation == 0xB0:
        result = right
    else:
        raise Unknown(f"device program: arithmetic 0x{operation:02x} not understood")
    return result & mask


def _jump(operation: int, left: int, right: int, bits: int) -> bool:
    sign = 1 << (bits - 1)
    signed_left, signed_right = (left ^ sign) - sign, (right ^ sign) - sign
    answers = {
        0x10: left == right, 0x20: left > right, 0x30: left >= right, 0x40: bool(left & right), 0x50: left != right,
        0x60: signed_left > signed_right, 0x70: signed_left >= signed_right, 0xA0: left < right, 0xB0: left <= right,
        0xC0: signed_left < signed_right, 0xD0: signed_left <= signed_right,
    }  # fmt: skip
    if operation not in answers:
        raise Unknown(f"device program: jump 0x{operation:02x} not understood")
    return answers[operation]


@dataclass(frozen=True)
class Programs:
    """The device programs a process passes; none at all allow everything."""

    programs: tuple[tuple[Insn, ...], ...]

    def allows(self, kind: str, major: int, minor: int, access: str = "rw") -> bool:
        """Is this access to `c` or `b` major:minor allowed? Raises Unknown where a program cannot be followed."""
        bits = sum(ACCESS[letter] for letter in access)
        context = (bits << 16 | (CHAR if kind == "c" else BLOCK), major, minor)
        return all(run(program, context) != 0 for program in self.programs)

    @property
    def allows_everything(self) -> bool:
        """Does it let through devices that no rule is likely to name?"""
        return all(
            self.allows("c", major, minor, "rwm") for major, minor in ((195, 77), (243, 3), (507, 9), (511, 200))
        )

    def char_majors(self) -> tuple[int, ...]:
        """Majors of character devices of which some minor may be opened read-write."""
        return _char_majors(self)

    def denied_majors(self) -> tuple[int, ...]:
        """Majors that a rule names and of which no minor may be opened read-write."""
        return tuple(sorted(set(_numbers(self)) - set(_char_majors(self))))


def _numbers(rules: Programs) -> list[int]:
    """Numbers in the instructions that may be majors."""
    return sorted({insn.imm for program in rules.programs for insn in program if 0 <= insn.imm < 512})


@lru_cache(maxsize=256)
def _char_majors(rules: Programs) -> tuple[int, ...]:
    numbers = {insn.imm for program in rules.programs for insn in program if 0 <= insn.imm < 4096}
    minors = sorted({0, 1, 2, 3, 77, 255} | numbers)
    candidates: Iterable[int] = range(512) if rules.allows_everything else _numbers(rules)
    return tuple(major for major in candidates if any(rules.allows("c", major, minor) for minor in minors))
