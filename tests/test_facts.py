"""Parsers: configurations keep every byte, device programs are followed as the kernel does."""

from __future__ import annotations

import struct

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpuctl.box import Snapshot, Unknown
from gpuctl.facts import bpf, devices, kernel_log, limits, lxc, nodes, pci, proxmox
from gpuctl.facts.errnos import errno_name

# -- configurations --

LINES = st.one_of(
    st.text(alphabet=st.characters(exclude_characters="\n"), max_size=30),
    st.sampled_from(["", "# note", "arch: amd64", "lxc.cgroup2.devices.allow: c 195:* rwm", "lxc.cgroup2.devices.allow = c 511:* rwm",
                     "[before]", "[pve:pending]", "dev0: /dev/nvidia0,mode=0666", "unprivileged: 1", "parent: before", "junk",
                     "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file"]),
)  # fmt: skip
TEXTS = st.builds(lambda lines, end, last: end.join(lines) + last, st.lists(LINES, max_size=12), st.sampled_from(["\n", "\r\n"]), st.sampled_from(["", "\n"]))  # fmt: skip


@given(TEXTS)
def test_a_configuration_renders_to_the_bytes_it_was_read_from(text):
    assert str(lxc.parse(text)) == text


@given(TEXTS, st.integers(1, 12))
def test_an_edit_keeps_every_other_byte(text, number):
    conf = lxc.parse(text)
    assume(any(line.number == number for line in conf.lines))
    others = [line.raw for line in conf.lines if line.number != number]
    assert str(conf.without([number])) == "".join(others)
    replaced = conf.replaced(number, "new: 1")
    assert [line.raw for line in replaced.lines if line.number != number] == others


@given(TEXTS)
def test_an_added_line_is_live_and_nothing_else_moves(text):
    conf = lxc.parse(text)
    after = conf.added(["dev9: /dev/nvidia-uvm,mode=0666"])
    assert after.devices()[9].path == "/dev/nvidia-uvm"
    assert after.sections() == conf.sections()
    kept = [line.text for line in after.lines]
    kept.remove("dev9: /dev/nvidia-uvm,mode=0666")
    assert kept == [line.text for line in conf.lines]


def test_lines_after_a_header_are_not_live():
    conf = lxc.parse(
        "lxc.cgroup2.devices.allow: c 195:* rwm\n\n[pve:pending]\ndev0: /dev/nvidia0\n[snap]\nlxc.idmap: u 0 100000 65536\n"
    )
    assert not conf.unprivileged
    assert not conf.devices()
    assert conf.sections() == ("pve:pending", "snap")


@pytest.mark.parametrize(
    ("value", "fault"),
    [("c 511:*rwm", "blank must stand before"), ("c 511 rwm", "colon"), ("c  511:* rwm", "exactly one blank"), ("c 511:* rw # x", "access"),
     ("x 1:1 r", "type"), ("c511:* rwm", "blank must follow"), ("", "type"), ("c 511: rwm", "minor")],
)  # fmt: skip
def test_lxc_refuses_these_rules(value, fault):
    with pytest.raises(lxc.Malformed, match=fault):
        lxc.parse_rule(value)


@pytest.mark.parametrize("value", ["c 511:* rwm", "c 511:0 rw", "b *:* m", "a", "c 511:* rwm # nvidia", "a *:* rwm"])
def test_lxc_takes_these_rules(value):
    assert lxc.parse_rule(value).access


def test_a_bare_a_empties_the_list_and_turns_the_default():
    everything = lxc.rules_of(lxc.parse("lxc.cgroup2.devices.deny: c 511:* rwm\nlxc.cgroup2.devices.allow: a\n"))
    assert everything.allows("c", 511, 0)
    nothing = lxc.rules_of(
        lxc.parse("unprivileged: 1\nlxc.cgroup2.devices.deny: a\nlxc.cgroup2.devices.allow: c 195:* rwm\n")
    )
    assert nothing.allows("c", 195, 0)
    assert not nothing.allows("c", 511, 0)


def test_an_empty_list_allows_everything_even_after_deny_a():
    assert lxc.rules_of(lxc.parse("lxc.cgroup2.devices.allow: c 195:* rwm\nlxc.cgroup2.devices.deny: a\n")).allows(
        "c", 511, 0
    )


def test_privileged_guests_may_make_every_node_and_open_few():
    rules = lxc.rules_of(lxc.parse("arch: amd64\n"))
    assert rules.allows("c", 511, 0, "m")
    assert not rules.allows("c", 511, 0)
    assert rules.allows("c", 1, 3, "rwm")


# -- device programs --

GOLDEN = """\
   0: (61) r2 = *(u32 *)(r1 +0)
   1: (54) w2 &= 65535
   2: (61) r3 = *(u32 *)(r1 +0)
   3: (74) w3 >>= 16
   4: (61) r4 = *(u32 *)(r1 +4)
   5: (61) r5 = *(u32 *)(r1 +8)
   6: (55) if r2 != 0x2 goto pc+3
   7: (55) if r4 != 0x1ff goto pc+2
   8: (b7) r0 = 1
   9: (95) exit
  10: (55) if r2 != 0x2 goto pc+3
  11: (55) if r4 != 0xc3 goto pc+2
  12: (b7) r0 = 1
  13: (95) exit
  14: (55) if r2 != 0x2 goto pc+4
  15: (55) if r4 != 0x1 goto pc+3
  16: (55) if r5 != 0x3 goto pc+2
  17: (b7) r0 = 1
  18: (95) exit
  19: (bc) w1 = w3
  20: (54) w1 &= 1
  21: (5d) if r1 != r3 goto pc+3
  22: (55) if r2 != 0x2 goto pc+2
  23: (b7) r0 = 1
  24: (95) exit
  25: (b7) r0 = 0
  26: (95) exit
"""


def encoded(insns):
    return b"".join(struct.pack("<BBhi", i.code, i.src << 4 | i.dst, i.off, i.imm) for i in insns)


@pytest.mark.parametrize(
    "insns", [bpf.parse_dump(GOLDEN), bpf.decode(encoded(bpf.parse_dump(GOLDEN)))], ids=["text", "bytes"]
)
def test_lxcs_program_is_followed(insns):
    rules = bpf.Programs((insns,))
    assert rules.allows("c", 511, 0)
    assert rules.allows("c", 195, 255)
    assert not rules.allows("c", 510, 0)
    assert rules.allows("c", 510, 0, "m")  # may be made, may not be opened
    assert rules.allows("c", 1, 3)
    assert not rules.allows("c", 1, 5)
    assert not rules.allows("b", 8, 0)
    assert rules.char_majors() == (1, 195, 511)
    assert not rules.allows_everything


def test_without_a_program_everything_is_allowed_and_of_several_all_must_allow():
    golden = bpf.parse_dump(GOLDEN)
    allow = bpf.parse_dump("0: (b7) r0 = 1\n1: (95) exit\n")
    assert bpf.Programs(()).allows_everything
    assert bpf.Programs((allow,)).allows_everything
    assert not bpf.Programs((allow, golden)).allows("c", 509, 0)


RULES = st.lists(
    st.builds(lxc.Rule, st.booleans(), st.sampled_from("cba"), st.one_of(st.none(), st.integers(0, 520)), st.one_of(st.none(), st.integers(0, 300)),
              st.sampled_from(["rwm", "rw", "m", "r", "w", "rm"])), max_size=6)  # fmt: skip


def compiled(rules, default):
    """A device program as LXC writes it for a list of rules."""
    insns = [
        (0x61, 2, 1, 0, 0),
        (0x54, 2, 0, 0, 0xFFFF),
        (0x61, 3, 1, 0, 0),
        (0x74, 3, 0, 0, 16),
        (0x61, 4, 1, 4, 0),
        (0x61, 5, 1, 8, 0),
    ]
    for rule in reversed(rules):
        if rule.allow == default:
            continue
        tests = []
        if rule.kind != "a":
            tests.append([(0x55, 2, 0, None, 2 if rule.kind == "c" else 1)])
        if set(rule.access) != set("rwm"):
            mask = sum(bpf.ACCESS[letter] for letter in set(rule.access))
            tests.append([(0xBC, 1, 3, 0, 0), (0x54, 1, 0, 0, mask), (0x5D, 1, 3, None, 0)])
        if rule.major is not None:
            tests.append([(0x55, 4, 0, None, rule.major)])
        if rule.minor is not None:
            tests.append([(0x55, 5, 0, None, rule.minor)])
        block = [insn for test in tests for insn in test] + [(0xB7, 0, 0, 0, int(rule.allow)), (0x95, 0, 0, 0, 0)]
        insns += [(c, d, s, len(block) - at - 1 if o is None else o, i) for at, (c, d, s, o, i) in enumerate(block)]
    insns += [(0xB7, 0, 0, 0, int(default)), (0x95, 0, 0, 0, 0)]
    return b"".join(struct.pack("<BBhi", c, s << 4 | d, o, i) for c, d, s, o, i in insns)


@given(
    RULES,
    st.booleans(),
    st.sampled_from("cb"),
    st.integers(0, 520),
    st.integers(0, 300),
    st.sampled_from(["rw", "r", "m", "rwm"]),
)
def test_the_configurations_rules_and_the_kernels_program_agree(rules, default, kind, major, minor, access):
    distinct = [r for i, r in enumerate(rules) if all((r.kind, r.major, r.minor, r.access) != (o.kind, o.major, o.minor, o.access) for o in rules[:i])]  # fmt: skip
    written = lxc.Rules(tuple((rule, None) for rule in distinct), default)
    program = bpf.Programs((bpf.decode(compiled(distinct, default)),) if distinct else ())
    assert written.allows(kind, major, minor, access) == program.allows(kind, major, minor, access)


@given(st.binary(max_size=160))
def test_any_bytes_are_a_program_with_an_answer_or_unknown(data):
    try:
        assert bpf.Programs((bpf.decode(data),)).allows("c", 195, 0) in (True, False)
    except Unknown:
        pass


def test_a_program_that_loops_is_unknown():
    with pytest.raises(Unknown, match="does not end"):
        bpf.run(bpf.parse_dump("0: (05) goto pc-1\n"), (0, 0, 0))


def test_rules_of_cgroup_v1_are_read_from_devices_list():
    path = "/sys/fs/cgroup/devices/lxc/200/devices.list"
    found = Snapshot({"files": {path: "c *:* m\nc 195:* rwm\nc 1:3 rwm\n"}})[proxmox.IN_FORCE][200]
    assert found.allows("c", 195, 0)
    assert not found.allows("c", 511, 0)
    assert found.majors_text() == "195"


# -- smaller ones --


def test_the_name_of_major_195_changed_with_the_driver():
    for name in ("nvidia", "nvidia-frontend"):
        assert devices.parse_devices(f"Character devices:\n195 {name}\n").of("nvidia") == 195


@given(
    st.dictionaries(st.sampled_from(["nvidia-uvm", "nvidia-caps", "drm", "hidraw"]), st.integers(1, 511), max_size=4)
)
def test_majors_are_read_as_they_are_written(majors):
    text = (
        "Character devices:\n"
        + "".join(f"{number:3} {name}\n" for name, number in majors.items())
        + "\nBlock devices:\n  7 loop\n"
    )
    parsed = devices.parse_devices(text)
    assert {name: parsed.of(name) for name in majors} == majors
    assert parsed.block == {"loop": (7,)}


@given(st.integers(0, 0o777), st.integers(0, 4095), st.integers(0, 255))
def test_a_node_is_read_as_ls_writes_it(mode, major, minor):
    import stat

    line = f"{stat.filemode(stat.S_IFCHR | mode)} 1 root video {major}, {minor:3} Jan 12 10:11 /dev/nvidia0"
    node = nodes.parse_ls(line)["/dev/nvidia0"]
    assert (node.mode, node.major, node.minor, node.gid) == (mode, major, minor, "video")


@given(st.text(max_size=200))
def test_any_text_is_a_listing_with_or_without_nodes(text):
    nodes.parse_ls(text)
    errno_name(text)
    pci.parse_lspci(text)
    kernel_log.parse_xids(tuple(text.splitlines()))
    nodes.parse_opens_in(iter(text.splitlines()))


def test_lspci_with_drivers():
    text = """\
01:00.0 VGA compatible controller [0300]: NVIDIA Corporation AD102 [GeForce RTX 4090] [10de:2684] (rev a1)
	Kernel driver in use: vfio-pci
	Kernel modules: nouveau, nvidia
01:00.1 Audio device [0403]: NVIDIA Corporation AD102 High Definition Audio Controller [10de:22ba] (rev a1)
	Kernel driver in use: snd_hda_intel
02:00.0 3D controller: NVIDIA Corporation GH100 [H200] (rev ff)
07:00.0 Bridge [0680]: NVIDIA Corporation GH100 [H100 NVSwitch] [10de:22a3] (rev a1)
	Kernel driver in use: nvidia-nvswitch
"""
    found = pci.parse_lspci(text)
    gpus = [device for device in found if device.is_gpu]
    assert [gpu.address for gpu in gpus] == ["0000:01:00.0", "0000:02:00.0"]
    assert [gpu.driver for gpu in gpus] == ["vfio-pci", None]
    assert gpus[1].attributes["rev_ff"]
    assert [device.address for device in found if device.is_nvswitch] == ["0000:07:00.0"]


@pytest.mark.parametrize(
    ("text", "value"), [("16", 16), ("8 GiB", 8 << 30), ("64KiB", 64 << 10), ("unlimited", None), ("infinity", None)]
)
def test_limits_are_read_with_their_units(text, value):
    assert limits.parse_value(text) == value
