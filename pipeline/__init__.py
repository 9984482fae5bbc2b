"""Distributed Keras training: a config becomes a plan, a plan becomes processes, processes report events, and events
become a result that can be compared."""
