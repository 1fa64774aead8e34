"""Options that several verbs share, and the inventory they name."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from gpuctl.config import Inventory

F = TypeVar("F", bound=Callable[..., Any])


class Finite(click.FloatRange):
    """A number: neither `inf` nor `nan`, which Python reads as such and no range refuses."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no number to work with.", param, ctx)
        return number


class Whole(click.IntRange):
    name = "whole number"


inventory_option = click.option(
    "-i",
    "--inventory",
    "inventory",
    metavar="DIR",
    default=lambda: os.environ.get("GPUCTL_INVENTORY", "local"),
    show_default="local, or $GPUCTL_INVENTORY",
    shell_complete=lambda ctx, param, begun: [name for name in _inventories() if name.startswith(begun)],
    help="Folder with hosts.yml, models.yml, servers.yml, phases.yml; or its name under inventory/.",
)


def _of_boxes(name: str, what: str, default: str) -> Callable[[F], F]:
    return click.option(
        "-t",
        "--target",
        name,
        metavar="BOX",
        multiple=name == "targets",
        shell_complete=lambda ctx, param, begun: completing("boxes")(ctx, param, begun),
        help=f"{what} [default: {default}]",
    )


target_option = _of_boxes("target", "The box.", "the phase's own")
box_option = _of_boxes("target", "The box.", "the only one")
targets_option = _of_boxes("targets", "Boxes, groups, or all.", "guests")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
check_option = click.option("--check", is_flag=True, help="Change nothing; show what would change.")
yes_option = click.option("--yes", is_flag=True, help="Ask no question.")
runs_option = click.option(
    "--runs", metavar="DIR", default="runs", show_default=True, type=click.Path(path_type=Path), help="Where runs lie."
)


def _a_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    from gpuctl.config import NAME

    if value is not None and not re.match(NAME, value):
        raise click.BadParameter(f"{value!r} is no name: letters, digits, dot, dash, underscore", ctx, param)
    return value


run_option = click.option(
    "--run",
    "run_name",
    metavar="NAME",
    callback=_a_name,
    help="Name of the run folder. [default: the inventory's campaign]",
)


def options(*several: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, shown in this order."""
    return lambda function: functools.reduce(lambda f, option: option(f), reversed(several), function)


def folder(name: str) -> Path:
    """The inventory folder of that name: a path, or a folder under inventory/ here or as shipped."""
    given = Path(name)
    if given.is_dir() or os.sep in name:
        return given
    from gpuctl.assets import asset

    for place in (Path("inventory") / name, asset("inventory") / name):
        if place.is_dir():
            return place
    return Path("inventory") / name


def load_inventory(name: str) -> Inventory:
    """The inventory, checked. Raises ConfigError."""
    from gpuctl import config, plugins

    workloads = {workload: plugins.get("workloads", workload).Parameters for workload in plugins.names("workloads")}
    engines = plugins.names("engines")
    multi_node = [engine for engine in engines if getattr(plugins.get("engines", engine), "MULTI_NODE", False)]
    return config.load(folder(name), engines=engines, workloads=workloads, multi_node=multi_node)


def _inventories() -> list[str]:
    from gpuctl.assets import asset

    places = [place for place in (Path("inventory"), asset("inventory")) if place.is_dir()]
    return sorted({one.name for place in places for one in place.iterdir() if one.is_dir()})


def completing(*kinds: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """For a shell: names of the inventory that stands on the line. `kinds`: phases | servers | models | boxes."""

    def names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        try:
            place = ctx.params.get("inventory") or os.environ.get("GPUCTL_INVENTORY", "local")
            if "boxes" in kinds:
                from gpuctl import hosts

                machines = hosts.load(folder(place))
                found = [*machines.machines, *machines.groups]
            else:
                known = load_inventory(place)
                found = [name for kind in kinds for name in getattr(known, kind)]
        except Exception:  # noqa: BLE001 - a shell wants names or none, never a message
            return []
        return [name for name in found if name.startswith(incomplete)]

    return names
