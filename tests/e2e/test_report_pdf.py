"""LaTeX compiled: what is printed is what the names were, and nothing in a document can run a program."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import runfolders

from gpuctl.document.wording import plain
from gpuctl.report import load_run, render
from gpuctl.reports import latex, pdf
from tests.test_report_html import run_named

needs_latex = pytest.mark.skipif(
    not (shutil.which("pdflatex") and shutil.which("pdftotext")), reason="no LaTeX here: `make latex` installs it"
)


def words_of(data, tmp_path):
    file = tmp_path / "report.pdf"
    file.write_bytes(data)
    return subprocess.run(["pdftotext", "-layout", file, "-"], capture_output=True, check=True, text=True).stdout


@needs_latex
def test_the_report_compiles_to_the_same_bytes_each_time_and_its_references_arrive(tmp_path):
    run = load_run(runfolders.small(tmp_path / "run"))
    data = render(run, "pdf")
    assert data.startswith(b"%PDF-")
    assert render(run, "pdf") == data
    text = words_of(data, tmp_path)
    assert "tp1-linear" in text
    assert "??" not in text


@needs_latex
def test_strange_names_are_printed_as_they_are(tmp_path):
    data = render(load_run(runfolders.strange(tmp_path / "run")), "pdf")
    text = words_of(data, tmp_path)
    for name in ('=HYPERLINK("http://x","y")', "a|b`c`*d*_e_", "<script>alert(1)</script>&amp;", "{{7*7}} ${x}"):
        assert name in text
    assert "U+65E5" in text


@needs_latex
def test_every_special_character_compiles(tmp_path):
    """One document with all of Latin-1, all specials, doubled, and letters no font has."""
    every = "".join(chr(i) for i in range(0x20, 0x100)) + "".join(c * 2 for c in latex._SPECIAL) + "日\U0001f600ſŁα→"
    assert render(run_named(plain(every)), "pdf").startswith(b"%PDF-")


@needs_latex
def test_a_document_cannot_run_programs(tmp_path):
    mark = tmp_path / "mark"
    source = rf"\documentclass{{article}}\begin{{document}}x\immediate\write18{{touch {mark}}}\end{{document}}"
    pdf.compile(source.encode())
    assert not mark.exists()


@needs_latex
def test_a_package_that_is_missing_is_named():
    with pytest.raises(pdf.CannotCompile, match=r"this LaTeX has no gpuctl-no-such-package.sty. Debian"):
        pdf.compile(rb"\documentclass{article}\usepackage{gpuctl-no-such-package}\begin{document}x\end{document}")


@needs_latex
def test_an_error_is_one_line():
    with pytest.raises(pdf.CannotCompile, match=r"fails: Undefined control sequence.; --format latex"):
        pdf.compile(rb"\documentclass{article}\begin{document}\undefined\end{document}")


@pytest.mark.skipif(
    not (shutil.which("lualatex") and subprocess.run(["kpsewhich", "luaotfload.sty"], capture_output=True).stdout),
    reason="no LuaLaTeX here",
)
def test_where_there_is_only_lualatex_it_does_as_well(monkeypatch, tmp_path):
    missing = ("pdflatex", "latexmk")
    monkeypatch.setattr(pdf.shutil, "which", lambda name, find=shutil.which: None if name in missing else find(name))
    run = load_run(runfolders.small(tmp_path / "run"))
    data = render(run, "pdf")
    assert data.startswith(b"%PDF-")
    assert render(run, "pdf") == data
