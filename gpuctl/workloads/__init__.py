"""What is asked of a server: one file a workload; the file name is its id.

A workload has
    Parameters   a frozen dataclass (pydantic checks it): what a phase may say, with defaults
    points(p)    -> Iterator[Point]: the cells of one server
    requests(point, rep, words)  -> list of requests for agent/load.py: the same for the same arguments, and none
                 like another one where a cache would lie
Texts are made from a seed; `words` is how many words give the wanted prompt tokens (see `Point.prompt_tokens`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

# The short prompts of the campaign: code, arithmetic, structure and prose speculate differently well.
PROMPTS = {
    "fib": "Write a Python function that returns the n-th Fibonacci number, with memoisation, and explain each line.",
    "qsort": "Implement quicksort in C for an array of integers, in place, and explain the choice of the pivot.",
    "arith": "Compute 37 * 481 - 1296 / 18 + 77 step by step, writing out every intermediate result.",
    "json": "Write a JSON document that describes a small library: ten books with title, author, year and shelf.",
    "haiku": "Write haiku about the four seasons, one after another, each followed by a sentence on its picture.",
}

# Short, common words: most tokenizers give one token each, so lengths come out close before they are calibrated.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education"
).split()


def stream(seed: str) -> Iterator[int]:
    """Endless numbers 0..65535 from a seed, the same on every machine and Python (SHA-256 in counter mode)."""
    counter = 0
    while True:
        block = hashlib.sha256(f"{seed}:{counter}".encode()).digest()
        for index in range(0, 32, 2):
            yield block[index] << 8 | block[index + 1]
        counter += 1


def text(seed: str, words: int) -> str:
    """`words` words from a seed."""
    numbers = stream(seed)
    return " ".join(_WORDS[next(numbers) % len(_WORDS)] for _ in range(words))


def nonce(seed: str) -> str:
    """A few characters that stand first in a prompt, so that no prefix cache knows it."""
    return hashlib.sha256(seed.encode()).hexdigest()[:12]
