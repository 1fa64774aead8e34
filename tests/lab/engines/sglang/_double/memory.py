"""How a release divides GPU memory among recurrent state, keys and values, and requests. Pure.

Three regimes. Facts: release 0.5.16's numbers are held to measured servers, to the token and slot; the other two
follow the arithmetic of their releases (kv_cache mixin of 0.5.11, kv_cache configurator of 0.5.23), with worked
examples in the tests. All sizes are GiB where named so, else bytes.
"""

import math

GIB = 1 << 30
RATIOS = {"no_buffer": 3, "extra_buffer_lazy": 4, "extra_buffer": 5}
# 0.5.23 keeps this back for a multimodal model's cache of image embeddings (MB).
MULTIMODAL_RESERVE_MB = 100


class CannotFit(Exception):
    """The engine would refuse. `kind` is a word, args[0] its text."""

    def __init__(self, kind, error, text):
        super().__init__(text)
        self.kind, self.error = kind, error


class Request:
    """What the division depends on. Sizes per GPU."""

    def __init__(self, model, draft=None, **known):
        self.model, self.draft = model, draft
        self.regime = known["regime"]
        self.pre = known["pre"]  # GiB free before loading
        self.free = known["free"]  # GiB free when pools are sized
        self.fraction = known["fraction"]
        self.tp = known.get("tp", 1)
        self.requests = known.get("requests")  # --max-running-requests, None where not given
        self.draft_tokens = known.get("draft_tokens")  # None without speculation
        self.algorithm = known.get("algorithm")
        self.radix = known.get("radix", True)
        self.strategy = known.get("strategy", "no_buffer")
        self.overlap = known.get("overlap", True)
        self.mamba_ratio = known.get("mamba_ratio", 0.9)
        self.mamba_slots = known.get("mamba_slots")
        self.max_tokens = known.get("max_tokens")
        self.context = known["context"]
        self.page = known.get("page") or 1
        self.kv_element = known.get("kv_element", 2)
        self.ssm_bytes = known.get("ssm_bytes", 4)

    @property
    def slots_per_request(self):
        if not self.radix:
            return 1
        if self.strategy == "extra_buffer" and not self.overlap:
            return 4
        return RATIOS[self.strategy]

    @property
    def kv_bytes(self):
        """Bytes of one token, the draft's share included where the release budgets it."""
        own = self.model.kv_bytes(self.tp, self.kv_element)
        shares = ("DFLASH", "DDTREE") if self.regime == "A" else ("DFLASH", "DDTREE", "EAGLE", "EAGLE3", "STANDALONE")
        if self.draft is not None and self.algorithm in shares:
            layers = self.model.attention_layers
            return own * (layers + self.draft.layers) // layers
        return own


class Division:
    """The outcome: `slots` of recurrent state (None for pure attention), `tokens`, `requests`, `warnings`."""

    def __init__(self):
        self.slots = None
        self.tokens = self.requests = 0
        self.warnings = []


def divide(ask):
    """Divides, or raises CannotFit with the release's own words. `requests` may come out 0 (the caller asserts)."""
    out = Division()
    rest = ask.free - ask.pre * (1 - ask.fraction)
    if ask.regime == "C" and ask.model.multimodal:
        rest -= MULTIMODAL_RESERVE_MB / 1024
    if ask.model.hybrid:
        rest = _state(ask, rest, out)
    if rest <= 0 and ask.regime != "A":
        least = 1 - ask.free / ask.pre
        raise CannotFit(
            "weights",
            "ValueError",
            "Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=%s. Raise "
            "--mem-fraction-static above %.3f (minimum viable = 1 - available/pre = %.4f). If using speculative "
            "decoding, draft weights are now counted." % (ask.fraction, math.ceil(least * 1000) / 1000, least),
        )
    tokens = int(rest * GIB) // ask.kv_bytes // ask.page * ask.page
    if ask.max_tokens is not None:
        if ask.max_tokens > tokens:
            out.warnings.append(
                "max_total_tokens=%d is larger than the profiled value %d. Use the profiled value instead."
                % (ask.max_tokens, tokens)
            )
        tokens = min(tokens, ask.max_tokens // ask.page * ask.page)
    if tokens <= 0:
        raise CannotFit(
            "tokens",
            "RuntimeError",
            "Not enough memory. Please try to increase --mem-fraction-static. Current value: self.mem_fraction_static=%s"
            % ask.fraction
            if ask.regime == "A"
            else "Not enough memory. Please try to increase --mem-fraction-static.",
        )
    out.tokens = tokens
    out.requests = _requests(ask, out)
    return out


def _state(ask, rest, out):
    """Takes the recurrent state off `rest` and sets out.slots."""
    conv, ssm = ask.model.state(ask.tp, ask.ssm_bytes)
    slot, drafts, ratio = conv + ssm, ask.draft_tokens, ask.slots_per_request
    pad = 1 if ask.regime == "C" else 0
    share = rest * ask.mamba_ratio / (1 + ask.mamba_ratio) * GIB
    if ask.regime == "A":
        if drafts:
            # The requests asked for, before any cap: this is what starved the campaign's servers.
            rest -= slot * ask.requests * drafts / GIB
            share = rest * ask.mamba_ratio / (1 + ask.mamba_ratio) * GIB
        if ask.mamba_slots is not None:
            out.slots = ask.mamba_slots
        elif not ask.radix and ask.requests is not None:
            out.slots = ask.requests
        else:
            out.slots = int(share // slot)
        return rest - out.slots * slot / GIB

    if ask.mamba_slots is not None:
        out.slots = ask.mamba_slots
    elif not ask.radix and ask.requests is not None:
        out.slots = ask.requests
    elif drafts:
        out.slots = int((share - pad * slot * (1 + drafts)) // (slot * (1 + drafts / ratio)))
    else:
        out.slots = int((share - pad * slot) // slot)
    if drafts:
        if ask.mamba_slots is None and not ask.radix:
            running = out.slots
        else:
            running = min(ask.requests, out.slots // ratio)
        rest -= slot * (running + pad) * drafts / GIB
    if out.slots <= 0:
        raise CannotFit(
            "state",
            "RuntimeError",
            "Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed max_mamba_cache_size=%d "
            "(total_rest_memory=%.2f GB, mamba_cache_per_req=%.2f MB). Try: (1) reduce --max-running-requests, "
            "(2) increase --mem-fraction-static, (3) reduce --speculative-num-draft-tokens, or (4) use GPUs with more "
            "memory." % (out.slots, rest, slot / (1 << 20)),
        )
    return rest - (out.slots + pad) * slot / GIB


def _requests(ask, out):
    estimate = max(min(int(out.tokens / ask.context * 512), 4096), 2048)
    if ask.requests is None:
        requests = min(estimate, out.tokens // 2)
    elif ask.regime == "A":
        requests = min(ask.requests, estimate)
    else:
        requests = min(ask.requests, out.tokens // 2)
    by_state = False
    if ask.model.hybrid:
        ratio = ask.slots_per_request
        cap = out.slots // ratio
        if cap < requests:
            by_state = True
            if ask.regime == "C":
                out.warnings.append(
                    "max_running_requests is capped to %d by the mamba state cache (max_mamba_cache_size=%d, %d state "
                    "slots per request). To raise it: increase --mamba-full-memory-ratio or --max-mamba-cache-size, or "
                    "halve the state size with --mamba-ssm-dtype bfloat16." % (cap, out.slots, ratio)
                )
        requests = min(requests, cap)
        if requests <= 0 and ask.regime != "A":
            raise CannotFit(
                "state-requests",
                "RuntimeError",
                "Hybrid (mamba/linear-attention) state cache is too small to serve any requests. "
                "max_mamba_cache_size=%d, mamba_ratio=%d, resulting max_num_reqs=%d. Try: (1) reduce "
                "--max-running-requests, (2) increase --mem-fraction-static, or (3) use GPUs with more memory."
                % (out.slots, ratio, requests),
            )
    reduced = ask.requests is not None and requests < ask.requests and ask.regime != "A"
    if reduced and not (ask.regime == "C" and by_state):
        out.warnings.append(
            "max_running_requests was reduced from the requested %d to %d (per dp worker) due to the available KV cache "
            "capacity." % (ask.requests, requests)
        )
    return requests


class Pools:
    """What is really allocated, GiB: one slot, one page and one row more each than the division says."""

    def __init__(self, ask, division):
        drafts = ask.draft_tokens or 0
        rows = division.requests + 1
        self.conv = self.ssm = self.spec_ssm = self.spec_conv = 0.0
        if ask.model.hybrid:
            conv, ssm = ask.model.state(ask.tp, ask.ssm_bytes)
            slots = division.slots + 1
            self.conv, self.ssm = conv * slots / GIB, ssm * slots / GIB
            if drafts:
                self.spec_ssm = ssm * rows * drafts / GIB
                width = ask.model.text["linear_conv_kernel_dim"] - 1
                # One window a draft token in 0.5.11, one sliding window over all of them later.
                columns = drafts * width if ask.regime == "A" else drafts + width - 1
                self.spec_conv = conv * rows * columns / width / GIB
        own = ask.model.kv_bytes(ask.tp, ask.kv_element)
        self.kv = own * (division.tokens + ask.page) / GIB
        self.draft_kv = 0.0
        if ask.draft is not None:
            self.draft_kv = ask.draft.kv_bytes(ask.tp, ask.kv_element) * (division.tokens + ask.page) / GIB
        self.table = rows * (ask.context + 4 + drafts) * 4 / GIB

    @property
    def target(self):
        return self.conv + self.ssm + self.spec_ssm + self.spec_conv + self.kv + self.table


def default_fraction(gpu_mib, model, **known):
    """`--mem-fraction-static` where it is not given; `gpu_mib` as nvidia-smi has it."""
    reserved = 512 + 1.5 * max(known["chunked_prefill"], 2048) + known["tp"] / 8 * 1024 + 2 * known["graph_max"]
    reserved += 8 * known["prefill_graphs"]
    if gpu_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    if known["regime"] == "A" and known.get("algorithm"):
        reserved += {"STANDALONE": 6 * 1024, "NGRAM": 0}.get(known["algorithm"], 4 * 1024)
    fraction = round((gpu_mib - reserved) / gpu_mib, 3)
    if model.multimodal and model.config.get("vision_config"):
        # The vision tower's depth is read under a name these models do not use, so 24 layers always.
        hidden = model.config["vision_config"].get("hidden_size", 1024)
        complexity = 24 * hidden**2 / (24 * 1024**2)
        fraction *= 0.95 * max(0.8, min(1.05, 1 - 0.1 * (complexity - 1)))
    return fraction
