"""Every preset's gradient, by the trainer's own arrays and losses, is its paper's in float64, however rows are cut.

The policy is a table: a log-probability for each token of each rollout, so that its gradient is that of J by tokens,
and each token's can be found again in any layout. With a decoder, on meshes: tests/rl/training/test_policy_mesh.py.
Tolerance: 1e-6 of the largest entry (float32 sums of about a hundred terms).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_like.layers.aux import Aux
from axlearn_like.layers.base import split
from rl.objective import (
    PRESETS,
    Objective,
    derived_metrics,
)
from rl.protocol.headers import header_of
from rl.protocol.messages import Episode, Group, Score, Turn, contents_of
from rl.training import program
from rl.training.batching import Batch, PackedRows, PaddedRows, arrange, fill_packed, fill_padded
from rl.training.packing import Packing
from rl.training.spec import UpdateSpec
from tests.bounds import within
from tests.rl.objective.papers import (
    CASES,
    DEMONSTRATIONS,
    LENGTH,
    LENGTHS,
    MOST,
    MU,
    NEW,
    OLD,
    REFERENCE,
    REWARDS,
    SIZES,
    TOOL,
    TRUNCATED,
    TURNS,
    UNSCORED,
    VALUES,
    differences,
)
from tests.rl.tiny import make_prompt, make_rollout

pytestmark = pytest.mark.numerics

TOLERANCE = 1e-6
IDS = np.arange(1, NEW.size + 1).reshape(NEW.shape)  # of tokens; 0: padding
MAX_PROMPT = 6


def by_id(values: np.ndarray) -> np.ndarray:
    """[tokens + 1]: the values of tokens by their ids; what padding has must not matter, and is not finite."""
    return np.concatenate([[np.nan], values.ravel()]).astype(np.float32)


class Table(nnx.Module):
    """The policy: log pi of each token by its id."""

    def __init__(self) -> None:
        self.logprobs = nnx.Param(jnp.asarray(np.nan_to_num(by_id(NEW))))


GRAPHDEF, PARAMS = split(Table())


def read_table(model: Any, batch: Mapping[str, Any], *_how: Any) -> program.Scored:
    """Stand in for `policy_logprobs`, however that would compute them; entropies are made up of the ids."""
    found = model.logprobs[...][batch["targets"]]
    entropy = jnp.asarray(batch["targets"] % 7, jnp.float32)
    return program.Scored(jnp.where(batch["targets"] == 0, jnp.nan, found), entropy, Aux())


def made_groups(demonstrations: bool = False) -> list[Group]:
    """The rollouts of `papers`, as messages; those of DEMONSTRATIONS are marked as such, or are drawn as any other."""
    groups: list[Group] = []
    for g, size in enumerate(SIZES):
        prompt, rollouts, scores = make_prompt(g, 1 + g), [], []
        for i in range(size):
            length = int(LENGTHS[g, i])
            rollout = make_rollout(prompt, i, IDS[g, i, :length], stopped=(g, i) not in TRUNCATED)
            turns = (Turn(*TURNS[g, i]), Turn(length, 0.0)) if (g, i) in TURNS else ()
            mask = np.array([(g, i, t) not in TOOL for t in range(length)])
            changed: dict[str, Any] = {"logprobs": MU[g, i, :length].astype(np.float32), "action_mask": mask}
            changed["episode"] = Episode(turns) if turns else None
            if demonstrations and (g, i) in DEMONSTRATIONS:
                changed |= {"demonstration": True, "logprobs": np.zeros(length, np.float32)}
            rollouts.append(dataclasses.replace(rollout, **changed))
            failed = (g, i) in UNSCORED
            scores.append(Score(99.0 if failed else float(REWARDS[g, i]), "crash" if failed else "ok"))
        groups.append(Group(prompt, tuple(rollouts), tuple(scores)))
    return groups


def reordered(groups: Sequence[Group]) -> list[Group]:
    """The same rollouts with prompts, and the rollouts of each, in another order."""
    rng, found = np.random.default_rng(5), []
    for g in rng.permutation(len(groups)):
        order = rng.permutation(len(groups[g].rollouts))
        parts = tuple(groups[g].rollouts[i] for i in order), tuple(groups[g].scores[i] for i in order)
        found.append(Group(groups[g].prompt, *parts))
    return found


@dataclasses.dataclass(frozen=True)
class Layout:
    """How rollouts are placed in rows, and rows in micro-batches.

    Attributes:
        packed: several rollouts, of several prompts, in a row of 16 tokens.
        samples_per_row: samples in a row of padded rows.
        row_multiple: multiple of padded rows: empty ones follow.
        cuts: rows at which a micro-batch ends.
        longer: tokens of padding behind the longest rollout.
        shuffled: prompts and rollouts in another order.
    """

    packed: bool = False
    samples_per_row: int | None = None
    row_multiple: int = 1
    cuts: tuple[int, ...] = ()
    longer: int = 0
    shuffled: bool = False


# The first two are for every run of the tests: each holds all that a layout of its kind can change.
LAYOUTS: dict[str, Layout] = {
    "padded": Layout(samples_per_row=3, row_multiple=8, cuts=(4,), longer=3, shuffled=True),
    "packed": Layout(packed=True, shuffled=True),
    "whole": Layout(),
    "micro-batches of 1, 6 and 14 rollouts": Layout(samples_per_row=1, cuts=(1, 7)),
    "more rows": Layout(samples_per_row=7, row_multiple=16),
    "packed in order": Layout(packed=True),
}
QUICK = ("padded", "packed")


def batches(objective: Objective, layout: Layout) -> list[Batch]:
    """The arrays of each micro-batch, by the trainer's own functions, with the other policies' log-probabilities."""
    groups = made_groups(objective.mixes)
    groups = reordered(groups) if layout.shuffled else groups
    headers, contents, max_new_tokens = (
        [header_of(group) for group in groups],
        contents_of(groups),
        LENGTH + layout.longer,
    )
    scored: dict[str, Any] = {}
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    others = {"values": (objective.needs_values, VALUES), "divergence": (objective.needs_divergence, MU - REFERENCE)}
    for name in (name for name, (needed, _) in others.items() if needed):
        scored[name] = np.full((len(rollouts), max_new_tokens), np.nan)
        for row, rollout in zip(scored[name], rollouts, strict=True):
            row[: len(rollout.tokens)] = others[name][1].ravel()[rollout.tokens - 1]
    filled: list[Batch] = []
    if layout.packed:
        packing = Packing.Config(lengths=(16,), rows=2, completions=6).build(
            max_prompt_tokens=MAX_PROMPT, max_new_tokens=max_new_tokens
        )
        for minibatch in arrange(headers, objective, PackedRows(packing), **scored).minibatches:
            for one in minibatch.microbatches:
                filled.append(fill_packed(one.rows, one.length, minibatch.prepared, contents, packing))
    else:
        rows = PaddedRows(MAX_PROMPT, max_new_tokens, layout.row_multiple, layout.samples_per_row)
        samples = layout.samples_per_row or MOST
        for minibatch in arrange(headers, objective, rows, **scored).minibatches:
            (one,) = minibatch.microbatches
            ends = [0, *layout.cuts, len(one.rows)]
            for begin, end in zip(ends, ends[1:], strict=False):
                part = one.rows[begin:end]
                filled.append(fill_padded(part, minibatch.prepared, contents, MAX_PROMPT, max_new_tokens, samples))
    needed = {"old": objective.needs_old, "reference": objective.needs_reference}
    policies = {name: by_id(x) for name, x in (("old", OLD), ("reference", REFERENCE)) if needed[name]}
    for batch in filled:
        batch |= {f"logprobs_{name}": values[batch["targets"]] for name, values in policies.items()}
    return filled


Found = tuple[float, np.ndarray, dict[str, float]]


def summed(objective: Objective, given: Sequence[Batch], layout: Layout) -> Found:
    """J, its gradient by token [groups, rollouts, tokens], and metrics: the sums of the micro-batches, in float64."""
    make = program.make_packed_loss if layout.packed else program.make_policy_loss
    spec = UpdateSpec(1.0, max_new_tokens=LENGTH if layout.packed else None)
    compute = jax.value_and_grad(make(GRAPHDEF, objective, spec), has_aux=True)
    value, gradient, metrics = 0.0, np.zeros(NEW.size + 1), dict[str, float]()
    for batch in given:
        (loss, figures), slopes = compute(PARAMS, batch)
        value -= float(loss)
        gradient -= np.asarray(jax.tree.leaves(slopes)[0], np.float64)
        for name, figure in figures.items():
            largest = name.endswith("_max")
            metrics[name] = (
                max(metrics.get(name, -np.inf), float(figure)) if largest else metrics.get(name, 0) + float(figure)
            )
    return value, gradient[1:].reshape(NEW.shape), metrics | derived_metrics(metrics)


@functools.cache
def expected(name: str) -> tuple[float, np.ndarray]:
    """The paper's J and gradient."""
    paper = CASES[name][1]
    return paper(NEW, NEW), differences(paper)


def error(gradient: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference, as a share of the largest entry."""
    return float(np.abs(gradient - wanted).max() / np.abs(wanted).max())


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "policy_logprobs", read_table)


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [QUICK, pytest.param(LAYOUTS, marks=pytest.mark.full)], ids=["quick", "all"])
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_the_papers_in_every_layout(name: str, layouts: Sequence[str]):
    """Ragged groups, padding that is not finite, and unscored, truncated, tool and equal rows among the others."""
    objective, (value, gradient) = CASES[name][0].build(), expected(name)
    assert np.count_nonzero(gradient) > 20
    metrics: dict[str, float] = {}
    for layout in map(LAYOUTS.__getitem__, layouts):
        found, slopes, figures = summed(objective, batches(objective, layout), layout)
        assert found == pytest.approx(value, rel=1e-5, abs=3e-6), layout
        assert within(error(slopes, gradient), TOLERANCE), layout
        metrics = metrics or figures
        assert figures == pytest.approx(metrics, rel=1e-4, abs=1e-6), layout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dapo", "grpo", "grpo on stale rollouts"])
@pytest.mark.parametrize("layout", QUICK)
def test_divergence_from_the_sampler_and_effective_sample_size_are_those_of_all_tokens(name: str, layout: str):
    """Against float64 sums over the tokens of the loss, which the arrays of one row for each rollout give."""
    objective = CASES[name][0].build()
    whole = batches(objective, LAYOUTS["whole"])
    weights, ids = (np.concatenate([b[key].ravel() for b in whole]) for key in ("weights", "targets"))
    live = weights > 0
    w, log_ratio = weights[live].astype(np.float64), (NEW - MU).ravel()[ids[live] - 1]
    ratio = np.exp(log_ratio)
    given = batches(objective, LAYOUTS[layout])
    _, _, figures = summed(objective, given, LAYOUTS[layout])
    assert figures["kl_mu_pi"] == pytest.approx(np.average(ratio - 1 - log_ratio, weights=w), rel=1e-5)
    ess = np.average(ratio, weights=w) ** 2 / np.average(ratio**2, weights=w)
    assert 0.2 < ess < 0.99 and figures["ess"] == pytest.approx(ess, rel=1e-5)
    # A mean over micro-batches of each one's own would be another number.
    each = [summed(objective, [batch], LAYOUTS[layout])[2].get("ess") for batch in given]
    assert len(each) == 1 or abs(np.mean([x for x in each if x is not None]) / ess - 1) > 1e-3


@pytest.mark.slow
def test_every_preset_has_a_paper_and_the_data_reach_every_branch():
    """Some tokens clipped above, some below, some not; all gradients differ where the formulas do.

    With an advantage for each token GSPO-token is another objective than GSPO; with one a rollout it is the same.
    """
    assert PRESETS.keys() | {"ppo", "distillation"} == {name.split()[0] for name in CASES}
    r = np.exp(NEW - OLD)[np.arange(LENGTH) < LENGTHS[..., None]]
    assert (r > 1.28).any() and (r < 0.8).any() and ((r > 0.8) & (r < 1.2)).any()
    distinct = {name: expected(name)[1].tobytes() for name in CASES}
    assert distinct.pop("ppo_clip") == distinct["reinforce_pp"]
    equal = "gspo_token with equal advantages"
    assert distinct.pop(equal)
    same, by_turn = (error(expected(name)[1], expected("gspo")[1]) for name in (equal, "gspo_token"))
    assert within(same, 1e-8) and by_turn > 0.1
    assert len(set(distinct.values())) == len(distinct)
