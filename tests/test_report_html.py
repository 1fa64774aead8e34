"""The HTML page: well-formed, closed against the network, and nothing from outside is markup."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser

import pytest
import runfolders
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuctl import plots
from gpuctl.document.wording import plain
from gpuctl.records import CellId, Failure, Record, State, estimate
from gpuctl.report import load_run, render
from gpuctl.results.run import LeftOut, Run

VOID = {"meta", "br", "link"}
PAGE = frozenset({
    "html", "head", "meta", "title", "style", "body", "a", "header", "h1", "h2", "h3", "h4", "ul", "li", "p", "nav",
    "main", "section", "div", "table", "caption", "thead", "tbody", "tr", "th", "td", "code", "strong", "sup", "span",
    "pre", "br", "details", "summary", "figure", "figcaption", "footer",
})  # fmt: skip
DRAWING = {"svg", "g", "path", "defs", "use", "text", "clippath", "rect", "pattern", "tspan"}


class Page(HTMLParser):
    """Reads a page and checks on the way that every tag is closed in order."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.words, self.attributes, self.ids = [], set(), [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    run = load_run(runfolders.example(tmp_path_factory.mktemp("run") / "example"))
    return Page(render(run, "html").decode())


def test_tags_are_closed_in_order_and_only_those_of_a_report(page):
    assert page.tags <= PAGE | DRAWING


def test_ids_are_unique_and_every_link_inside_the_page_arrives(page):
    assert len(page.ids) == len(set(page.ids))
    targets = [value for _, name, value in page.attributes if name in ("href", "xlink:href")]
    assert targets
    assert all(target.startswith("#") and target[1:] in page.ids for target in targets)


def test_the_page_loads_nothing_and_runs_nothing(page):
    assert not {name for _, name, _ in page.attributes} & {"src", "srcset", "action", "background"}
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    policy = [value for tag, name, value in page.attributes if tag == "meta" and name == "content"]
    assert "default-src 'none'; style-src 'unsafe-inline'" in policy


def test_every_table_has_a_caption_and_every_row_a_header(page):
    assert {"caption", "thead"} <= page.tags
    scopes = [value for tag, name, value in page.attributes if tag == "th" and name == "scope"]
    assert set(scopes) == {"col", "row"}


def test_every_figure_says_what_it_shows_and_has_its_numbers_in_a_table(page):
    drawings = [value for tag, name, value in page.attributes if tag == "svg" and name == "aria-label"]
    assert len(drawings) > 10
    assert all("The table has its numbers." in label for label in drawings)


def test_without_matplotlib_the_page_has_its_tables_and_says_what_is_missing(monkeypatch, tmp_path):
    def cannot():
        raise plots.CannotDraw("figures are drawn with matplotlib: pip install matplotlib")

    monkeypatch.setattr(plots, "check", cannot)
    text = render(load_run(runfolders.small(tmp_path / "run")), "html").decode()
    assert "<svg" not in text
    assert "The figures are missing; figures are drawn with matplotlib" in text
    assert "tp1-linear" in text


def run_named(text):
    """A run in which everything a person or a server may name is named `text`."""
    name = text or "x"
    ok = Record(
        CellId(name, name, "decode", name), State.OK, name, name, {"argv": [name], name: name}, name,
        metrics={"decode_tok_s": estimate([1.0, 2.0], "tok/s")}, parameters={"prompt": name}, boot={name: name},
    )  # fmt: skip
    failure = Failure(name, name, (name, name), name)
    failed = Record(CellId(name, name, name, name), State.FAILED, "", "", {}, "", failure=failure, notes=(name,))
    campaign = {
        "command": [name],
        "phases": {name: {"title": name}},
        "servers": {name: {"argv": [name], "engine": name}},
    }
    events = ({"t": name, "event": name, name: name}, {"t": name, "event": "machine_away", "why": name})
    return Run(name, (ok, failed), campaign, events, (LeftOut(name, name),))


MARKUP = ("</style><b>", "'\"><img src=x>", "--><!--", "&lt;", "]]>", "<![CDATA[", "<?x?>")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(min_size=1) | st.sampled_from([*runfolders.STRANGE, "</style><b>", "'\"><img src=x>", "--><!--", "&lt;"])
)
def test_nothing_from_outside_becomes_markup(monkeypatch, text):
    monkeypatch.setattr(plots, "svg", lambda figure: plots.Drawing("<svg></svg>", 1, 1))
    page = Page(render(run_named(text), "html").decode())
    assert page.tags <= PAGE | DRAWING
    assert len(page.ids) == len(set(page.ids))
    assert any(plain(text) in word for word in page.words)


@pytest.mark.parametrize("text", [*runfolders.STRANGE, "_underscore", "$x_1$", "a" * 300])
def test_strange_names_survive_in_drawings(text):
    page = Page(render(run_named(text), "html").decode())
    shown = plain(text)[:20]
    assert any(shown in word for word in page.words)
    assert page.tags <= PAGE | DRAWING


def test_drawings_tell_series_apart_without_colour(tmp_path):
    """Each series has a hatch or a marker and dash of its own."""
    count = len(plots.COLOURS)
    assert all(len({str(way) for way in ways}) == count for ways in (plots.HATCHES, plots.MARKERS, plots.DASHES))
    lightness = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (_rgb(c) for c in plots.COLOURS)]
    assert all(abs(a - b) > 8 for a, b in itertools.pairwise(lightness))


def _rgb(colour):
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def test_series_colours_follow_the_page(tmp_path):
    text = render(load_run(runfolders.small(tmp_path / "run")), "html").decode()
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert drawings
    for colour in (plots.INK, plots.PAPER, *plots.COLOURS):
        assert not any(colour in drawing for drawing in drawings)
