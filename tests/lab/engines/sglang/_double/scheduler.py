"""Rank 0's event loop: batches, steps, and their pace in real time. Other ranks hold their GPU and wait.

It speaks with the HTTP process over a socket, one JSON document a line:
in   {"new": id, "prompt": n, "cached": n, "limit": n, "kind": word, "health": bool} | {"abort": id} | {"flush": 1}
out  {"step": [[id, tokens, done], ...], "stats": {...}}
"""

import json
import os
import random
import select
import signal
import time
from collections import deque

from sglang._double import log, tracebacks
from sglang._double.faults import method

ILLEGAL = (
    "CUDA error: an illegal %s was encountered\nSearch for `cudaErrorIllegal%s' in "
    "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\nCUDA kernel errors "
    "might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\nFor debugging "
    "consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
# The largest activation of a chunk (the joined q, k, v of a linear layer) and what else lives beside it.
ACTIVATION_BYTES, ACTIVATION_OTHERS = 2 * 2, 4.0


class Request:
    __slots__ = (
        "cached",
        "context",
        "credit",
        "done",
        "health",
        "id",
        "kind",
        "left",
        "luck",
        "made",
        "prompt",
        "random",
    )

    def __init__(self, message):
        self.id, self.prompt, self.cached = message["new"], message["prompt"], message["cached"]
        self.left, self.kind, self.health = message["limit"], message["kind"], message.get("health", False)
        self.made, self.credit, self.luck = 0, 0.0, None
        self.random = random.Random(self.id)


class Loop:
    def __init__(self, rank, channel, parent):
        self.rank, self.settings, self.faults = rank, rank.settings, rank.faults
        self.channel, self.parent = channel, parent
        self.speed = rank.profile.speed(self.settings.model, self.settings.tp, method(self.settings))
        self.waiting, self.running = deque(), []
        self.inbox, self.outbox = b"", b""
        self.clock = time.monotonic()
        self.began = time.monotonic()
        self.steps = 0
        self.served = 0
        self.since = [time.monotonic(), 0]
        self.throughput = 0.0
        self.verified = [0, 0]  # steps of requests, tokens they brought: since the last line of the log
        self.totals = {"verify": 0, "accepted": 0, "prompt": 0, "generated": 0, "cached": 0, "requests": 0}
        self.noise = random.Random(self.settings["random_seed"] or 0)
        channel.setblocking(False)

    def run(self):
        while True:
            self._pump(None if not (self.waiting or self.running) else 0)
            self._timed_faults()
            if self.waiting and len(self.running) < self.rank.division.requests and self._room():
                self._prefill()
            elif self.running:
                self._decode()

    # -- the channel

    def _pump(self, timeout):
        """Reads what came; waits up to `timeout` seconds for the first of it (None: until something comes)."""
        if timeout is None and self._pending_timer():
            timeout = 0.2
        ready, _, _ = select.select([self.channel], [], [], timeout)
        if not ready:
            return
        try:
            data = self.channel.recv(1 << 20)
        except BlockingIOError:
            return
        if not data:
            os._exit(0)
        *lines, self.inbox = (self.inbox + data).split(b"\n")
        for line in lines:
            self._message(json.loads(line))

    def _message(self, message):
        if "new" in message:
            request = Request(message)
            if not request.health:
                self._arrival_faults(request)
            self.waiting.append(request)
            if len(self.waiting) == 1 and not self.running:
                self.clock = max(self.clock, time.monotonic())
        elif "abort" in message:
            gone = message["abort"]
            self.running = [request for request in self.running if request.id != gone]
            self.waiting = deque(request for request in self.waiting if request.id != gone)
        elif "flush" in message:
            self.totals["verify"] = self.totals["accepted"] = 0

    def _send(self, document):
        data = json.dumps(document).encode() + b"\n"
        self.channel.setblocking(True)
        self.channel.sendall(data)
        self.channel.setblocking(False)

    def _until(self, moment):
        """Waits for a moment; messages that come meanwhile are taken in."""
        while True:
            left = moment - time.monotonic()
            if left <= 0:
                return
            self._pump(left)

    # -- the work

    def _used(self):
        return sum(request.prompt + request.made for request in self.running)

    def _room(self):
        head = self.waiting[0]
        if not self.running:
            return True
        held = sum(request.prompt + request.made + request.left for request in self.running)
        return held + head.prompt + head.left <= self.rank.division.tokens

    def _prefill(self):
        batch, tokens, cached = [], 0, 0
        chunk = self.settings["chunked_prefill_size"]
        while self.waiting and len(self.running) + len(batch) < self.rank.division.requests:
            head = self.waiting[0]
            new = max(1, head.prompt - head.cached)
            if batch and (tokens + new > max(chunk, 0) or not self._room()):
                break
            batch.append(self.waiting.popleft())
            tokens, cached = tokens + new, cached + head.cached
        self._memory_faults(tokens)
        pending = sum(max(1, request.prompt - request.cached) for request in self.waiting)
        began = max(self.clock, time.monotonic() - 0.002)
        # Long prompts go through in chunks, one line each.
        left = tokens
        while left > 0:
            part = min(left, chunk) if chunk > 0 else left
            self.clock = began = began + part / self.speed.prefill
            self._until(self.clock)
            left -= part
            self._prefill_line(
                len(batch) if left <= 0 else 1, part, cached, pending + left, part / (part / self.speed.prefill)
            )
        emitted = []
        for request in batch:
            request.made, request.left = 1, request.left - 1
            emitted.append([request.id, 1, request.left <= 0])
            if not request.health:
                self.totals["prompt"] += request.prompt
                self.totals["cached"] += request.cached
                self.totals["requests"] += 1
                self.totals["generated"] += 1
                self.since[1] += 1
        self.running += [request for request in batch if request.left > 0]
        self._send({"step": emitted, "stats": self._stats()})

    def _decode(self):
        running = self.running
        duration = self.speed.step(len(running), self._used())
        noise = self.rank.profile.chunk_noise
        if noise:
            duration *= 1 + self.noise.gauss(0, noise)
        now = time.monotonic()
        if now - self.clock > 0.05:
            self.clock = now  # was idle, or could not keep up
        self.clock += duration
        self._until(self.clock)
        emitted, speculative = [], bool(self.settings.draft_tokens)
        for request in self.running:
            count = min(self._accepted(request), request.left) if speculative else 1
            request.made += count
            request.left -= count
            emitted.append([request.id, count, request.left <= 0])
            self.verified[0] += 1
            self.verified[1] += count
            if not request.health:
                self.totals["generated"] += count
                self.totals["verify"] += 1
                self.totals["accepted"] += count
            self.since[1] += count
        self.steps += 1
        if self.steps % (self.settings["decode_log_interval"] or 40) == 0:
            self._decode_line()
        self.running = [request for request in self.running if request.left > 0]
        self._send({"step": emitted, "stats": self._stats()})

    def _accepted(self, request):
        """Tokens of one verify step: varying, 1 to D, with exactly the profile's mean over two steps."""
        mean, most = self.speed.accepted(request.kind), self.settings.draft_tokens
        if request.luck is None:
            request.luck = request.random.uniform(-0.45, 0.45) * min(mean - 1, most - mean) if mean > 1 else 0.0
            wanted = mean + request.luck
        else:
            wanted, request.luck = mean - request.luck, None
        request.credit += wanted
        count = max(1, min(most, int(request.credit + 1e-9)))
        request.credit -= count
        return count

    # -- what is told

    def _usage(self, decode):
        division, used = self.rank.division, self._used()
        share = used / division.tokens
        if not self.settings.model.hybrid:
            return ("#token: %d, token usage: %.2f" % (used, share)) if decode else "token usage: %.2f" % share
        slots = len(self.running) * self._slots()
        state = slots / max(1, division.slots)
        if not decode:
            return "full token usage: %.2f, mamba usage: %.2f" % (share, state)
        return "#full token: %d, full token usage: %.2f, mamba num: %d, mamba usage: %.2f" % (used, share, slots, state)

    def _slots(self):
        return 1 if self.settings["disable_radix_cache"] else 4

    def _prefill_line(self, count, tokens, cached, pending, rate):
        graph = self.settings.prefill_backend != "disabled" and not self.settings.model.hybrid
        log.line(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, %s, #running-req: %d, #queue-req: %d, "
            "#pending-token: %d, cuda graph: %s, input throughput (token/s): %.2f"
            % (count, tokens, cached, self._usage(False), len(self.running), len(self.waiting), pending, graph, rate)
        )

    def _decode_line(self):
        now = time.monotonic()
        self.throughput = self.since[1] / max(1e-6, now - self.since[0])
        self.since = [now, 0]
        speculation = ""
        if self.settings.draft_tokens:
            steps, tokens = self.verified
            drafted = steps * (self.settings.draft_tokens - 1)
            speculation = "accept len: %.2f, accept rate: %.2f, " % (
                tokens / max(1, steps),
                (tokens - steps) / drafted if drafted else 0,
            )
        self.verified = [0, 0]
        log.line(
            "Decode batch, #running-req: %d, %s, %scuda graph: %s, gen throughput (token/s): %.2f, #queue-req: %d"
            % (
                len(self.running),
                self._usage(True),
                speculation,
                bool(self.settings.graphs) and len(self.running) <= max(self.settings.graphs),
                self.throughput,
                len(self.waiting),
            )
        )

    def _stats(self):
        return {
            "running": len(self.running),
            "queue": len(self.waiting),
            "used": self._used(),
            "slots": len(self.running) * self._slots(),
            "throughput": self.throughput,
            **self.totals,
        }

    # -- faults

    def _arrival_faults(self, request):
        self.served += 1
        for kind, name in (("illegal-instruction", "instruction"), ("illegal-access", "memory access")):
            fault = self.faults.find(kind, at="request", default="request")
            if fault and self.served >= int(fault.get("request", 1)):
                title = "Instruction" if name == "instruction" else "Address"
                self._die("torch.AcceleratorError", ILLEGAL % (name, title))
        fault = self.faults.find("oom", at="request", default="request")
        if fault and self.served >= int(fault.get("request", 1)):
            wanted = float(fault.get("gib", 0.15625))
            self.rank.device.exhaust(wanted)
            self._die("torch.OutOfMemoryError", self.rank.device.out_of_memory(wanted))
        fault = self.faults.find("scheduler-killed", default="request", at="request")
        if fault and "after_s" not in fault and self.served >= int(fault.get("request", 1)):
            os.kill(os.getpid(), signal.SIGKILL)
        fault = self.faults.find("hang", at="serving", default="nccl")
        if fault and self.served >= int(fault.get("request", 1)):
            while True:
                time.sleep(3600)

    def _pending_timer(self):
        fault = self.faults.find("scheduler-killed")
        return bool(fault and "after_s" in fault)

    def _timed_faults(self):
        fault = self.faults.find("scheduler-killed")
        if fault and "after_s" in fault and time.monotonic() - self.began >= float(fault["after_s"]):
            os.kill(os.getpid(), signal.SIGKILL)

    def _memory_faults(self, tokens):
        """The first long prefill of a server whose pools left too little for activations."""
        text = self.settings.model.text
        part = min(tokens, max(1, self.settings["chunked_prefill_size"]))
        one = part * text["hidden_size"] * ACTIVATION_BYTES / (1 << 30) / self.settings.tp
        device = self.rank.device
        if one * ACTIVATION_OTHERS > device.free:
            device.exhaust(one)
            self._die("torch.OutOfMemoryError", self.rank.device.out_of_memory(one))

    def _die(self, error, text):
        log.line("Scheduler hit an exception: " + tracebacks.serve(error, text))
        if self.faults.find("no-exit"):
            # Seen in the field: the error is in the log, the process stays, /health goes on saying 200.
            while True:
                time.sleep(3600)
        os.kill(self.parent, signal.SIGQUIT)
        os._exit(1)
