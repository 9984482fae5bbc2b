"""A model's own loop: `pipeline.fit`, and models whose `train_step` or callbacks need Keras's."""
