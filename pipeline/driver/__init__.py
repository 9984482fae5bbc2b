"""Turns plans into commands to processes, and the events that come back into a run's result."""
