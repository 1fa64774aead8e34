"""The same load as agent/load.py sends, sent the way other tools send it. One JSON line a request on stdout.

    clients.py aiohttp|threads PORT STREAMS ROUNDS

Both open their connections before anything is timed, keep them, parse each event as it comes and stamp it after that,
as the benchmarks people use do: aiohttp in one event loop, http.client with a thread a stream.
"""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import sys
import threading
import time
from typing import Any

BODY = {"model": "paced", "prompt": "Hi", "stream": True, "max_tokens": 1 << 20}


class Seen:
    """What one request saw."""

    def __init__(self) -> None:
        self.row: dict[str, Any] = {"response_id": None, "t_request": time.monotonic(), "t_chunks": [], "tokens": []}

    def line(self, line: bytes) -> None:
        line = line.strip()
        if not line.startswith(b"data: ") or line == b"data: [DONE]":
            return
        document = json.loads(line[6:])
        if document["choices"] and document["choices"][0]["text"]:
            self.row["t_chunks"].append(time.monotonic())
            self.row["tokens"].append(document["usage"]["completion_tokens"])
            self.row["response_id"] = document["id"]


def threads(port: int, streams: int, rounds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    ready = threading.Barrier(streams)

    def one() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/v1/models")
        connection.getresponse().read()
        ready.wait()
        for _ in range(rounds):
            seen = Seen()
            connection.request("POST", "/v1/completions", json.dumps(BODY), {"Content-Type": "application/json"})
            response = connection.getresponse()
            for line in response:
                seen.line(line)
            rows.append(seen.row)

    workers = [threading.Thread(target=one) for _ in range(streams)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return rows


def aio(port: int, streams: int, rounds: int) -> list[dict[str, Any]]:
    import aiohttp

    rows: list[dict[str, Any]] = []
    base = f"http://127.0.0.1:{port}/v1"

    async def one(session: aiohttp.ClientSession, ready: asyncio.Barrier) -> None:
        async with session.get(base + "/models") as response:
            await response.read()
        await ready.wait()
        for _ in range(rounds):
            seen = Seen()
            async with session.post(base + "/completions", json=BODY) as response:
                async for line in response.content:
                    seen.line(line)
            rows.append(seen.row)

    async def everything() -> None:
        ready = asyncio.Barrier(streams)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, read_bufsize=10 << 20) as session:
            await asyncio.gather(*(one(session, ready) for _ in range(streams)))

    asyncio.run(everything())
    return rows


def main() -> None:
    kind, port, streams, rounds = sys.argv[1], *map(int, sys.argv[2:5])
    gc.collect()
    gc.disable()
    rows = (aio if kind == "aiohttp" else threads)(port, streams, rounds)
    for row in rows:
        print(json.dumps(row))


main()
