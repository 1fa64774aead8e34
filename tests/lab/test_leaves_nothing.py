"""A lab that goes, however it goes, leaves nothing behind on the machine, and two do not meet."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab import keeper
from tests.lab.lab import REPOSITORY, Lab
from tests.lab.layout import STATES, NoLab, interface
from tests.lab.requirements import check_inotify
from tests.patience import wait_until

pytestmark = pytest.mark.lab


def left_of(lab):
    """Everything the machine still has of this lab."""
    left = [f"process {pid}: {line}" for pid, line in processes() if str(lab.state) in line or lab.name in line]
    left += [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(lab.state) in line]
    left += [interface(lab.name)] if Path("/sys/class/net", interface(lab.name)).exists() else []
    left += [str(lab.state)] if lab.state.exists() else []
    left += [str(path) for path in cgroups() if path.name == keeper.cgroup(lab.state)]
    return left


def processes():
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) != os.getpid():
                yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def cgroups():
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    for point in (Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"):
        yield from (path for path in point.iterdir() if path.is_dir())


def namespaces(lab, of_all=False):
    """Mount, network and PID namespaces of a lab's processes; or of all but other labs': a new one may get an old number."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            group = re.search(r"/(gpuctl-lab-[^/\n]+)", (folder / "cgroup").read_text())
            if group[1] == keeper.cgroup(lab.state) if group else of_all:
                found |= {os.readlink(folder / "ns" / kind) for kind in ("mnt", "net", "pid")}
    return found


@pytest.fixture
def gone():
    """Checks that of these labs nothing is left; takes away what is."""
    labs = []
    yield labs.append
    for lab in labs:
        lab.down()


def command(lab, *words, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.lab", "-n", lab.name, *words], cwd=REPOSITORY, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def test_a_lab_beside_another_does_not_meet_it_and_leaves_nothing_when_it_goes_down(lab, gone):
    other = Lab(f"other-{os.getpid()}")
    gone(other)
    boot = lab.boot_id("ct200")
    with command(other, "up") as process:
        said = process.communicate(timeout=200)[1]
        assert process.returncode == 0, said
    made = namespaces(other)
    assert len(made) > 12  # the keeper's, and three for each machine at least
    assert not made & namespaces(lab)
    assert left_of(other)
    assert lab.subnet != other.subnet
    assert other.boot_id("ct200") not in ("", boot)
    assert other.ssh("ct200", "true").returncode == 0
    assert other.down()
    assert left_of(other) == []
    assert wait_until(lambda: not made & namespaces(other, of_all=True))
    assert not [file for file in STATES.iterdir() if other.name in file.name]
    assert not other.down()
    assert lab.ssh("ct200", "cat", "/proc/sys/kernel/random/boot_id").stdout.strip() == boot


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_an_interrupted_start_cleans_up(gone, number):
    lab = Lab(f"stopped-{os.getpid()}")
    gone(lab)
    with command(lab, "up") as process:
        assert wait_until(lambda: (lab.state / "keeper").exists())
        time.sleep(0.5)
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode != 0
    assert wait_until(lambda: not left_of(lab)), left_of(lab)


def test_a_lab_that_belongs_to_a_session_ends_with_it(gone):
    lab = Lab(f"tied-{os.getpid()}")
    gone(lab)
    script = f"from tests.lab.lab import Lab; import os; Lab({lab.name!r}).up(stay=False); os._exit(0)"
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True, timeout=100)
    assert wait_until(lambda: not left_of(lab)), left_of(lab)


def test_a_lab_whose_keepers_were_killed_is_cleaned_up_by_the_next_command(gone):
    lab = Lab(f"killed-{os.getpid()}")
    gone(lab)
    lab.up()
    for pid, line in processes():
        if "tests.lab.keeper" in line and str(lab.state) in line:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not lab.alive())
    assert lab.state.exists()
    assert lab.down()
    assert left_of(lab) == []


def test_a_second_up_says_that_it_is_up_and_changes_nothing(gone):
    lab = Lab(f"twice-{os.getpid()}")
    gone(lab)
    lab.up()
    before = lab.boot_id("kpro6")
    with command(lab, "up") as process:
        assert f"{lab.name} is up already" in process.communicate(timeout=20)[1]
    assert process.returncode == 0
    assert lab.boot_id("kpro6") == before


def test_a_machine_without_room_for_another_lab_says_what_to_do():
    with pytest.raises(NoLab, match=r"raise fs.inotify.max_user_instances, which is [0-9]+$"):
        check_inotify(1_000_000)
