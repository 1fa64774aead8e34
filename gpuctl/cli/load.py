"""`gpuctl load URL`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from gpuctl.cli import FINDINGS, WELL
from gpuctl.cli._console import document, out
from gpuctl.cli._options import Finite, Whole, json_option, options


@click.command("load", short_help="send load to any OpenAI-compatible server and time it")
@click.argument("url")
@click.option("--concurrency", type=Whole(1, 65535), metavar="N", help="Requests at a time. [default: 1]")
@click.option(
    "--requests",
    type=Whole(1, 1_000_000),
    metavar="N",
    help="Requests in all. [default: 4 a stream, at least 8]",
)
@click.option(
    "--max-tokens",
    type=Whole(1, 10_000_000),
    metavar="N",
    default=128,
    show_default=True,
    help="Length of each answer.",
)
@click.option("--chat", is_flag=True, help="/v1/chat/completions instead of /v1/completions.")
@click.option("--model", metavar="ID", help="[default: the first the server names]")
@click.option("--rate", type=Finite(min=0, min_open=True), metavar="R", help="Requests a second (Poisson).")
@click.option("--seed", type=int, metavar="N", help="Of prompts and arrivals. [default: new ones, so no cache helps]")
@click.option(
    "--timeout",
    "timeout_s",
    type=Finite(min=0, min_open=True),
    metavar="S",
    default=600.0,
    show_default=True,
    help="Seconds a request may take.",
)
@click.option("--raw", metavar="FILE", type=click.Path(path_type=Path), help="One JSON line a request: all stamps.")
@options(json_option)
def command(
    url: str,
    concurrency: int | None,
    requests: int | None,
    max_tokens: int,
    chat: bool,
    model: str | None,
    rate: float | None,
    seed: int | None,
    timeout_s: float,
    raw: Path | None,
    as_json: bool,
) -> int:
    """Sends load to URL and says how the server did: TTFT, time per token, throughput, and how far to trust them.

    Tokens are what the server says it made, never counted chunks. A key is taken from $OPENAI_API_KEY.
    """
    from gpuctl.load import measure, table
    from gpuctl.transport import Local

    result = measure(
        Local(),
        url,
        concurrency=concurrency,
        requests=requests,
        max_tokens=max_tokens,
        chat=chat,
        model=model,
        rate=rate,
        api_key=os.environ.get("OPENAI_API_KEY"),
        seed=int(time.time()) if seed is None else seed,
        timeout_s=timeout_s,
        raw=raw,
        on_request=_Progress(as_json),
        python=sys.executable,
    )
    if as_json:
        document(result)
    else:
        out(table(result))
    return FINDINGS if result["verdict"] == "failed" else WELL


class _Progress:
    """A count of what is done, on a terminal, once it takes longer than two seconds."""

    def __init__(self, quiet: bool) -> None:
        self.began = time.monotonic()
        self.done = 0
        self.shown = 0.0
        self.live = sys.stderr.isatty() and not quiet

    def __call__(self, row: Any) -> None:
        self.done += 1
        now = time.monotonic()
        if self.live and now - self.began > 2 and now - self.shown > 0.2:
            self.shown = now
            click.echo(f"\r\033[K{self.done} requests done ...\r", err=True, nl=False)
