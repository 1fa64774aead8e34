"""The command line of the faults, made from their functions."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import click

import tests.lab.faults
from tests.lab.lab import Lab


def faults() -> dict[str, Callable[..., Any]]:
    """Command -> function: every public function of the modules here whose first parameter is the lab."""
    found: dict[str, Callable[..., Any]] = {}
    for module in pkgutil.iter_modules(tests.lab.faults.__path__):
        if module.name == "commands":
            continue
        loaded = importlib.import_module(f"tests.lab.faults.{module.name}")
        for name, function in inspect.getmembers(loaded, inspect.isfunction):
            own = function.__module__ == loaded.__name__ and not name.startswith("_")
            if own and next(iter(inspect.signature(function).parameters), "") == "lab":
                found[name.replace("_", "-")] = function
    return found


def group() -> click.Group:
    fault = click.Group("fault", help="Break something. Most faults take --undo, the others end with a restart.")
    for name, function in sorted(faults().items()):
        fault.add_command(_command(name, function))
    return fault


def _command(name: str, function: Callable[..., Any]) -> click.Command:
    parameters: list[click.Parameter] = []
    for parameter in list(inspect.signature(function, eval_str=True).parameters.values())[1:]:
        plain = parameter.name.rstrip("_")
        given = parameter.default is not inspect.Parameter.empty
        kind, default = parameter.annotation, parameter.default if given else None
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            metavar = plain.upper()
            parameters.append(
                click.Argument([parameter.name], type=kind, required=not given, default=default, metavar=metavar)
            )
        elif kind is bool:
            flag = f"--{plain}/--no-{plain}" if default else f"--{plain}"
            parameters.append(click.Option([flag], is_flag=True, default=default))
        else:
            parameters.append(
                click.Option([f"--{plain}", parameter.name], type=kind, default=default, show_default=True)
            )

    @click.pass_obj
    def run(lab: Lab, **given: Any) -> None:
        positional = inspect.signature(function).parameters
        said = function(lab, **{key: given[key if key in given else key.rstrip("_")] for key in list(positional)[1:]})
        if said:
            click.echo(said)

    return click.Command(name, callback=run, params=parameters, help=function.__doc__)
