"""Turns the hosts of a cluster into findings: what was found on each, what was expected there, and what to type.

`python -m pipeline.doctor` looks at the host that it is started on; the driver judges what it reports.
"""
