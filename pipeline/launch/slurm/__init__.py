"""Nodes of a Slurm cluster: options to a batch script, a job to its state, its nodes to agents."""
