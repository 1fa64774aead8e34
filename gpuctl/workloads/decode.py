"""Single requests: a short prompt, a long answer. What one user alone sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from gpuctl.cells import Point
from gpuctl.workloads import PROMPTS, Prompt, Tokens, nonce, some


@dataclass(frozen=True)
class Parameters:
    prompts: Annotated[list[Prompt], some] = field(default_factory=lambda: list(PROMPTS))
    max_tokens: Annotated[list[Tokens], some] = field(default_factory=lambda: [256])


def points(parameters: Parameters) -> Iterator[Point]:
    for tokens in parameters.max_tokens:
        for prompt in parameters.prompts:
            yield Point(f"{prompt}-{tokens}", {"prompt": prompt, "max_tokens": tokens}, max_tokens=tokens)


def requests(point: Point, rep: int, words: int) -> list[dict[str, Any]]:
    prompt = point.parameters["prompt"]
    mark = nonce(f"decode:{point.name}:{rep}")
    return [{"id": f"{prompt}-{rep}", "prompt": f"[{mark}] {PROMPTS[prompt]}\n", "max_tokens": point.max_tokens}]
