"""Which cells are measured, which are left out, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuctl import cells, config, plugins
from gpuctl.records import CellId, Failure, Record, State

ROOT = Path(__file__).parents[1]
WORKLOADS = {name: plugins.get("workloads", name).Parameters for name in plugins.names("workloads")}
CAMPAIGN = config.load(ROOT / "inventory" / "kpro6", engines=plugins.names("engines"), workloads=WORKLOADS)


def workload(name):
    return plugins.get("workloads", name)


def record(state=State.OK, parts=None, failure=None):
    parts = parts or {"driver": "580.1", "argv": ["a", "b"]}
    return Record(CellId("p", "s", "w", "x"), state, "t0", "t1", parts, cells.fingerprint_id(parts), failure=failure)


@pytest.mark.parametrize("phase", list(CAMPAIGN.phases))
def test_cells_of_the_campaign_have_different_names_and_files(phase):
    found = [cell.id for several in cells.of_phase(CAMPAIGN.phase(phase), workload).values() for cell in several]
    assert len(found) == len(set(found))
    assert all("/" not in part for name in found for part in name)


@pytest.mark.parametrize("phase", list(CAMPAIGN.phases))
def test_no_request_is_asked_twice_in_a_phase_where_a_cache_would_lie(phase):
    seen = set()
    (several, *_) = cells.of_phase(CAMPAIGN.phase(phase), workload).values()
    for cell in several:
        for rep in range(cell.reps):
            for request in cell.requests(cell.point, rep, 20):
                text = request.get("prompt") or request["turns"][0]
                assert text not in seen
                seen.add(text)


def test_the_same_cell_asks_the_same_on_every_machine():
    first = {c.id: c.definition() for cs in cells.of_phase(CAMPAIGN.phase("tp4"), workload).values() for c in cs}
    again = {c.id: c.definition() for cs in cells.of_phase(CAMPAIGN.phase("tp4"), workload).values() for c in cs}
    assert first == again


def test_only_names_servers_or_cells():
    plan = CAMPAIGN.phase("tp4")
    assert set(cells.of_phase(plan, workload, ["tp4-auto"])) == {"tp4-auto"}
    chosen = cells.of_phase(plan, workload, ["*/concurrency/c8"])
    assert all(len(several) == 1 for several in chosen.values())
    assert cells.of_phase(plan, workload, ["nothing"]) == {}


NOW = {"driver": "580.1", "argv": ["a", "b"]}


@pytest.mark.parametrize(
    ("before", "options", "measure", "why"),
    [
        (None, {}, True, "not measured yet"),
        (record(), {}, False, "nothing has changed"),
        (record(State.UNSTABLE), {}, False, "nothing has changed"),
        (record(State.CAPACITY_LIMITED), {}, False, "nothing has changed"),
        (record(), {"fresh": True}, True, "afresh"),
        (record(parts={"driver": "570.9", "argv": ["a", "b"]}), {}, True, "driver 570.9 -> 580.1"),
        (record(parts={"driver": "580.1", "argv": ["a", "c"]}), {}, True, "argv without c with b"),
        (record(State.FAILED, failure=Failure("http_error", "HTTP 400")), {}, False, "failed: HTTP 400"),
        (record(State.FAILED, failure=Failure("http_error", "HTTP 400")), {"retry_failed": True}, True, "asked for again"),
        (record(State.FAILED, failure=Failure("machine_away", "lost")), {}, True, "lost"),
        (record(State.SKIPPED), {}, True, "not tried"),
    ],
)  # fmt: skip
def test_a_result_counts_only_under_the_conditions_it_was_made_under(before, options, measure, why):
    decision = cells.decide(before, NOW, **options)
    assert decision.measure is measure
    assert why in decision.why


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(min_size=1, max_size=6), values, max_size=4))
def test_a_fingerprint_equals_itself(parts):
    assert cells.differences(parts, parts) == ""
    assert not cells.decide(record(parts=parts), parts).measure if parts else True


@given(*[st.dictionaries(st.sampled_from("abc"), st.integers(0, 3), max_size=3)] * 2)
def test_what_differs_is_said(one, other):
    assert (cells.differences(one, other) == "") == (one == other)
