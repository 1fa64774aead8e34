"""How large a model is: its layers, caches, recurrent states and weights, and how they divide among GPUs. Pure data."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_BYTES = {
    "float32": 4.0, "float": 4.0, "float16": 2.0, "half": 2.0, "bfloat16": 2.0, "float8_e4m3fn": 1.0, "fp8": 1.0,
    "uint8": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Recurrent:
    """The state that linear attention (GDN, KDA) or Mamba layers keep for one sequence, instead of a KV cache."""

    layers: int
    channels: int  # that the convolution looks back on
    kernel: int  # of the convolution
    heads: int
    key_dim: int
    value_dim: int
    dtype: str = "float32"  # of the recurrent state, as the configuration wants it

    def conv_bytes(self, tp: int = 1, element: int = 2) -> int:
        return self.layers * (-(-self.channels // tp)) * (self.kernel - 1) * element

    def ssm_bytes(self, tp: int = 1, element: int = 4) -> int:
        return self.layers * (-(-self.heads // tp)) * self.key_dim * self.value_dim * element

    def slot_bytes(self, tp: int = 1, element: int = 4) -> int:
        """Bytes of one state on one GPU; `element`: bytes of a number of the recurrent part (the rest has 2)."""
        return self.conv_bytes(tp) + self.ssm_bytes(tp, element)


@dataclass(frozen=True)
class Quantisation:
    """How weights are stored."""

    method: str  # fp8, compressed-tensors, gptq, awq, modelopt, mxfp4, bitsandbytes, ...
    bits: float
    group: int | None = None  # weights that share a scale
    block: tuple[int, int] | None = None  # rows and columns that share a scale
    ignored: tuple[str, ...] = ()  # modules that are not quantised: names, patterns, "re:" expressions
    scale_bytes: float = 2.0  # of one scale

    @property
    def weight_bytes(self) -> float:
        """Bytes that one weight takes, with its share of a scale."""
        size = self.bits / 8
        if self.block:
            return size + 4 / (self.block[0] * self.block[1])
        return size + (self.scale_bytes / self.group if self.group else 0.0)

    def skips(self, module: str) -> bool:
        """Whether the module's weights stay as they are."""
        for name in self.ignored:
            if name.startswith("re:"):
                try:
                    if re.match(name[3:], module):
                        return True
                except re.error:
                    continue
            elif name == module or f".{name}." in f".{module}." or fnmatch.fnmatchcase(module, name):
                return True
        return False


@dataclass(frozen=True)
class Part:
    """A group of weights of one kind.

    `split`: how tensor parallelism divides it: "tp" evenly, "kv" by KV heads (repeated when there are fewer than GPUs),
    "none" not at all. `active`: the share that one token passes through.
    """

    name: str
    count: int
    split: str = "tp"
    module: str = ""  # a representative name, while it is not settled whether quantisation ignores it
    active: float = 1.0
    quantised: bool = True


@dataclass(frozen=True)
class ModelFacts:
    architecture: str
    model_type: str
    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int  # of keys
    value_dim: int  # of values
    intermediate: int
    context: int | None  # tokens it was made for
    dtype: str
    attention_layers: int  # with a KV cache of the whole context
    sliding_layers: int = 0  # with a KV cache of `window` tokens
    window: int | None = None
    latent: int | None = None  # MLA: numbers kept a token and layer, once for all heads
    indexer_dim: int | None = None  # sparse attention over a latent cache keeps keys of this size as well
    recurrent: Recurrent | None = None
    experts: int = 0
    experts_active: int = 0
    expert_width: int | None = None  # of one expert's feed-forward part
    dense: bool = True  # some layers have a feed-forward part without experts
    vision_hidden: int | None = None  # of a vision tower; None: no such tower
    mtp_layers: int = 0  # layers for multi-token prediction in the checkpoint
    draft_block: int | None = None  # tokens a DFLASH drafter proposes at once
    quantisation: Quantisation | None = None
    parts: tuple[Part, ...] = ()
    mtp_parts: tuple[Part, ...] = ()  # of the MTP layers
    stored_bytes: int | None = None  # of the weight files, where the index says so
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        return sum(part.count for part in self.parts)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through; the embedding is a look-up and does not count."""
        return round(sum(part.count * part.active for part in self.parts if part.name != "embedding"))

    @property
    def multimodal(self) -> bool:
        return self.vision_hidden is not None

    def element_bytes(self) -> float:
        return _BYTES.get(self.dtype, 2.0)

    def part_bytes(self, part: Part) -> float:
        """Bytes that one weight of this part takes."""
        if self.quantisation is None or not part.quantised:
            return self.element_bytes()
        return self.quantisation.weight_bytes

    def share(self, part: Part, tp: int) -> float:
        """The part of it that one of `tp` GPUs holds."""
        if part.split == "none" or tp <= 1:
            return 1.0
        return 1 / min(tp, max(self.kv_heads, 1)) if part.split == "kv" else 1 / tp

    def computed_bytes(self, tp: int = 1, parts: Sequence[Part] | None = None) -> int:
        """Bytes of weights on one GPU, computed from the configuration."""
        return round(
            sum(
                part.count * self.part_bytes(part) * self.share(part, tp)
                for part in (self.parts if parts is None else parts)
            )
        )

    def weight_bytes(self, tp: int = 1) -> int:
        """Bytes of weights on one GPU: computed, or from the size of the files where those disagree with it.

        Files may hold more than is loaded (layers for multi-token prediction), so a small difference is the files';
        a large one means that the configuration describes weights not known here.
        """
        whole, mtp = self.computed_bytes(), self.computed_bytes(1, self.mtp_parts)
        if self.stored_bytes is None or not whole:
            return self.computed_bytes(tp)
        near = 0.02 if self.quantisation is None else 0.0
        if any(abs(self.stored_bytes - size) <= near * size for size in (whole, whole + mtp)):
            return self.computed_bytes(tp)
        loaded = self.stored_bytes - (mtp if self.stored_bytes > whole + mtp / 2 else 0)
        return round(self.computed_bytes(tp) * loaded / whole)

    def active_bytes(self, tp: int = 1) -> int:
        """Bytes of weights that one GPU reads to generate one token for one sequence."""
        scale = self.weight_bytes() / self.computed_bytes() if self.parts else 1.0
        return round(
            scale
            * sum(
                part.count * part.active * self.part_bytes(part) * self.share(part, tp)
                for part in self.parts
                if part.name not in ("embedding", "vision")
            )
        )

    def kv_token_bytes(self, tp: int = 1, element: float = 2) -> int:
        """Bytes of KV cache for one token on one GPU, over the layers that keep the whole context."""
        if self.latent is not None:
            each = self.latent * element
            if self.indexer_dim:
                each += self.indexer_dim + self.indexer_dim // 128 * 4
            return round(self.attention_layers * each)
        return round(self.attention_layers * self.kv_layer_bytes(tp, element))

    def kv_layer_bytes(self, tp: int = 1, element: float = 2) -> float:
        """Bytes of keys and values of one token in one layer on one GPU."""
        return max(1, self.kv_heads // tp) * (self.head_dim + self.value_dim) * element


@dataclass(frozen=True)
class TensorParallel:
    """Whether a model can be divided among `size` GPUs. `findings`: why not, or what to know, one line each."""

    size: int
    possible: bool
    findings: tuple[str, ...] = field(default_factory=tuple)


def divide(facts: ModelFacts, size: int) -> TensorParallel:
    """What tensor parallelism over `size` GPUs needs of this model (sources: SGLang's and vLLM's linear layers)."""
    wrong, known = [], []
    if size < 1:
        return TensorParallel(size, False, ("the size must be at least 1",))
    if facts.heads % size:
        wrong.append(f"{facts.heads} attention heads are not divisible by {size}")
    if facts.latent is not None:
        if size > 1:
            known.append("every GPU keeps the whole latent KV cache: more GPUs do not add context")
    elif facts.kv_heads >= size:
        if facts.kv_heads % size:
            wrong.append(f"{facts.kv_heads} KV heads are not divisible by {size}")
    elif size % facts.kv_heads:
        wrong.append(f"{size} GPUs are not a multiple of {facts.kv_heads} KV heads, which would have to be repeated")
    else:
        known.append(
            f"{facts.kv_heads} KV heads on {size} GPUs are repeated {size // facts.kv_heads} times: KV cache per token "
            f"and GPU stays that of {facts.kv_heads} GPUs"
        )
    if facts.recurrent is not None and facts.recurrent.heads % size:
        wrong.append(f"{facts.recurrent.heads} heads of the recurrent layers are not divisible by {size}")
    for name, width in _widths(facts):
        if width % size:
            wrong.append(f"{name} of {width} is not divisible by {size}")
        elif facts.quantisation is not None and not facts.experts:
            unit = facts.quantisation.block[0] if facts.quantisation.block else facts.quantisation.group
            if unit and width // size % unit:
                wrong.append(f"{name} of {width} / {size} = {width // size} is not a whole number of blocks of {unit}")
    return TensorParallel(size, not wrong, (*wrong, *known))


def _widths(facts: ModelFacts) -> Iterable[tuple[str, int]]:
    names = {part.name for part in facts.parts}
    if "feed forward" in names:
        yield "feed-forward width", facts.intermediate
