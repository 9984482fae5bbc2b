"""Training: the batches each replica sees, the exact loss, the compiled steps, and the loop around them."""
