"""Processes as the engine has them: named, dying with their parent, killed as a tree."""

import ctypes
import os
import signal
from pathlib import Path

from sglang._double import log
from sglang._double.release import RELEASE

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def name(title):
    """Shows `title` as the process's command line and name, as setproctitle does."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        room = end - start
        text = title.encode()[: room - 1]
        ctypes.memset(start, 0, room)
        ctypes.memmove(start, text, len(text))
        ctypes.CDLL(None).prctl(PR_SET_NAME, title.encode()[:15], 0, 0, 0)
    except (OSError, ValueError, IndexError):
        pass  # only the looks are lost


def die_with_parent(parent):
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def children_of(pid):
    """All descendants, nearest first."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
    found, level = [], [pid]
    while level:
        level = [child for child, parent in parents.items() if parent in level]
        found += level
    return found


def kill_tree(include_parent=True):
    """Ends this process and all below it with SIGKILL: a parent sees -9, a shell 137."""
    own = os.getpid()
    if RELEASE != "0.5.11" and include_parent:
        log.line("kill_process_tree called: parent_pid=%d, include_parent=True, pid=%d" % (own, own))
    for child in children_of(own):
        try:
            os.kill(child, signal.SIGKILL)
        except OSError:
            pass
    if include_parent:
        os.kill(own, signal.SIGKILL)
        signal.pause()
