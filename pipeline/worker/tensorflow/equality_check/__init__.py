"""All replicas compared with one device on a small batch, before training."""
