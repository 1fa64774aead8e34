"""The SGLang double in a guest of the lab, on the NVIDIA double: it takes the GPUs, and dies as torch does without them."""

import json

import pytest

from tests.lab.faults import driver

pytestmark = pytest.mark.lab

LOG = "/tmp/engine.log"
DRAFT = "/root/models/Qwen3.6-27B-DFlash"
TARGET = "/root/.cache/huggingface/hub/models--Qwen--Qwen3.6-27B/snapshots"
START = f"cd /tmp && exec /opt/sglang/bin/python -m sglang.launch_server --model-path {TARGET}/* --tp-size 2 "
FLAGS = (
    "--mem-fraction-static 0.75 --context-length 32768 --attention-backend triton --disable-radix-cache --port 30000"
)


@pytest.fixture
def guest(lab):
    """A command in ct200; no engine is left behind."""
    yield lambda script: lab.run("ct200", ["sh", "-c", script])
    lab.run("ct200", ["systemctl", "stop", "engine"])


def used(guest):
    lines = guest("nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits").stdout.split()
    return [int(line) for line in lines]


def up(guest):
    """Until its log says so: its own, not the one of an engine before it."""
    started = guest(
        f"rm -f {LOG}; systemd-run --unit engine --collect -p StandardOutput=file:{LOG} -p StandardError=file:{LOG} sh -c '{START}{FLAGS}'"
    )
    assert started.returncode == 0, started.stderr
    wait = f"for n in $(seq 300); do grep -q 'fired up' {LOG} && exit 0; sleep 0.1; done; cat {LOG}; exit 1"
    done = guest(wait)
    assert done.returncode == 0, done.stdout


def test_it_holds_the_memory_of_the_gpus_it_was_given_and_gives_it_back(guest):
    assert used(guest) == [0] * 8
    up(guest)
    held = used(guest)
    assert all(mib > 60_000 for mib in held[:2]), held
    assert held[2:] == [0] * 6
    assert "sglang::scheduler_TP1" in guest("nvidia-smi").stdout
    answer = guest(
        "python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:30000/v1/models').read().decode())\""
    )
    assert json.loads(answer.stdout)["data"][0]["owned_by"] == "sglang"
    guest("systemctl stop engine")
    assert used(guest) == [0] * 8


def test_a_second_server_finds_the_gpus_taken(guest):
    up(guest)
    second = guest(f"{START}{FLAGS.replace('30000', '30001')} 2>&1")
    assert second.returncode == -9 or second.returncode == 137
    assert "torch.OutOfMemoryError: CUDA out of memory." in second.stdout


def test_without_cuda_it_says_what_torch_says(lab, guest):
    driver.answer_cuinit(lab, "kpro6", 999)
    try:
        done = guest(f"{START}{FLAGS} 2>&1")
        assert done.returncode == 1
        assert (
            "UserWarning: CUDA initialization: CUDA unknown error - this may be due to an incorrectly set up environment"
            in done.stdout
        )
        assert done.stdout.rstrip().endswith(
            "RuntimeError: No accelerator (CUDA, XPU, HPU, NPU, MUSA, MPS) is available."
        )
    finally:
        driver.answer_cuinit(lab, "kpro6", undo=True)
