"""Rules of decoding beside the sampler: penalties, scores of alternatives, stop strings."""
