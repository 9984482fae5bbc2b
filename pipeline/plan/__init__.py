"""Turns a config and what a machine has into frozen numbers, by arithmetic alone, or into a refusal."""
