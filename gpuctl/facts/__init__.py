"""Facts: what a snapshot's raw answers mean. Pure parsers; what cannot be read is Unknown.

Each module is one subject. A fact is a module constant in capitals: `snapshot[devices.MAJORS]`.
"""
