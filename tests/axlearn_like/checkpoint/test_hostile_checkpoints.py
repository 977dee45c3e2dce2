"""Hostile checkpoints are refused with a sentence, within a second and 200 MB: by their descriptions, before arrays."""

import pytest

from tests.axlearn_like.checkpoint import hostile_checkpoints
from tests.measured import check, measured


@pytest.mark.slow
def test_every_hostile_checkpoint_is_refused() -> None:
    found = measured(hostile_checkpoints.__name__)
    assert len(found) == len(hostile_checkpoints.CASES) > 90
    check(found)
