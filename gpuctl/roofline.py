"""The fastest that a server can decode: what one step has to read, over what the GPU's memory delivers. Pure.

Decoding reads all weights that a step passes through, the caches and states of the running requests, and the drafter's
weights where there is one; a step gives each request one token, or as many as are accepted under speculation. Real
servers stay below: a value above is a measuring error, one far below a configuration error. What several GPUs say to
each other between layers is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuctl.facts.gpus import Speed
from gpuctl.facts.model import ModelFacts

# Reached of it by servers that are well: a matrix times a vector on an H200 reads 82 % of what the bus could, and a 27B
# in bf16 decoded at 26.4 of 34.8 tok/s on an RTX PRO 6000. Several GPUs wait for each other: 4 of them reached 54 %.
REACHED, REACHED_BY_MANY = 0.75, 0.5
PREFILL_REACHED = 0.5  # of the arithmetic, for long prompts


@dataclass(frozen=True)
class Decoder:
    """What a server reads from the memory of one GPU. `steps`: passes of the drafter for one step of the target."""

    target: ModelFacts
    tp: int = 1
    kv_element: float = 2.0
    state_element: int = 4
    draft: ModelFacts | None = None
    steps: int = 1
    drafted: int = 0  # tokens verified a step

    def weight_bytes(self, requests: int = 1) -> float:
        """Weights that one step reads: of experts those that some token of the step is sent to."""
        tokens = requests * max(self.drafted, 1)
        return _touched(self.target, self.tp, tokens) + (
            self.steps * self.draft.active_bytes(self.tp) if self.draft is not None else 0
        )

    def request_bytes(self, context: int) -> float:
        """What a step reads besides for one request that has `context` tokens."""
        cached: float = context * self.target.kv_token_bytes(self.tp, self.kv_element)
        if self.target.sliding_layers and self.target.window:
            seen = min(context, self.target.window)
            cached += seen * self.target.sliding_layers * self.target.kv_layer_bytes(self.tp, self.kv_element)
        if self.draft is not None:
            cached += self.steps * context * self.draft.kv_token_bytes(self.tp, self.kv_element)
        state = self.target.recurrent
        return cached + (2 * state.slot_bytes(self.tp, self.state_element) if state else 0)  # read, and written anew

    def step_bytes(self, requests: int, context: int) -> float:
        return self.weight_bytes(requests) + requests * self.request_bytes(context)


def _touched(target: ModelFacts, tp: int, tokens: int) -> float:
    """Bytes of weights that `tokens` tokens pass through together, routed to experts as if by chance."""
    one = target.active_bytes(tp)
    if not target.experts or not target.experts_active or tokens <= 1:
        return one
    experts = [part for part in target.parts if part.name == "experts"]
    whole = sum(part.count * target.part_bytes(part) * target.share(part, tp) for part in experts)
    share = target.experts_active / target.experts
    reached = 1 - (1 - share) ** tokens
    return one + whole * max(0.0, reached - share)


def tok_s(decoder: Decoder, speed: Speed, *, requests: int = 1, context: int = 0, accepted: float = 1.0) -> float:
    """Tokens that one of `requests` requests can at most get in a second."""
    return accepted * speed.bandwidth_bytes_s / decoder.step_bytes(requests, context)


def prefill_tok_s(target: ModelFacts, speed: Speed, gpus: int = 1) -> float | None:
    """Prompt tokens that can at most be read in a second (two operations a weight); None: arithmetic not known."""
    if speed.flops is None or not target.active_parameters:
        return None
    return speed.flops * gpus / (2 * target.active_parameters)
