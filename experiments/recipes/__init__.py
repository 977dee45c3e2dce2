"""Recipes: models by job and machine, and the computation of what fits."""
