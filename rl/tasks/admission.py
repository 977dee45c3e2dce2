"""Admission of problems to training and evaluation: what is left out because it cannot be made, or used."""

from collections.abc import Callable

from rl.protocol.messages import Problem


class Admission:
    """Problems that raise when they are made are left out; a subclass may leave out more."""

    def make(self, problem_id: int, family: str, make: Callable[[], Problem]) -> Problem | None:
        """Return the problem; None: it is left out, and the plan goes on with the next candidate."""
        try:
            return make()
        except Exception:  # any library that makes problems may raise
            return None

    def fits(self, problem: Problem) -> bool:
        """Return False for a problem that is left out although it could be made."""
        return True

    def too_few(self, family: str) -> str:
        """Return why problems of a family did not fit, and what to change; empty: none was left out for that."""
        return ""
