"""Studies behind the figures of the docs: run from a checkout, not part of the wheel."""
