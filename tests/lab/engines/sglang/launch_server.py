"""`python -m sglang.launch_server`: serves a model, as far as a client, a log reader or a process supervisor can tell."""

import sys

if __name__ == "__main__":
    try:
        import json  # noqa: F401
    except ImportError:
        sys.exit("sglang double: needs Debian's `python3`, `python3-minimal` alone has no json and no ctypes")
    from sglang._double.engine import main

    main(sys.argv[1:])
