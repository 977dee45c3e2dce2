"""Curation of rows before a run: filters, near duplicates, contamination, splits, difficulty; with a report."""
