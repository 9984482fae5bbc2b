"""Agents, one a host, which start, watch and stop processes there, and a conductor's job that they have in common."""
