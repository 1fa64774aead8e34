"""The main process: arguments, ranks, then the HTTP server; and every way in which it ends."""

import json
import os
import select
import signal
import socket
import sys
import time
import warnings

from sglang._double import gpu, log, process, profile, tracebacks
from sglang._double.arguments import parser
from sglang._double.faults import Faults, method
from sglang._double.release import PACKAGE, RELEASE
from sglang._double.settings import Refused, Settings

_peers = []  # connections to the other nodes, open as long as we live


class Child:
    def __init__(self, pid, name, channel=None):
        self.pid, self.name, self.channel = pid, name, channel
        self.exit = None

    def poll(self):
        """The exit code as multiprocessing has it (negative signal), None while it runs."""
        if self.exit is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        return self.exit


def main(arguments):
    """Runs a server with these arguments. Does not return."""
    try:
        known = profile.load()
    except profile.BadProfile as error:
        sys.exit(str(error))
    warnings.warn(
        "'python -m sglang.launch_server' is still supported, but 'sglang serve' is the recommended entrypoint.\n"
        "  Example: sglang serve --model-path <model> [options]",
        UserWarning,
        stacklevel=2,
    )
    if not {"-h", "--help"} & set(arguments):
        time.sleep(known.delay("imports"))
    namespace = parser(fork=known.fork).parse_args(arguments)
    _cuda(namespace, known)
    try:
        settings = Settings(namespace, known)
    except Refused as error:
        log.raw(tracebacks.argument(error.error, str(error), error.where))
        sys.exit(1)
    faults = Faults(settings)
    if faults.find("crash"):
        sys.exit(1)
    log.line("server_args=ServerArgs(%s)" % ", ".join("%s=%r" % pair for pair in settings.fields.items()))
    log.line("Using default HuggingFace chat template with detected content format: string")
    _serve(settings, faults)


def _cuda(namespace, known):
    """Without a CUDA device the engine refuses before anything else; torch has said why just before."""
    if known.cuda != "auto":
        return
    result, count = gpu.initialize()
    if result == gpu.MISSING or (result == 0 and count):
        return
    said = gpu.complaint(result)
    site = PACKAGE.parent
    if said:
        log.raw(
            "%s/torch/cuda/__init__.py:187: UserWarning: %s (Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:119.)"
            "\n  return torch._C._cuda_getDeviceCount() > 0\n" % (site, said)
        )
    log.raw(tracebacks.argument("RuntimeError", gpu.NO_ACCELERATOR, "arguments"))
    sys.exit(1)


def _serve(settings, faults):
    signal.signal(signal.SIGQUIT, _quit_while_starting)
    sys.stdout.flush()
    here = settings.tp // settings["nnodes"]
    _peers.extend(_meet_nodes(settings))
    first = settings["node_rank"] * here
    schedulers = [_fork_rank(settings, faults, index) for index in range(first, first + here)]
    detokenizer = _fork_idle("sglang::detokenizer", "detokenizer")
    children = [*schedulers, detokenizer]
    facts = _wait_until_ready(schedulers)
    if settings["node_rank"]:
        log.line(
            "Dummy health check server started in background thread at %s:%s" % (settings["host"], settings["port"])
        )
        while all(child.poll() is None for child in children):
            time.sleep(0.2)
        process.kill_tree()
    from sglang._double.http import Server

    Server(settings, faults, children, facts).run()


def _meet_nodes(settings):
    """Waits until every node is at dist_init_addr, as torch.distributed does. Returns the connections, to be kept."""
    nodes = settings["nnodes"]
    if nodes == 1:
        return []
    host, _, port = settings["dist_init_addr"].rpartition(":")
    if settings["node_rank"] == 0:
        with socket.create_server((host, int(port))) as server:
            return [server.accept()[0] for _ in range(nodes - 1)]
    for _ in range(600):
        try:
            return [socket.create_connection((host, int(port)), 5)]
        except OSError:
            time.sleep(0.1)
    log.raw(
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (%s, %s).\n"
        % (host, port)
    )
    sys.exit(1)


def _quit_while_starting(signum, frame):
    log.line("Received sigquit from a child process. It usually means the child failed.")
    process.kill_tree()


def _fork_rank(settings, faults, index):
    own, theirs = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return Child(pid, "scheduler_%d" % index, own)
    own.close()
    _become(parent, "sglang::scheduler" + ("_TP%d" % index if settings.tp > 1 else ""))
    if settings.tp > 1:
        log.rank("TP%d" % index)
    _run_rank(settings, faults, index, theirs, parent)


def _become(parent, title):
    for number in (signal.SIGQUIT, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.die_with_parent(parent)
    process.name(title)


def _run_rank(settings, faults, index, channel, parent):
    from sglang._double import scheduler, startup

    def meet(value):
        """The least of all ranks' values, once every rank is here: a collective."""
        channel.sendall(json.dumps({"here": value}).encode() + b"\n")
        return json.loads(channel.recv(64))

    rank = startup.Rank(settings, faults, index, meet)
    try:
        rank.start()
    except startup.Died as error:
        startup.report(rank, error)
        os.kill(parent, signal.SIGQUIT)
        os._exit(1)
    division = rank.division
    facts = {
        "tokens": division.tokens,
        "requests": division.requests,
        "slots": division.slots,
        "weights_gib": rank.weights_gib,
        "kv_gib": rank.kv_gib,
        "graph_gib": rank.graph_gib,
        "load_s": rank.load_seconds,
        "broken": rank.broken_weights,
        "free_gib": rank.device.free,
    }
    channel.sendall(json.dumps({"ready": facts}).encode() + b"\n")
    if index == 0:
        scheduler.Loop(rank, channel, parent).run()
    while channel.recv(4096):
        pass
    os._exit(0)


def _fork_idle(title, name):
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return Child(pid, name)
    _become(parent, title)
    while True:
        time.sleep(3600)


def _wait_until_ready(schedulers):
    """The facts of rank 0 once every rank is up. A rank that vanishes ends the start."""
    waiting = {child.channel: child for child in schedulers}
    buffers = dict.fromkeys(waiting, b"")
    facts, here = None, []
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], 1.0)
        for channel in ready:
            data = channel.recv(65536)
            if not data:
                _rank_vanished(schedulers, waiting[channel])
            *lines, buffers[channel] = (buffers[channel] + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "here" in message:
                    here.append(message["here"])
                    if len(here) == len(schedulers):
                        for child in schedulers:
                            child.channel.sendall(json.dumps(min(here)).encode())
                        here.clear()
                    continue
                if waiting.pop(channel) is schedulers[0]:
                    facts = message["ready"]
    return facts


def _rank_vanished(schedulers, child):
    deadline = time.monotonic() + 10
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    number = schedulers.index(child)
    text = (
        "Rank %d scheduler died during initialization (exit code: %s). If exit code is -9 (SIGKILL), a common cause is the "
        "OS OOM killer. Run `dmesg -T | grep -i oom` to check." % (number, child.exit)
    )
    if child.exit == 1:
        time.sleep(5)  # its SIGQUIT is under way
    log.raw(tracebacks.argument("RuntimeError", text, "arguments"))
    process.kill_tree(include_parent=False)
    os._exit(1)


__all__ = ["RELEASE", "main", "method"]
