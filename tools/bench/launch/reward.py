"""The reward of the run that is launched, in a module of its own: its process imports nothing else."""

import time


def ascii_share(problem_id: int, answer: str) -> float:
    """Return the share of ASCII characters in an answer, after a pause."""
    del problem_id
    time.sleep(0.02)
    return sum(character.isascii() for character in answer) / max(len(answer), 1)
