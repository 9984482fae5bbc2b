"""TensorFlow inside a process: builds the model, steps, evaluates, saves and restores it."""
