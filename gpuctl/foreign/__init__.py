"""Result files of other load generators: one file a tool, found by looking into the folder.

A module has `TOOL` (its name in reports), `recognise(document) -> bool` and `runs(document) -> list[Imported]`; a
document is one JSON value of a file. Pure.
"""
