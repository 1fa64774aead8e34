"""The machine and the models' speeds, as a JSON file: what a double cannot compute and has to be told.

Looked for in this order: LAB_SGLANG_PROFILE (a file, or the name of a built-in profile), `profile.json` beside the
package, the built-in `campaign`. A file may say `"base": NAME` and give only what differs; objects merge, the rest is
replaced. ../../README.md documents every key.
"""

import json
import os
import re
from pathlib import Path

from sglang._double.release import PACKAGE

BUILT_IN = PACKAGE / "_double" / "profiles"


class BadProfile(Exception):
    """The profile cannot be used; one line says why."""


def _merge(base, over):
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _document(name):
    file = Path(name)
    if not file.suffix and (BUILT_IN / (name + ".json")).exists():
        file = BUILT_IN / (name + ".json")
    try:
        document = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise BadProfile("sglang double: profile %s: %s" % (file, error)) from None
    base = document.pop("base", None)
    return _merge(_document(base), document) if base else document


class Profile:
    def __init__(self, document):
        self.document = document
        self.gpu = document["gpu"]
        self.fork = document.get("fork", False)
        self.cuda = document.get("cuda", "auto")
        self.startup = document.get("startup", {})
        self.weights = document.get("weights_gib", {})
        self.kinds = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in document.get("kinds", {}).items()]
        self.natural = document.get("natural_tokens", {})
        self.faults = document.get("faults", [])
        self.speeds = document.get("speeds", [])
        self.chunk_noise = document.get("step_noise", 0.0)

    @property
    def scale(self):
        """Start-up delays are multiplied by this; rates never are."""
        return float(os.environ.get("LAB_SGLANG_STARTUP_SCALE", self.startup.get("scale", 1.0)))

    def delay(self, stage, default=0.0):
        return self.startup.get(stage, default) * self.scale

    def weights_of(self, model, tp):
        """GiB of weights on one GPU: as measured where the profile knows the model, else computed."""
        for name, gib in self.weights.items():
            if name.lower() == model.name.lower():
                return gib / tp
        return model.weights_gib(tp)

    def kind(self, prompt):
        """The kind of a prompt, by the patterns of the profile; `*` where none matches. Looks at both ends only."""
        ends = prompt[:4000] + prompt[-4000:] if len(prompt) > 8000 else prompt
        for kind, pattern in self.kinds:
            if pattern.search(ends):
                return kind
        return "*"

    def speed(self, model, tp, method):
        """The entry for a model, a tensor-parallel size and a method; the nearest one where none is exact."""
        best, best_score = None, -1
        for entry in self.speeds:
            if not re.search(entry.get("model", "."), model.name + " " + model.architecture, re.IGNORECASE):
                continue
            score = (
                1 + 4 * (entry.get("method") == method) + 2 * (entry.get("tp") == tp) + (entry.get("method") == "auto")
            )
            if score > best_score:
                best, best_score = entry, score
        if best is None:
            raise BadProfile("sglang double: the profile has no speed for %s (%s)" % (model.name, model.architecture))
        return Speed(best, method)


class Speed:
    """How long a step takes and how many tokens it brings. Times in seconds."""

    def __init__(self, entry, method):
        self.steps = sorted((int(count), ms / 1000.0) for count, ms in entry["step_ms"].items())
        accept = entry.get("accept", {"*": 1.0})
        self.accept = {"*": 1.0} if method == "auto" else accept
        self.prefill = float(entry.get("prefill_tok_s", 8000))
        self.per_token = entry.get("step_ms_per_1k_context", 0.0) / 1000.0 / 1000.0

    def step(self, running, context=0):
        """Seconds of one decode step with `running` requests of `context` tokens altogether."""
        points = self.steps
        if running <= points[0][0]:
            base = points[0][1]
        elif running >= points[-1][0]:
            base = points[-1][1] * (running / points[-1][0] if len(points) > 1 else 1)
        else:
            for (low, a), (high, b) in zip(points, points[1:]):
                if low <= running <= high:
                    base = a + (b - a) * (running - low) / (high - low)
                    break
        return base + self.per_token * context

    def accepted(self, kind):
        """Mean tokens of one step for a kind of prompt (the bonus token included)."""
        return float(self.accept.get(kind, self.accept.get("*", 1.0)))


def load():
    """The profile of this installation. Raises BadProfile."""
    beside = PACKAGE / "profile.json"
    name = os.environ.get("LAB_SGLANG_PROFILE") or (str(beside) if beside.exists() else "campaign")
    document = _document(name)
    try:
        return Profile(document)
    except (KeyError, re.error, TypeError, AttributeError) as error:
        raise BadProfile("sglang double: profile %s: %r" % (name, error)) from None
