"""One generation request from its checks to its last byte: OpenAI completions and chat, and the engine's own /generate."""

import json
import time
import uuid

from sglang._double import bodies, texts, tokens

DEFAULT_LENGTH = {"completions": 16, "generate": 128}


class BadRequest(Exception):
    """HTTP 400. `kind` is the `type` of the body."""

    def __init__(self, text, kind="BadRequestError"):
        super().__init__(text)
        self.kind = kind


class Part:
    """One sequence of a request: its prompt, what was written, how it ended."""

    health = False

    def __init__(self, exchange, index, prompt, count):
        self.exchange, self.index, self.prompt, self.count = exchange, index, prompt, count
        self.made = self.steps = 0
        self.text = ""
        self.reason = None
        self.matched = None
        self.histogram = []
        self.cached = 0
        self.first_at = self.last_at = None

    def advance(self, count, done):
        """`count` more tokens came from the scheduler; `done` with the last of them."""
        self.made += count
        self.steps += 1
        self.histogram.append(count)
        self.last_at = time.time()
        self.first_at = self.first_at or self.last_at
        piece = self.writer.take(count)
        self.text += piece
        stop = self.exchange.stopped(self.text)
        if stop:
            at = self.text.index(stop)
            piece = piece[: max(0, len(piece) - (len(self.text) - at))]
            self.text, self.reason, self.matched = self.text[:at], "stop", stop
            self.exchange.cancel(self)
        elif done:
            natural = self.natural is not None and self.made >= self.natural
            self.reason = "stop" if natural else "length"
            self.matched = self.exchange.end_token if natural else None
        self.exchange.came(self, piece)

    def finish(self, reason):
        self.reason = reason
        self.exchange.came(self, "")


class Exchange:
    def __init__(self, api, connection, kind, document):
        self.api, self.connection, self.kind, self.document = api, connection, kind, document
        self.server, self.settings = api.server, api.settings
        self.id = document.get("rid") if kind == "generate" and document.get("rid") else uuid.uuid4().hex
        self.created = int(time.time())
        self.received = time.time()
        self.parts = []
        self.stream = bool(document.get("stream"))
        options = document.get("stream_options") or {}
        self.usage = bool(options.get("include_usage")) or bool(self.settings["stream_response_default_include_usage"])
        self.continuous = bool(options.get("continuous_usage_stats"))
        self.model = document.get("model") or self.settings["served_model_name"]
        self.begun = self.logged = False
        sampling = document.get("sampling_params") or {} if kind == "generate" else document
        if isinstance(sampling, list):
            sampling = sampling[0] if sampling else {}
        self.sampling = sampling
        stop = sampling.get("stop")
        self.stops = [stop] if isinstance(stop, str) else list(stop or [])
        text = self.settings.model.text
        eos = text.get("eos_token_id") or self.settings.model.config.get("eos_token_id") or 151645
        self.end_token = eos[0] if isinstance(eos, list) else eos

    # -- checks

    def _integer(self, name):
        value = self.sampling.get(name)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        kind, said = "int_type", "Input should be a valid integer"
        if isinstance(value, str):
            kind, said = "int_parsing", "Input should be a valid integer, unable to parse string as an integer"
        raise BadRequest(
            "[{'type': '%s', 'loc': ('body', '%s'), 'msg': '%s', 'input': %r}]" % (kind, name, said, value),
            "Bad Request",
        )

    def _prompts(self):
        """(text, tokens) of each prompt."""
        if self.kind == "chat":
            messages = self.document.get("messages")
            if messages is None:
                self._missing("messages")
            if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
                raise BadRequest("[{'type': 'list_type', 'loc': ('body', 'messages'), 'msg': 'Input should be a valid list', 'input': %r}]" % (messages,), "Bad Request")  # fmt: skip
            if not messages:
                raise BadRequest("Messages cannot be empty.")
            return [tokens.chat(messages)]
        name = "text" if self.kind == "generate" else "prompt"
        prompt = self.document.get(name)
        if prompt is None and self.kind == "generate":
            prompt = self.document.get("input_ids")
        if prompt is None:
            if self.kind == "generate":
                raise BadRequest("Either text, input_ids or input_embeds should be provided.")
            self._missing("prompt")
        if isinstance(prompt, str) or (prompt and all(isinstance(item, int) for item in prompt)):
            prompt = [prompt]
        if not prompt:
            raise BadRequest("Prompt cannot be empty")
        counted = []
        for item in prompt:
            if isinstance(item, str):
                counted.append((item, tokens.count(item)))
            else:
                counted.append((" ".join(map(str, item)), len(item)))
        return counted

    def _missing(self, name):
        raise BadRequest(
            "[{'type': 'missing', 'loc': ('body', '%s'), 'msg': 'Field required', 'input': %r}]"
            % (name, self.document),
            "Bad Request",
        )

    def _length(self, count):
        """How many tokens at most, from the request and the windows. Raises BadRequest."""
        context, server = self.settings.context, self.server
        names = {"chat": ("max_completion_tokens", "max_tokens"), "generate": ("max_new_tokens",)}
        asked = None
        for name in names.get(self.kind, ("max_tokens",)):
            asked = self._integer(name) if asked is None else asked
        if count >= context:
            raise BadRequest(
                "The input (%d tokens) is longer than the model's context length (%d tokens)." % (count, context)
            )
        if asked is not None and asked < 1:
            raise BadRequest("max_new_tokens must be at least 0, got %d." % asked if asked < 0 else "max_tokens must be at least 1, got 0.")  # fmt: skip
        if asked is not None and count + asked > context:
            raise BadRequest(
                "Requested token count exceeds the model's maximum context length of %d tokens. You requested a total of %d "
                "tokens: %d tokens from the input messages and %d tokens for the completion. Please reduce the number of "
                "tokens in the input messages or the completion to fit within the limit."
                % (context, count + asked, count, asked)
            )
        longest = bodies.longest(server)
        if count >= longest - 5:
            raise BadRequest(
                "Input length (%d tokens) exceeds the maximum allowed length (%d tokens). Use a shorter input or enable "
                "--allow-auto-truncate." % (count, longest - 5)
            )
        wanted = asked or DEFAULT_LENGTH.get(self.kind) or context - count
        return max(1, min(wanted, longest - count - 1))

    # -- start

    def start(self):
        prompts = self._prompts()
        copies = self._integer("n") or 1
        ignore = bool(self.sampling.get("ignore_eos"))
        garbage = bool(self.server.faults.find("garbage")) or self.server.facts["broken"]
        profile = self.settings.profile
        planned = []
        for text, count in prompts:
            length = self._length(count)
            kind = profile.kind(text)
            cached = self.api.cached(text, count)
            for _ in range(copies):
                part = Part(self, len(self.parts), text, count)
                part.cached = cached
                part.writer = texts.Writer(kind, text, garbage)
                natural = part.writer.natural or profile.natural.get(kind)
                part.natural = None if ignore or garbage or natural is None or natural > length else natural
                self.parts.append(part)
                planned.append((part, kind, part.natural or length))
        self.connection.on_close = self._gone
        for part, kind, limit in planned:
            number = next(self.api.numbers)
            part.number = number
            self.server.parts[number] = part
            self.server.tell(
                {
                    "new": number,
                    "prompt": part.count,
                    "cached": part.cached,
                    "limit": limit,
                    "kind": kind,
                    "health": False,
                }
            )

    def _gone(self):
        """The client went away: the sequences are taken back."""
        for part in self.parts:
            if part.reason is None:
                self.cancel(part)

    def cancel(self, part):
        if self.server.parts.pop(part.number, None) is not None:
            self.server.tell({"abort": part.number})

    def stopped(self, text):
        for stop in self.stops:
            if stop and stop in text:
                return stop
        return None

    # -- out

    def came(self, part, piece):
        if self.connection.closed:
            return
        if self.stream:
            self._stream(part, piece)
        elif all(one.reason for one in self.parts):
            self._count_in()
            self.api.answer(self.connection, 200, bodies.whole(self))

    def _count_in(self):
        for part in self.parts:
            self.api.counts.finished(self, part)

    def _stream(self, part, piece):
        events = []
        if not self.begun:
            self.begun = True
            self.api.access(self.connection, 200)
            self.connection.begin("text/event-stream; charset=utf-8")
        if self.kind == "chat" and part.steps <= 1:
            events.append(bodies.opening(self, part))
        # Nothing is sent for tokens that make no text yet.
        if piece or part.reason:
            events += bodies.chunk(self, part, piece)
        if all(one.reason for one in self.parts):
            self._count_in()
            if self.usage and self.kind != "generate":
                events.append(bodies.usage_chunk(self))
            events.append("[DONE]")
        lines = [self._event(event) for event in events]
        self.connection.chunk(*lines)
        if events and events[-1] == "[DONE]":
            self.connection.end()

    def _event(self, event):
        text = event if isinstance(event, str) else json.dumps(event, separators=(",", ":"), ensure_ascii=False)
        return ("data: %s\n\n" % text).encode()
