"""One server from its configuration to "it answers, and it is the one we started", and down again."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from gpuctl import diagnosis
from gpuctl.config import Server
from gpuctl.engines import Identity, Launch, environment
from gpuctl.records import Failure
from gpuctl.store import Run
from gpuctl.supervision import NoRoom, Start, SupervisionError, Supervisor, UnitState, Watch

Tell = Callable[..., None]  # tell(event, **facts): progress for whoever watches, and the event log

HANG_AFTER_S = 300.0  # no log line, nothing read, no memory taken for so long while starting: it hangs
PORT_FREE_S = 10.0  # how long a port is waited for that a server of ours still holds


class StartFailed(Exception):
    """The server did not come up; `failure` says why, as it goes into the records of its cells."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.summary)
        self.failure = failure


@dataclass
class Up:
    """A server that answers."""

    launch: Launch
    engine: ModuleType
    unit: str
    identity: Identity
    model_id: str | None  # what a request has to name
    ready_s: float
    state: UnitState | None = None  # None: somebody else's
    watch: Watch | None = None
    log: Log | None = None
    log_file: str | None = None  # relative to the run folder
    facts: dict[str, Any] = field(default_factory=dict)

    def died(self, wait_s: float = 0.0) -> Failure | None:
        """The failure, when the server has ended."""
        if self.watch is None or not self.watch.ended.wait(wait_s):
            return None
        if self.watch.lost is not None:
            return Failure("machine_away", f"lost sight of {self.unit}: {self.watch.lost}")
        failure = ended("server_died", f"{self.unit} died while it was measured", self.watch)
        return self.log.explain(failure) if self.log else failure

    def as_json(self) -> dict[str, Any]:
        known = self.identity
        return {
            "unit": self.unit,
            "pid": self.state.pid if self.state else None,
            "start": self.state.start if self.state else None,
            "url": self.launch.base_url,
            "model_id": self.model_id,
            "model_path": known.model_path,
            "version": known.version,
            "context": known.context,
            "requests_at_once": known.requests_at_once,
            "kv_tokens": known.kv_tokens,
            "ready_s": round(self.ready_s, 3),
            "log": self.log_file,
            **known.facts,
            **self.facts,
        }


def ended(kind: str, what: str, watch: Watch) -> Failure:
    """A failure out of how a server ended: exit status, signal, last log lines."""
    end = watch.exit or {}
    status, signal = end.get("status"), end.get("signal")
    memory = " (out of memory)" if end.get("why") == "oom-kill" else ""
    how = (
        f"killed by {signal}{memory}"
        if signal
        else f"exit status {status}"
        if status is not None
        else str(end.get("why"))
    )
    how += f" on {end['machine']}" if end.get("machine") else ""
    tail = tuple(line for line in list(watch.log_tail)[-12:] if line.strip())
    return Failure(kind, f"{what}: {how}", tail, exit_status=status, signal=signal)


def unit_name(server: str) -> str:
    return f"gpuctl-{server}"


class NoKey(Exception):
    """The key that a server's clients must send cannot be read. One line."""


def key_of(server: Server) -> str | None:
    """The key that clients of a server must send, where it wants one. Raises NoKey."""
    if server.api_key_file is None:
        return None
    try:
        words = Path(server.api_key_file).expanduser().read_text(encoding="ascii").split()
    except OSError as error:
        raise NoKey(f"{server.api_key_file}: {error.strerror} (api_key_file)") from error
    except (UnicodeDecodeError, RuntimeError):  # RuntimeError: ~somebody whom nobody knows
        words = []
    if len(words) != 1:
        raise NoKey(f"{server.api_key_file}: one word is expected there, the key (api_key_file)")
    return words[0]


def bearer(api_key: str | None) -> dict[str, str]:
    """The header that a server with a key wants to see."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def bring_up(
    engine: ModuleType,
    launch: Launch,
    supervisor: Supervisor,
    *,
    run: Run,
    owner: str,
    tell: Tell,
    known_answer: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Up:
    """Starts the server, follows its log to readiness, and makes sure who answers. Raises StartFailed."""
    began = time.monotonic()
    unit = unit_name(launch.name)
    if launch.server.url:
        up = Up(launch, engine, unit, Identity(), None, 0.0)
        _identify(up, supervisor, headers)
        _answer(up, supervisor, known_answer or {}, headers)
        return up
    port = launch.server.port
    _check_free(unit, port, supervisor, owner)
    argv, env = engine.argv(launch), environment(engine, launch)
    path = run.log_path(launch.name)
    log = Log(launch.server, launch.name, path, tell)
    up = Up(launch, engine, unit, Identity(), None, 0.0, log=log, log_file=str(path.relative_to(run.folder)))
    try:
        try:
            up.state = supervisor.start(Start(unit, argv, env, owner, launch.server.secrets))
        except SupervisionError as error:
            kind = "no_room" if isinstance(error, NoRoom) else "start_failed"
            raise StartFailed(Failure(kind, f"{launch.name} could not be started: {error}")) from None
        up.watch = supervisor.watch(unit, [launch.base_url + path for path in engine.HEALTH], log.take)
        _wait_ready(up, log, began)
        up.ready_s = time.monotonic() - began
        up.facts["capacity"] = log.capacity()
        _identify(up, supervisor, headers)
        _, listening = supervisor.status([port])
        if port not in listening or not supervisor.owns(listening[port], unit):
            other = listening[port].command if port in listening else "nobody"
            raise StartFailed(Failure("wrong_identity", f"port {port} is answered by another process: {other}"))
        _answer(up, supervisor, known_answer or {}, headers)
    except BaseException as error:
        failure = _died_of_it(up, log, error.failure) if isinstance(error, StartFailed) else None
        # also when it was interrupted in the middle of starting, and nobody knows yet whether there is something
        _stop(up, supervisor)
        if failure is not None:
            raise StartFailed(log.explain(failure)) from None
        raise
    return up


def _check_free(unit: str, port: int, supervisor: Supervisor, owner: str) -> None:
    """That neither its name nor its port is taken; what is being stopped is waited for. Raises StartFailed."""
    began = time.monotonic()
    while True:
        units, listening = supervisor.status([port])
        same = next((one for one in units if one.unit == unit and one.running), None)
        taken = listening.get(port)
        ours = same.owner == owner if same is not None else taken is not None and taken.unit
        if not ours or time.monotonic() - began > PORT_FREE_S:
            break
        time.sleep(0.5)
    if same is not None:
        whose = f"for campaign {same.owner}" if same.owner else "as at boot"
        then = "wait for that run to end, or stop the server" if same.owner else f"systemctl stop {unit} ends it"
        where = supervisor.transport.name
        raise StartFailed(Failure("in_use", f"{where}: {unit} runs already, {whose}; {then}"))
    if taken is not None:
        name = f"pid {taken.pid}: {taken.command}" if taken.pid else "a process of another user"
        raise StartFailed(
            Failure("port_in_use", f"port {port} is in use by {name}", advice="stop it, or change `port`")
        )


def follow(
    engine: ModuleType,
    launch: Launch,
    supervisor: Supervisor,
    *,
    tell: Tell,
    known_answer: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Up:
    """A server that somebody else started, as systemd does at boot: waits until it is ready, makes sure who answers.

    It runs on, however this ends. Raises StartFailed.
    """
    began, unit = time.monotonic(), unit_name(launch.name)
    log = Log(launch.server, launch.name, Path(os.devnull), tell)
    up = Up(launch, engine, unit, Identity(), None, 0.0, log=log)
    up.watch = supervisor.watch(unit, [launch.base_url + path for path in engine.HEALTH], log.take)
    try:
        _wait_ready(up, log, began)
        up.ready_s = time.monotonic() - began
        _identify(up, supervisor, headers)
        _answer(up, supervisor, known_answer or {}, headers)
    except StartFailed as error:
        raise StartFailed(log.explain(error.failure)) from None
    finally:
        up.watch.close()
        log.close()
    return up


def take_down(up: Up, supervisor: Supervisor) -> UnitState | None:
    """Stops the server and everything it started. Leaves somebody else's alone."""
    return None if up.state is None else _stop(up, supervisor)


def _stop(up: Up, supervisor: Supervisor) -> UnitState | None:
    if up.log is not None:
        up.log.going = True
    try:
        return supervisor.stop(up.unit)
    finally:
        if up.watch is not None:
            up.watch.ended.wait(2)
            up.watch.close()
        if up.log is not None:
            up.log.close()


class Log:
    """A server's log as it comes: kept in a file, its stages told once each, and asked at the end why it ended.

    That it goes down is told when its log says so: SGLang lives on for five seconds after it has lost a process.
    """

    def __init__(self, server: Server, name: str, path: Path, tell: Tell) -> None:
        known = server.engine if server.engine in diagnosis.engines() else None
        self.reader = diagnosis.Reader(known)
        self.file = path.open("w", encoding="utf-8")
        self.name, self.tell, self.title = name, tell, ""
        self.going = False  # down: it was told, or it is we who stop it
        self.reading = threading.Lock()  # the log comes in a thread of its own

    def take(self, text: str) -> None:
        with self.reading:
            if self.file.closed:
                return  # nobody waits for it any more
            self.file.write(text)
            self.file.flush()
            self.reader.feed(text.encode())
            title = self.reader.title()
            dying = self.reader.diagnosis(running=False) if self.reader.dying() and not self.going else None
        if title and title != self.title:
            self.title = title
            self.tell("stage", server=self.name, stage=title)
        if dying is not None:
            self.going = True
            self.tell("dying", server=self.name, why=dying.causes[0].summary if dying.causes else "")

    def close(self) -> None:
        with self.reading:
            self.file.close()

    def capacity(self) -> dict[str, Any]:
        """What the log says the server can hold."""
        with self.reading:
            return self.reader.diagnosis(running=True).capacity.as_json()

    def where(self) -> str:
        """How far it came, for a sentence."""
        return f"after “{self.title}”" if self.title else "before it said anything of its start"

    def explain(self, failure: Failure) -> Failure:
        """The failure with what the log says caused it."""
        with self.reading:
            found = self.reader.diagnosis(exit_status=failure.exit_status)
        if not found.causes:
            return failure
        cause = found.causes[0]
        return replace(
            failure,
            summary=f"{failure.summary}: {cause.summary}",
            evidence=(*cause.evidence, *(line for line in failure.evidence if line not in cause.evidence)),
            advice=cause.advice or failure.advice,
            finding=cause.as_json(),
        )


def _wait_ready(up: Up, log: Log, began: float) -> None:
    watch, server = up.watch, up.launch.server
    assert watch is not None
    while not watch.ready.wait(0.05):
        if watch.ended.is_set():
            if watch.lost is not None:
                raise StartFailed(Failure("machine_away", f"lost sight of {up.unit}: {watch.lost}"))
            raise StartFailed(ended("start_failed", f"{up.launch.name} died {log.where()}", watch))
        waited, quiet = time.monotonic() - began, time.monotonic() - watch.progress_at
        tail = tuple(line for line in list(watch.log_tail)[-12:] if line.strip())
        if quiet > HANG_AFTER_S:
            what = f"{up.launch.name} hangs {log.where()}: no log line, reading or growth of memory for {quiet:.0f} s"
            raise StartFailed(Failure("hang", what, tail))
        if waited > server.ready_within_s:
            what = f"{up.launch.name} was not ready within {server.ready_within_s:g} s; it stopped {log.where()}"
            raise StartFailed(Failure("timeout", f"{what}, /health answered {watch.health}", tail))


def _died_of_it(up: Up, log: Log, failure: Failure) -> Failure:
    """A server that was ready and ended with the first request did not answer wrongly: it died."""
    watch = up.watch
    if failure.kind not in ("unreachable", "wrong_identity", "wrong_answer") or watch is None:
        return failure
    if not watch.ended.wait(1.0) or watch.lost is not None:
        return failure
    return ended("start_failed", f"{up.launch.name} died of the first thing it was asked, {log.where()}", watch)


def who_answers(
    launch: Launch, engine: ModuleType, supervisor: Supervisor, headers: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a server says of itself, by path, and what became of each path that it was asked."""
    answers = supervisor.ask(
        [{"url": launch.base_url + path, "headers": dict(headers or {}), "timeout_s": 10} for path in engine.IDENTITY]
    )
    found = {}
    for path, answer in zip(engine.IDENTITY, answers, strict=True):
        if answer.get("status") == 200:
            with contextlib.suppress(ValueError):
                found[path] = json.loads(answer["body"])
    return found, dict(zip(engine.IDENTITY, answers, strict=True))


def _identify(up: Up, supervisor: Supervisor, headers: Mapping[str, str] | None) -> None:
    """Asks who answers, and compares with what was started."""
    launch, engine = up.launch, up.engine
    found, answers = who_answers(launch, engine, supervisor, headers)
    errors = [answer["error"] for answer in answers.values() if "error" in answer]
    if len(errors) == len(answers):
        raise StartFailed(
            Failure(
                "unreachable",
                f"{launch.base_url} does not answer: {errors[0]}",
                advice="is the server running, and the address right?",
            )
        )
    if not found:
        seen = ", ".join(f"{path}: {answer.get('status') or answer.get('error')}" for path, answer in answers.items())
        raise StartFailed(Failure("wrong_identity", f"{launch.base_url} does not say who it is ({seen})"))
    up.identity = engine.identity(found)
    if up.identity.requests_at_once is None and hasattr(engine, "requests_at_once"):
        up.identity = replace(up.identity, requests_at_once=engine.requests_at_once(launch))
    wanted = {launch.model, str(launch.server.flags.get("served-model-name")), str(launch.server.flags.get("alias"))}
    served = {up.identity.model_path, *up.identity.models} - {None}
    if launch.model and served and not served & wanted:
        raise StartFailed(
            Failure("wrong_identity", f"{launch.base_url} serves {', '.join(map(str, served))}, not {launch.model}")
        )
    up.model_id = up.identity.models[0] if up.identity.models else launch.model


def _answer(up: Up, supervisor: Supervisor, known_answer: Mapping[str, str], headers: Mapping[str, str] | None) -> None:
    """A server can be healthy and talk nonsense: it has to answer, and rightly where the right answer is known."""
    for prompt, expected in (dict(known_answer) or {"The capital of France is": ""}).items():
        body = {"model": up.model_id, "prompt": prompt, "max_tokens": 16, "temperature": 0}
        (answer,) = supervisor.ask(
            [
                {
                    "method": "POST",
                    "url": up.launch.base_url + "/v1/completions",
                    "body": body,
                    "headers": dict(headers or {}),
                    "timeout_s": 120,
                }
            ]
        )
        if answer.get("status") != 200:
            said = str(answer.get("body") or answer.get("error"))[:300]
            raise StartFailed(Failure("wrong_answer", f"{prompt!r} was answered with {answer.get('status')}: {said}"))
        try:
            reply = json.loads(answer["body"])
            text, tokens = reply["choices"][0]["text"], reply["usage"]["completion_tokens"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise StartFailed(
                Failure("wrong_answer", f"{prompt!r} was not answered as OpenAI's API does: {answer['body'][:200]!r}")
            ) from None
        if not tokens or expected not in text:
            wanted = f", not with {expected!r}" if expected else ""
            raise StartFailed(
                Failure("wrong_answer", f"{prompt!r} was answered with {text!r} ({tokens} tokens){wanted}",
                        advice="the server is healthy and talks nonsense: kernel, quantisation or weights")
            )  # fmt: skip
