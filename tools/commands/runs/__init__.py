"""Commands on run directories."""
