"""Single requests: a short prompt, a long answer. What one user alone sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gpuctl.cells import Point
from gpuctl.workloads import PROMPTS, TOKENS, nonce, within


@dataclass(frozen=True)
class Parameters:
    prompts: list[str] = field(default_factory=lambda: list(PROMPTS))
    max_tokens: list[int] = field(default_factory=lambda: [256])

    def __post_init__(self) -> None:
        for prompt in self.prompts:
            if prompt not in PROMPTS:
                raise ValueError(f"no prompt {prompt!r}; there are: {', '.join(PROMPTS)}")
        within("max_tokens", self.max_tokens, 1, TOKENS)


def points(parameters: Parameters) -> Iterator[Point]:
    for tokens in parameters.max_tokens:
        for prompt in parameters.prompts:
            yield Point(f"{prompt}-{tokens}", {"prompt": prompt, "max_tokens": tokens}, max_tokens=tokens)


def requests(point: Point, rep: int, words: int) -> list[dict[str, Any]]:
    prompt = point.parameters["prompt"]
    mark = nonce(f"decode:{point.name}:{rep}")
    return [{"id": f"{prompt}-{rep}", "prompt": f"[{mark}] {PROMPTS[prompt]}\n", "max_tokens": point.max_tokens}]
