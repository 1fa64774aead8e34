"""Single-file programs sent to the machines: standard library only, Python 3.9 and newer."""
