"""A small client of the API of Kubernetes: what a submission needs, without the 119 MB of the official one."""
