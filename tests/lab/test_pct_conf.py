"""The grammar of a guest's configuration, as Proxmox reads and rewrites it."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.pct import conf as grammar

USED = """\
#GPU box%3A do not touch
arch: amd64
hostname: ct200
memory: 65536
# a remark between the lines
net0: name=eth0,bridge=vmbr0,hwaddr=02:67:70:75:00:C8,ip=192.0.2.200/24,type=veth
ostype: debian
rootfs: local:200/subvol-200-disk-0.subvol,size=4G
unprivileged: no
lxc.cgroup2.devices.allow: c 195:* rwm
lxc.cgroup2.devices.allow = c 509:* rwm  # uvm
lxc.mount.entry: /dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file

[pve:pending]
memory: 131072
delete: swap

[before-update]
#taken by hand
snaptime: 1764000000
memory: 32768
lxc.cgroup2.devices.allow: c 511:* rwm
"""


def test_a_rewrite_moves_comments_to_the_top_sorts_keys_and_keeps_raw_lines_in_order():
    assert grammar.render(grammar.parse(USED, 200)) == (
        "#GPU box%3A do not touch\n"
        "# a remark between the lines\n"
        "arch: amd64\n"
        "hostname: ct200\n"
        "memory: 65536\n"
        "net0: name=eth0,bridge=vmbr0,hwaddr=02:67:70:75:00:C8,ip=192.0.2.200/24,type=veth\n"
        "ostype: debian\n"
        "rootfs: local:200/subvol-200-disk-0.subvol,size=4G\n"
        "unprivileged: 0\n"
        "lxc.cgroup2.devices.allow: c 195:* rwm\n"
        "lxc.cgroup2.devices.allow: c 509:* rwm  # uvm\n"
        "lxc.mount.entry: /dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file\n"
        "\n[pve:pending]\n"
        "delete: swap\n"
        "memory: 131072\n"
        "\n[before-update]\n"
        "#taken by hand\n"
        "memory: 32768\n"
        "snaptime: 1764000000\n"
        "lxc.cgroup2.devices.allow: c 511:* rwm\n"
    )


def test_a_rule_below_a_section_header_is_not_in_force():
    conf = grammar.parse(USED, 200)
    assert ("lxc.cgroup2.devices.allow", "c 511:* rwm") not in conf.main.lxc
    assert conf.snapshots["before-update"].lxc == [("lxc.cgroup2.devices.allow", "c 511:* rwm")]


def test_pending_changes_show_in_the_configuration_but_are_not_current():
    conf = grammar.parse(USED, 200)
    assert conf.main.keys["memory"] == "65536"
    assert grammar.with_pending(conf).keys["memory"] == "131072"


def test_the_last_of_a_key_wins():
    assert grammar.parse("memory: 1\nmemory: 2\n", 200).main.keys == {"memory": "2"}


@pytest.mark.parametrize(
    ("line", "warning"),
    [
        ("memory 512", "vm 200 - unable to parse config: memory 512"),
        (" # indented", "vm 200 - unable to parse config:  # indented"),
        ("lxc.frobnicate: 1", "vm 200 - unable to parse config: lxc.frobnicate: 1"),
        ("lxc.rootfs.path: /x", "vm 200 - lxc.rootfs.path: lxc.rootfs.path is auto generated from rootfs"),
        (
            "lxc.cgroup.devices.allow: c 195:* rwm",
            "vm 200 - lxc.cgroup.devices.allow is deprecated, this will be a hard error in the future!",
        ),
        ("lxc.id_map: u 0 1 2", "vm 200 - lxc.id_map is deprecated and was renamed to lxc.idmap"),
        ("delete: swap", "vm 200 - property 'delete' is only allowed in [pve:pending]"),
        (
            "memory: lots",
            "vm 200 - unable to parse value of 'memory' - type check ('integer') failed - got 'lots'",
        ),
        ("frobnicate: 1", "vm 200 - unable to parse value of 'frobnicate' - unknown setting 'frobnicate'"),
    ],
)
def test_what_pct_cannot_take_is_warned_about_in_its_words(line, warning):
    assert grammar.parse(f"{line}\n", 200).warnings == [warning]


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ("/dev/../etc/shadow", "/dev/../etc/shadow is not a valid device path"),
        ("/etc/shadow", "/etc/shadow is not a valid device path"),
        ("/dev/nvidia0,mode=666", "mode: value does not match the regex pattern"),
        ("/dev/nvidia0,gid=video", "gid: type check ('integer') failed - got 'video'"),
        ("/dev/nvidia0,/dev/nvidia1", "duplicate key in comma-separated list property: path"),
        ("/dev/nvidia0,owner=1", "invalid key in comma-separated list property: owner"),
    ],
)
def test_a_wrong_device_is_refused_with_its_reason(value, wrong):
    with pytest.raises(grammar.ConfError, match="^(format error\n)?.*" + wrong.replace("(", r"\(").replace(")", r"\)")):
        grammar.device(value)


def test_the_number_of_a_device_is_bounded():
    assert grammar.known("dev255")
    assert not grammar.known("dev256")
    assert not grammar.known("dev01")


# --- whatever is in a file

printable = st.text(alphabet=string.printable.replace("\r", "").replace("\x0b", "").replace("\x0c", ""), max_size=200)
lines = st.lists(
    st.one_of(
        st.sampled_from(USED.splitlines()),
        printable.filter(lambda text: "\n" not in text),
        st.builds("{}: {}".format, st.sampled_from(["memory", "dev0", "hostname", "tags"]), printable),
        st.builds("[{}]".format, st.from_regex(r"[a-z][a-z0-9_\-]{0,8}", fullmatch=True)),
    ),
    max_size=20,
).map("\n".join)


@given(lines)
def test_reading_never_fails_and_a_second_rewrite_changes_nothing(text):
    once = grammar.render(grammar.parse(text, 200))
    again = grammar.parse(once, 200)
    assert grammar.render(again) == once


@given(lines)
def test_a_rewrite_keeps_everything_that_was_understood(text):
    before = grammar.parse(text, 200)
    after = grammar.parse(grammar.render(before), 200)
    assert after.main.lxc == before.main.lxc
    assert after.main.keys == before.main.keys
    assert after.snapshots.keys() == before.snapshots.keys()
    for name, section in before.snapshots.items():
        assert (after.snapshots[name].keys, after.snapshots[name].lxc) == (section.keys, section.lxc)


@given(st.text())
def test_a_description_survives_being_written_as_comments(text):
    text = text.encode("utf-8", "ignore").decode()
    assert grammar.decode(grammar.encode(text)) == text
    assert all(0x20 <= ord(c) < 0x7F and c not in ":" for c in grammar.encode(text))
