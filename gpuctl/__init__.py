"""gpuctl: why CUDA does not start, back to serving after a reboot, and numbers that are true."""
