"""YAML as text that a person wrote: its value, and the line of each part for messages. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

Path = tuple[str | int, ...]


class NotYaml(ValueError):
    """The text cannot be read. The message is one line: file, line, what."""


@dataclass(frozen=True)
class Document:
    file: str  # as messages name it
    value: Any
    lines: dict[Path, int]  # path of keys and indices -> line, counted from 1
    twice: tuple[tuple[Path, int], ...]  # keys that a mapping has a second time

    def at(self, *path: str | int) -> str:
        """`file:line`, of the part or of what encloses it."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.file}:{self.lines.get(path, 1)}"


class _Loader(yaml.SafeLoader):
    """SafeLoader, and Ansible's two tags as the text they carry."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # 2026-13-01, which looks like a date
            said = f"{node.value!r} looks like a number or a date and is none ({error}): quote it"
            raise yaml.constructor.ConstructorError(None, None, said, node.start_mark) from None


def _text(loader: _Loader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node))


_Loader.add_constructor("!vault", _text)
_Loader.add_constructor("!unsafe", _text)


def parse(text: str, file: str) -> Document:
    """Raises NotYaml."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        value = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line, why = _in_words(error, text)
        raise NotYaml(f"{file}:{line}: {why}" if line else f"{file}: {why}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise NotYaml(f"{file}:{line}: a character that may not stand there: #x{error.character:02x}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise NotYaml(f"{file}: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from None
    lines: dict[Path, int] = {}
    twice: list[tuple[Path, int]] = []
    if node is not None:
        # aliases of aliases multiply: nobody writes that many keys by hand
        for path, line, again in itertools.islice(_walk(node, (), 1), 200_000):
            lines.setdefault(path, line)
            if again:
                twice.append((path, line))
    return Document(file, value, lines, tuple(twice))


def _in_words(error: yaml.MarkedYAMLError, text: str) -> tuple[int, str]:
    """Where a mistake began, and what is probably wrong, as a person would say it; line 0 where none is known."""
    problem, context = (" ".join(str(one or "").split()) for one in (error.problem, error.context))
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return 0, problem or context
    line, began = mark.line + 1, (error.context_mark or mark).line + 1
    lines = text.splitlines()
    here = lines[mark.line] if mark.line < len(lines) else ""
    if "'\\t'" in problem:
        return line, "a tab where blanks are needed: YAML is indented by blanks"
    if re.search(r":\s+[^'\"\s#]*\{\{|^[^'\"#:]*\{\{", here) and ("unhashable" in problem or "expected" in problem):
        return line, 'a template has to be quoted, as in "{{ name }}"'
    if "quoted scalar" in context and "end of stream" in problem:
        return began, "a quote opens here and is never closed"
    opened, quoted = _left_open(text)
    if problem.startswith("expected <block end>") and quoted and quoted[0] < line <= quoted[1] + 1:
        return quoted[0], f"a quote opens here and is closed only in line {quoted[1]}: is one missing?"
    if opened and ("<stream end>" in problem or (problem.startswith("expected ',' or") and opened[0] < line)):
        return opened[0], f"a `{opened[1]}` opens here and is not closed"
    if problem == "mapping values are not allowed here":
        return _second_colon(lines, mark.line, mark.column)
    for pattern, words in _WORDS:
        if found := re.search(pattern, problem):
            return line, words.format(*found.groups(), began=began, blanks=len(here) - len(here.lstrip()))
    if "expected ':'" in problem:
        return began, "a key without a value: a colon and a blank are missing (`key: value`)"
    return line, problem or context


# PyYAML's problem -> words
_WORDS = (
    (
        r"^expected <block end>, but found '<block mapping start>'",
        "it is indented by {blanks}, as nothing above it is: keys that belong together stand in one column",
    ),
    (r"^expected <block end>, but found '-'", "an item of a list stands among the keys that begin in line {began}"),
    (r"^expected <block end>, but found '\?'", "a key stands among the items of the list that begins in line {began}"),
    (r"^expected <block end>, but found '<scalar>'", "text after a value that has ended: quote all of it"),
    (r"^expected alphabetic or numeric character", "a text that begins with `*` or `&` has to be quoted"),
    (r"but found '([\]}}])'", "a `{0}` that closes nothing"),
    (r"but found ','", "a comma where a value is needed"),
    (r"^expected ',' or '(.)', but got", "a comma or a `{0}` is missing"),
    (r"^found undefined alias '(.*)'", "`*{0}` means what `&{0}` names, and nothing does; quote it where it is a text"),
    (r"^found character '(.)' that cannot start", "a text that begins with {0} has to be quoted"),
    (r"^found unknown escape character '(.)'", "`\\{0}` means nothing in double quotes; use single ones, or `\\\\`"),
    (r"^could not determine a constructor for the tag '(?:tag:yaml.org,2002:)?!?(.*)'",
     "the tag `!{0}` is not known; a text that begins with `!` has to be quoted"),
    (r"^sequence entries are not allowed", "a list begins in a line of its own, or is written as [a, b]"),
    (r"another document", "a second document begins (`---`); one is expected"),
    (r"^found unhashable key", "a list or a mapping cannot be a key; a text with brackets has to be quoted"),
    (r"^expected chomping or indentation", "the text after `|` or `>` begins in the next line"),
)  # fmt: skip


def _second_colon(lines: list[str], index: int, column: int) -> tuple[int, str]:
    """Why a colon stands where it may not: it is the line's second, or the line above is no key."""
    if re.search(r":\s", lines[index][:column]):
        return index + 1, "a second `: ` in one line: quote the text it stands in, or begin a new line"
    above = next((n for n in range(index - 1, -1, -1) if re.sub(r"(^|\s)#.*", "", lines[n]).strip()), None)
    if above is None:
        return index + 1, "a colon where no key is"
    said = re.sub(r"\s#.*", "", lines[above]).strip()
    if not re.search(r":(\s|$)", said):
        return above + 1, "a key without a value: a colon and a blank are missing (`key: value`)"
    return index + 1, f"it is indented deeper than line {above + 1}, which has a value already"


def _left_open(text: str) -> tuple[tuple[int, str] | None, tuple[int, int] | None]:
    """Up to the mistake: the innermost bracket that is open (line, bracket), and the last quoted text over several
    lines (first, last)."""
    opened: list[tuple[int, str]] = []
    quoted = None
    try:
        for token in yaml.scan(text, Loader=yaml.SafeLoader):
            if isinstance(token, yaml.FlowSequenceStartToken | yaml.FlowMappingStartToken):
                bracket = "[" if isinstance(token, yaml.FlowSequenceStartToken) else "{"
                opened.append((token.start_mark.line + 1, bracket))
            elif isinstance(token, yaml.FlowSequenceEndToken | yaml.FlowMappingEndToken):
                del opened[-1:]
            elif isinstance(token, yaml.ScalarToken) and token.style in ("'", '"'):
                first, last = token.start_mark.line + 1, token.end_mark.line + 1
                quoted = (first, last) if last > first else quoted
    except yaml.YAMLError:
        pass  # that is the mistake
    return (opened[-1] if opened else None), quoted


def _walk(node: yaml.Node, path: Path, line: int, deep: int = 0) -> Iterator[tuple[Path, int, bool]]:
    yield path, line, False
    if deep > 50:  # an anchor inside itself; nobody nests that deep by hand
        return
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            name, at = str(key.value), key.start_mark.line + 1
            if name in seen:
                yield (*path, name), at, True
            seen.add(name)
            yield from _walk(value, (*path, name), at, deep + 1)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _walk(value, (*path, index), value.start_mark.line + 1, deep + 1)
