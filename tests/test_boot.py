"""What happened to a box between two looks: said rightly, or not at all, whatever of it could be read."""

from __future__ import annotations

import json
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gpuctl.facts.boot import IDENTITY, Boot, BoxBoot, Happened, from_json, happened, parse_identity, whole
from gpuctl.transport import Local

A, B, C = "11111111-1111-4111-8111-111111111111", "2" * 36, "3" * 36


def box(guest=B, ticks=5000, node: str | None = A, container=True):
    return BoxBoot(Boot(guest, ticks), Boot(node, 1) if node else None, container)


@pytest.mark.parametrize(
    ("before", "after", "serves", "said"),
    [
        (box(), box(guest=C, ticks=4800, node=C), None, Happened.NODE_REBOOT),
        (box(), box(guest=C, ticks=9000), None, Happened.GUEST_RESTART),
        # autodev=0: the container shows the node's boot_id, which its restart leaves as it is
        (box(guest=A), box(guest=A, ticks=9000), None, Happened.GUEST_RESTART),
        (box(), box(), False, Happened.SERVICE_DIED),
        (box(), box(), True, Happened.NETWORK),
        (box(), box(), None, Happened.UNKNOWN),
        # the node cannot be asked: a later start may be either, an earlier one only a reboot
        (box(node=None), box(guest=C, ticks=9000, node=None), None, Happened.RESTART),
        (box(node=None), box(guest=C, ticks=4000, node=None), None, Happened.NODE_REBOOT),
        (box(node=None), box(guest=C, ticks=None, node=None), None, Happened.RESTART),
        (box(node=None), box(node=None), True, Happened.NETWORK),
        # a machine of its own
        (
            box(node=None, container=False),
            box(guest=C, ticks=5000, node=None, container=False),
            None,
            Happened.NODE_REBOOT,
        ),
        (box(), BoxBoot(None, Boot(A, 1)), None, Happened.UNKNOWN),
        (box(), BoxBoot(None, Boot(C, 1)), None, Happened.NODE_REBOOT),
    ],
)
def test_what_happened(before, after, serves, said):
    assert happened(before, after, serves=serves) is said


class Node:
    """A node and its guest, and what really happened to them."""

    def __init__(self, draw, mocked, container):
        self.draw, self.mocked, self.container = draw, mocked, container
        self.number = 0
        self.boot()

    def fresh(self):
        self.number += 1
        return f"{self.number:08x}-0000-4000-8000-000000000000"

    def boot(self):
        self.node, self.now = self.fresh(), 0
        self.start()

    def start(self):
        self.now += self.draw(st.integers(1, 1000))
        self.ticks = self.now
        self.guest = self.fresh() if self.mocked and self.container else self.node
        self.serve()

    def serve(self):
        self.now += 1
        self.server = self.now

    def look(self, asked, ticks):
        node = Boot(self.node, 1) if asked and self.container else None
        return BoxBoot(Boot(self.guest, self.ticks if ticks or not self.container else None), node, self.container)


@given(st.data())
def test_a_verdict_is_never_wrong(data):
    world = Node(data.draw, data.draw(st.booleans()), data.draw(st.booleans()))
    partial = st.tuples(st.booleans(), st.booleans())
    before, server = world.look(*data.draw(partial)), world.server
    worst = Happened.NETWORK
    for event in data.draw(st.lists(st.sampled_from(["boot", "start", "die", "cut"]), max_size=4)):
        if event == "boot":
            world.boot()
            worst = Happened.NODE_REBOOT
        elif event == "start" and world.container:
            world.start()
            worst = worst if worst is Happened.NODE_REBOOT else Happened.GUEST_RESTART
        elif event == "die":
            world.serve()
            worst = Happened.SERVICE_DIED if worst is Happened.NETWORK else worst
    after = world.look(*data.draw(partial))
    knows = data.draw(st.booleans())
    said = happened(before, after, serves=(worst is Happened.NETWORK) if knows else None)
    right = {worst, Happened.UNKNOWN}
    if worst in (Happened.NODE_REBOOT, Happened.GUEST_RESTART):
        right.add(Happened.RESTART)
    assert said in right
    if before.node and after.node and before.guest.pid1_start_ticks and after.guest.pid1_start_ticks and knows:
        assert said is worst, "everything was read"
    assert server  # whoever looks has a server to look for


@given(st.data())
def test_what_an_event_keeps_is_what_is_read_back(data):
    boot = st.builds(Boot, st.text("0123456789abcdef-", min_size=1), st.none() | st.integers(0, 10**9))
    made = data.draw(
        st.builds(
            BoxBoot, st.none() | boot, st.none() | boot.map(lambda b: replace(b, pid1_start_ticks=None)), st.booleans()
        )
    )
    assert from_json(json.loads(json.dumps(made.as_json()))) == made
    for wrong in (None, [], "x", 3):
        assert from_json(wrong) is None


@given(st.text())
def test_an_answer_of_anything_is_an_identity_or_refused(text):
    try:
        parse_identity(text)
    except ValueError:
        pass


def test_this_machine_says_who_it_is():
    boot, _, _ = parse_identity(Local().run(["sh", "-c", IDENTITY]).text)
    assert boot.pid1_start_ticks is not None
    assert parse_identity(Local().run(["sh", "-c", IDENTITY]).text)[0] == boot


def test_a_node_that_did_not_answer_is_taken_from_before_only_within_its_boot():
    assert whole(box(node=None), box()).node.boot_id == A
    assert whole(box(guest=C, ticks=9, node=None), box()).node is None
    assert whole(None, box()) == box()
