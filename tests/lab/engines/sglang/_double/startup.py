"""A rank's start: device, weights, pools, graphs, each with the release's lines; and how each can fail."""

import os
import signal
import struct
import time

from sglang._double import gpu, log, memory, models, tracebacks

# Measured: decode graphs take 0.04 (small) to 0.25 GiB (27B); a prefill graph set 0.6.
GRAPH_GIB, DRAFT_GRAPH_GIB, PREFILL_GIB, DRAFT_PREFILL_GIB = 0.23, 0.1, 0.59, 0.43
BETWEEN_GIB, BETWEEN_DRAFT_GIB = 0.0495, 0.127
# Free memory below which buffers before the capture do not fit any more.
LEAST_GIB = 0.2


class Died(Exception):
    """The rank cannot go on: (error, text, where)."""


class Rank:
    """Numbers of one rank that is up: `division`, `pools`, `device`, sizes for /server_info."""

    def __init__(self, settings, faults, index, meet):
        self.settings, self.faults, self.index, self.meet = settings, faults, index, meet
        self.profile = settings.profile
        self.weights_gib = self.graph_gib = self.kv_gib = 0.0
        self.broken_weights = False
        self.load_seconds = 0.0

    def start(self):
        settings, profile = self.settings, self.profile
        _sleep(profile.delay("scheduler_imports"))
        self._device()
        self._distributed()
        self._weights(settings.model, settings["model_path"], draft=False)
        if settings.regime == "A":
            self._pools()
            self._graphs()
            if settings.draft is not None:
                self._draft_distributed()
                self._weights(settings.draft, settings["speculative_draft_model_path"], draft=True)
                self._draft_ready()
                self._draft_pools()
                self._draft_graphs()
        else:
            if settings.draft is not None:
                self._draft_distributed()
                self._weights(settings.draft, settings["speculative_draft_model_path"], draft=True)
                self._draft_ready()
            self._pools()
            if settings.draft is not None:
                self._draft_pools()
            self._graphs()
            if settings.draft is not None:
                self._draft_graphs()
        if self.index == 0:
            log.line(
                "max_total_num_tokens=%d, chunked_prefill_size=%d, max_prefill_tokens=%d, max_running_requests=%d, "
                "context_len=%d, available_gpu_mem=%.2f GB"
                % (
                    self.division.tokens,
                    settings["chunked_prefill_size"],
                    settings["max_prefill_tokens"],
                    self.division.requests,
                    settings.context,
                    self.device.free,
                )
            )
            self._tree_cache()

    def _tree_cache(self):
        if self.settings.release == "0.5.11":
            return
        radix, hybrid = not self.settings["disable_radix_cache"], self.settings.model.hybrid
        if radix and hybrid:
            log.line("Init Unified RadixTree with components (<ComponentType.FULL: 0>, <ComponentType.MAMBA: 2>)")
        kind = "ChunkCache" if not radix else "UnifiedRadixCache" if hybrid else "RadixCache"
        log.line(
            "Tree cache initialized: source=default impl=%s hybrid_swa=False hybrid_ssm=%s hierarchical=False "
            "streaming_wrapped=False" % (kind, hybrid)
        )

    def _device(self):
        settings = self.settings
        number = settings["base_gpu_id"] + self.index % (settings.tp // settings["nnodes"]) * (
            settings["gpu_id_step"] or 1
        )
        log.line("Init torch distributed begin.")
        self.device = gpu.Device(number, self.profile)
        try:
            self.device.open()
        except IndexError:
            log.line(
                "Context: device='cuda' ps.gpu_id=%d os.environ.get('CUDA_VISIBLE_DEVICES')=%r ps.tp_rank=%d "
                "ps.tp_size=%d" % (number, os.environ.get("CUDA_VISIBLE_DEVICES"), self.index, settings.tp)
            )
            raise Died(
                "torch.AcceleratorError",
                "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?\nCUDA kernel "
                "errors might be asynchronously reported at some other API call, so the stacktrace below might be "
                "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to "
                "enable device-side assertions.\n",
                "device",
            ) from None
        except gpu.CudaError as error:
            raise Died("RuntimeError", (gpu.complaint(error.args[1]) or gpu.NO_ACCELERATOR)[21:], "device") from None

    def _distributed(self):
        began, before = time.monotonic(), self.device.free
        if self.settings.tp > 1:
            if self.index == 0:
                log.line("sglang is using nccl==2.28.9")
            _sleep(self.profile.delay("nccl"))
        self._hang("nccl")
        self._killed("nccl")
        taken = self.profile.gpu.get("nccl_gib", 0.09) * (1 if self.settings.tp == 1 else 6)
        self.device.take(taken)
        # 0.5.11 looks after NCCL's start, the later ones before; all take the GPU that has least.
        self.pre = self.meet(self.device.free if self.settings.regime == "A" else before)
        local = self.device.free
        if self.pre < local * 0.9:
            raise Died(
                "RuntimeError",
                "The memory capacity is unbalanced. Some GPUs may be occupied by other processes. "
                "pre_model_load_memory=%r, local_gpu_memory=%r, local_gpu_memory * 0.9=%r"
                % (self.pre, local, local * 0.9),
                "device",
            )
        log.line(
            "Init torch distributed ends. elapsed=%.2f s, mem usage=%.2f GB" % (time.monotonic() - began + 0.17, taken)
        )

    def _draft_distributed(self):
        log.line("Init torch distributed begin.")
        log.line("Init torch distributed ends. elapsed=0.00 s, mem usage=0.00 GB")

    def _weights(self, model, path, draft):
        settings = self.settings
        log.line("Load weight begin. avail mem=%.2f GB" % self.device.free)
        if settings.tp > 1 or not draft:
            self._divisible(model)
        began = time.monotonic()
        if settings["load_format"] != "dummy":
            self._files(model, path)
        slow = self.faults.find("slow-weights")
        seconds = self.profile.delay("weights") * (0.08 if draft else 1)
        if slow and not draft:
            seconds = float(slow.get("seconds", 600))
        if settings["load_format"] == "dummy":
            _sleep(min(seconds, 0.2))
        else:
            self._shards(model, path, seconds)
        self._hang("weights")
        self._killed("weights")
        gib = self.profile.weights_of(model, settings.tp)
        self._take(gib, "load")
        self.weights_gib += 0 if draft else gib
        self.load_seconds += time.monotonic() - began
        log.line(
            "Load weight end. elapsed=%.2f s, type=%s, avail mem=%.2f GB, mem usage=%.2f GB."
            % (time.monotonic() - began, model.architecture, self.device.free, gib)
        )

    def _divisible(self, model):
        tp = self.settings.tp
        linear = model.text.get("linear_num_value_heads", 0), model.text.get("linear_num_key_heads", 0)
        if model.heads % tp:
            raise Died("AssertionError", "", "load")
        if not model.mla and (model.kv_heads % tp if model.kv_heads >= tp else tp % model.kv_heads):
            raise Died("AssertionError", "", "load")
        for wide in (*linear, model.text.get("intermediate_size", 0)):
            if wide % tp:
                raise Died("AssertionError", "%d is not divisible by %d" % (wide, tp), "load")

    def _files(self, model, path):
        present, missing = models.weight_files(path)
        if not present:
            raise Died("RuntimeError", "Cannot find any model weights with `%s`" % path, "load")
        for file in present:
            wrong = safetensors_error(file)
            if wrong:
                raise Died("safetensors_rust.SafetensorError", "Error while deserializing header: " + wrong, "load")
        # The loader takes the shards that are there; what is not filled stays as it was allocated.
        self.broken_weights = self.broken_weights or bool(missing)

    def _shards(self, model, path, seconds):
        count = max(1, len(models.weight_files(path)[0]))
        began = time.monotonic()
        for done in range(count + 1):
            if self.index == 0:
                spent = time.monotonic() - began
                rate = done / spent if spent > 0 and done else 0
                log.raw(
                    "\rLoading safetensors checkpoint shards: %3d%% Completed | %d/%d [%02d:%02d<%s, %s]"
                    % (
                        100 * done // count,
                        done,
                        count,
                        spent // 60,
                        spent % 60,
                        "00:00" if done == count else "?",
                        "%.2fit/s" % rate if rate else "?it/s",
                    )
                )
            if done < count:
                _sleep(seconds / count)
        if self.index == 0:
            log.raw("\n\n")

    def _draft_ready(self):
        settings, draft = self.settings, self.settings.draft
        algorithm = settings["speculative_algorithm"]
        if algorithm not in ("DFLASH", "DDTREE"):
            return
        log.line(
            "Initialized %s draft runner. attention_backend=%s, model=%s, block_size=%d, draft_window_size=None, "
            "compact_cache=False"
            % (algorithm, settings["attention_backend"], draft.architecture, settings.draft_tokens)
        )
        mask = (draft.config.get("dflash_config") or {}).get("mask_token_id")
        log.line(
            "%s draft runner ready. mask_token=<|MASK|>, mask_token_id=%s, mask_token_id_override=%s"
            % (algorithm, mask, mask)
        )
        log.line(
            "%s fused KV materialization enabled. n_layers=%d, num_kv_heads=%d, head_dim=%d"
            % (algorithm, draft.layers, max(1, draft.kv_heads // settings.tp), draft.head_dim)
        )

    def _pools(self):
        settings = self.settings
        if settings.regime != "A" and settings.model.hybrid:
            # Measured: gone between the end of loading and the sizing of the pools.
            self._take(BETWEEN_GIB if settings.draft is None else BETWEEN_DRAFT_GIB, "pools")
        ask = settings.division(self.pre, self.meet(self.device.free))
        fault = self.faults.find("oom", at="kv", default="request")
        try:
            division = memory.divide(ask)
        except memory.CannotFit as error:
            raise Died(error.error, error.args[0], "pools") from None
        self.division, self.pools = division, memory.Pools(ask, division)
        pools = self.pools
        for warning in division.warnings:
            if self.index == 0:
                log.line(warning)
        if fault:
            self.device.exhaust(pools.kv / 2)
            raise Died("torch.OutOfMemoryError", self.device.out_of_memory(pools.kv / 2), "pools")
        if settings.model.hybrid:
            self._mamba()
        self._kv(settings.model, pools.kv, pools.target)
        log.line("Memory pool end. avail mem=%.2f GB" % self.device.free)
        if division.requests <= 0:
            raise Died("AssertionError", "max_running_request is zero", "assert")

    def _mamba(self):
        pools = self.pools
        text = (
            "Mamba Cache is allocated. max_mamba_cache_size: %d, conv_state size: %.2fGB, ssm_state size: %.2fGB "
            % (
                self.division.slots,
                pools.conv,
                pools.ssm,
            )
        )
        if self.settings.draft_tokens:
            text += "intermediate_ssm_state_cache size: %.2fGB intermediate_conv_window_cache size: %.2fGB " % (
                pools.spec_ssm,
                pools.spec_conv,
            )
        log.line(text)

    def _kv(self, model, kv, taken):
        settings = self.settings
        if taken > self.device.free:
            per_layer = kv / 2 / model.attention_layers
            self.device.taken += taken - kv
            self.device.taken += int(self.device.free / per_layer) * per_layer
            raise Died("torch.OutOfMemoryError", self.device.out_of_memory(per_layer), "pools")
        self._take(taken, "pools")
        self.kv_gib = self.kv_gib or kv
        kind = "" if settings.release == "0.5.11" else " dtype: torch.bfloat16,"
        if model.mla:
            log.line("KV Cache is allocated.%s #tokens: %d, KV size: %.2f GB" % (kind, self.division.tokens, kv))
        else:
            log.line(
                "KV Cache is allocated.%s #tokens: %d, K size: %.2f GB, V size: %.2f GB"
                % (kind, self.division.tokens, kv / 2, kv / 2)
            )

    def _draft_pools(self):
        self._kv(self.settings.draft, self.pools.draft_kv, self.pools.draft_kv)
        log.line("Memory pool end. avail mem=%.2f GB" % self.device.free)

    def _graphs(self):
        settings = self.settings
        if settings.model.hybrid:
            log.line("Using hybrid linear attention backend for hybrid GDN models.")
            self._backend()
        if self.device.free < LEAST_GIB:
            raise Died("torch.OutOfMemoryError", self.device.out_of_memory(36 / 1024), "pools")
        sizes = [size for size in settings.graphs if size <= self.division.requests] or settings.graphs[:1]
        if self.division.requests < settings.graph_max and settings.graphs:
            sizes = sorted({*sizes, self.division.requests})
        spec = bool(settings.draft_tokens)
        if settings.release == "0.5.11":
            if sizes:
                self._capture("cuda graph", sizes, GRAPH_GIB, old=True)
            return
        self._prefill_graphs("target")
        if sizes:
            self._capture("target %s CUDA graph" % ("verify" if spec else "decode"), sizes, GRAPH_GIB)

    def _prefill_graphs(self, role):
        if self.settings.prefill_backend == "disabled" or self.settings.model.hybrid:
            log.line(
                "Disable prefill CUDA graph because cuda_graph_config resolved prefill.backend='disabled' (e.g. via "
                "--cuda-graph-backend-prefill=disabled or auto-disable rules)."
            )
        else:
            gib = PREFILL_GIB if role == "target" else DRAFT_PREFILL_GIB
            self._capture(role + " prefill CUDA graph", self.settings.prefill_sizes, gib, tokens=True)

    def _backend(self):
        from sglang._double.settings import BLACKWELL_GDN

        chosen = self.settings["attention_backend"]
        allowed = (*BLACKWELL_GDN, "fa4") if self.settings.release == "0.5.11" else BLACKWELL_GDN
        if self.profile.gpu["capability"][0] < 10 or chosen in allowed:
            return
        if self.settings.release == "0.5.11":
            text = (
                "triton, trtllm_mha, fa4, or flashinfer backend are the only supported backends on Blackwell GPUs for "
                "hybrid GDN models, use --attention-backend to specify the backend."
            )
        else:
            text = (
                "Only %r backends are supported on Blackwell GPUs for hybrid GDN models. Got attention_backend=%s."
                % (set(allowed), chosen)
            )
        raise Died("AssertionError", text, "load")

    def _draft_graphs(self):
        settings = self.settings
        sizes = [size for size in settings.graphs if size <= self.division.requests]
        if not sizes:
            return
        if settings.release == "0.5.11":
            self._capture("cuda graph", sizes, DRAFT_GRAPH_GIB, old=True)
            return
        self._prefill_graphs("draft")
        if settings["speculative_algorithm"] in ("DFLASH", "DDTREE"):
            self._capture("draft verify CUDA graph", sizes, DRAFT_GRAPH_GIB)
        else:
            self._capture("draft decode CUDA graph", sizes, 0.04, per_request=1)
            self._capture("draft extend CUDA graph", sizes, 0.05)

    def _capture(self, what, sizes, gib, tokens=False, old=False, per_request=None):
        began = time.monotonic()
        if old:
            log.line(
                "Capture %s begin. This can take up to several minutes. avail mem=%.2f GB" % (what, self.device.free)
            )
        elif tokens:
            log.line(
                "Capture %s begin. backend=%s, num_tokens=%s, avail mem=%.2f GB"
                % (what, self.settings.prefill_backend, sizes, self.device.free)
            )
        else:
            width = per_request or self.settings.draft_tokens or 1
            listed = "" if self.settings.release == "0.5.23" else " bs=%s," % sizes
            log.line(
                "Capture %s begin. backend=full, num_tokens_per_req=%d,%s avail mem=%.2f GB"
                % (what, width, listed, self.device.free)
            )
        fault = self.faults.find("oom", at="graph", default="request")
        if fault:
            self.device.exhaust(0.0625)
            text = self.device.out_of_memory(0.0625)
            if self.settings.release == "0.5.11":
                raise Died("Exception", "Capture cuda graph failed: %s\nPossible solutions:\n1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n2. set --cuda-graph-max-bs to a smaller value (e.g., 16)\n3. disable torch compile by not using --enable-torch-compile\n4. disable CUDA graph by --disable-cuda-graph. (Not recommended. Huge performance loss)\nOpen an issue on GitHub https://github.com/sgl-project/sglang/issues/new/choose \n" % text, "load")  # fmt: skip
            raise Died("torch.OutOfMemoryError", text, "pools")
        self._hang("graphs")
        self._progress(sizes, gib, tokens)
        self.graph_gib = self.graph_gib or gib
        spent = time.monotonic() - began
        if old:
            log.line(
                "Capture %s end. Time elapsed: %.2f s. mem usage=%.2f GB. avail mem=%.2f GB."
                % (what, spent, gib, self.device.free)
            )
        else:
            log.line(
                "Capture %s end. elapsed=%.2f s, mem usage=%.2f GB, avail mem=%.2f GB."
                % (what, spent, gib, self.device.free)
            )

    def _progress(self, sizes, gib, tokens):
        """tqdm's bar, which redraws itself with carriage returns."""
        seconds = self.profile.delay("graphs") * (0.3 if tokens else 1) / max(1, len(sizes))
        what, unit = ("num tokens", "num_tokens") if tokens else ("batches", "bs")
        count = len(sizes)
        for done, size in enumerate(sorted(sizes, reverse=True)):
            if self.index == 0:
                if done == 0:
                    log.raw("\r  0%%|          | 0/%d [00:00<?, ?it/s]" % count)
                bar = ("█" * (10 * done // count)).ljust(10)
                log.raw(
                    "\rCapturing %s (%s=%d avail_mem=%.2f GB): %3d%%|%s| %d/%d [00:00<?, ?it/s]"
                    % (what, unit, size, self.device.free, 100 * done // count, bar, done, count)
                )
            self._take(gib / count, "pools")
            _sleep(seconds)
        if self.index == 0:
            log.raw(
                "\rCapturing %s (%s=%d avail_mem=%.2f GB): 100%%|██████████| %d/%d [00:00<00:00, %.2fit/s]\n"
                % (what, unit, min(sizes), self.device.free, count, count, 1 / seconds if seconds else 99.0)
            )

    def _take(self, gib, where):
        try:
            self.device.take(gib)
        except MemoryError:
            wanted = min(gib, max(0.02, self.device.free + 0.02))
            raise Died("torch.OutOfMemoryError", self.device.out_of_memory(wanted), where) from None

    def _hang(self, stage):
        fault = self.faults.find("hang", at=stage, default="nccl")
        if fault and self.index in fault.get("ranks", range(self.settings.tp)):
            while True:
                time.sleep(3600)

    def _killed(self, stage):
        fault = self.faults.find("rank-killed", at=stage, default="weights")
        if fault and self.index == int(fault.get("rank", 0)):
            os.kill(os.getpid(), signal.SIGKILL)


def _sleep(seconds):
    if seconds > 0:
        time.sleep(seconds)


def safetensors_error(file):
    """What the safetensors library says of a file that it cannot open; None where it can. The payload is not read."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if len(start) < 8:
            return "header too small"
        (length,) = struct.unpack("<Q", start)
        if length > 100_000_000:
            return "header too large"
        if 8 + length > size:
            return "invalid header length"
        try:
            import json

            header = json.loads(stream.read(length))
        except ValueError:
            return "invalid header deserialization"
    ends = [row["data_offsets"][1] for key, row in header.items() if key != "__metadata__"]
    if 8 + length + max(ends, default=0) != size:
        return "incomplete metadata, file not fully covered"
    return None


def report(rank, error):
    """Prints a rank's death as the engine does."""
    name, text, where = error.args
    log.line("Scheduler hit an exception: " + tracebacks.start(name, text, where))
