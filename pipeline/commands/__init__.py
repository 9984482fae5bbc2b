"""The command line: its verbs, each a `main` that takes arguments and returns the exit code."""
