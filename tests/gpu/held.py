"""SGLang's launch_server, whose scheduler waits for its turn before it touches the GPU.

    HELD=FILE python held.py --model-path ...       as sglang.launch_server; goes on when FILE is there

Many servers import what they need side by side (half a minute each), and use the GPU one after another.
"""

import functools
import os
import runpy
import time

from sglang.srt.managers import scheduler

run = scheduler.run_scheduler_process


@functools.wraps(run)
def held(*arguments, **more):
    while not os.path.exists(os.environ["HELD"]):
        time.sleep(0.02)
    return run(*arguments, **more)


scheduler.run_scheduler_process = held

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
