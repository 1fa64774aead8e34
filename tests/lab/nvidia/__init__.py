"""A double of the NVIDIA driver and what comes with it: see README.md beside this file."""
