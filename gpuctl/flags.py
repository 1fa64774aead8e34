"""Flags of a server's command line: what the installed version takes, read from its own `--help`, and what is wrong.

The installed `--help` is the truth: flags come, go and are renamed with every release of an engine. It is read in the
forms of argparse (SGLang, vLLM with its groups, on any Python) and of llama-server. Pure: asking the machine is not
here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpuctl.finding import Certainty, Finding, Layer, Severity
from gpuctl.spelling import nearest

# Engines that read `--max_model_len` as --max-model-len: vLLM's utils/argparse_utils.py, llama.cpp's common/arg.cpp.
UNDERSCORES = ("vllm", "llamacpp")


@dataclass(frozen=True)
class Option:
    """One flag with all its names. `takes`: how many values, "0", "1", "?" (none or one), "+" (several)."""

    names: tuple[str, ...]
    takes: str = "1"
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class FlagSet:
    """What one installed version takes."""

    options: tuple[Option, ...]
    abbreviates: bool = True  # argparse: a unique beginning of a flag stands for it
    underscores: bool = False  # vLLM, llama.cpp: --max_model_len is --max-model-len
    by_name: Mapping[str, Option] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {name: option for option in self.options for name in option.names})

    def find(self, name: str) -> tuple[Option | None, tuple[str, ...]]:
        """The option of that name; or none, with the flags that the name could be the beginning of."""
        if self.underscores:
            name = dashed(name)
        if name in self.by_name:
            return self.by_name[name], ()
        if self.underscores and name.partition(".")[0] in self.by_name:
            return self.by_name[name.partition(".")[0]], ()  # vLLM: --speculative-config.method eagle3
        if not self.abbreviates or not name.startswith("--"):
            return None, ()
        begun = tuple(known for known in self.by_name if known.startswith(name))
        options = {self.by_name[known].names: self.by_name[known] for known in begun}
        if len(options) == 1:
            return next(iter(options.values())), begun[:1]
        return None, begun


class NoFlags(ValueError):
    """The text is no help text: no flag was found in it."""


def parse_help(text: str, *, engine: str = "") -> FlagSet:
    """The flags of a `--help` text, or of a usage message. Raises NoFlags."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text.replace("\r", ""))[:4_000_000]
    found: dict[str, Option] = {}
    for option in (*_listed(text.splitlines()), *_usage(text)):
        names = tuple(dict.fromkeys(option.names))
        known = next((found[name] for name in names if name in found), None)
        if known is not None:
            names = tuple(dict.fromkeys((*known.names, *names)))
            takes = known.takes if known.takes != "0" or option.takes == "0" else option.takes
            option = Option(names, takes, known.choices or option.choices)
        for name in names:
            found[name] = Option(names, option.takes, option.choices)
    if not found:
        raise NoFlags("no flag was found in the text: is it the output of --help?")
    unique = tuple({option.names: option for option in found.values()}.values())
    return FlagSet(unique, abbreviates=engine != "llamacpp", underscores=engine in UNDERSCORES)


_NAME = r"-{1,2}[A-Za-z0-9][\w.-]*"
_ENTRY = re.compile(rf"^ {{0,8}}(?P<names>{_NAME}(?:[ =,|].*)?)$")
_FIRST = re.compile(rf"(?P<name>{_NAME})")


def _listed(lines: Sequence[str]) -> Iterator[Option]:
    """Options as help texts list them, one an entry: names with their values, then words after two or more blanks."""
    for number, line in enumerate(lines):
        if (match := _ENTRY.match(line)) is None:
            continue
        indent = len(line) - len(line.lstrip())
        head = match["names"]
        # llama-server pads between a short and a long name; the words begin after two blanks behind a name or a value.
        head = re.sub(rf"({_NAME},) +(?=-)", r"\1 ", head)
        head = re.split(r"\s{2,}", head, maxsplit=1)[0]
        if number + 1 < len(lines):
            following = lines[number + 1]
            more = _ENTRY.match(following) is None and len(following) - len(following.lstrip()) == indent
            if more and head.rstrip().endswith((",", "|")):
                head += " " + following.strip()
        option = _option(head)
        if option is not None:
            yield option


def _option(head: str) -> Option | None:
    names, metas = [], []
    for piece in re.split(rf"[,|] *(?={_NAME})| \| (?={_NAME})", head):
        first = _FIRST.match(piece.strip())
        if first is None:
            return None
        names.append(first["name"])
        metas.append(piece.strip()[first.end() :].strip(" ="))
    meta = next((meta for meta in reversed(metas) if meta), "")
    if meta and not _is_meta(meta):
        meta = ""
    return Option(tuple(names), _takes(meta), _choices(meta))


def _is_meta(meta: str) -> bool:
    """Whether words after a flag stand for its value, and are not the beginning of a sentence."""
    if meta[0] in "{[<":
        return True
    if re.fullmatch(r"(?:[\w.:/+*-]+,)+[\w.:/+*-]+", meta):
        return True  # llama-server lists choices bare: --spec-type none,draft-simple
    words = meta.split()
    return len(words) <= 4 and all(re.fullmatch(r"[A-Z0-9_.:/|\[\]<>=,-]+|\.\.\.\]?|lo-hi", word) for word in words)


def _takes(meta: str) -> str:
    if not meta:
        return "0"
    if "..." in meta and not re.fullmatch(r"<[^>]*>|\{[^}]*\}", meta):
        return "+"
    return "?" if meta.startswith("[") and meta.endswith("]") and "|" not in meta else "1"


def _choices(meta: str) -> tuple[str, ...]:
    if (match := re.search(r"\{([^{}]*)\}", meta)) is not None:
        return tuple(choice.strip().strip("'\"") for choice in match[1].split(",") if choice.strip())
    if (match := re.fullmatch(r"[\[<]([\w.-]+(?:\|[\w.-]+)+)[\]>]", meta)) is not None:
        return tuple(match[1].split("|"))
    return ()


def _usage(text: str) -> Iterator[Option]:
    """Options out of argparse's usage message, which names each flag once and gives its choices."""
    match = re.search(r"(?m)^usage:(?P<usage>.*(?:\n[ \t]+.*)*)", text)
    if match is None:
        return
    usage = re.sub(r"\s+", " ", match["usage"])
    for found in re.finditer(
        rf"(?<![\w-])(?P<names>{_NAME}(?: \| {_NAME})*)(?: (?P<meta>\{{[^{{}}]*\}}|[A-Z][A-Z0-9_]*|\[[A-Z][^\[\]]*\]))?"
        r"(?P<more> \[[^\[\]-]*\.\.\.\])?",
        usage,
    ):
        meta = (found["meta"] or "") + (found["more"] or "")
        yield Option(tuple(found["names"].split(" | ")), _takes(meta), _choices(meta))


# What was given


@dataclass(frozen=True)
class Given:
    """A flag on a command line, as written, with its values."""

    name: str
    values: tuple[str, ...] = ()

    @property
    def value(self) -> str | None:
        return self.values[0] if self.values else None


_NUMBER = re.compile(r"-\d+(?:\.\d*)?(?:[eE][+-]?\d+)?$|-\.\d+$")


def given(argv: Sequence[str]) -> tuple[Given, ...]:
    """The flags of a command line in order, each with what follows it; what stands before the first is left out."""
    found: list[Given] = []
    for word in argv:
        if word.startswith("-") and len(word) > 1 and not _NUMBER.match(word):
            name, equals, value = word.partition("=")
            if not equals or not re.fullmatch(_NAME, name):
                name, value, equals = word, "", ""
            found.append(Given(name, (value,) if equals else ()))
        elif found:
            last = found[-1]
            found[-1] = Given(last.name, (*last.values, word))
    return tuple(found)


@dataclass(frozen=True)
class Arguments:
    """A command line by flag: the last of each counts, aliases are one."""

    values: Mapping[str, tuple[str, ...]]

    def text(self, *names: str) -> str | None:
        """The value of the first of the names that was given."""
        for name in names:
            if name in self.values:
                found = self.values[name]
                return found[0] if found else ""
        return None

    def on(self, *names: str) -> bool:
        """Whether one of the names was given, with no value that says no."""
        value = self.text(*names)
        return value is not None and value.lower() not in ("false", "0", "off", "no")

    def number(self, *names: str) -> float | None:
        """The value as a finite number; None where it is absent or none (checking that is `check`'s)."""
        value = self.text(*names)
        try:
            found = None if value is None else float(value)
        except ValueError:
            return None
        return found if found is not None and math.isfinite(found) else None

    def whole(self, *names: str) -> int | None:
        """The value as a whole number; None where it is absent or none."""
        try:
            return int(self.text(*names) or "")
        except ValueError:
            return None

    def many(self, *names: str) -> tuple[str, ...]:
        return next((self.values[name] for name in names if name in self.values), ())


def arguments(argv: Sequence[str]) -> Arguments:
    return Arguments({flag.name: flag.values for flag in given(argv)})


def dashed(name: str) -> str:
    """A flag as engines read it that take underscores for dashes; other words as they are."""
    if not name.startswith("--"):
        return name
    head, mark, rest = re.fullmatch(r"([^.=]*)([.=]?)(.*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
    return f"{head.replace('_', '-')}{mark}{rest}"


# Values


def plain_number(text: str) -> float | None:
    """A number as Python's argparse reads it; None where it is none, or not finite."""
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


@dataclass(frozen=True)
class Number:
    """A flag whose value is a number: what its engine takes, without what makes no sense.

    `least` itself is refused where the number need not be whole: a share of nothing. `also` is taken beside numbers.
    """

    names: tuple[str, ...]
    least: float = 1
    most: float = math.inf
    whole: bool = True
    also: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()  # refused by the engine's own rules, with words of their own
    several: bool = False  # a list of them
    read: Callable[[str], float | None] = plain_number

    @property
    def expected(self) -> str:
        if self.whole:
            number = f"a whole number of at least {self.least:g}"
        else:
            number = f"a number above {self.least:g}" + (f" and at most {self.most:g}" if self.most < math.inf else "")
        return " or ".join((number, *self.also))

    def takes(self, text: str) -> bool:
        if text in self.also or text in self.elsewhere:
            return True
        found = self.read(text)
        if found is None or found > self.most:
            return False
        if not self.whole:
            return found > self.least
        # argparse's int() takes neither 1.5 nor 8.0; an engine that reads units says what they come to
        return found >= self.least and found == int(found) and (self.read is not plain_number or _is_int(text))


def _is_int(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def unreadable(given: Arguments, numbers: Iterable[Number]) -> Iterator[Finding]:
    """Values that the engine refuses, or that make no sense, among the flags that a plan is computed from."""
    for number in numbers:
        for name in number.names:
            if name not in given.values:
                continue
            values = given.values[name]
            if values and (number.several or len(values) == 1) and all(number.takes(value) for value in values):
                continue
            wrong_ones = [value for value in values if not number.takes(value)] or list(values)
            was = f"is {' '.join(wrong_ones)!r}" if values else "has no value"
            yield _wrong("bad-argument", f"{name} {was}: {number.expected} is expected", _meant(name, number, values))


def unread(given: Arguments, words: Mapping[tuple[str, ...], Iterable[str]]) -> Iterator[Finding]:
    """Values, among flags that take one of several words, that a plan does not know: it is made as if without them."""
    for names, known in words.items():
        for name in names:
            value = next(iter(given.values.get(name, ())), None)
            if value is None or value in known:
                continue
            near = nearest(value, known)
            yield wrong(
                "bad-choice",
                f"{name} {value}: not known offline" + (f"; did you mean {near}?" if near else ""),
                f"It is planned as if {name} were absent. Known are: {', '.join(known)}",
                severity=Severity.WARNING,
                certainty=Certainty.POSSIBLE,
            )


def _meant(name: str, number: Number, values: Sequence[str]) -> str:
    text = values[0] if len(values) == 1 else ""
    if (match := re.fullmatch(r"(\d+)[kK]", text)) and number.takes(match[1]):
        return f"Write it out: {name} {int(match[1]) * 1024} (or {int(match[1]) * 1000})."
    for changed in (text.replace(",", "."), text.replace(",", ""), text.removesuffix(".0")):
        if changed != text and number.takes(changed):
            return f"{name} {changed}, or leave the flag out."
    return "Correct it, or leave the flag out."


# What is wrong


def check(argv: Sequence[str], flags: FlagSet, *, engine: str, renamed: Mapping[str, str] | None = None,
          foreign: Mapping[str, str] | None = None) -> Iterator[Finding]:  # fmt: skip
    """What the installed version will refuse on this command line. `renamed`, `foreign`: what a flag is called here."""
    for flag in given(argv):
        option, begun = flags.find(flag.name)
        if option is None and len(begun) > 1:
            yield _wrong(
                "ambiguous-flag",
                f"{flag.name} is the beginning of several flags of the installed {engine}: {', '.join(sorted(begun))}",
                f"Write {now} out." if (now := (renamed or {}).get(flag.name)) in begun else "Write one of them out.",
            )
        elif option is None:
            yield _unknown(flag, flags, engine, {**(foreign or {}), **(renamed or {})})
        else:
            if begun:
                yield _wrong(
                    "abbreviated-flag",
                    f"{flag.name} works only as the beginning of {begun[0]}; a new flag of that beginning breaks it",
                    f"Write {begun[0]}.",
                    severity=Severity.WARNING,
                )
            yield from _values(flag, option, engine)


def _unknown(flag: Given, flags: FlagSet, engine: str, names: Mapping[str, str]) -> Finding:
    known = names.get(flag.name)
    if known is not None and (known not in flags.by_name and known.startswith("--")):
        known = None
    near = nearest(flag.name, flags.by_name, alike=0.75)
    advice = (
        f"It is called {known} here."
        if known
        else f"Did you mean {near}?"
        if near
        else "Leave it out, or look for its new name in the engine's --help."
    )
    return _wrong("unknown-flag", f"the installed {engine} has no flag {flag.name}", advice)


def unknown(argv: Sequence[str], names: Iterable[str]) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Flags that are none of the known names: those that look like a slip of one of them, and the others.

    The names need not be all that the engine has, so none is called wrong.
    """
    known = FlagSet(tuple(Option((name,)) for name in sorted(set(names))))
    slips, others = [], []
    for flag in given(argv):
        name = flag.name.partition(".")[0]
        positive = name.replace("--no-", "--", 1) if name.startswith("--no-") else name
        if name in known.by_name or positive in known.by_name:
            continue
        _, begun = known.find(name)
        near = begun[0] if len(begun) == 1 else nearest(dashed(name), known.by_name, alike=0.85)
        if near is None or not name.startswith("--"):
            others.append(name)
            continue
        slips.append(
            wrong(
                "unknown-flag",
                f"{name}: not known offline; did you mean {near}?",
                "What a plan reads is read from flags written out. If the installed version has it: "
                "`gpuctl plan` without --offline asks it once.",
                severity=Severity.WARNING,
                certainty=Certainty.POSSIBLE,
            )
        )
    return tuple(slips), tuple(dict.fromkeys(others))


def _values(flag: Given, option: Option, engine: str) -> Iterator[Finding]:
    if option.takes == "1" and not flag.values:
        yield _wrong("bad-argument", f"{flag.name} needs a value", "Give one, or leave the flag out.")
    for value in flag.values:
        if option.choices and value not in option.choices:
            near = nearest(value, option.choices, alike=0.5)
            yield _wrong(
                "bad-choice",
                f"{flag.name} cannot be {value!r} in the installed {engine}",
                (f"Did you mean {near}? " if near else "") + f"It takes: {', '.join(option.choices)}",
            )
    if option.takes == "0" and flag.values and flag.name.startswith("--"):
        yield _wrong(
            "bad-argument",
            f"{flag.name} takes no value, and {flag.values[0]!r} follows it",
            "Take the value away (a flag that is on has none).",
        )


def _wrong(id: str, summary: str, advice: str, severity: Severity = Severity.CRITICAL) -> Finding:
    return Finding(
        summary=summary[:1].upper() + summary[1:],
        layer=Layer.SERVER,
        severity=severity,
        certainty=Certainty.PROVED,
        advice=advice,
        id=id,
    )


def wrong(id: str, summary: str, advice: str, **more: object) -> Finding:
    """A finding about a command line, for the rules of an engine."""
    return Finding(summary=summary, layer=Layer.SERVER, advice=advice, id=id, **more)  # type: ignore[arg-type]


def worst(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """What makes the command line impossible, before what is only worth knowing."""
    order = {Severity.CRITICAL: 0, Severity.WARNING: 1, Severity.INFO: 2}
    return tuple(sorted(findings, key=lambda finding: order[finding.severity]))
