"""Turns a data set into batches for each replica, and measures how fast that is."""
