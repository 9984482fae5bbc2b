"""Turns events and results into what people see."""
