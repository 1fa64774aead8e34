"""Work beside us: what it says, and that Ctrl-C ends the wait and not the work."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from gpuctl import background


def test_what_it_returns_or_raises_is_the_futures():
    def fails():
        raise KeyboardInterrupt  # also what is no Exception

    good, bad = background.begin(lambda: 7), background.begin(fails)
    assert background.ended([good, bad])
    assert good.result() == 7
    with pytest.raises(KeyboardInterrupt):
        bad.result()


def test_work_that_goes_on_has_not_ended():
    go = threading.Event()
    work = background.begin(go.wait)
    assert not background.ended([work], timeout=0.05)
    go.set()
    assert background.ended([work], timeout=60)
    assert background.ended([])


def test_after_ctrl_c_the_work_still_goes_on_and_can_be_waited_for():
    """A Thread.join that was interrupted says that the thread has ended."""
    go = threading.Event()
    work = background.begin(go.wait)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        background.ended([work])
    assert not background.ended([work], timeout=0.05)
    threading.Timer(0.1, go.set).start()
    began = time.monotonic()
    assert background.ended([work], timeout=60)
    assert time.monotonic() - began > 0.05


@pytest.mark.parametrize("begun", [True, False], ids=["just begun", "not begun"])
def test_ctrl_c_while_it_begins_leaves_nothing_unknown(monkeypatch, begun):
    start, go, did = threading.Thread.start, threading.Event(), []

    def interrupted(thread):
        if begun:
            start(thread)
            while not did:
                time.sleep(0.01)
        raise KeyboardInterrupt

    def work():
        did.append("began")
        go.wait()
        did.append("ended")

    works = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            background.begin(work, among=works)
    assert background.ended(works, timeout=0.05) is not begun
    go.set()
    assert background.ended(works, timeout=60)
    assert did == (["began", "ended"] if begun else [])
