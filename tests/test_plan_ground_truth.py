"""What servers held that were started on an H200 after their plan was made (tests/gpu/plan.py): the plan still says it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu import plan

HERE = Path(__file__).parent
ROWS = json.loads((HERE / "gpu/ground-truth/plans.json").read_text())


def config(model):
    return json.loads((HERE / f"ground_truth/sglang/models/{model}.json").read_text())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"])
def test_the_plan_says_what_the_server_then_held(row):
    said = plan.predict(row["case"], {}, config)
    assert plan.agrees(said, row), (said, row)
