"""One file a check; the file name is its id. See docs/design.md."""
