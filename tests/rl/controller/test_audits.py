"""Audits find wrong rollouts as often as computed, and never one that is right."""

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.config import ConfigError
from rl.audit.comparison import AuditTerms, Rounding, first_difference
from rl.controller import audits
from rl.controller.audits import Audits
from rl.protocol.messages import Group, Lease
from rl.rollout.decoding.drawing import row_keys
from rl.verification.service import Verifier
from rl.verification.verifiers.judge import LLMJudge
from rl.verification.verifiers.self_test import Rows
from tests.rl.controller.scripted import Clock, config, drain, granted, scored
from tests.rl.environments.toys import Echo, tasks
from tests.rl.tiny import make_group, make_prompt, make_rollout, tiny_experiment

TERMS = AuditTerms(seed=0, vocab=50, cpu_bound=1e-4, bound=0.25)
PROMPTS = [make_prompt(number) for number in range(10)]
SAMPLES = 6


def batch(number: int, wrong: Sequence[tuple[int, int]] = ()) -> tuple[Lease, tuple[Group, ...]]:
    """Return a lease and its groups, of which some rollouts have another last token."""
    lease = Lease(number, number, tuple(PROMPTS), SAMPLES, number, 60.0)
    return lease, tuple(
        dataclasses.replace(
            make_group(
                prompt,
                [[prompt.id, sample, 7 + ((prompt.id, sample) in wrong)] for sample in range(SAMPLES)],
                [0.5] * SAMPLES,
                version=number,
            ),
            hardware="cpu",
        )
        for prompt in PROMPTS
    )


def again(made: Audits, worker: str, right: tuple[Group, ...]) -> dict[str, str]:
    """Let an honest worker draw all again that it is granted; returns the workers found wrong."""
    found: dict[str, str] = {}
    while (lease := made.lease(worker, 4, 0.0, 60.0)) is not None:
        groups = {group.prompt.id: group for group in right}
        drawn = tuple(
            dataclasses.replace(
                groups[prompt.id],
                rollouts=tuple(groups[prompt.id].rollouts[n] for n in lease.samples_of(prompt)),
                scores=tuple(groups[prompt.id].scores[n] for n in lease.samples_of(prompt)),
            )
            for prompt in lease.prompts
        )
        found |= made.submitted(lease.id, drawn) or {}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("share", "dose"), [(0.01, 30), (0.1, 1), (0.1, 5), (0.1, 20), (0.5, 2), (1.0, 1)])
def test_wrong_rollouts_are_found_as_often_as_computed(share: float, dose: int) -> None:
    trials, found = 300, 0
    rng = random.Random(f"{share}/{dose}")
    places = list(itertools.product(range(len(PROMPTS)), range(SAMPLES)))
    _, right = batch(0)
    for _ in range(trials):
        with mock.patch.object(audits.secrets, "token_bytes", rng.randbytes):
            made = Audits(share, TERMS, first_lease=1000, leases=1000)
        lease, groups = batch(0, rng.sample(places, dose))
        assert made.choose("bad", lease, groups) is None
        wrong = {**again(made, "a", right), **again(made, "b", right)}
        assert wrong.keys() <= {"bad"} and made.holds(0) is None
        found += "bad" in wrong
    expected = 1 - (1 - share) ** dose
    assert abs(found / trials - expected) <= 4 * math.sqrt(expected * (1 - expected) / trials)


def rounded(count: int) -> int:
    """Compare so many rollouts with those of another class of hardware; returns how many have another token."""
    rng, tokens, bound = np.random.default_rng(0), 4, 0.01
    rounding = Rounding(bound, 0, TERMS.vocab)
    identity = np.stack([np.zeros(count), np.zeros(count), np.full(count, 7), np.arange(count)], 1).astype(np.uint32)
    keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(row_keys(jnp.asarray(identity)), jnp.arange(4))
    noise = np.asarray(jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (TERMS.vocab,))))(keys))
    logits = rng.normal(size=noise.shape).astype(np.float32)
    flips, prompt = 0, make_prompt(7)
    drawn: list[Any] = []
    for error in (np.float32(0), rng.uniform(-0.45 * bound, 0.45 * bound, noise.shape).astype(np.float32)):
        logprobs = np.asarray(jax.nn.log_softmax(jnp.asarray(logits + error)))
        best = np.argmax(logprobs + noise, -1)
        drawn.append((best, np.take_along_axis(logprobs, best[..., None], -1)[..., 0]))
    for sample in range(count):
        one, other = (
            dataclasses.replace(make_rollout(prompt, sample, best[sample]), logprobs=chosen[sample])
            for best, chosen in drawn
        )
        assert first_difference(one, other, rounding) is None
        flips += not np.array_equal(one.tokens, other.tokens)
    assert tokens == noise.shape[1]
    return flips


@pytest.mark.slow
@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.full)])
def test_no_right_rollout_is_called_wrong(count: int) -> None:
    """Compare drawings with the same bits by way of leases, and those of another class of hardware directly."""
    made, each = Audits(1.0, TERMS, first_lease=10**6, leases=10**6), len(PROMPTS) * SAMPLES
    audited = 0.0
    for number in range(-(-count // each)):
        lease, groups = batch(number)
        assert made.choose("one", lease, groups) is None
        assert again(made, "other", batch(number)[1]) == {}
        figures = made.figures()
        assert figures["audit_failures"] == 0
        audited += figures["audited"]
    assert audited >= count
    assert rounded(count) > count / 1000, "near ties that rounding decides must have occurred"


def test_workers_that_all_draw_differently_end_an_audit_and_nobody_is_accused() -> None:
    made = Audits(1.0, TERMS, first_lease=1000, leases=1000)
    lease, groups = batch(0, [(3, 2)])
    made.choose("a", lease, groups)
    others = [tuple(dataclasses.replace(g, hardware=name) for g in batch(0)[1]) for name in ("x", "y")]
    for name, right in zip(("b", "c"), others, strict=True):
        wrong = dataclasses.replace(right[3].rollouts[2], tokens=np.full(3, ord(name), np.int32))
        rollouts = tuple(wrong if r.sample_id == 2 else r for r in right[3].rollouts)
        assert again(made, name, (*right[:3], dataclasses.replace(right[3], rollouts=rollouts), *right[4:])) == {}
    assert made.holds(0) is None and made.figures()["audit_failures"] == 1


# ---- in the controller


def audited_controller(**changes: Any) -> Any:
    made = Audits(1.0, TERMS, first_lease=10**8, leases=10**8)
    controller = config(audit=1.0, **changes).build(clock=Clock(), audits=made)
    controller.begin(0, 0)
    for worker in ("a", "b", "c"):
        controller.join(worker)
    return controller


def test_a_batch_waits_for_its_audits_and_lost_auditors_are_replaced() -> None:
    controller = audited_controller()
    leases = drain(controller, "a")
    for lease in leases:
        assert controller.submit(lease.id, scored(lease))
    assert controller.lease("a") is None, "nobody audits itself"
    first = granted(controller, "b")
    assert first.again and controller.next_batch(0) is None
    assert controller.missing(0).startswith("8 audits, such as another worker than a to draw prompt ")
    controller.leave("b")
    assert not controller.submit(first.id, ())
    while (lease := controller.lease("c")) is not None:
        assert controller.submit(lease.id, only(lease, scored))
    assert controller.next_batch(0) is not None
    assert controller.consumed(0) == {"audited": 8.0, "audit_failures": 0.0}


def only(lease: Lease, drawn: Any) -> tuple[Group, ...]:
    """Return of what a worker would draw those samples that are asked for."""
    return tuple(
        dataclasses.replace(
            group,
            rollouts=tuple(group.rollouts[n] for n in lease.samples_of(group.prompt)),
            scores=tuple(group.scores[n] for n in lease.samples_of(group.prompt)),
        )
        for group in drawn(lease)
    )


def test_what_the_trainer_has_got_is_not_taken_back_and_what_comes_after_is() -> None:
    controller = audited_controller(staleness=1)
    for lease in drain(controller, "a"):
        groups = scored(lease)
        if lease.step == 1:
            groups = tuple(dataclasses.replace(g, scores=(g.scores[1], g.scores[0])) for g in groups)
        assert controller.submit(lease.id, groups)
    for worker in ("b", "c"):
        while (lease := controller.lease(worker)) is not None and lease.step == 0:
            assert controller.submit(lease.id, only(lease, scored))
        if worker == "b":
            assert controller.next_batch(0) is not None
        if lease is not None:
            assert controller.submit(lease.id, only(lease, scored))
    assert controller.lease("a") is None and controller.status()["workers"] == ["b", "c"]
    assert controller.consumed(0)["audit_failures"] == 4
    again = drain(controller, "b")
    assert [lease.step for lease in again if not lease.again] == [1, 1]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"controller.audit": 1.5}, "controller.audit"),
        ({"controller.weights": "newest", "staleness": 1}, "controller.weights"),
        ({"workers": 2}, "workers"),
    ],
)
def test_what_cannot_be_audited_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    cfg = tiny_experiment(workers=3)
    cfg.controller.set(audit=0.1)
    for path, value in changes.items():
        owner = cfg.controller if path.startswith("controller.") else cfg
        setattr(owner, path.removeprefix("controller."), value)
    with pytest.raises(ConfigError, match=field):
        cfg.build().cfg.check("ray")


def test_rewards_and_environments_that_do_not_repeat_are_refused() -> None:
    judge = LLMJudge.Config(mixture=Rows.Config(rows=()), url="http://localhost:1/v1", model="m")
    for field, value in (("verifier", Verifier.Config(scorer=judge)), ("tasks", tasks(Echo.Config(pure=False)))):
        cfg = tiny_experiment(**{field: value})
        cfg.check_fields()
        cfg.controller.set(audit=0.1)
        with pytest.raises(ConfigError, match=rf"^RLExperiment\.{field}: expected"):
            cfg.check_fields()
