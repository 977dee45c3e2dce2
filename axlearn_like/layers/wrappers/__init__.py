"""Wrappers: a layer around any other layer that changes its weights, as LoRA and quantisation do."""
