"""Writes what processes tell into files, whole, and reads it back."""
