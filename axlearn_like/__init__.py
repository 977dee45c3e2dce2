"""Composable training for language models: configs, layers, kernels, learner, trainer, input, checkpoints."""
