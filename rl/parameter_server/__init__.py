"""The parameter server: versions of the weights, from the trainer to the rollout workers."""
