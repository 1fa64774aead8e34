"""The wheel brings all it needs: inventories, playbooks and templates, from an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with what the wheel installs, and none of its dependencies: those are this environment's."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(out / "site")
    return out / "site"


def python(site, cwd, *words):
    env = {**os.environ, "PYTHONPATH": str(site), "HOME": str(cwd), "NO_COLOR": "1"}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=110)


def test_its_inventories_and_playbooks_are_its_own(site, tmp_path):
    where = python(site, tmp_path, "-c", "import gpuctl.assets; print(gpuctl.assets.asset('playbooks', 'site.yml'))")
    assert where.stdout.strip() == str(site / "gpuctl/_assets/playbooks/site.yml")
    shown = python(site, tmp_path, "-m", "gpuctl", "render", "tp4-ddtree-b15", "-i", "kpro6")
    assert "--speculative-ddtree-budget 15" in shown.stdout, shown.stderr
    for name in sorted(path.name for path in (ROOT / "playbooks").glob("*.yml")):
        assert (site / "gpuctl/_assets/playbooks" / name).read_text() == (ROOT / "playbooks" / name).read_text()
    for name in sorted(path.name for path in (ROOT / "gpuctl/agent").glob("*.py")):
        assert (site / "gpuctl/agent" / name).is_file()


def test_a_playbook_of_it_runs_with_its_modules(site, tmp_path):
    (tmp_path / "hosts.yml").write_text("all: {hosts: {here: {ansible_connection: local}}}")
    code = (
        "import pathlib; from gpuctl.playbook import play; done = play('server', pathlib.Path('hosts.yml'), ['here'], "
        "{'server_files': [{'path': '/nowhere/x', 'text': 'a'}]}, check=True); print(done.why or done.changed)"
    )
    done = python(site, tmp_path, "-c", code)
    # either is the module's own word
    assert "there is no systemd on this machine" in done.stdout or "here" in done.stdout, done.stdout + done.stderr
    assert "couldn't resolve module" not in done.stdout
