"""Power, energy and memory of this machine's GPUs, read at intervals until nobody listens any more.

Job (JSON on stdin): {"every_s": 0.2}
Lines: {"gpus": [{"pci": "00000000:21:00.0", "uuid": "GPU-..."}, ...]} once, or {"none": why} and the end. Then
{"t": CLOCK_MONOTONIC seconds, "mw": [...], "mj": [...], "used": [...]}: power now, energy since the driver was loaded,
bytes in use without the driver's own, a GPU each; null where it does not say.

The library is NVIDIA's own (NVML), through ctypes. A root's NVML makes device nodes that are missing, which would
hide a fault: without them it is not asked. Standard library only, Python 3.9. Changes nothing.
"""

import ctypes
import glob
import json
import os
import sys
import time


class Memory(ctypes.Structure):
    """nvmlMemory_v2_t: unlike the first version it keeps apart what the driver reserves."""

    _fields_ = [
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class Memory1(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Pci(ctypes.Structure):
    """nvmlPciInfo_t, third version."""

    _fields_ = [
        ("old", ctypes.c_char * 16),
        ("numbers", ctypes.c_uint * 5),
        ("bus", ctypes.c_char * 32),
    ]


def say(line):
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


class Driver:
    def __init__(self, library):
        self.library = library

    def ask(self, name, handle, value):
        """The value as the function left it, None where it does not say."""
        function = getattr(self.library, name, None)
        if function is None or function(handle, ctypes.byref(value)) != 0:
            return None
        return value

    def number(self, name, handle, kind):
        answer = self.ask(name, handle, kind())
        return None if answer is None else answer.value

    def used(self, handle):
        memory = Memory(ctypes.sizeof(Memory) | 2 << 24)
        answer = self.ask("nvmlDeviceGetMemoryInfo_v2", handle, memory)
        if answer is None:  # drivers before 510
            answer = self.ask("nvmlDeviceGetMemoryInfo", handle, Memory1())
        return None if answer is None else answer.used

    def handles(self):
        count, found = ctypes.c_uint(), []
        if self.library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return found
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if self.library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                found.append(handle)
        return found


def driver():
    """The driver's library, initialised, or why there is none."""
    if not glob.glob("/proc/driver/nvidia/gpus/*"):
        return "no NVIDIA GPU"
    if not os.path.exists("/dev/nvidiactl"):
        return "no /dev/nvidiactl"
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        return str(error)
    code = library.nvmlInit_v2()
    return Driver(library) if code == 0 else "nvmlInit: %d" % code


def main():
    job = json.loads(sys.stdin.buffer.readline())
    found = driver()
    handles = found.handles() if isinstance(found, Driver) else []
    if not handles:
        say({"none": found if isinstance(found, str) else "no GPU answers"})
        return
    gpus = []
    for handle in handles:
        pci = found.ask("nvmlDeviceGetPciInfo_v3", handle, Pci())
        uuid = ctypes.create_string_buffer(96)
        named = found.library.nvmlDeviceGetUUID(handle, uuid, 96) == 0
        gpus.append({"pci": pci.bus.decode() if pci else None, "uuid": uuid.value.decode() if named else None})
    say({"gpus": gpus})
    due = time.monotonic()
    while True:
        line = {"t": time.monotonic(), "mw": [], "mj": [], "used": []}
        for handle in handles:
            line["mw"].append(found.number("nvmlDeviceGetPowerUsage", handle, ctypes.c_uint))
            line["mj"].append(found.number("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.c_ulonglong))
            line["used"].append(found.used(handle))
        say(line)
        due = max(due + job["every_s"], time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(0)  # who listened has gone: nothing is left to be said
