"""gpuctl: why CUDA does not start, back to serving after a reboot, and numbers that are true."""

__version__ = "0.1.0"
