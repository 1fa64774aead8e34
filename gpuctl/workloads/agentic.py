"""Conversations of several turns, as agents have them: every turn sends all that was said before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from gpuctl.cells import Point
from gpuctl.workloads import TOKENS, Streams, Tokens, between, nonce, some, text, within

_TASKS = (
    "Read this report of a tool and say in one paragraph what it found:\n{report}",
    "The next tool answered as follows. What changes in your view?\n{report}",
    "Plan the next three steps, given this as well:\n{report}",
)


@dataclass(frozen=True)
class Parameters:
    turns: Annotated[int, between(1, 10_000)] = 6
    words_per_turn: Annotated[int, between(1, TOKENS)] = 200
    concurrency: Annotated[list[Streams], some] = field(default_factory=lambda: [1])
    max_tokens: Tokens = 128

    def __post_init__(self) -> None:
        words = self.turns * self.words_per_turn * max(self.concurrency)
        within("turns x words_per_turn x concurrency: ", words, 1, 100_000_000)


def points(parameters: Parameters) -> Iterator[Point]:
    for sessions in parameters.concurrency:
        yield Point(
            f"t{parameters.turns}-c{sessions}",
            {
                "turns": parameters.turns,
                "words_per_turn": parameters.words_per_turn,
                "concurrency": sessions,
                "max_tokens": parameters.max_tokens,
            },
            concurrency=sessions,
            max_tokens=parameters.max_tokens,
            chat=True,
            exact_length=False,
        )


def requests(point: Point, rep: int, words: int) -> list[dict[str, Any]]:
    asked = []
    for session in range(point.concurrency):
        turns = []
        for turn in range(point.parameters["turns"]):
            seed = f"agentic:{point.name}:{rep}:{session}:{turn}"
            report = text(seed, point.parameters["words_per_turn"])
            turns.append(f"[{nonce(seed)}] " + _TASKS[turn % len(_TASKS)].format(report=report))
        asked.append({"id": f"{rep}-{session}", "turns": turns, "max_tokens": point.max_tokens})
    return asked
