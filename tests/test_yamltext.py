"""What is wrong with a text that should be YAML is said in words, and where it began."""

from __future__ import annotations

import pytest

from gpuctl.yamltext import NotYaml, parse

SERVERS = """\
servers:
  plain:
    engine: llamacpp
    model: tiny
    flags: {ctx-size: 4096}
    title: QUOTE
    port: 30000
  second:
    engine: llamacpp
    model: 'tiny'
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SERVERS.replace("QUOTE", "'one").replace("'tiny'", "tiny"), "6: a quote opens here and is never closed"),
        (SERVERS.replace("QUOTE", "'one"), "6: a quote opens here and is closed only in line 10: is one missing?"),
        (SERVERS.replace("QUOTE", "a: b"), "6: a second `: ` in one line: quote the text it stands in, or begin a new line"),
        (SERVERS.replace("4096}", "4096"), "5: a `{` opens here and is not closed"),
        ("a:\n  - [1, 2\n", "2: a `[` opens here and is not closed"),
        ("a: {b: 1 c: 2}\n", "1: a comma or a `}` is missing"),
        ("a: [1, 2]]\n", "1: a `]` that closes nothing"),
        ("a: {x: 1,, y: 2}\n", "1: a comma where a value is needed"),
        ("a:\n  b: 1\n   c: 2\n", "3: it is indented deeper than line 2, which has a value already"),
        ("a:\n  b: 1\n c: 2\n", "3: it is indented by 1, as nothing above it is: keys that belong together stand in one column"),
        ("a:\n  engine:vllm\n  b: 1\n", "2: a key without a value: a colon and a blank are missing (`key: value`)"),
        ("a: 1\nmodel\nb: 2\n", "2: a key without a value: a colon and a blank are missing (`key: value`)"),
        ("a:\n  - x\n  b: 1\n", "3: a key stands among the items of the list that begins in line 2"),
        ("a: 1\n- b\n", "2: an item of a list stands among the keys that begin in line 1"),
        ("a: - b\n", "1: a list begins in a line of its own, or is written as [a, b]"),
        ("a: \"x\" y\n", "1: text after a value that has ended: quote all of it"),
        ("servers:\n  s:\n    port: {{ port }}\n", "3: a template has to be quoted, as in \"{{ name }}\""),
        ("a: {{ tp }}-b\n", "1: a template has to be quoted, as in \"{{ name }}\""),
        ("a: [tp1-auto, *tp4]\n", "1: `*tp4` means what `&tp4` names, and nothing does; quote it where it is a text"),
        ("a: [*]\n", "1: a text that begins with `*` or `&` has to be quoted"),
        ("a: @x\n", "1: a text that begins with @ has to be quoted"),
        ("a: \"C:\\quit\"\n", "1: `\\q` means nothing in double quotes; use single ones, or `\\\\`"),
        ("a: !secret x\n", "1: the tag `!secret` is not known; a text that begins with `!` has to be quoted"),
        ("a: |x\n b\n", "1: the text after `|` or `>` begins in the next line"),
        ("a: 1\n---\nb: 2\n", "2: a second document begins (`---`); one is expected"),
        ("a: 1\nb: 2026-13-01\n", "2: '2026-13-01' looks like a number or a date and is none (month must be in 1..12): quote it"),
        ("a:\n\tb: 1\n", "2: a tab where blanks are needed: YAML is indented by blanks"),
    ],
)  # fmt: skip
def test_a_mistake_is_said_in_words_where_it_began(text, said):
    with pytest.raises(NotYaml) as caught:
        parse(text, "servers.yml")
    assert str(caught.value) == f"servers.yml:{said}"
