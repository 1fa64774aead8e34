"""What is asked of a server: one file a workload; the file name is its id.

A workload has
    Parameters   a frozen dataclass (config.py has pydantic check it): what a phase may say, with defaults
    points(p)    -> Iterator[Point]: the cells of one server
    requests(point, rep, words)  -> list of requests for agent/load.py: the same for the same arguments, and none
                 like another one where a cache would lie
Texts are made from a seed; `words` is how many words give the wanted prompt tokens (see `Point.prompt_tokens`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator, Field

from gpuctl.spelling import hint

TOKENS = 10_000_000  # of a request, at most
STREAMS = 65_535  # at once, at most: an address has no more ports

# The short prompts of the campaign: code, arithmetic, structure and prose speculate differently well.
PROMPTS = {
    "fib": "Write a Python function that returns the n-th Fibonacci number, with memoisation, and explain each line.",
    "qsort": "Implement quicksort in C for an array of integers, in place, and explain the choice of the pivot.",
    "arith": "Compute 37 * 481 - 1296 / 18 + 77 step by step, writing out every intermediate result.",
    "json": "Write a JSON document that describes a small library: ten books with title, author, year and shelf.",
    "haiku": "Write haiku about the four seasons, one after another, each followed by a sentence on its picture.",
}

# Common words of five letters: most tokenizers give one token each, and one that works on bytes gives six, so that
# equally many words have equally many tokens whatever the seed.
_WORDS = (
    "about above after again alone along among angle apple beach began being below black blood board bread break "
    "bring broad broke brown build carry catch cause chair chart chief child class clean clear climb clock close "
    "cloud coast color could count court cover cross crowd dance death dream dress drink drive early earth eight "
    "empty enemy enjoy enter equal event every exact field fight final first floor force forty found frame fresh "
    "front fruit glass grand grass great green group grown guess happy heart heavy horse hotel house human joint "
    "judge large later laugh learn leave level light limit local lower lucky lunch major match maybe metal might "
    "model money month mouth music never night noise north ocean offer often order other outer owner paint paper "
    "party peace phone piece pilot place plain plane plant plate point pound power press price pride prime prove "
    "queen quick quiet quite radio raise reach ready right river rough round royal scale scene score seven shape "
    "share sharp sheet shirt shoot short shown sight since skill sleep small smile solid solve sound south space "
    "speak speed spend sport staff stage stand start state steel stick still stock stone store storm story study "
    "style sugar sweet table taste teach thank their there thick thing think third those three throw title today "
    "total touch tower track trade train treat trial truck trust truth twice uncle under union until upper usual "
    "value video visit voice waste watch water wheel where which while white whole woman world worry would write "
    "wrong young"
).split()


def stream(seed: str) -> Iterator[int]:
    """Endless numbers 0..65535 from a seed, the same on every machine and Python (SHA-256 in counter mode)."""
    counter = 0
    while True:
        block = hashlib.sha256(f"{seed}:{counter}".encode()).digest()
        for index in range(0, 32, 2):
            yield block[index] << 8 | block[index + 1]
        counter += 1


def within(what: str, value: int, least: int, most: int) -> None:
    """Raises ValueError where a value is not from `least` to `most`: nobody means that many."""
    if not least <= value <= most:
        raise ValueError(f"{what}{value:,} is not from {least:,} to {most:,}")


def between(least: int, most: int) -> AfterValidator:
    """For the type of a parameter: a number from `least` to `most`."""

    def check(value: int) -> int:
        within("", value, least, most)
        return value

    return AfterValidator(check)


def _one_of_prompts(name: str) -> str:
    if name not in PROMPTS:
        raise ValueError(f"no prompt {name!r}; {hint(name, PROMPTS)}")
    return name


Tokens = Annotated[int, between(1, TOKENS)]
Streams = Annotated[int, between(1, STREAMS)]
Prompt = Annotated[str, AfterValidator(_one_of_prompts)]
some = Field(min_length=1)  # of a list: it would ask for nothing at all


def text(seed: str, words: int) -> str:
    """`words` words from a seed."""
    numbers = stream(seed)
    return " ".join(_WORDS[next(numbers) % len(_WORDS)] for _ in range(words))


def nonce(seed: str) -> str:
    """A few characters that stand first in a prompt, so that no prefix cache knows it."""
    return hashlib.sha256(seed.encode()).hexdigest()[:12]
