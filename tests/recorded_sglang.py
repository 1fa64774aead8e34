"""The recorded servers of SGLang 0.5.16, as the tests of its double read them."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

TRUTH = Path(__file__).parent / "ground_truth" / "sglang"
ANSWERS = json.loads((TRUTH.parent / "sglang-answers.json").read_text())

_held = tempfile.TemporaryDirectory(prefix="gpuctl-models-")
MODELS = Path(_held.name)
for _file in (TRUTH / "models").glob("*.json"):
    (MODELS / _file.stem).mkdir()
    (MODELS / _file.stem / "config.json").write_bytes(_file.read_bytes())


class Case:
    """One recorded server. Its arguments name the models where they lie here."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.log = (folder / "server.log").read_text().replace("\r", "\n")
        document = json.loads((folder / "argv.json").read_text())
        self.exit: int | None = document["exit_code"]
        self.arguments = [a.replace("/models/", f"{MODELS}/") for a in document["argv"][3:]]
        self.held_mib = document.get("gpu_before", {}).get("used_mib", 0)
        self.trace: dict[str, Any] = {}
        if (folder / "trace.jsonl").exists():
            for line in (folder / "trace.jsonl").read_text().splitlines():
                row = json.loads(line)
                self.trace[row["what"]] = row

    def number(self, pattern: str) -> float | None:
        """The last number the log has at a pattern."""
        found = re.findall(pattern, self.log)
        return float(found[-1]) if found else None

    @property
    def inputs(self) -> tuple[float, float]:
        """GiB free before loading and when the pools were sized: exact where traced, else from the log."""
        if "profile" in self.trace:
            return self.trace["profile"]["pre_model_load_gib"], self.trace["profile"]["free_before_pools_gib"]
        begin = float(re.findall(r"Load weight begin. avail mem=([\d.]+)", self.log)[0])
        nccl = float(re.findall(r"Init torch distributed ends.*mem usage=([\d.]+)", self.log)[0])
        return begin + nccl, float(re.findall(r"Load weight end.* avail mem=([\d.]+)", self.log)[-1])


CASES = [Case(folder) for folder in sorted(TRUTH.iterdir()) if (folder / "argv.json").exists()]
BY_NAME = {case.name: case for case in CASES}
