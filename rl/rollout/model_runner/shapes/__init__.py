"""Shapes of the programs of an engine: all sizes, and the short list that servers keep to."""
