"""Submission of experiments to TPUs: a plan, manifests and the code in use, written without asking any cloud.

Nothing is imported here: `tools.launch.process` starts in every container, and needs no jax.
"""
