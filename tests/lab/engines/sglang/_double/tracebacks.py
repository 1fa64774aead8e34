"""Tracebacks as Python prints them: the frames of each release, the exception last.

Tools read the last line and the envelope around it; the frames make a log look and measure like one.
"""

from sglang._double.release import PACKAGE, RELEASE

SITE = str(PACKAGE.parent)
RUNPY = [("<frozen runpy>", 198, "_run_module_as_main", None), ("<frozen runpy>", 88, "_run_code", None)]

# (file below the package, line, function, source) by release.
_ARGUMENTS = {
    "0.5.11": [
        ("launch_server.py", 66, "<module>", "server_args = prepare_server_args(sys.argv[1:])"),
        ("srt/server_args.py", 7299, "prepare_server_args", "return ServerArgs.from_cli_args(raw_args)"),
        ("srt/server_args.py", 6685, "from_cli_args", "return cls(**{attr: getattr(args, attr) for attr in attrs})"),
        ("<string>", 362, "__init__", None),
    ],
    "0.5.16": [
        ("launch_server.py", 68, "<module>", "server_args = prepare_server_args(sys.argv[1:])"),
        ("srt/server_args.py", 8224, "prepare_server_args", "return ServerArgs.from_cli_args(raw_args)"),
        ("srt/server_args.py", 7348, "from_cli_args", "return cls(**{attr: getattr(args, attr) for attr in attrs})"),
        ("<string>", 448, "__init__", None),
    ],
    "0.5.23": [
        ("launch_server.py", 84, "<module>", "run_server(server_args)"),
        ("launch_server.py", 29, "run_server", "server_args.resolve_once()"),
        ("srt/server_args.py", 244, "resolve_once", None),
    ],
}
_CHECKS = {
    "0.5.11": {
        "dflash": [("srt/server_args.py", 882, "__post_init__", "self._handle_speculative_decoding()")],
        "context": [("srt/server_args.py", 842, "__post_init__", "self._handle_gpu_memory_settings(gpu_mem)")],
        "arguments": [("srt/server_args.py", 845, "__post_init__", "self._handle_model_specific_adjustments()")],
    },
    "0.5.16": {
        "dflash": [
            ("srt/server_args.py", 3031, "__post_init__", "handle_speculative_decoding(self)"),
            (
                "srt/arg_groups/speculative_hook.py",
                144,
                "handle_speculative_decoding",
                "algo.handle_server_args(server_args)",
            ),
        ],
        "context": [
            ("srt/server_args.py", 2966, "__post_init__", "self._handle_gpu_memory_settings(gpu_mem)"),
            (
                "srt/server_args.py",
                7412,
                "get_model_config",
                "self.model_config = ModelConfig.from_server_args(self)",
            ),
        ],
        "arguments": [("srt/server_args.py", 2949, "__post_init__", None)],
    },
    "0.5.23": {"dflash": [], "context": [], "arguments": []},
}
_START = {
    "0.5.11": [
        ("srt/managers/scheduler.py", 3918, "run_scheduler_process", "scheduler = Scheduler("),
        ("srt/managers/scheduler.py", 432, "__init__", "self.init_model_worker()"),
        ("srt/managers/scheduler.py", 693, "init_model_worker", "self.init_tp_model_worker()"),
        (
            "srt/managers/scheduler.py",
            648,
            "init_tp_model_worker",
            "self.tp_worker = TpModelWorker(**worker_kwargs)",
        ),
    ],
    "0.5.16": [
        ("srt/managers/scheduler.py", 4623, "run_scheduler_process", "scheduler = Scheduler("),
        ("srt/managers/scheduler.py", 431, "__init__", "self.init_model_worker()"),
    ],
    "0.5.23": [
        ("srt/managers/scheduler.py", 6362, "run_scheduler_process", "scheduler = Scheduler(server_args, port_args)"),
        ("srt/managers/scheduler.py", 568, "__init__", "self.init_model_worker()"),
    ],
}
_LOAD = {
    "0.5.11": [
        ("srt/managers/tp_worker.py", 260, "__init__", "self._init_model_runner()"),
        ("srt/managers/tp_worker.py", 345, "_init_model_runner", "self._model_runner = ModelRunner("),
        ("srt/model_executor/model_runner.py", 508, "__init__", "self.initialize(pre_model_load_memory)"),
    ],
    "0.5.16": [
        ("srt/managers/scheduler.py", 847, "init_model_worker", "self.init_tp_model_worker()"),
        (
            "srt/managers/scheduler.py",
            771,
            "init_tp_model_worker",
            "self.tp_worker = TpModelWorker(**worker_kwargs)",
        ),
        ("srt/managers/tp_worker.py", 308, "__init__", "self._init_model_runner()"),
        ("srt/managers/tp_worker.py", 424, "_init_model_runner", "self._model_runner = ModelRunner("),
        ("srt/model_executor/model_runner.py", 357, "__init__", "self.initialize()"),
        ("srt/model_executor/model_runner.py", 567, "initialize", "self.load_model()"),
    ],
    "0.5.23": [
        ("srt/managers/scheduler.py", 1130, "init_model_worker", "self.init_tp_model_worker()"),
        (
            "srt/managers/scheduler.py",
            1033,
            "init_tp_model_worker",
            "self.tp_worker = TpModelWorker(**worker_kwargs)",
        ),
        ("srt/managers/tp_worker.py", 319, "__init__", "self._init_model_runner()"),
        ("srt/managers/tp_worker.py", 487, "_init_model_runner", "self._model_runner = ModelRunner("),
        ("srt/model_executor/model_runner.py", 499, "__init__", "self.initialize()"),
        ("srt/model_executor/model_runner.py", 715, "initialize", "self.load_model()"),
    ],
}
_POOLS = {
    "0.5.11": [
        *_LOAD["0.5.11"],
        ("srt/model_executor/model_runner.py", 733, "initialize", "self.init_memory_pool(pre_model_load_memory)"),
        (
            "srt/model_executor/model_runner_kv_cache_mixin.py",
            762,
            "init_memory_pool",
            "self.memory_pool_config = self._resolve_memory_pool_config(",
        ),
    ],
    "0.5.16": [
        ("srt/managers/scheduler.py", 851, "init_model_worker", "self.init_memory_pools()"),
        ("srt/managers/scheduler.py", 824, "init_memory_pools", "self.init_target_memory_pool()"),
        ("srt/managers/scheduler.py", 820, "init_target_memory_pool", "self.tp_worker.alloc_memory_pool()"),
        (
            "srt/managers/tp_worker.py",
            374,
            "alloc_memory_pool",
            "self.model_runner.alloc_memory_pool(memory_pool_config)",
        ),
        (
            "srt/model_executor/model_runner.py",
            734,
            "alloc_memory_pool",
            "result = self.kv_cache_configurator.configure(",
        ),
        (
            "srt/mem_cache/kv_cache_configurator.py",
            227,
            "configure",
            "config = self._resolve_memory_pool_config(pre_model_load_memory)",
        ),
    ],
    "0.5.23": [
        ("srt/managers/scheduler.py", 1137, "init_model_worker", "self.init_memory_pools()"),
        ("srt/managers/scheduler.py", 1100, "init_memory_pools", "self.init_target_memory_pool()"),
        ("srt/managers/scheduler.py", 1090, "init_target_memory_pool", "self.tp_worker.alloc_memory_pool("),
        ("srt/managers/tp_worker.py", 409, "alloc_memory_pool", "self.model_runner.alloc_memory_pool("),
        (
            "srt/model_executor/model_runner.py",
            982,
            "alloc_memory_pool",
            "result = self.kv_cache_configurator.configure(",
        ),
        (
            "srt/mem_cache/kv_cache_configurator.py",
            476,
            "configure",
            "config = self._resolve_memory_pool_config(pre_model_load_memory)",
        ),
    ],
}
_ASSERT = {
    "0.5.11": [
        (
            "srt/managers/tp_worker.py",
            297,
            "__init__",
            'assert self.max_running_requests > 0, "max_running_request is zero"',
        )
    ],
    "0.5.16": [
        *_POOLS["0.5.16"][:3],
        (
            "srt/managers/tp_worker.py",
            381,
            "alloc_memory_pool",
            'assert self.model_runner.max_running_requests > 0, "max_running_request is zero"',
        ),
    ],
    "0.5.23": [
        *_POOLS["0.5.23"][:3],
        (
            "srt/managers/tp_worker.py",
            420,
            "alloc_memory_pool",
            'assert self.model_runner.max_running_requests > 0, "max_running_request is zero"',
        ),
    ],
}
_DEVICE = {
    "0.5.11": [
        *_LOAD["0.5.11"][:2],
        (
            "srt/model_executor/model_runner.py",
            481,
            "__init__",
            "pre_model_load_memory = self.init_torch_distributed()",
        ),
    ],
    "0.5.16": [
        *_LOAD["0.5.16"][:4],
        ("srt/model_executor/model_runner.py", 323, "__init__", "self.init_torch_distributed()"),
    ],
    "0.5.23": [
        *_LOAD["0.5.23"][:4],
        ("srt/model_executor/model_runner.py", 466, "__init__", "self.init_torch_distributed()"),
    ],
}
_SERVE = {
    "0.5.11": [
        ("srt/managers/scheduler.py", 3934, "run_scheduler_process", "scheduler.run_event_loop()"),
        ("srt/managers/scheduler.py", 1565, "event_loop_normal", "batch_result = self.run_batch(batch)"),
        ("srt/managers/scheduler.py", 2981, "run_batch", "batch_result = self.model_worker.forward_batch_generation("),
    ],
    "0.5.16": [
        ("srt/managers/scheduler.py", 4639, "run_scheduler_process", "scheduler.run_event_loop()"),
        ("srt/managers/scheduler.py", 1500, "run_event_loop", "dispatch_event_loop(self)"),
        ("srt/managers/scheduler.py", 4490, "dispatch_event_loop", "scheduler.event_loop_overlap()"),
        ("srt/managers/scheduler.py", 1601, "event_loop_overlap", "batch_result = self.run_batch(batch)"),
        ("srt/managers/scheduler.py", 3351, "run_batch", "batch_result = self.model_worker.forward_batch_generation("),
        ("srt/managers/tp_worker.py", 564, "forward_batch_generation", "out = self.model_runner.forward("),
    ],
    "0.5.23": [
        ("srt/managers/scheduler.py", 6368, "run_scheduler_process", "scheduler.run_event_loop()"),
        ("srt/managers/scheduler.py", 2109, "event_loop_overlap", "batch_result = self.run_batch(batch)"),
        ("srt/managers/scheduler.py", 4870, "run_batch", "batch_result = self.model_worker.forward_batch_generation("),
    ],
}


def _frames(rows):
    lines = []
    for file, line, function, source in rows:
        path = file if file.startswith("<") else "%s/sglang/%s" % (SITE, file)
        lines.append('  File "%s", line %d, in %s' % (path, line, function))
        if source:
            lines.append("    " + source)
    return lines


def _print(rows, error, text):
    last = "%s: %s" % (error, text) if text else error
    return "\n".join(["Traceback (most recent call last):", *_frames(rows), last, ""])


def argument(error, text, where):
    """A refusal of the command line, as it stands on the terminal."""
    checks = _CHECKS[RELEASE]
    group = "context" if where == "context" else "arguments" if where in ("arguments", "no-model") else "dflash"
    return _print([*RUNPY, *_ARGUMENTS[RELEASE], *checks[group]], error, text)


def start(error, text, where):
    """A failure in a scheduler while it starts. `where`: device | load | pools | assert."""
    chain = {"device": _DEVICE, "load": _LOAD, "pools": _POOLS, "assert": _ASSERT}[where][RELEASE]
    return _print([*_START[RELEASE], *chain], error, text)


def serve(error, text):
    """A failure in a scheduler while it serves."""
    return _print(_SERVE[RELEASE], error, text)
