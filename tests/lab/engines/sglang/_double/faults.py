"""Faults on demand: what a profile, or a control file at any moment, says shall go wrong. ../../README.md lists them.

The control file is LAB_SGLANG_FAULTS, else /run/lab/sglang/faults.json. It is read at every start and again whenever it
changes, so that a running server can be broken too. `{"faults": [{"kind": ..., ...}]}`.
"""

import json
import os
from pathlib import Path

DEFAULT = "/run/lab/sglang/faults.json"
KINDS = (
    "illegal-instruction",
    "illegal-access",
    "oom",
    "hang",
    "garbage",
    "port-taken",
    "slow-weights",
    "scheduler-killed",
    "rank-killed",
    "crash",
    "http-error",
    "no-exit",
)


def path():
    return Path(os.environ.get("LAB_SGLANG_FAULTS", DEFAULT))


class Faults:
    def __init__(self, settings):
        self._settings = settings
        self._stamp = None
        self._listed = []
        self.start = self._count_start()
        self.requests = 0

    def _count_start(self):
        """Which start of this control file this is, for `every`. Counted beside the file, if that can be written."""
        counter = path().with_name("starts")
        if not path().exists():
            return 1
        try:
            number = int(counter.read_text()) + 1 if counter.exists() else 1
            counter.write_text(str(number))
        except (OSError, ValueError):
            number = 1
        return number

    def _read(self):
        try:
            stamp = path().stat().st_mtime_ns
        except OSError:
            self._stamp, self._listed = None, []
            return
        if stamp == self._stamp:
            return
        try:
            listed = json.loads(path().read_text()).get("faults", [])
            unknown = [fault.get("kind") for fault in listed if fault.get("kind") not in KINDS]
            if unknown:
                raise ValueError("no fault of kind %r; there are %s" % (unknown[0], ", ".join(KINDS)))
        except (OSError, ValueError, AttributeError) as error:
            raise SystemExit("sglang double: %s: %s" % (path(), error)) from None
        self._stamp, self._listed = stamp, listed

    def find(self, kind, **point):
        """The fault of a kind that is wanted for this server now and at this point (`at`), or None."""
        self._read()
        for fault in [*self._settings.profile.faults, *self._listed]:
            if fault["kind"] == kind and self._applies(fault, point):
                return fault
        return None

    def _applies(self, fault, point):
        if "at" in point and fault.get("at", point.get("default")) != point["at"]:
            return False
        if "every" in fault and self.start % int(fault["every"]):
            return False
        return all(self._same(key, wanted) for key, wanted in fault.get("when", {}).items())

    def _same(self, key, wanted):
        settings = self._settings
        value = {
            "ddtree_budget": settings.budget,
            "method": method(settings),
            "model": settings.model.name,
            "tp": settings.tp,
            "port": settings["port"],
        }.get(key, settings[key])
        return value in wanted if isinstance(wanted, list) else value == wanted


def method(settings):
    """What the campaign calls it: auto, dflash, ddtree, ddtree-b32, eagle3, ngram."""
    algorithm = settings["speculative_algorithm"]
    if algorithm is None:
        return "auto"
    if algorithm == "DDTREE" and (settings.budget or 15) > 16:
        return "ddtree-b%d" % settings.budget
    return algorithm.lower()
