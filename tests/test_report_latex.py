"""LaTeX: whatever a name holds is printed and never acts; what is written compiles, and to the same bytes each time."""

from __future__ import annotations

import re

import pytest
import runfolders
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl.document.blocks import Cell, Column, Table
from gpuctl.report import load_run, render
from gpuctl.reports import latex
from gpuctl.reports.pdf import CannotCompile
from tests.test_report_html import run_named

# Everything that `escape` may write: a plain character, or one of these. Nothing else can act.
PLAIN = r"[A-Za-z0-9 @()/:;.+=À-ÖØ-öø-ÿ]"
SAFE = re.compile(
    rf"(?:{PLAIN}|\\[{{}}$&#%_]|\\ |\{{[-,!?*\[\]]\}}|\\text[a-z]+\{{\}}|\\ensuremath\{{\\[a-z]+\}}"
    r"|\\gpuctlchar\{[0-9A-F]+\}|\\allowbreak\{\})*"
)


@given(st.text(), st.booleans())
def test_whatever_is_escaped_can_only_be_printed(text, breaks):
    assert SAFE.fullmatch(latex.escape(text, breaks=breaks)), latex.escape(text)


@given(st.text())
def test_no_two_texts_print_the_same(text):
    """Undoing the escapes gives the text back."""
    undone = re.sub(r"\\gpuctlchar\{([0-9A-F]+)\}", lambda m: chr(int(m[1], 16)), latex.escape(text))
    names = {value: key for key, value in latex._SPECIAL.items()}
    for written in sorted(names, key=len, reverse=True):
        if written.startswith("\\text") or written.startswith("\\ensure"):
            undone = undone.replace(written, f"\0{ord(names[written])}\0")
    undone = re.sub(r"\{([-,!?*\[\]])\}", r"\1", undone)
    undone = re.sub(r"\\([{}$&#%_ ])", r"\1", undone)
    assert re.sub("\0(\\d+)\0", lambda m: chr(int(m[1])), undone) == text or "\0" in text


@settings(max_examples=30, deadline=None)
@given(st.text(min_size=1))
def test_documents_are_balanced(text):
    document = render(run_named(text), "latex").decode()
    opened = re.findall(r"\\begin\{([a-z*]+)\}", document)
    closed = re.findall(r"\\end\{([a-z*]+)\}", document)
    # the preamble defines environments: its own begins and ends are in pairs as well
    assert sorted(opened) == sorted(closed)


@pytest.mark.parametrize("which", ["small", "strange"])
def test_latex_reads_as_it_always_did(tmp_path, golden, which):
    run = load_run(getattr(runfolders, which)(tmp_path / "run"))
    text = render(run, "latex").decode()
    golden(f"report/{which}.tex", text[text.index(r"\hypersetup{pdftitle") :])


def test_the_preamble_has_the_palette_of_the_drawings():
    preamble = latex._PREAMBLE.read_text()
    assert latex.colours() in preamble


def test_every_figure_stands_between_marks_to_be_taken_out(tmp_path):
    text = render(load_run(runfolders.small(tmp_path / "run")), "latex").decode()
    figures = re.findall(
        r"% figure: (\S+)\n\\begin\{tikzpicture\}.*?\\end\{tikzpicture\}\n% end of figure", text, re.DOTALL
    )
    assert len(figures) == text.count("% figure: ") > 2


def test_a_wide_table_is_split_and_its_parts_say_so(tmp_path):
    folder = runfolders.Folder(tmp_path / "run")
    for i in range(20):
        folder.cell("p", "s", "decode", f"q{i}-256", {"prompt": f"q{i}", "max_tokens": 256}, {"decode_tok_s": 20.0})
    text = render(load_run(folder.close()), "latex").decode()
    assert "{(}1 of 4)" in text or "(1 of 4)" in text
    assert "(4 of 4)" in text


def test_an_interval_stays_with_its_figure_beside_a_text_of_several_lines():
    columns = (Column("What", text=True), Column("Factor"))
    long, short = (Cell("word " * 60), Cell("5.41", "[5.15, 5.67]")), (Cell("word"), Cell("2.60", "[2.56, 2.63]"))
    lines = list(latex._table(Table("t", "T", columns, (long, short))))
    assert any(
        r"\begin{tabular}[t]{@{}r@{}}{5.41}\\\gpuctlbelow{{[}5.15{,} 5.67{]}}\end{tabular}" in line for line in lines
    )
    assert any(line.endswith(r"{2.60} \\*") for line in lines)  # a line of its own costs no width


def test_without_latex_it_is_said_how_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotCompile, match=r"there is none here. Debian and Ubuntu: apt install latexmk"):
        render(load_run(runfolders.small(tmp_path / "run")), "pdf")
