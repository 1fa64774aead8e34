"""docs/doctor.md has every cause, with what the recorded boxes show of it."""

from __future__ import annotations

import re
from pathlib import Path

from gpuctl import doctor, plugins, snapshots
from gpuctl.finding import Certainty
from tests.test_boxes import FILES

DOCS = Path(__file__).parents[1] / "docs" / "doctor.md"
START, END = "<!-- causes -->\n", "<!-- /causes -->\n"
SURE = list(Certainty)


def table():
    best: dict[str, Certainty] = {}
    seen: dict[str, set[str]] = {}
    mended: set[str] = set()
    for path in FILES:
        parts = snapshots.read(path.read_text(), path.name)
        views = {"both": parts}
        if len(parts) == 2:
            views |= {"node" if part.role == "node" else "guest": [part] for part in parts}
        else:
            views["node" if parts[0].role == "node" else "machine" if parts[0].role == "machine" else "guest"] = parts
        for name, some in views.items():
            for finding in doctor.diagnose(doctor.box_from(some)).all:
                old = best.get(finding.id, Certainty.POSSIBLE)
                best[finding.id] = min(old, finding.certainty, key=SURE.index)
                seen.setdefault(finding.id, set()).add(name)
                if finding.remedy is not None:
                    mended.add(finding.id)
    rows = ["| cause | layer | what it is | certainty | seen from | --fix |", "|---|---|---|---|---|---|"]
    modules = [(plugins.get("checks", name).LAYER, name) for name in plugins.names("checks")]
    for layer, name in sorted(modules):
        title = doctor.explain(name)[2]
        places = seen.get(name, set())
        where = ", ".join(place for place in ("guest", "node", "machine") if place in places) or "both together"
        rows.append(
            f"| `{name}` | {layer.name} | {title} | {best[name].value} | {where} | {'yes' if name in mended else ''} |"
        )
    return "\n".join(rows) + "\n"


def test_the_documentation_lists_every_cause(request):
    text = DOCS.read_text()
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    wanted = before + START + table() + END + after
    if request.config.getoption("--update-golden"):
        DOCS.write_text(wanted)
    assert DOCS.read_text() == wanted, "run pytest tests/test_doctor_docs.py --update-golden"


RESTORE = {"memory_not_mounted", "model_not_staged", "server_down", "server_silent", "settings_lost"}  # shown there


def test_each_cause_is_shown_in_the_lab_or_it_is_told_why_not():
    shown = (DOCS.parents[1] / "tests" / "test_doctor_lab.py").read_text()
    _, _, rest = DOCS.read_text().partition("## What the lab shows\n")
    told = rest.partition("\n## ")[0]
    for name in set(plugins.names("checks")) - RESTORE:
        assert (re.search(rf"\b{name}\b", shown) is None) == (f"`{name}`" in told), name
