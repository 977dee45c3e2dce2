"""A new column is one class and one line: here the version that drew each token, which the loss reads."""

from pathlib import Path
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.config.tree import children
from mesh import UserError, make_mesh
from rl.experiment import RLExperiment
from rl.objective import Objective
from rl.objective.presets import grpo
from rl.protocol.headers import header_of
from rl.protocol.messages import Rollout, contents_of
from rl.training.batching import PackedRows, PaddedRows, arrange, fill_packed, fill_padded
from rl.training.columns import CandidateTokens, TokenColumn, sequence_places
from rl.training.packing import Packing
from rl.training.trainer import PolicyTrainer
from tests.rl.tiny import make_group, make_prompt
from tests.rl.training.test_trainer import Roles, config


class Version(TokenColumn):
    """The version of the policy that drew each token."""

    name = "version"

    @override
    def record(self, rollout: Rollout) -> np.ndarray:
        return rollout.versions.astype(np.float32)


class Versions(PolicyTrainer):
    """A trainer whose batches have the column."""

    class Config(PolicyTrainer.Config):
        @override
        def columns(self) -> tuple[TokenColumn, ...]:
            return *super().columns(), Version()


class Summing(Objective):
    """GRPO with a metric: the sum of the versions of the tokens that are learned from."""

    class Config(Objective.Config):
        pass

    @override
    def loss(self, logprobs: jax.Array, batch: Any, *others: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss, metrics = super().loss(logprobs, batch, *others)
        return loss, {**metrics, "version_sum": jnp.sum(jnp.where(batch["weights"] > 0, batch["version"], 0))}


def experiment(packing: Packing.Config | None) -> RLExperiment.Config:
    cfg = config()
    trainer, objective = Versions.Config(**dict(children(cfg.trainer))), Summing.Config(**dict(children(grpo())))
    return cfg.set(trainer=trainer.set(packing=packing), objective=objective)


ROWS = {
    "padded": None,
    "packed": Packing.Config(lengths=(12, 6), rows=2),
    "trees": Packing.Config(lengths=(12,), rows=2, tree=True),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "packing", [ROWS["padded"], *(pytest.param(ROWS[name], marks=pytest.mark.full) for name in ("packed", "trees"))]
)
def test_an_update_takes_a_column_that_a_class_and_a_line_add(tmp_path: Path, packing: Packing.Config | None):
    roles = Roles.make(tmp_path / "r", experiment(packing))
    for version in range(2):
        groups = roles.submit(rewards=[1.0, 0.0, 0.5, 0.2], lengths=[6, 1, 3, 5])
        assert roles.trainer.run_once()
        roles.trainer.settle()
        tokens = sum(len(rollout.tokens) for group in groups for rollout in group.rollouts)
        row = roles.rows()[version]
        assert (row["version_sum"], row["version_bytes"]) == (version * tokens, 4 * tokens)
    roles.trainer.close()


@pytest.mark.parametrize("packing", ROWS.values(), ids=ROWS)
def test_the_described_update_has_the_column(packing: Packing.Config | None):
    made = experiment(packing).build()
    mesh = make_mesh({})
    for batch in made.trainer_cfg.batches(mesh, groups=2, samples=4).values():
        assert batch["version"] == batch["logprobs_behaviour"]


@pytest.mark.parametrize("packing", ROWS.values(), ids=ROWS)
def test_a_value_lies_where_its_token_does(packing: Packing.Config | None):
    class Token(TokenColumn):
        name = "token"

        @override
        def record(self, rollout: Rollout) -> np.ndarray:
            return rollout.tokens

    groups = [make_group(make_prompt(g, 2 + g), [[5, 6, 7 + g], [5, 9], [5]], [0.0, 1.0, 0.5]) for g in range(3)]
    headers, contents, seen = [header_of(group) for group in groups], contents_of(groups), 0
    built = None if packing is None else packing.build(max_prompt_tokens=6, max_new_tokens=6)
    layout = PaddedRows(6, 6) if built is None else PackedRows(built)
    plan = arrange(headers, grpo().build(), layout)
    for one in plan.microbatches:
        if built is None:
            batch = fill_padded(one.rows, plan.prepared, contents, 6, 6, 3, [Token()])
        else:
            batch = fill_packed(one.rows, one.length, plan.prepared, contents, built, [Token()])
        targets = batch["targets"]
        if "paths" in batch:
            targets = np.stack([row[paths] for row, paths in zip(targets, batch["paths"], strict=True)])
        live = batch["token"] != 0
        np.testing.assert_array_equal(live, batch["action_mask"])
        np.testing.assert_array_equal(batch["token"][live], targets[live])
        seen += int(live.sum())
    assert seen == 18


def test_rollouts_without_the_record_are_refused():
    class Never(TokenColumn):
        name = "teacher"

        @override
        def record(self, rollout: Rollout) -> None:
            return None

    (group,) = [make_group(make_prompt(3), [[1, 2]], [0.0])]
    (rollout,) = group.rollouts
    with pytest.raises(UserError, match="prompt 3, sample 0 came without teacher; expected a value for each token"):
        Never().fill(sequence_places([(group.prompt.tokens, rollout)], 1, 16))
    assert CandidateTokens(3).describe((2, 4, 6)).shape == (2, 4, 6, 3)
