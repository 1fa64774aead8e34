"""The endpoints: which exist in this release, what they check, what they answer."""

import itertools
import json
import os
import time
import urllib.parse
from hashlib import blake2b

from sglang._double import bodies, log, metrics, tokens
from sglang._double.generation import BadRequest, Exchange

HEALTH_SECONDS = 20
# Paths that a release answers and the double does not play: an honest 501 instead of a wrong 404.
REAL = (
    "/encode", "/classify", "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/responses", "/v1/messages", "/start_profile",
    "/stop_profile", "/freeze_gc", "/set_internal_state", "/pause_generation", "/continue_generation", "/configure_logging",
    "/update_weights_from_disk", "/release_memory_occupation", "/resume_memory_occupation", "/load_lora_adapter",
    "/unload_lora_adapter", "/open_session", "/close_session", "/v1/detokenize", "/detokenize",
)  # fmt: skip


class Api:
    def __init__(self, server):
        self.server, self.settings = server, server.settings
        self.numbers = itertools.count(1)
        self.prefixes = {}
        self.counts = metrics.Counts()
        release = self.settings.release
        self.routes = {
            ("GET", "/health"): self.health,
            ("GET", "/health_generate"): self.health,
            ("GET", "/model_info"): self.model_info,
            ("GET", "/get_model_info"): self.old("/model_info", self.model_info),
            ("GET", "/server_info"): self.server_info,
            ("GET", "/get_server_info"): self.old("/server_info", self.server_info),
            ("GET", "/v1/models"): self.models,
            ("GET", "/v1/loads"): self.loads,
            ("GET", "/flush_cache"): self.flush,
            ("POST", "/flush_cache"): self.flush,
            ("POST", "/v1/completions"): self.generation("completions"),
            ("POST", "/v1/chat/completions"): self.generation("chat"),
            ("POST", "/generate"): self.generation("generate"),
            ("POST", "/tokenize"): self.tokenize,
            ("POST", "/v1/tokenize"): self.tokenize,
            ("POST", "/abort_request"): self.abort,
            ("GET", "/ping"): self.health,
        }
        if release == "0.5.23":
            self.routes[("GET", "/ready")] = self.ready
        else:
            self.routes[("GET", "/get_load")] = self.old("/v1/loads", self.load)
        if self.settings["enable_metrics"]:
            self.routes[("GET", "/metrics")] = self.metrics
            self.routes[("GET", "/metrics/")] = self.metrics

    # -- coming in

    def handle(self, connection, incoming):
        path = incoming.path
        action = self.routes.get((incoming.method, path))
        self.counts.request(incoming.method, path)
        if action is None:
            self._unknown(connection, incoming)
            return
        key = self.settings["api_key"]
        if key and not self._public(path) and incoming.headers.get("authorization") != "Bearer " + key:
            self.answer(connection, 401, {"error": "Unauthorized"})
            return
        fault = self.server.faults.find("http-error", at=path, default=path)
        if fault and self.server.status == "up":
            self.answer(connection, int(fault.get("status", 500)), bodies.error(fault.get("message", "Internal Server Error"), "InternalServerError", int(fault.get("status", 500))))  # fmt: skip
            return
        try:
            action(connection, incoming)
        except BadRequest as error:
            self.answer(connection, 400, bodies.error(str(error), error.kind, 400))

    def _public(self, path):
        return path in ("/health", "/health_generate", "/ready") or path.startswith("/metrics")

    def _unknown(self, connection, incoming):
        methods = [method for method, path in self.routes if path == incoming.path]
        if methods:
            self.answer(connection, 405, {"detail": "Method Not Allowed"}, extra=(("allow", ", ".join(methods)),))
        elif incoming.path in REAL:
            self.answer(connection, 501, {"detail": "The double does not play this endpoint"})
        else:
            self.answer(connection, 404, {"detail": "Not Found"})

    def answer(self, connection, status, document=None, text=None, extra=(), kind="application/json"):
        """One complete response, with its line in the log."""
        body = b"" if document is None else json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
        if text is not None:
            body = text.encode()
        self.access(connection, status)
        connection.respond(status, body, kind, extra)

    def access(self, connection, status):
        from sglang._double.wire import PHRASES

        incoming = connection.incoming
        self.counts.response(incoming.method, incoming.path, status)
        target = incoming.path + ("?" + incoming.query if incoming.query else "")
        log.line(
            'INFO:     %s:%d - "%s %s HTTP/1.1" %d %s'
            % (connection.peer[0], connection.peer[1], incoming.method, target, status, PHRASES.get(status, ""))
        )

    # -- readiness

    def warm_up(self):
        """The request the engine sends itself; with its answer the server is ready."""
        settings = self.settings
        if settings["skip_server_warmup"]:
            self._fired_up()
            return
        log.line('INFO:     127.0.0.1:40998 - "GET /model_info HTTP/1.1" 200 OK')
        self.server.after(
            settings.profile.delay("warmup", 2),
            lambda: self._probe(8, "warmup", lambda: self._warm(settings)),
        )

    def _warm(self, settings):
        path = "/v1/chat/completions" if settings.model.multimodal else "/generate"
        log.line('INFO:     127.0.0.1:41000 - "POST %s HTTP/1.1" 200 OK' % path)
        self._fired_up()

    def _fired_up(self):
        self.server.status = "up"
        log.line("The server is fired up and ready to roll!")

    def _probe(self, length, kind, then):
        """A generation of the server's own."""

        class Part:
            health = True

            def advance(self, count, done):
                if done:
                    then()

        number = next(self.numbers)
        self.server.parts[number] = Part()
        prompt = 1 if kind == "health" else 29
        self.server.tell({"new": number, "prompt": prompt, "cached": 0, "limit": length, "kind": "*", "health": True})

    def ready(self, connection, incoming):
        up = self.server.status == "up" and not self.server.leaving
        self.answer(connection, 200 if up else 503)

    def health(self, connection, incoming):
        server = self.server
        if server.leaving:
            log.line("Health check request received during shutdown. Returning 503.")
            self.answer(connection, 503)
            return
        if server.status == "starting":
            self.answer(connection, 503)
            return
        if os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "1").lower() in ("0", "false") and (
            incoming.path == "/health"
        ):
            self.answer(connection, 200)
            return
        began = time.time()
        if not server.parts:
            self._probe(1, "health", lambda: None)
        # The engine looks once a second whether anything came from the scheduler since.
        server.after(1.0, lambda: self._look(connection, began, began))

    def _look(self, connection, began, last):
        server = self.server
        if connection.closed:
            return
        if server.last_token > began:
            server.status = "up"
            self.answer(connection, 200)
        elif time.time() - began < HEALTH_SECONDS:
            server.after(1.0, lambda: self._look(connection, began, last))
        else:
            log.line(
                "Health check failed. Server couldn't get a response from detokenizer for last %d seconds. tic start time: "
                "%s. last_heartbeat time: %s"
                % (
                    HEALTH_SECONDS,
                    time.strftime("%H:%M:%S", time.localtime(began)),
                    time.strftime("%H:%M:%S", time.localtime(server.last_token)),
                )
            )
            server.status = "unhealthy"
            self.answer(connection, 503)

    # -- information

    def old(self, new, action):
        def answer(connection, incoming):
            log.line(
                "Endpoint '%s' is deprecated and will be removed in a future version. Please use '%s' instead."
                % (incoming.path, new)
            )
            action(connection, incoming)

        return answer

    def model_info(self, connection, incoming):
        self.answer(connection, 200, bodies.model_info(self.settings))

    def server_info(self, connection, incoming):
        self.answer(connection, 200, bodies.server_info(self.server))

    def models(self, connection, incoming):
        self.answer(connection, 200, bodies.models(self.settings))

    def loads(self, connection, incoming):
        self.answer(connection, 200, bodies.loads(self.server))

    def load(self, connection, incoming):
        self.answer(connection, 200, bodies.load(self.server))

    def metrics(self, connection, incoming):
        text = metrics.text(self.server, self.counts)
        self.answer(connection, 200, text=text, kind="text/plain; version=0.0.4; charset=utf-8")

    def flush(self, connection, incoming):
        if any(not part.health for part in self.server.parts.values()):
            self.answer(connection, 400, text="Flush cache failed.\n", kind="text/plain; charset=utf-8")
            return
        self.prefixes.clear()
        self.server.tell({"flush": 1})
        log.line("Cache flushed successfully!")
        self.answer(
            connection,
            200,
            text="Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, "
            "the operation will not be performed.)\n",
            kind="text/plain; charset=utf-8",
        )

    def tokenize(self, connection, incoming):
        document = self.document(incoming)
        text = document.get("prompt")
        if text is None:
            text, count = tokens.chat(document.get("messages") or [])
        else:
            count = tokens.count(text)
        ids = [bodies.token_id(piece) for piece in tokens.split(text)]
        self.answer(connection, 200, {"tokens": ids, "count": count, "max_model_len": self.settings.context})

    def abort(self, connection, incoming):
        document = self.document(incoming)
        for number, part in list(self.server.parts.items()):
            if not part.health and (document.get("abort_all") or part.exchange.id == document.get("rid")):
                del self.server.parts[number]
                self.server.tell({"abort": number})
                part.finish("abort")
        self.answer(connection, 200)

    # -- generation

    def document(self, incoming):
        try:
            document = json.loads(incoming.body or b"null")
        except ValueError as error:
            raise BadRequest(
                "[{'type': 'json_invalid', 'loc': ('body', %d), 'msg': 'JSON decode error', 'input': {}, 'ctx': {'error': "
                "%r}}]" % (getattr(error, "pos", 0), getattr(error, "msg", str(error))),
                "Bad Request",
            ) from None
        if not isinstance(document, dict):
            raise BadRequest(
                "[{'type': 'model_attributes_type', 'loc': ('body',), 'msg': 'Input should be a valid dictionary or object to "
                "extract fields from', 'input': %r}]" % (document,),
                "Bad Request",
            )
        return document

    def generation(self, kind):
        def start(connection, incoming):
            Exchange(self, connection, kind, self.document(incoming)).start()

        return start

    def cached(self, text, count):
        """Tokens of a prompt's beginning that an earlier prompt shared; remembers this one. Blocks of 64 tokens."""
        if self.settings["disable_radix_cache"]:
            return 0
        size = max(1, len(text) * 64 // max(1, count))
        digest, found, shared = blake2b(digest_size=12), 0, True
        for end in range(size, len(text) + 1, size):
            digest.update(text[end - size : end].encode("utf-8", "replace"))
            mark = digest.hexdigest()
            if shared and mark in self.prefixes:
                found += 64
            else:
                shared = False
                self.prefixes[mark] = True
        while len(self.prefixes) > 200_000:
            self.prefixes.pop(next(iter(self.prefixes)))
        return min(found, max(0, count - 1))


def query(incoming):
    return dict(urllib.parse.parse_qsl(incoming.query))
