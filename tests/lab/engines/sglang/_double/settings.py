"""What a command line comes to: defaults filled in and combinations refused, in the release's order and words.

Facts: the argument handling of the three releases (server_args.py, arg_groups/speculative_hook.py and
memory_hook.py, configs/model_config.py) and the recorded refusals of 0.5.16.
"""

import os
import random

from sglang._double import log, memory, models
from sglang._double.release import REGIME, RELEASE, table

LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
RESET = (
    "Max running requests is reset to 48 for speculative decoding. You can override this by explicitly setting "
    "--max-running-requests."
)
BLACKWELL_GDN = ("triton", "trtllm_mha", "flashinfer")


class Refused(Exception):
    """The command line is refused: exit 1 with a traceback. `error` is the exception's name, `where` a frame chain."""

    def __init__(self, error, text, where="arguments"):
        super().__init__(text)
        self.error, self.where = error, where


def refuse(text, error="ValueError", where="arguments"):
    raise Refused(error, text, where)


class Settings:
    """The resolved values, by the release's own names, in `fields`; what the double needs beside them as attributes."""

    def __init__(self, namespace, profile, release=RELEASE):
        self.release, self.profile = release, profile
        self.regime = REGIME[release]
        known = vars(namespace)
        self.fields = {name: known.get(name) for name in table(release)["fields"]}
        # Options that fill no field of that name: old ones, `--config`, a fork's.
        self.beside = {name: value for name, value in known.items() if name not in self.fields}
        self.draft = None
        self.budget = self["speculative_ddtree_budget"]
        if self["tokenizer_path"] is None:
            self["tokenizer_path"] = self["model_path"]
        if self["served_model_name"] is None:
            self["served_model_name"] = self["model_path"]
        try:
            self.model = models.read(self["model_path"])
        except models.NoModel as error:
            refuse(str(error), "OSError", "no-model")
        self.context = self._context(self.model, self["context_length"])
        self._gpu()
        self._hybrid_before()
        self._speculation()
        self["device"] = self["device"] or "cuda"
        self["sampling_backend"] = self["sampling_backend"] or "flashinfer"
        self["grammar_backend"] = self["grammar_backend"] or "xgrammar"
        if self["random_seed"] is None:
            self["random_seed"] = random.randint(0, 1 << 30)
        if not self["max_prefill_tokens"]:
            self["max_prefill_tokens"] = 16384
        self._check()

    def __getitem__(self, name):
        return self.fields[name] if name in self.fields else self.beside.get(name)

    def __setitem__(self, name, value):
        self.fields[name] = value

    @property
    def tp(self):
        return self["tp_size"]

    @property
    def draft_tokens(self):
        return self["speculative_num_draft_tokens"] if self["speculative_algorithm"] else None

    @property
    def strategy(self):
        if not self.model.hybrid:
            return None
        return self["mamba_scheduler_strategy" if self.release == "0.5.11" else "mamba_radix_cache_strategy"]

    @property
    def graphs(self):
        """Batch sizes of decode CUDA graphs; empty where they are off."""
        return [] if self["disable_cuda_graph"] or self.decode_backend == "disabled" else self.graph_sizes

    def _context(self, model, asked, draft=False):
        derived = model.context
        if asked is None or asked <= derived:
            return asked or derived
        text = (
            "Warning: %s context_length (%d) is greater than the derived context_length (%d). This may lead to incorrect "
            "model outputs or CUDA errors. Note that the derived context_length may differ from max_position_embeddings in "
            "the model's config." % ("Target model's" if draft else "User-specified", asked, derived)
        )
        if os.environ.get(LONGER, "").lower() in ("1", "true"):
            log.line(text)
            return asked
        if draft:
            log.line("%s Overriding the draft model's context_length to %d." % (text, asked))
            return asked
        return refuse("%s To allow overriding this maximum, set the env var %s=1" % (text, LONGER), where="context")

    def _gpu(self):
        mib = self.profile.gpu["smi_mib"]
        small = mib < 60 * 1024
        if self["chunked_prefill_size"] is None:
            self["chunked_prefill_size"] = 2048 if mib < 35 * 1024 else 4096 if small else 8192
            if mib >= 160 * 1024:
                self["chunked_prefill_size"] = 16384
        self.decode_backend = self.prefill_backend = None
        if self.release == "0.5.11":
            top = self["cuda_graph_max_bs"]
            sizes = self["cuda_graph_bs"]
            self.prefill_backend = "disabled" if self["disable_piecewise_cuda_graph"] else "piecewise"
        else:
            top, sizes = self["cuda_graph_max_bs_decode"], self["cuda_graph_bs_decode"]
            self.decode_backend = self["cuda_graph_backend_decode"] or "full"
            off = self["disable_prefill_cuda_graph"] or self["disable_cuda_graph"]
            self.prefill_backend = "disabled" if off else self["cuda_graph_backend_prefill"] or "breakable"
        if sizes:
            top = max(sizes)
        given = top is not None
        if not given:
            top = 8 if mib < 20 * 1024 else 32 if small else 256 if self.tp < 4 else 512
            if self.release == "0.5.23" and self["max_running_requests"]:
                top = min(top, self["max_running_requests"])
        self.graph_max = top
        self.graph_sizes = sorted(sizes) if sizes else graph_sizes(top, self["speculative_algorithm"])
        self.prefill_sizes = prefill_sizes(self["chunked_prefill_size"], self["max_total_tokens"])
        if self.model.mla and self.release != "0.5.16":
            self.prefill_sizes = [size for size in self.prefill_sizes if size <= 2048]
        if self["mem_fraction_static"] is None:
            self["mem_fraction_static"] = memory.default_fraction(
                mib,
                self.model,
                regime=self.regime,
                chunked_prefill=self["chunked_prefill_size"],
                tp=self.tp,
                graph_max=0 if self["disable_cuda_graph"] else top,
                prefill_graphs=0 if self.prefill_backend == "disabled" else len(self.prefill_sizes),
                algorithm=self["speculative_algorithm"],
            )

    def _hybrid_before(self):
        """The recurrent-state checks; before speculation is resolved, as in the releases."""
        field = "mamba_scheduler_strategy" if self.release == "0.5.11" else "mamba_radix_cache_strategy"
        if self.release == "0.5.11" and self[field] == "auto":
            self[field] = "no_buffer"
        if not self.model.hybrid:
            if self.release == "0.5.23" and self[field] in ("extra_buffer", "extra_buffer_lazy"):
                refuse(
                    "--mamba-radix-cache-strategy %s needs mamba state, got %s."
                    % (self[field], self.model.architecture)
                )
            return
        if self.release == "0.5.11":
            self._hybrid_old(field)
            return
        if self["disable_radix_cache"]:
            return
        self["uses_mamba_radix_cache"] = True
        if self[field] == "auto":
            paging = (self["page_size"] or 1) > 1
            if not self["disable_overlap_schedule"] or paging:
                self[field] = "extra_buffer"
            else:
                self[field], self["disable_overlap_schedule"] = "no_buffer", True
        if self[field] == "no_buffer" and not self["disable_overlap_schedule"]:
            refuse(
                "no_buffer do not support overlap schedule. Try to set disable_overlap_schedule=True.", "AssertionError"
            )

    def _hybrid_old(self, field):
        if self[field] == "extra_buffer":
            if self["disable_radix_cache"]:
                refuse(
                    "mamba extra_buffer is not compatible with --disable-radix-cache Overlap scheduling is already "
                    "supported with no_buffer + disable_radix_cache. Please use --mamba-scheduler-strategy no_buffer "
                    "instead."
                )
            return
        if self["disable_radix_cache"]:
            return
        if self["speculative_algorithm"] is None:
            log.line(
                "Disabling overlap schedule since mamba no_buffer is not compatible with overlap schedule, try to use "
                "--disable-radix-cache if overlap schedule is necessary"
            )
            self["disable_overlap_schedule"] = True
            return
        refuse(
            "Speculative decoding for %s is not compatible with radix cache when using --mamba-scheduler-strategy "
            "no_buffer.To use radix cache with speculative decoding, please use --mamba-scheduler-strategy extra_buffer "
            "and set SGLANG_ENABLE_SPEC_V2=1." % self.model.architecture
        )

    def _speculation(self):
        algorithm = self["speculative_algorithm"]
        if self["speculative_draft_model_path"] and self["speculative_draft_model_revision"] is None:
            self["speculative_draft_model_revision"] = "main"
        if algorithm == "NEXTN":
            algorithm = self["speculative_algorithm"] = "EAGLE"
        if algorithm is None:
            return
        known = ["EAGLE", "EAGLE3", "STANDALONE", "NGRAM", "DFLASH"]
        if self.profile.fork:
            known.append("DDTREE")
        if algorithm not in known:
            refuse("Unknown speculative algorithm name: %s" % algorithm, where="algorithm")
        if algorithm in ("DFLASH", "DDTREE"):
            self._dflash(algorithm)
        elif algorithm == "NGRAM":
            self._ngram()
        else:
            self._eagle()
        path = self["speculative_draft_model_path"]
        if path and algorithm != "NGRAM":
            try:
                self.draft = models.read(path)
            except models.NoModel as error:
                refuse(str(error), "OSError", "no-model")

    def _reset_requests(self):
        if self["max_running_requests"] is None:
            self["max_running_requests"] = 48
            log.line(RESET)

    def _dflash(self, algorithm):
        if self["pp_size"] != 1:
            refuse("Currently %s speculative decoding only supports pp_size == 1." % algorithm, where="dflash")
        if self["speculative_draft_model_path"] is None:
            refuse(
                "%s speculative decoding requires setting --speculative-draft-model-path." % algorithm, where="dflash"
            )
        for field in ("speculative_num_steps", "speculative_eagle_topk"):
            if self[field] not in (None, 1):
                log.line("%s only supports %s == 1; overriding %s=%s to 1." % (algorithm, field, field, self[field]))
            self[field] = 1
        block, drafts = self["speculative_dflash_block_size"], self["speculative_num_draft_tokens"]
        if algorithm == "DDTREE":
            # One node more than the budget: the root.
            self["speculative_num_draft_tokens"] = (self.budget or 15) + 1
        elif block is not None:
            if block <= 0:
                refuse(
                    "DFLASH requires --speculative-dflash-block-size to be positive, got %d." % block, where="dflash"
                )
            if drafts is not None and drafts != block:
                refuse(
                    "Both --speculative-num-draft-tokens and --speculative-dflash-block-size are set but they differ. For "
                    "DFLASH they must match. speculative_num_draft_tokens=%d, speculative_dflash_block_size=%d."
                    % (drafts, block),
                    where="block-size",
                )
            self["speculative_num_draft_tokens"] = block
        elif drafts is None:
            self["speculative_num_draft_tokens"] = self._block_size()
        self._reset_requests()
        if self.release == "0.5.11":
            self["disable_overlap_schedule"] = True
            log.line(
                "Overlap scheduler is disabled when using %s speculative decoding (spec v2 is not supported yet)."
                % algorithm
            )

    def _block_size(self):
        try:
            inferred = models.read(self["speculative_draft_model_path"]).config.get("block_size")
        except models.NoModel as error:
            log.line(
                "Failed to infer DFLASH block_size from draft model config; defaulting speculative_num_draft_tokens to "
                "16. Error: %s" % error
            )
            inferred = None
        if inferred is None:
            log.line("speculative_num_draft_tokens is not set; defaulting to 16 for DFLASH.")
        return inferred or 16

    def _ngram(self):
        self._reset_requests()
        old = self.release == "0.5.11"
        if old:
            self["disable_overlap_schedule"] = True
        self["speculative_eagle_topk"] = self["speculative_ngram_max_bfs_breadth"]
        if self["speculative_num_draft_tokens"] is None:
            self["speculative_num_draft_tokens"] = 12
            log.line(
                "speculative_num_draft_tokens is set to 12 by default for ngram speculative decoding. You can override "
                "this by explicitly setting --speculative-num-draft-tokens."
            )
        what = "overlap scheduler and mixed chunked prefill" if old else "mixed chunked prefill"
        log.line("The %s are disabled because of using ngram speculative decoding." % what)
        self._tree_paging("(%d)" % self["speculative_eagle_topk"], "(%s)" % self["page_size"], ("flashinfer",), "ngram")

    def _tree_paging(self, topk, page, backends, where):
        if (
            (self["speculative_eagle_topk"] or 1) > 1
            and (self["page_size"] or 1) > 1
            and self["attention_backend"] not in backends
        ):
            refuse(
                "speculative_eagle_topk%s > 1 with page_size%s > 1 is unstable and produces incorrect results for paged "
                "attention backends. This combination is only supported for the 'flashinfer' backend." % (topk, page),
                where=where,
            )

    def _eagle(self):
        self._reset_requests()
        topk, drafts = self["speculative_eagle_topk"], self["speculative_num_draft_tokens"]
        if self.release == "0.5.11":
            reason = None
            if not self["disable_overlap_schedule"]:
                if topk is not None and topk > 1:
                    reason = "spec v2 currently only supports topk = 1"
                elif os.environ.get("SGLANG_ENABLE_SPEC_V2", "").lower() not in ("1", "true"):
                    reason = "SGLANG_ENABLE_SPEC_V2=False"
                self["disable_overlap_schedule"] = reason is not None
            if self["disable_overlap_schedule"]:
                log.line(
                    "Spec v1 is used for eagle/eagle3/standalone speculative decoding because %s."
                    % (reason or "overlap schedule is disabled")
                )
            else:
                log.line("Spec v2 is enabled by default for eagle/eagle3/standalone speculative decoding.")
        if self["speculative_num_steps"] is None:
            if topk is not None or drafts is not None:
                refuse("", "AssertionError", "eagle")  # the releases assert without a text here
            steps = (5, 4, 8) if self.model.architecture == "LlamaForCausalLM" else (3, 1, 4)
            self["speculative_num_steps"], topk, drafts = steps
            self["speculative_eagle_topk"], self["speculative_num_draft_tokens"] = topk, drafts
        if topk is None or drafts is None:
            # None > 1 and None != 4: Python's own words, as the releases let it happen.
            refuse("'>' not supported between instances of 'NoneType' and 'int'", "TypeError", "eagle")
        backends = [
            self[name] for name in ("attention_backend", "decode_attention_backend", "prefill_attention_backend")
        ]
        if "trtllm_mha" in backends and topk > 1:
            refuse("trtllm_mha backend only supports topk = 1 for speculative decoding.", where="eagle")
        if topk == 1 and drafts != self["speculative_num_steps"] + 1:
            log.line(
                "speculative_num_draft_tokens is adjusted to speculative_num_steps + 1 when speculative_eagle_topk == 1"
            )
            self["speculative_num_draft_tokens"] = self["speculative_num_steps"] + 1
        self._tree_paging("", "", ("flashinfer", "fa3"), "eagle")

    def _check(self):
        if ":" in str(self["served_model_name"]):
            refuse(
                "served_model_name cannot contain a colon (':') character. The colon is reserved for the 'model:adapter' "
                "syntax used in LoRA adapter specification. Invalid value: '%s'" % self["served_model_name"],
                "AssertionError",
            )
        page, chunk = self["page_size"] or 1, self["chunked_prefill_size"]
        self["page_size"] = page
        if chunk > 0 and chunk % page:
            refuse("chunked_prefill_size must be divisible by page_size", "AssertionError")
        if self.draft is not None and self["speculative_algorithm"] in ("EAGLE", "EAGLE3", "STANDALONE"):
            self._context(self.draft, self.context, draft=True)
        if self["attention_backend"] is None:
            self["attention_backend"] = self._backend()

    def _backend(self):
        major = self.profile.gpu["capability"][0]
        if major == 9:
            return "fa3"
        if self.model.mla:
            return "triton" if major == 12 else "flashinfer"
        return "trtllm_mha" if major == 10 else "flashinfer"

    def division(self, pre, free):
        """The question memory.divide answers, for this command line."""
        ssm = self["mamba_ssm_dtype"] or self.model.text.get("mamba_ssm_dtype") or "float32"
        return memory.Request(
            self.model,
            self.draft,
            regime=self.regime,
            pre=pre,
            free=free,
            fraction=self["mem_fraction_static"],
            tp=self.tp,
            requests=self["max_running_requests"],
            draft_tokens=self.draft_tokens,
            algorithm=self["speculative_algorithm"],
            radix=not self["disable_radix_cache"],
            strategy=self.strategy if self.strategy in memory.RATIOS else "no_buffer",
            overlap=not self["disable_overlap_schedule"],
            mamba_ratio=self["mamba_full_memory_ratio"],
            mamba_slots=self["max_mamba_cache_size"],
            max_tokens=self["max_total_tokens"],
            context=self.context,
            page=self["page_size"],
            kv_element=1 if str(self["kv_cache_dtype"]).startswith("fp8") else 2,
            ssm_bytes=4 if ssm == "float32" else 2,
        )


def graph_sizes(top, algorithm):
    if algorithm is None:
        sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, top + 1, 32)]
    else:
        sizes = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, top + 1, 16)]
    sizes = [size for size in sizes if size <= top]
    if top not in sizes:
        sizes.append(top)
    return sizes


def prefill_sizes(chunk, most):
    sizes = [*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64)]
    sizes += [*range(1280, 4097, 256), *range(4608, 8193, 512)]
    top = chunk if most is None else min(chunk, most)
    return [size for size in sizes if size <= top]
