"""Plots and tables of the docs, made from stored results of `axl bench`."""
