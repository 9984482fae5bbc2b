"""Turns a command that tests ask for into one that need not import what others did: the same code, processes, words."""
