"""A double of SGLang for machines without a GPU: see ../README.md.

Standard library only, Python 3.9 or newer. It is a program that behaves like the engine, not a library with its API.
"""

from sglang._double.release import RELEASE

__version__ = RELEASE
