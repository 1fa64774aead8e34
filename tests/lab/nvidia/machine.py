"""A machine with the driver in a folder, without a boot: for tests of the double and of what needs no more than it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.lab.nvidia.driver import Config
from tests.lab.nvidia.install import LIBRARIES, install_guest
from tests.lab.nvidia.kernel import HOME

REPOSITORY = Path(__file__).parents[3]
MEASURED = {  # the machines of tests/ground_truth/nvidia
    "nvidia-caps-imex-channels": 242, "nvidia-caps": 241, "nvidia-nvlink": 240, "nvidia-nvswitch": 239, "nvidia-uvm": 238,
}  # fmt: skip


class Machine:
    """What runs in it shares everything with this machine but the driver."""

    def __init__(self, root: Path, config: Config | None = None) -> None:
        self.root = root
        root.chmod(0o755)
        config = config or Config(modules=["nvidia", "nvidia_uvm"])
        install_guest(root, config.driver)
        (root / HOME / "config.json").write_text(json.dumps(config.document()))

    @classmethod
    def measured(cls, root: Path, gpus: int) -> Machine:
        """That of the ground truth: H200 behind a virtual machine's PCI bus, driver 580.159.04."""
        hardware = {"model": "h200", "count": gpus, "layout": "flat"}
        modules = ["nvidia", "nvidia_uvm"]
        return cls(root, Config(driver="580.159.04", hardware=hardware, majors=MEASURED, modules=modules))

    @property
    def libraries(self) -> Path:
        return self.root / LIBRARIES

    def start(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.lab.nvidia", str(self.root), "--", *argv]
        return subprocess.Popen(command, cwd=REPOSITORY, text=True, **options)

    def run(self, argv: Sequence[str], stdin: str = "", timeout: float = 60) -> subprocess.CompletedProcess[str]:
        pipe = subprocess.PIPE
        with self.start(argv, stdin=pipe, stdout=pipe, stderr=pipe) as process:
            try:
                out, err = process.communicate(stdin, timeout)
            except subprocess.TimeoutExpired:
                process.terminate()
                raise
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def python(self, code: str, timeout: float = 60) -> str:
        """Runs code with a /dev of its own and the libraries on the path; its output. Raises AssertionError."""
        setup = "import os, sys\nfrom tests.lab.nvidia import replay\nreplay.unshare_mounts(); replay.make_dev({})\n"
        done = self.run([sys.executable, "-c", setup + code], timeout=timeout)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def replay(self, cases: Sequence[dict[str, Any]], gpus: int) -> list[dict[str, Any]]:
        """What the double answers to each case."""
        job = json.dumps({"cases": list(cases), "gpus": gpus})
        done = self.run([sys.executable, "-m", "tests.lab.nvidia.replay", str(self.root)], stdin=job)
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(answers) == len(cases), done.stderr
        return answers
