"""`gpuctl tunnel SERVER`."""

from __future__ import annotations

import threading

import click

from gpuctl.cli import WELL
from gpuctl.cli._console import out, say
from gpuctl.cli._options import (
    Whole,
    box_option,
    completing,
    folder,
    inventory_option,
    load_inventory,
    options,
)


@click.command("tunnel", short_help="a server of a box on a port here, to look at it; never to time it")
@click.argument("server", shell_complete=completing("servers"))
@options(inventory_option, box_option)
@click.option("--port", type=Whole(0, 65535), default=0, metavar="N", help="Here. [default: a free one]")
def command(server: str, inventory: str, target: str | None, port: int) -> int:
    """Brings SERVER (a name of servers.yml, or a port number of the box) to a port on 127.0.0.1, until Ctrl-C.

    For its health, its metrics, a question or two. Whatever is timed goes beside the server: gpuctl bench, gpuctl load.
    """
    from gpuctl import hosts
    from gpuctl.transport import Tunnel

    machines = hosts.load(folder(inventory))
    if server.isdecimal():
        if not 1 <= int(server) <= 65535:
            raise click.UsageError(f"{server} is no port: 1 to 65535")
        there, nodes = ("127.0.0.1", int(server)), []
    else:
        known = load_inventory(inventory).server(server)
        if known.url:
            raise click.UsageError(f"{server} is not deployed: it answers at {known.url}")
        host = "127.0.0.1" if known.host in ("0.0.0.0", "::") else known.host  # noqa: S104
        there, nodes = (host, known.port), known.nodes
    (machine, *others) = machines.chosen([target] if target else nodes[:1])
    if others:
        raise click.UsageError(f"name the box: -t {machine.name}")
    ways = hosts.transports(machines)
    ways[machine.name].run(["true"], timeout=30)  # one that is not there is told now, not at the first connection
    with Tunnel(ways[machine.name], there, port) as tunnel:
        out(f"http://127.0.0.1:{tunnel.port}")
        say(
            f"port {there[1]} of {machine.name}, to look at; what is timed through it is timed wrongly. Ctrl-C ends it."
        )
        told = ""
        try:
            while not threading.Event().wait(0.5):
                if tunnel.said != told:
                    told = tunnel.said
                    say(f"gpuctl: {told}")
        except KeyboardInterrupt:
            say()
    return WELL
