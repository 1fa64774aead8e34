"""LaTeX: whatever a name holds is printed and never acts; what is written compiles, and to the same bytes each time."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import runfolders
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl.document.wording import plain
from gpuctl.report import load_run, render
from gpuctl.reports import latex, pdf
from tests.test_report_html import run_named

HAS_LATEX = shutil.which("pdflatex") or shutil.which("lualatex")
needs_latex = pytest.mark.skipif(not HAS_LATEX, reason="no LaTeX here: `make latex` installs it")

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


# --- compiled ---


def words_of(data, tmp_path):
    file = tmp_path / "report.pdf"
    file.write_bytes(data)
    return subprocess.run(["pdftotext", "-layout", file, "-"], capture_output=True, check=True, text=True).stdout


@needs_latex
def test_the_example_compiles_without_a_warning_that_matters(tmp_path):
    run = load_run(runfolders.small(tmp_path / "run"))
    data = render(run, "pdf")
    assert data.startswith(b"%PDF-")
    if shutil.which("pdftotext"):
        text = words_of(data, tmp_path)
        assert "tp1-linear" in text
        assert "??" not in text  # every reference found its table


@needs_latex
def test_strange_names_are_printed_as_they_are(tmp_path):
    data = render(load_run(runfolders.strange(tmp_path / "run")), "pdf")
    if shutil.which("pdftotext"):
        text = words_of(data, tmp_path)
        for name in ('=HYPERLINK("http://x","y")', "a|b`c`*d*_e_", "<script>alert(1)</script>&amp;", "{{7*7}} ${x}"):
            assert name in text
        assert "U+65E5" in text


@needs_latex
@pytest.mark.slow
def test_every_special_character_compiles(tmp_path):
    """One document with all of Latin-1, all specials, doubled, and letters no font has."""
    every = "".join(chr(i) for i in range(0x20, 0x100)) + "".join(c * 2 for c in latex._SPECIAL) + "日\U0001f600ſŁα→"
    assert render(run_named(plain(every)), "pdf").startswith(b"%PDF-")


@needs_latex
def test_the_same_run_gives_the_same_pdf(tmp_path):
    run = load_run(runfolders.small(tmp_path / "run"))
    assert render(run, "pdf") == render(run, "pdf")


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


def test_without_latex_it_is_said_how_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pdf.CannotCompile, match=r"there is none here. Debian and Ubuntu: apt install latexmk"):
        render(load_run(runfolders.small(tmp_path / "run")), "pdf")
