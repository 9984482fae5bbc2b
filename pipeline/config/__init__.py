"""Turns YAML and overrides into a typed config, or one sentence that says what is wrong with them."""
