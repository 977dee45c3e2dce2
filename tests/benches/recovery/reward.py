"""The reward of the recovery benchmark's job, in a module of its own: a verifier's process imports nothing else."""

import time

SECONDS = 0.02


def ascii_share(problem_id: int, answer: str) -> float:
    """Return the share of ASCII characters; 0 for an empty answer."""
    del problem_id
    return sum(character.isascii() for character in answer) / len(answer) if answer else 0.0


def slow_ascii_share(problem_id: int, answer: str) -> float:
    """Return `ascii_share` after a delay, so that an update takes a third of a second and hardly any CPU."""
    time.sleep(SECONDS)
    return ascii_share(problem_id, answer)
