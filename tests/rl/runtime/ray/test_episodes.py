"""A worker that is killed in the middle of episodes: pure ones are the same to the bit, others are tagged."""

import signal
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.tokenizers.bytes import ByteTokenizer
from rl.environments.scoring import NoScorer
from rl.verification.inline import InlineVerifier
from tests.rl.environments.toys import Typed, tasks
from tests.rl.runtime.ray.experiments import assert_same_outcome, metrics, run_here, slow
from tests.rl.runtime.ray.test_preemption import Scenario, run_with
from tests.rl.tiny import tiny_policy

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def played(*, pure: bool) -> dict[str, Any]:
    """Return the fields of an experiment whose rollouts are episodes."""
    tokenizer = ByteTokenizer.Config()
    return {
        "policy": tiny_policy(tokenizer.vocab_size),
        "tokenizer": tokenizer,
        "tasks": tasks(Typed.Config(pure=pure, seconds=0.1)),
        "max_prompt_tokens": 8,
        "max_new_tokens": 40,
        "num_steps": 6,
        "workers": 1,
        "verifier": InlineVerifier.Config(scorer=NoScorer.Config()),
    }


@pytest.mark.usefixtures("shared_session")
@pytest.mark.parametrize("pure", [True, False])
def test_kill_9_in_the_middle_of_episodes(pure: bool, tmp_path: Path):
    fields = played(pure=pure)
    expected = run_here(tmp_path / "here", slow(**fields))
    scenario = Scenario(tmp_path / "run")
    scenario.when(lambda: scenario.step >= 2, lambda: scenario.send("worker-0", signal.SIGKILL))
    run_with(scenario, **fields)
    assert scenario.starts("worker-0") == 2 and scenario.seen("lease_expired", worker="worker-0")
    if pure:
        assert_same_outcome(tmp_path / "run", expected)
    else:  # the same here, too, but nobody has declared it
        found = metrics(tmp_path / "run")
        rerun = [row.pop("episode/rerun") for row in found]
        assert any(rerun) and not all(rerun)
        assert found == [{k: v for k, v in row.items() if k != "episode/rerun"} for row in metrics(expected)]
    assert all(row["episode/turns"] == 3 and row["episode/failures"] == 0 for row in metrics(tmp_path / "run"))
