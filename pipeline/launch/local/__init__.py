"""This machine: plans to processes forked from a server that has TensorFlow, on all of its devices or on a share."""

from pipeline.launch.local.cluster import LocalCluster, LocalJob

__all__ = ["LocalCluster", "LocalJob"]
