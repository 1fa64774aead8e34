"""One cell against a server that sends exactly what a test wants: a number that is true, or a cause."""

from __future__ import annotations

import json
import sys

import pytest
from sse_server import DONE, event, plain, said, serving, stream, total

from gpuctl import plugins
from gpuctl.cells import Cell
from gpuctl.config import Server
from gpuctl.engines import Identity, Launch
from gpuctl.load import load_all
from gpuctl.measuring import measure
from gpuctl.records import CellId, State
from gpuctl.serving import Up
from gpuctl.supervision import Processes, UnitState
from gpuctl.transport import Local

OURS = UnitState("gpuctl-s", "campaign", 1, 1, "boot", running=True)


def cell(workload, reps=1, **parameters):
    module = plugins.get("workloads", workload)
    (point,) = module.points(module.Parameters(**parameters))
    return Cell(CellId("p", "s", workload, point.name), point, reps, module.requests)


def tokens(request, prompt=7):
    """A good answer of as many tokens as were asked for."""
    count = request.body["max_tokens"]
    return stream(*(said("a", n + 1) for n in range(count)), total(count, prompt), DONE)


def measured(wanted, answer, *, engine="external", state=None, **options):
    """(what became of the cell, the server that answered it)"""
    with serving(answer) as server:
        launch = Launch("s", Server(engine=engine, url=server.url))
        up = Up(launch, plugins.get("engines", engine), "gpuctl-s", Identity(), "double", 0.0, state)
        here = Local()
        supervisor = Processes(here, python=sys.executable)
        what = measure(wanted, up, supervisor, lambda jobs: load_all(here, jobs, python=sys.executable), **options)
    return what, server


def texts(server):
    return [request.body["prompt"] for request in server.requests if request.body]


DECODE = cell("decode", prompts=["fib"], max_tokens=[4])
CONTEXT = cell("context", tokens=[100], max_tokens=4)


def test_a_good_answer_is_a_number():
    what, _ = measured(DECODE, tokens)
    assert (what.state, what.failure) == (State.OK, None)
    assert what.metrics["completion_tokens"].mean == 4


@pytest.mark.parametrize("prompt", [None, 0, "many", -3, True])
def test_a_context_whose_length_the_server_does_not_tell_is_no_number(prompt):
    def answer(request):
        last = {"choices": [], "usage": {"completion_tokens": 4}}
        if prompt is not None:
            last["usage"]["prompt_tokens"] = prompt
        return stream(*(said("a") for _ in range(4)), event(last), DONE)

    what, _ = measured(CONTEXT, answer)
    assert (what.state, what.metrics) == (State.FAILED, {})
    assert what.failure.kind == "no_usage"
    assert "does not say how many tokens the prompt has" in what.failure.summary


def test_a_context_has_the_length_that_was_asked_for_whatever_the_tokenizer():
    def answer(request):  # three tokens a word
        return tokens(request, 3 * len(request.body["prompt"].split()))

    what, _ = measured(CONTEXT, answer)
    assert (what.state, what.metrics["prompt_tokens"].mean) == (State.OK, pytest.approx(100, rel=0.02))


def test_a_server_of_somebody_else_is_never_asked_what_it_may_have_in_its_cache_from_an_earlier_run():
    for wanted in (DECODE, cell("concurrency", concurrency=[2], max_tokens=4)):
        runs = [texts(measured(wanted, tokens)[1]) for _ in range(2)]
        assert len(set(runs[0] + runs[1])) == len(runs[0]) + len(runs[1])


def test_a_server_of_ours_is_asked_the_same_in_every_run():
    runs = [texts(measured(DECODE, tokens, engine="llamacpp", state=OURS)[1]) for _ in range(2)]
    assert runs[0] == runs[1]


def test_the_cache_of_a_server_with_a_key_is_emptied_with_that_key():
    asked = []

    def answer(request):
        if request.path == "/flush_cache":
            asked.append(request.headers.get("authorization"))
            return plain("200 OK" if asked[-1] == "Bearer k3y" else "401 Unauthorized", b"{}")
        return tokens(request)

    what, _ = measured(DECODE, answer, engine="sglang", state=OURS, api_key="k3y")
    assert (what.state, asked) == (State.OK, ["Bearer k3y"])
    assert not any("could not be emptied" in note for note in what.notes)


def test_a_cache_that_cannot_be_emptied_is_noted():
    def answer(request):
        return plain("404 Not Found", b"") if request.path == "/flush_cache" else tokens(request)

    what, _ = measured(DECODE, answer, engine="sglang", state=OURS)
    # A machine that has other work may add what that did to the stamps.
    assert "the prefix cache could not be emptied: /flush_cache answered 404" in what.notes
    assert json.loads(json.dumps(what.raw)) == list(what.raw)


def test_streams_that_differ_in_speed_are_unstable_also_where_the_whole_took_the_same_time():
    count = iter(range(100))

    def answer(request):
        head, first, *rest = tokens(request)
        pause = 0.3 if next(count) % 2 else 0.02
        return [head, 0.32 - pause, first, pause, *rest]

    what, _ = measured(cell("decode", reps=3, prompts=["fib"], max_tokens=[4]), answer)
    assert what.state is State.UNSTABLE
    assert any(note.startswith("decode_tok_s: repetitions differ") for note in what.notes)
