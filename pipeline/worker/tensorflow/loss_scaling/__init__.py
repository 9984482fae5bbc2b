"""Losses, metrics and statistics of several replicas, brought to what one device has."""
