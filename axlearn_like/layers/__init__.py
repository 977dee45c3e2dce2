"""Layers: Flax NNX modules used functionally (built from configs, pure calls, plain dicts of arrays outside)."""
