"""Turns a plan into pods of a Kubernetes cluster, and what is seen of them into the words of a job."""
