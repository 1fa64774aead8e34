"""Many users at once: the same kind of request at rising concurrency, closed loop. Aggregate and per request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from gpuctl.cells import Point
from gpuctl.workloads import PROMPTS, Prompt, Streams, Tokens, between, nonce, some, within


@dataclass(frozen=True)
class Parameters:
    concurrency: Annotated[list[Streams], some] = field(default_factory=lambda: [1, 2, 4, 8])
    max_tokens: Tokens = 256
    rounds: Annotated[int, between(1, 1000)] = 2  # requests a stream sends one after another in a repetition
    prompts: Annotated[list[Prompt], some] = field(default_factory=lambda: list(PROMPTS))  # in turn

    def __post_init__(self) -> None:
        within("concurrency x rounds: ", max(self.concurrency) * self.rounds, 1, 1_000_000)


def points(parameters: Parameters) -> Iterator[Point]:
    for streams in parameters.concurrency:
        yield Point(
            f"c{streams}",
            {
                "concurrency": streams,
                "max_tokens": parameters.max_tokens,
                "rounds": parameters.rounds,
                "prompts": list(parameters.prompts),
            },
            concurrency=streams,
            max_tokens=parameters.max_tokens,
        )


def requests(point: Point, rep: int, words: int) -> list[dict[str, Any]]:
    texts = [PROMPTS[name] for name in point.parameters["prompts"]]
    return [
        {
            "id": f"{rep}-{index}",
            "prompt": f"[{nonce(f'concurrency:{point.name}:{rep}:{index}')}] {texts[index % len(texts)]}\n",
            "max_tokens": point.max_tokens,
        }
        for index in range(point.concurrency * point.parameters["rounds"])
    ]
