"""Observers of batches: what is done by each before the policy's updates, beside them, and measured."""

from collections.abc import Mapping, Sequence

from rl.protocol.headers import GroupHeader
from rl.training.critic.values import RolloutValues
from rl.training.publication import Publication
from rl.training.scoring.logprob_diff import LogprobDiff, only_version
from rl.training.steps.fill import FilledBatch
from rl.training.steps.take import RolloutIndex


class BatchObserver:
    """Base of observers, which does nothing. In several processes all make the same calls."""

    def rollouts(self, headers: Sequence[GroupHeader], version: int) -> list[RolloutIndex]:
        """Return the rollouts of the batch whose tokens `before` needs in this process."""
        return []

    def before(self, batch: FilledBatch) -> Mapping[str, float]:
        """Act on a batch before the first update by it; returns metrics."""
        return {}


class CriticUpdates(BatchObserver):
    """Updates of a critic, where it makes some of its own, and figures about its values."""

    def __init__(self, critic: RolloutValues):
        self._critic = critic

    def rollouts(self, headers: Sequence[GroupHeader], version: int) -> list[RolloutIndex]:
        """Return the rollouts of this process's rows."""
        return self._critic.rows(headers) if self._critic.separate else []

    def before(self, batch: FilledBatch) -> Mapping[str, float]:
        """Update by the batch, if it has tokens with a weight."""
        scored, (returns, mask) = batch.scored, batch.scored.arranged.targets
        if not mask.any():
            return {}
        return self._critic.update(scored.headers, scored.contents, scored.scores["values"], returns, mask)


class LogprobComparison(BatchObserver):
    """Comparison of trainer and sampler log-probabilities by every n-th batch whose tokens are of one version."""

    def __init__(self, diff: LogprobDiff, publication: Publication, every: int):
        self._diff, self._publication, self._every = diff, publication, every

    def rollouts(self, headers: Sequence[GroupHeader], version: int) -> list[RolloutIndex]:
        """Return the rollouts of this process's rows."""
        return [] if self._drawn_by(headers, version) is None else self._diff.rows(headers)

    def before(self, batch: FilledBatch) -> Mapping[str, float]:
        """Compare."""
        headers, version = batch.scored.headers, batch.scored.step
        if (drawn_by := self._drawn_by(headers, version)) is None:
            return {}
        sampler = self._publication.params(drawn_by, version, batch.params)
        rows = [(one.batch, one.arrays) for one in batch.rows]
        return self._diff.metrics(rows, headers, batch.scored.contents, sampler)

    def _drawn_by(self, headers: Sequence[GroupHeader], version: int) -> int | None:
        return only_version(headers) if version % self._every == 0 else None
