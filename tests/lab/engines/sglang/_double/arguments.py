"""The command line: the true options of the release, so that argparse itself finds what is unknown or ambiguous."""

import argparse
import json

from sglang._double import log
from sglang._double.release import RELEASE, table

DDTREE_FLAG = {"options": ["--speculative-ddtree-budget"], "kind": "store", "type": "int"}


def _size(text):
    """A number, or one with a suffix: 4k, 1M, 2.5Ki."""
    units = {"k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
    lower = text.strip().lower()
    for unit in sorted(units, key=len, reverse=True):
        if lower.endswith(unit):
            return int(float(lower[: -len(unit)]) * units[unit])
    return int(lower)


def _nullable(text):
    return None if text in ("", "None") else text


_size.__name__, _nullable.__name__ = "human_readable_int", "nullable_str"
TYPES = {"int": int, "float": float, "str": str, "json": json.loads, "size": _size, "nullable": _nullable}


def _yellow(text):
    log.line("\033[1;33m%s\033[0m" % text)


class _Old(argparse.Action):
    """An option that still works, with a warning; `new` names what replaces it."""

    def __init__(self, *args, value=None, new=None, **kwargs):
        self.value, self.new = value, new
        super().__init__(*args, **kwargs)

    def __call__(self, parser, namespace, values, option_string=None):
        instead = " Use '%s' instead." % self.new if self.new else ""
        _yellow("'%s' is deprecated and will be removed in a future release.%s" % (option_string, instead))
        setattr(namespace, self.dest, values if self.value is None else self.value)


class _Gone(argparse.Action):
    """An option that is accepted and does nothing."""

    def __call__(self, parser, namespace, values, option_string=None):
        _yellow("The command line argument '%s' is deprecated and will be removed in future versions." % option_string)


def _dest(flag):
    return flag.get("dest") or flag["options"][0].lstrip("-").replace("-", "_")


def _replacement(flag, flags):
    """The option that fills the same field and is not old itself."""
    for other in flags:
        if other is not flag and _dest(other) == _dest(flag) and not other["kind"].startswith("old"):
            return other["options"][0]
    return None


def _add(parser, flag, flags):
    kind = flag["kind"]
    known = {"dest": _dest(flag), "default": flag.get("default", False if kind in ("true", "old-true") else None)}
    if flag.get("hidden"):
        known["help"] = argparse.SUPPRESS
    if kind == "bool":
        parser.add_argument(*flag["options"], action=_Boolean, nargs=0, **known)
    elif kind == "true":
        parser.add_argument(*flag["options"], action="store_true", **known)
    elif kind == "gone":
        parser.add_argument(*flag["options"], action=_Gone, nargs=0, **known)
    elif kind in ("old-true", "old-const"):
        value = True if kind == "old-true" else flag["const"]
        new = _replacement(flag, flags)
        if kind == "old-const" and new:
            new = "%s=%s" % (new, value)
        parser.add_argument(*flag["options"], action=_Old, nargs=0, value=value, new=new, **known)
    else:
        if "choices" in flag:
            known["choices"] = flag["choices"]
        if "nargs" in flag:
            known["nargs"] = flag["nargs"]
            if flag["nargs"] == "?":
                known["const"] = ""
        if flag.get("metavar"):
            known["metavar"] = flag["metavar"]
        known["type"] = TYPES[flag.get("type", "str")]
        if kind == "old-store":
            parser.add_argument(*flag["options"], action=_Old, new=_replacement(flag, flags), **known)
        else:
            parser.add_argument(*flag["options"], required=flag.get("required", False), **known)


class _Boolean(argparse.Action):
    """argparse.BooleanOptionalAction, whose help text differs between Python releases."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, not option_string.startswith("--no-"))

    def format_usage(self):
        return " | ".join(self.option_strings)


def _with_ddtree(flag):
    if flag["options"][0] == "--speculative-algorithm" and "choices" in flag:
        return {**flag, "choices": [*flag["choices"], "DDTREE"]}
    return flag


def parser(fork=False, release=RELEASE):
    """The parser of a release; `fork` adds the option that no release has and the DDTREE forks do."""
    made = argparse.ArgumentParser(prog="sglang serve")
    flags = table(release)["flags"]
    if fork:
        flags = [_with_ddtree(flag) for flag in flags] + [DDTREE_FLAG]
    for flag in flags:
        _add(made, flag, flags)
    return made
