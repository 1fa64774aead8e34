"""Starting the SGLang double from a checkout, for tests: no root, no installation."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Double:
    """A server that was started. `log` is all it wrote so far."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self._log = process, port, log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace").replace("\r", "\n")

    @property
    def lines(self) -> list[str]:
        return self.log.splitlines()

    def wait(self, seconds: float = 20) -> int:
        """The exit code, negative for a signal."""
        return self.process.wait(seconds)

    def ready(self, seconds: float = 20) -> Double:
        self.says("The server is fired up and ready to roll!", seconds)
        return self

    def says(self, text: str, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while text not in self.log:
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"never said {text!r}; exit {self.process.poll()}:\n{self.log[-3000:]}")
            time.sleep(0.02)

    def ask(self, method: str, path: str, body: Any = None, timeout: float = 30) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def json(self, method: str, path: str, body: Any = None) -> Any:
        return json.loads(self.ask(method, path, body)[2])

    def events(self, path: str, body: Any) -> list[Any]:
        """The events of a stream, parsed; `[DONE]` as it is."""
        text = self.ask("POST", path, body)[2].decode()
        found = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
        return [event if event == "[DONE]" else json.loads(event) for event in found]


@contextlib.contextmanager
def double(
    folder: Path,
    arguments: Sequence[str],
    *,
    release: str = "0.5.16",
    profile: str = "campaign",
    faults: Sequence[Mapping[str, Any]] | None = None,
    scale: float = 0.0,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
    port: int | None = None,
) -> Iterator[Double]:
    """Runs `python -m sglang.launch_server` with these arguments and a free port; killed at the end with all it started."""
    port = port or free_port()
    control = folder / "faults.json"
    if faults is not None:
        control.write_text(json.dumps({"faults": list(faults)}))
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "COLUMNS": "80",
        "PYTHONPATH": str(HERE),
        "LAB_SGLANG_RELEASE": release,
        "LAB_SGLANG_PROFILE": profile,
        "LAB_SGLANG_FAULTS": str(control),
        "LAB_SGLANG_STARTUP_SCALE": str(scale),
        **(env or {}),
    }
    log = folder / f"server-{port}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [python, "-m", "sglang.launch_server", *arguments, "--port", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        yield Double(process, port, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
