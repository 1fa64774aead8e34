"""One file an engine; the file name is its id. See docs/design.md."""
