"""llama.cpp's HTTP server out of the Python package xllamacpp, with llama-server's own flags.

For machines that have no llama-server binary: `python -m gpuctl.agent.llama_server -m model.gguf --port 8080`.
It is llama.cpp's own server code; this file only reads the command line and waits.
"""

import argparse
import signal
import sys

SPECULATION = {  # llama-server's --spec-type -> the enumeration of xllamacpp
    "none": "NONE",
    "draft-simple": "DRAFT_SIMPLE",
    "ngram-simple": "NGRAM_SIMPLE",
    "ngram-map-k": "NGRAM_MAP_K",
    "ngram-map-k4v": "NGRAM_MAP_K4V",
    "ngram-mod": "NGRAM_MOD",
    "ngram-cache": "NGRAM_CACHE",
}


def parser():
    p = argparse.ArgumentParser("llama_server", allow_abbrev=False, description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", required=True)
    p.add_argument("-a", "--alias")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=8080)
    p.add_argument("-c", "--ctx-size", type=int, default=0, help="for all slots together; 0: as the model says")
    p.add_argument("-np", "--parallel", type=int, default=1)
    p.add_argument("-t", "--threads", type=int)
    p.add_argument("-ngl", "--gpu-layers", type=int, default=0)
    p.add_argument("-b", "--batch-size", type=int)
    p.add_argument("-ub", "--ubatch-size", type=int)
    p.add_argument("--metrics", action="store_true")
    p.add_argument("--no-warmup", action="store_true")
    p.add_argument("--api-key-file")
    p.add_argument("-md", "--model-draft", "--spec-draft-model")
    p.add_argument("--spec-type", choices=sorted(SPECULATION), default="none")
    p.add_argument("--spec-draft-n-max", type=int)
    for kind in ("simple", "map-k", "map-k4v"):
        for size in ("size-n", "size-m", "min-hits"):
            p.add_argument("--spec-ngram-%s-%s" % (kind, size), type=int)
    return p


def main():
    words = [word.replace("_", "-") if word.startswith("--") else word for word in sys.argv[1:]]  # as llama.cpp
    args = parser().parse_args(words)
    try:
        with open(args.model, "rb") as file:
            if file.read(4) != b"GGUF":
                sys.exit("llama_server: %s is not a GGUF model" % args.model)
    except OSError as error:
        sys.exit("llama_server: %s: %s" % (args.model, error.strerror))
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = args.model
    if args.alias:
        params.model_alias = {args.alias}
    params.hostnames = [args.host]
    params.port = args.port
    params.n_ctx = args.ctx_size
    params.n_parallel = args.parallel
    params.n_gpu_layers = args.gpu_layers
    params.endpoint_metrics = args.metrics
    params.endpoint_props = True
    params.warmup = not args.no_warmup
    params.fit_params = False  # llama.cpp would shrink the context by itself, and nobody would know
    if args.threads:
        params.cpuparams.n_threads = args.threads
        params.cpuparams_batch.n_threads = args.threads
    if args.batch_size:
        params.n_batch = args.batch_size
    if args.ubatch_size:
        params.n_ubatch = args.ubatch_size
    if args.api_key_file:
        with open(args.api_key_file) as file:
            params.api_keys = [line.strip() for line in file if line.strip()]
    kind = args.spec_type
    if args.model_draft:
        params.speculative.draft.mparams.path = args.model_draft
        kind = kind if kind != "none" else "draft-simple"
    if args.spec_draft_n_max:
        params.speculative.draft.n_max = args.spec_draft_n_max
    for kind_of, field in (("simple", "ngram_simple"), ("map_k", "ngram_map_k"), ("map_k4v", "ngram_map_k4v")):
        for size in ("size_n", "size_m", "min_hits"):
            value = getattr(args, "spec_ngram_%s_%s" % (kind_of, size))
            if value is not None:
                setattr(getattr(params.speculative, field), size, value)
    name = "COMMON_SPECULATIVE_TYPE_" + SPECULATION[kind]
    params.speculative.types = [getattr(xllamacpp.common_speculative_type, name)]
    server = xllamacpp.Server(params)
    print("llama_server: listening on %s" % server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()
    import os

    os._exit(0)  # the server's threads would be joined for seconds
