"""What is wrong with a config."""


class ConfigError(ValueError):
    """A config that is not what the schema allows: the message says what was expected, received and what to type."""
