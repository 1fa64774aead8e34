"""A report before it has a face: the blocks it is made of, and how a run becomes them. Pure."""
