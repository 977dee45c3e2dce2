"""Rules of decoding beside the sampler: penalties, scores of alternatives, grammars, stop strings."""
