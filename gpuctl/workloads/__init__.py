"""One file a workload; the file name is its id. See docs/design.md."""
