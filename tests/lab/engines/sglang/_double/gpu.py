"""The GPU as an engine touches it: cuInit, a context, the memory it takes.

With a `libcuda.so.1` (the lab's, or a real one) every call is really made; without one the profile is the machine.
"""

import ctypes
import os
import struct

GIB = 1 << 30
NOBODY_GIB = 0.4
MISSING = -1  # there is no library

# cuInit's results that torch words in its own way (c10/cuda/CUDAFunctions.cpp); others get the general text.
UNKNOWN = (
    "CUDA initialization: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env "
    "variable CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero."
)
GENERAL = (
    "CUDA initialization: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
    "NumCudaDevices() that might have already set an error? Error %d: %s"
)
NAMES = {
    3: "initialization error",
    802: "system not yet initialized",
    803: "system has unsupported display driver / cuda driver combination",
    804: "forward compatibility was attempted on non supported HW",
}
NO_ACCELERATOR = "No accelerator (CUDA, XPU, HPU, NPU, MUSA, MPS) is available."


class CudaError(Exception):
    """A call failed: args are its name and its result."""


class Library:
    def __init__(self, library):
        self._library = library

    def call(self, name, *arguments):
        """Makes a call and raises CudaError where it fails; False where the library has no such function."""
        for variant in (name + "_v2", name):
            function = getattr(self._library, variant, None)
            if function is not None:
                result = function(*arguments)
                if result:
                    raise CudaError(name, result)
                return True
        return False


def library():
    try:
        return Library(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return None


def initialize():
    """What cuInit and the count of devices give in a process of their own: (result, devices), MISSING without a library."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        result, count = MISSING, 0
        try:
            cuda = library()
            if cuda is not None:
                result = 0
                cuda.call("cuInit", 0)
                number = ctypes.c_int()
                if cuda.call("cuDeviceGetCount", ctypes.byref(number)):
                    count = number.value
        except CudaError as error:
            result = error.args[1]
        finally:
            os.write(writing, struct.pack("ii", result, count))
            os._exit(0)
    os.close(writing)
    answer = os.read(reading, 8)
    os.close(reading)
    os.waitpid(child, 0)
    return struct.unpack("ii", answer) if len(answer) == 8 else (999, 0)


def complaint(result):
    """torch's warning for a failed cuInit; None where it says nothing (no device, no library)."""
    if result == 999:
        return UNKNOWN
    if result in (0, 100, MISSING):
        return None
    return GENERAL % (result, NAMES.get(result, "unrecognized error code"))


class Device:
    """One GPU in one process. `used_elsewhere` GiB are read from the device where that is possible."""

    def __init__(self, index, profile):
        self.index, self.gpu = index, profile.gpu
        self.cuda = library() if profile.cuda == "auto" else None
        held = profile.gpu.get("held_gib", 0)
        self.elsewhere = float(held.get(str(index), 0) if isinstance(held, dict) else held)
        self.taken = 0.0
        self._blocks = []

    def open(self):
        """Initialises and makes a context. Raises CudaError; IndexError where there is no such device."""
        if self.cuda is None:
            if self.index >= self.gpu.get("count", 1):
                raise IndexError(self.index)
            return
        self.cuda.call("cuInit", 0)
        count = ctypes.c_int()
        if self.cuda.call("cuDeviceGetCount", ctypes.byref(count)) and self.index >= count.value:
            raise IndexError(self.index)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.cuda.call("cuDeviceGet", ctypes.byref(device), self.index)
        if self.cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device):
            self.cuda.call("cuCtxSetCurrent", context)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        if self.cuda.call("cuMemGetInfo", ctypes.byref(free), ctypes.byref(total)):
            # Our own context is among what is used; what is less than its like is nobody else's.
            others = (total.value - free.value) / GIB - self.gpu["context_gib"]
            if others > NOBODY_GIB:
                self.elsewhere = max(self.elsewhere, others)

    @property
    def free(self):
        """GiB free, the context taken off."""
        return self.gpu["total_gib"] - self.gpu["context_gib"] - self.elsewhere - self.taken

    def take(self, gib):
        """Takes memory, on the device too where it can be taken. Raises MemoryError where there is too little."""
        if gib > self.free:
            raise MemoryError(gib)
        self.taken += gib
        if self.cuda is not None and gib > 0:
            block = ctypes.c_void_p()
            try:
                if self.cuda.call("cuMemAlloc", ctypes.byref(block), ctypes.c_size_t(int(gib * GIB))):
                    self._blocks.append(block)
            except CudaError:
                raise MemoryError(gib) from None

    def exhaust(self, wanted_gib):
        """Leaves less than `wanted_gib` free, as whatever made the allocation fail has done."""
        self.taken += max(0.0, self.free - wanted_gib / 4)

    def out_of_memory(self, wanted_gib):
        """torch's text for an allocation that failed, with this device's numbers."""
        total, context = self.gpu["total_gib"], self.gpu["context_gib"]
        return (
            "CUDA out of memory. Tried to allocate %s. GPU %d has a total capacity of %.2f GiB of which %s is free. "
            "Including non-PyTorch memory, this process has %.2f GiB memory in use. Of the allocated memory %.2f GiB is "
            "allocated by PyTorch, and 60.28 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory "
            "is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
            "documentation for Memory Management  "
            "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
            % (_size(wanted_gib), self.index, total, _size(max(0.0, self.free)), self.taken + context, self.taken)
        )


def _size(gib):
    return "%.2f GiB" % gib if gib >= 1 else "%.2f MiB" % (gib * 1024)
