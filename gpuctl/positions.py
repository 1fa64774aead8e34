"""YAML with the line of every key, so that a mistake can be pointed at. Pure."""

from __future__ import annotations

from typing import Any

import yaml

Path = tuple[str | int, ...]


class Positions:
    """Where each key of a document stands."""

    def __init__(self, lines: dict[Path, int]) -> None:
        self._lines = lines

    def line(self, path: Path) -> int:
        """The line of the key, or of the nearest key above it that is in the file."""
        path = tuple(path)
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)


def parse(text: str) -> tuple[Any, Positions, list[tuple[int, str]]]:
    """The value (as yaml.safe_load gives it), the lines, and the problems as (line, what): syntax, double keys."""
    problems: list[tuple[int, str]] = []
    lines: dict[Path, int] = {}
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        return (
            None,
            Positions({}),
            [(line, f"not YAML: a character that may not stand there (#x{error.character:02x})")],
        )
    try:
        node = loader.get_single_node()
        if node is None:
            return None, Positions({}), problems
        _walk(node, (), lines, problems)
        value = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        return None, Positions({}), [(line, f"not YAML: {error.problem or error.context}")]
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return None, Positions({}), [(1, f"not YAML: {first}")]
    finally:
        loader.dispose()
    return value, Positions(lines), problems


def _walk(node: yaml.Node, path: Path, lines: dict[Path, int], problems: list[tuple[int, str]]) -> None:
    if len(path) > 50 or len(lines) > 100_000:  # aliases that contain themselves, or multiply
        return
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            name = str(key.value) if isinstance(key, yaml.ScalarNode) else "?"
            line = key.start_mark.line + 1
            if name in seen and name != "<<":
                problems.append((line, f"{name}: a second time; it stands on line {seen[name]} already"))
            seen.setdefault(name, line)
            lines[(*path, name)] = line
            _walk(value, (*path, name), lines, problems)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*path, index)] = value.start_mark.line + 1
            _walk(value, (*path, index), lines, problems)
