"""The verbs, in modules that are imported once they are needed."""
