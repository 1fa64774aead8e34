"""`gpuctl doctor` on a real GPU, healthy and in every fault; the all-reduce. Skipped where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.gpu import allreduce, doctor, faults

pytestmark = [
    pytest.mark.skipif(not faults.gpus_here() or not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU here"),
    pytest.mark.skipif(os.geteuid() != 0, reason="faults are made by root"),
]


def test_a_healthy_machine_is_well_within_two_seconds():
    found = doctor.healthy(3)
    assert found["document"] is not None, found["stderr"]
    assert found["document"]["findings"] == []
    assert found["rc"] == 0
    assert min(found["seconds"]) < doctor.WITHIN_S


@pytest.mark.parametrize("fault", faults.every(), ids=lambda fault: fault.name)
def test_doctor_names_the_fault(fault, tmp_path):
    if not fault.gpus <= faults.gpus_here() <= fault.at_most:
        pytest.skip("for another number of GPUs")
    row = doctor.ask(fault, tmp_path)
    assert row["right"], row


@pytest.mark.parametrize("profile", ["none", "latency"])
def test_an_all_reduce_ends_and_is_right(profile):
    pytest.importorskip("torch")
    if faults.gpus_here() < 2:
        pytest.skip("one GPU")
    found = allreduce.all_reduce(profile, faults.gpus_here(), within_s=60)
    assert "error" not in found, found
    assert all(size["right"] for size in found["sizes"])
