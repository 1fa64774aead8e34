"""Markdown: read by a CommonMark parser, names are text and tables are whole; figures lie beside it."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import runfolders
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from gpuctl import plots
from gpuctl.document.wording import plain
from gpuctl.report import files, load_run, render
from tests.test_report_html import MARKUP, run_named

OURS = re.compile(r"</?(?:sub|details|summary)>")


def parsed(text):
    return MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(text)


def pieces(tokens):
    for token in tokens:
        yield token
        yield from pieces(token.children or [])


@settings(max_examples=80, deadline=None)
@given(
    st.text(min_size=1)
    | st.sampled_from([*runfolders.STRANGE, *MARKUP, "a|b", "``", "`", "1. x", "- x", "# x", "    x"])
)
def test_nothing_from_outside_becomes_markup(text):
    found = list(pieces(parsed(render(run_named(text), "markdown").decode())))
    html = "".join(t.content for t in found if t.type in ("html_inline", "html_block"))
    assert "<" not in OURS.sub("", html)
    assert not [t for t in found if t.type in ("link_open", "image", "em_open", "s_open")]
    words = [t.content for t in found if t.type in ("text", "code_inline", "fence", "text_special")]
    assert any(plain(text).strip() in word for word in words) or plain(text) in "".join(words)


def test_every_row_of_a_table_has_the_cells_of_its_head(tmp_path):
    for which in ("small", "strange", "example"):
        run = load_run(getattr(runfolders, which)(tmp_path / which))
        width = 0
        for token in parsed(render(run, "markdown").decode()):
            if token.type == "thead_open":
                width = 0
            elif token.type == "th_open":
                width += 1
            elif token.type == "tr_open":
                cells = 0
            elif token.type == "td_open":
                cells += 1
            elif token.type == "tr_close" and cells:
                assert cells == width


def test_figures_lie_beside_the_document_and_are_sound(tmp_path):
    run = load_run(runfolders.small(tmp_path / "run"))
    made = files(run, "markdown", "report.md")
    named = re.findall(r"!\[[^\n]*\]\(([^)]+)\)", made["report.md"].decode())
    assert named
    assert set(named) == set(made) - {"report.md"}
    for name in named:
        root = ElementTree.fromstring(made[name])
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert made == files(run, "markdown", "report.md")


def test_without_matplotlib_the_document_has_its_tables(monkeypatch, tmp_path):
    def cannot():
        raise plots.CannotDraw("no")

    monkeypatch.setattr(plots, "check", cannot)
    made = files(load_run(runfolders.small(tmp_path / "run")), "markdown", "report.md")
    assert list(made) == ["report.md"]
    assert b"![" not in made["report.md"]


@pytest.mark.parametrize("format", ["terminal", "markdown", "csv", "json", "latex"])
def test_these_formats_need_no_matplotlib(tmp_path, format):
    """In a process of its own: the base report must not import it."""
    import subprocess
    import sys

    runfolders.small(tmp_path / "run")
    code = (
        "import sys; sys.modules['matplotlib'] = None; from gpuctl.report import *; "
        f"render(load_run({str(tmp_path / 'run')!r}), {format!r}); assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
