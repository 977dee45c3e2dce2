"""The supervised train step beside plain JAX and MaxText (`python -m tests.studies.train_step`)."""
