"""A Kubernetes that is none: it takes what the official client sends and runs pods as processes in namespaces.

What it does it does as the manifest says: names, environment, user, files, restarts. `api` speaks HTTP,
`controllers` keeps what was made, and makes jobs of JobSets and pods of jobs, `kubelet` starts and ends what pods hold,
`network` gives them addresses and names.
"""
