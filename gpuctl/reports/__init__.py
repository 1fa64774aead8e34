"""The faces of a report: one file each, named as the format. `gpuctl report --format NAME` finds them here.

A face is a module with `SUFFIX` (of the file it writes) and `render(report) -> bytes`. Delete the file and the
format is gone.
"""
