"""Turns the hosts of a cluster into findings: what was found on each, what was expected there, and what to type."""
