"""Lines as the engine writes them: one stream (stderr), a local time stamp, the rank where there is more than one."""

import os
import sys
import time

_rank = ""


def rank(text):
    """From now on lines of this process carry the rank, such as `TP3`."""
    global _rank
    _rank = " " + text if text else ""


def line(text):
    raw("[%s%s] %s\n" % (time.strftime("%Y-%m-%d %H:%M:%S"), _rank, text))


def raw(text):
    """One write(2) a message, so that lines of several processes do not mix."""
    sys.stdout.flush()
    data = text.encode("utf-8", "replace")
    while data:
        data = data[os.write(2, data) :]
