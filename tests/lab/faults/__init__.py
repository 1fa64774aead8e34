"""Ways to break the lab. A fault is a function of a lab; those of the modules here become commands by themselves.

    python -m tests.lab fault cut ct200          from tests.lab.faults.network import cut; cut(lab, "ct200")

Arguments of the function are arguments of the command, keyword-only ones are options, its docstring is the help.
"""
