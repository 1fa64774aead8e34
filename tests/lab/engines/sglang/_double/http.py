"""The HTTP process: one thread, one selector for listener, clients and scheduler; timers; and the end."""

import errno
import gc
import heapq
import itertools
import json
import os
import selectors
import signal
import socket
import time

from sglang._double import log, process, wire
from sglang._double.api import Api


class Server:
    def __init__(self, settings, faults, children, facts):
        self.settings, self.faults, self.children, self.facts = settings, faults, children, facts
        self.selector = selectors.DefaultSelector()
        self.date = wire.Date()
        self.timers = []
        self.order = itertools.count()
        self.channel = children[0].channel
        self.inbox = b""
        self.stats = {}
        self.last_token = 0.0
        self.status = "starting"  # starting | up | unhealthy
        self.leaving = False
        self.parts = {}
        self.created = time.time()
        self.api = Api(self)

    def run(self):
        settings = self.settings
        log.line("INFO:     Started server process [%d]" % os.getpid())
        log.line("INFO:     Waiting for application startup.")
        log.line(
            "Using default chat sampling params from model generation config: {'temperature': 0.6, 'top_k': 20, 'top_p': "
            "0.95}"
        )
        log.line("INFO:     Application startup complete.")
        self._listen(settings["host"] or "127.0.0.1", settings["port"] or 30000)
        self.selector.register(self.channel, selectors.EVENT_READ, self)
        self.channel.setblocking(False)
        self._signals()
        gc.collect()
        gc.freeze()
        self.after(1.0, self._watch)
        scale = self.settings.profile.scale
        self.after(min(1.0, max(0.05, scale)), self.api.warm_up)
        while True:
            wait = max(0.0, self.timers[0][0] - time.monotonic()) if self.timers else None
            for key, mask in self.selector.select(wait):
                if key.data == "accept":
                    self._accept(key.fileobj)
                elif key.data == "signal":
                    self._signal()
                else:
                    key.data.ready(mask)
            while self.timers and self.timers[0][0] <= time.monotonic():
                heapq.heappop(self.timers)[2]()

    def after(self, seconds, action):
        heapq.heappush(self.timers, (time.monotonic() + seconds, next(self.order), action))

    def _listen(self, host, port):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        taken = self.faults.find("port-taken")
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if taken:
                raise OSError(errno.EADDRINUSE, "")
            listener.bind((host, port))
        except OSError as error:
            log.line(
                "ERROR:    [Errno %d] error while attempting to bind on address ('%s', %d): %s"
                % (error.errno, host, port, os.strerror(error.errno).lower())
            )
            log.line("INFO:     Waiting for application shutdown.")
            # Measured: it stays like this, the GPUs' memory still held.
            while True:
                time.sleep(3600)
        listener.listen(2048)
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, "accept")
        shown = "[%s]" % host if ":" in host else host
        log.line("INFO:     Uvicorn running on http://%s:%d (Press CTRL+C to quit)" % (shown, port))

    def _accept(self, listener):
        while True:
            try:
                client, peer = listener.accept()
            except (BlockingIOError, OSError):
                return
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.Connection(self, client, peer, self.api.handle)

    # -- the scheduler

    def tell(self, message):
        self.channel.setblocking(True)
        try:
            self.channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # it died; the watch says so
        finally:
            self.channel.setblocking(False)

    def ready(self, mask):
        try:
            data = self.channel.recv(1 << 20)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.selector.unregister(self.channel)
            return
        *lines, self.inbox = (self.inbox + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            self.stats = message["stats"]
            self.last_token = time.time()
            for number, count, done in message["step"]:
                part = self.parts.get(number)
                if part is not None:
                    if done:
                        del self.parts[number]
                    part.advance(count, done)

    # -- the end

    def _signals(self):
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        signal.set_wakeup_fd(self._writing)
        for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT):
            signal.signal(number, lambda signum, frame: None)
        self.selector.register(self._reading, selectors.EVENT_READ, "signal")

    def _signal(self):
        for number in os.read(self._reading, 64):
            if number == signal.SIGQUIT:
                self._crash()
            elif number == signal.SIGTERM and not self.leaving:
                log.line("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
                self.leaving = True
                self.after(self.settings.profile.delay("shutdown", 4), self._drained)
            elif number == signal.SIGINT:
                log.line("INFO:     Shutting down")
                process.kill_tree(include_parent=False)
                os._exit(0)

    def _drained(self):
        left = [part.exchange.id for part in self.parts.values() if not part.health]
        log.line(
            "Gracefully exiting... Remaining number of requests %d. Remaining requests remaining_rids=%r."
            % (len(left), left)
        )
        if left:
            self.after(max(0.2, 5 * self.settings.profile.scale), self._drained)
        else:
            process.kill_tree()

    def _watch(self):
        """Once a second: a child that ended with an error takes the server with it."""
        for child in self.children:
            code = child.poll()
            if code:
                log.line(
                    "Subprocess %s (pid=%d) crashed with exit code %d. Triggering SIGQUIT for cleanup..."
                    % (child.name, child.pid, code)
                )
                self._crash()
        self.after(1.0, self._watch)

    def _crash(self):
        log.line("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
        if self.settings.release != "0.5.11":
            log.line("Sleeping 5 seconds before crash diagnostics to let GPU activity settle.")
            time.sleep(5 * min(1.0, self.settings.profile.scale))
            log.line("No live scheduler processes found; skipping py-spy and CUDA coredump.")
        process.kill_tree()
