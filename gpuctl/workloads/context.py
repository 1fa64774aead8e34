"""Long prompts: how fast they are read (TTFT, prefill), and how fast is written after them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from gpuctl.cells import Point
from gpuctl.workloads import TOKENS, Tokens, between, nonce, some, text


@dataclass(frozen=True)
class Parameters:
    tokens: Annotated[list[Annotated[int, between(64, TOKENS)]], some] = field(
        default_factory=lambda: [3000, 30000, 100000]
    )
    max_tokens: Tokens = 256


def _short(tokens: int) -> str:
    return f"{tokens // 1000}k" if tokens % 1000 == 0 else str(tokens)


def points(parameters: Parameters) -> Iterator[Point]:
    for tokens in parameters.tokens:
        yield Point(
            _short(tokens),
            {"context": tokens, "max_tokens": parameters.max_tokens},
            prompt_tokens=tokens,
            max_tokens=parameters.max_tokens,
        )


def requests(point: Point, rep: int, words: int) -> list[dict[str, Any]]:
    seed = f"context:{point.name}:{rep}"
    prompt = f"[{nonce(seed)}] {text(seed, words)}\nContinue the list of words.\n"
    return [{"id": f"{point.name}-{rep}", "prompt": prompt, "max_tokens": point.max_tokens}]
