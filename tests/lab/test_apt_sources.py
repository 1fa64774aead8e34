"""The lab builds its machines from the machine's own apt sources, in whichever form they are written."""

import pytest

from tests.lab.layout import NoLab
from tests.lab.roots import Source, own_source

DEB822 = """\
Types: deb
# URIs: http://old.example/debian
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb-src
URIs: http://source.example/debian
Suites: trixie
Components: main

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: trixie
Components: main

Types: deb
URIs: http://other.example/nodejs
Suites: trixie
Components: other
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 -----END PGP PUBLIC KEY BLOCK-----
"""


def test_the_deb822_form():
    found = own_source("bookworm", [("debian.sources", DEB822)])
    assert found == Source("http://mirror.example/debian", "bookworm", "/usr/share/keyrings/debian-archive-keyring.gpg")


def test_the_one_line_form():
    text = (
        "# deb http://off.example/debian trixie main\ndeb [arch=amd64 signed-by=/k.gpg] http://m.example/d trixie main"
    )
    assert own_source("trixie", [("sources.list", text)]) == Source("http://m.example/d", "trixie", "/k.gpg")


@pytest.mark.parametrize("suite", ["trixie", "bookworm-backports", ""])
def test_sources_that_are_off_or_of_others_are_not_taken(suite):
    with pytest.raises(NoLab, match="no apt source of this machine has the main component"):
        own_source(suite, [("debian.sources", DEB822)])
