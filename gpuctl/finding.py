"""What a check says: a finding with its evidence, how certain it is, and the remedy as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any


class Layer(IntEnum):
    """Layers of a serving box, as in booting: a fault in one explains faults in those above it."""

    DRIVER = 10
    DEVICES = 20
    CONTAINER = 30
    CUDA = 40
    TUNING = 50
    MODEL = 60
    SERVER = 70


class Severity(StrEnum):
    CRITICAL = "critical"  # CUDA or serving does not work because of it
    WARNING = "warning"  # works now, and will bite
    INFO = "info"  # worth knowing


class Certainty(StrEnum):
    PROVED = "proved"  # all the evidence the cause requires was seen
    LIKELY = "likely"  # nothing seen contradicts it, something is missing
    POSSIBLE = "possible"  # one of several explanations


@dataclass(frozen=True)
class Remedy:
    """A change to a machine, as data: printed, tried in check mode, applied, compared.

    `playbook` is the name of a file in playbooks/ without `.yml`; `vars` its extra variables;
    `on` which machine of the box it changes; `restarts` what has to restart for it to take effect.
    """

    playbook: str
    vars: Mapping[str, Any] = field(default_factory=dict)
    on: str = "guest"  # guest | node
    restarts: str | None = None  # None | service | guest | node


@dataclass(frozen=True)
class Finding:
    """One cause. `evidence` is what was seen, line by line; `advice` the exact commands, ready to paste."""

    summary: str
    layer: Layer
    severity: Severity = Severity.CRITICAL
    certainty: Certainty = Certainty.PROVED
    evidence: tuple[str, ...] = ()
    against: tuple[str, ...] = ()  # what was seen and speaks against it
    separates: str = ""  # the observation that would tell it from the other possible causes
    remedy: Remedy | None = None
    advice: str = ""
    id: str = ""  # the name of the check (of the rule, for a log); filled in by whoever ran it

    def as_json(self) -> dict[str, Any]:
        remedy = None
        if self.remedy is not None:
            remedy = {
                "playbook": self.remedy.playbook,
                "vars": dict(self.remedy.vars),
                "on": self.remedy.on,
                "restarts": self.remedy.restarts,
            }
        return {
            "id": self.id,
            "layer": self.layer.name,
            "summary": self.summary,
            "severity": self.severity.value,
            "certainty": self.certainty.value,
            "evidence": list(self.evidence),
            "against": list(self.against),
            "separates": self.separates,
            "remedy": remedy,
            "advice": self.advice,
        }
