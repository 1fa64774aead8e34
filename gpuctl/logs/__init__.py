"""Reading the logs of servers: lines out of bytes, and the words in which an engine describes its log."""
