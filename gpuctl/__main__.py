"""`python -m gpuctl`."""

from gpuctl.cli import main

main()
