"""YAML as text that a person wrote: its value, and the line of each part for messages. Pure."""

from __future__ import annotations

import itertools
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
        mark = error.problem_mark or error.context_mark
        where = f"{file}:{mark.line + 1}" if mark else file
        why = " ".join(str(error.problem or error.context).split())
        if "'\\t'" in why:
            why = "a tab where blanks are needed: YAML is indented by blanks"
        raise NotYaml(f"{where}: {why}") from None
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
