"""A draw under watch: the tokens that its watch has read, and the end that it may have asked for."""

from collections.abc import Sequence

from rl.rollout.agent_loops.commands import Abort, DrawWatch


class WatchedDraw:
    """One draw and its watch. The engine's thread takes the tokens, the watching thread reads them.

    Attributes:
        first: tokens of the completion before the draw.
        seen: tokens of the completion that the watch has read, and keeps.
        abort: end of the draw; None: it goes on.
        failed: the watch has raised or hung, and is not asked again.
    """

    def __init__(self, watch: DrawWatch, first: int):
        self._watch, self._taken = watch, first
        self.first = self.seen = first
        self.abort: Abort | None = None
        self.failed = False

    def take(self, drawn: int) -> int:
        """Count tokens of the completion as given to the watch, up to `drawn`; returns how many were before."""
        before, self._taken = self._taken, drawn
        return before

    def read(self, tokens: Sequence[int]) -> Abort | None:
        """Have the watch read tokens; it changes nothing here: a thread that was given up may still come this far.

        Raises:
            ValueError: it keeps tokens that there are not.
        """
        abort = self._watch.feed(tokens)
        if abort is not None and not 1 <= abort.kept <= self._taken - self.first:
            raise ValueError(f"the watch keeps {abort.kept} tokens of {self._taken - self.first}; expected 1 or more")
        return abort

    def settle(self, abort: Abort | None, *, failed: bool) -> None:
        """Take what the watch has said of the tokens that it was given."""
        self.abort, self.failed = abort, failed
        self.seen = self._taken if abort is None else self.first + abort.kept
