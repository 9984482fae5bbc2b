"""What is raised of a model, whichever file finds it out."""


class ModelError(ValueError):
    """A model that cannot be trained here: the message says what was expected and received."""
