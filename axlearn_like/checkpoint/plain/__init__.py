"""Checkpoints whose arrays are files of plain numbers, as an import writes them: read without Orbax."""
