"""Which release this installation plays, and what differs between the releases it knows.

The release is written in a file `VERSION` beside the package (an installation), else taken from LAB_SGLANG_RELEASE.
"""

import json
import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
KNOWN = ("0.5.11", "0.5.16", "0.5.23")
# How a release divides GPU memory (the regimes differ in order and terms: memory.py).
REGIME = {"0.5.11": "A", "0.5.16": "B", "0.5.23": "C"}


def chosen():
    file = PACKAGE / "VERSION"
    release = file.read_text().strip() if file.exists() else os.environ.get("LAB_SGLANG_RELEASE", "0.5.16")
    if release not in KNOWN:
        raise SystemExit("sglang double: no release %r; it knows %s" % (release, ", ".join(KNOWN)))
    return release


def table(release):
    """The flags and the fields of ServerArgs of a release, as its own parser has them."""
    return json.loads((PACKAGE / "_double" / "releases" / ("%s.json" % release)).read_text())


RELEASE = chosen()
