"""Agents, one a host, which start, watch and stop processes there, and the driver's side of them."""
