"""A cluster on this machine: it runs the commands of JobSets as local processes, by the rules of JobSet and Job.

No jax is imported here, because the process that does this lives beside those of the run.
"""
