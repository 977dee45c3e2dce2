"""Members in threads of one process whose experts are spread have the bits of one that is alone, and real gradients."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.config import ConfigError, resolve
from axlearn_like.elastic.coordinator import Coordinator
from axlearn_like.elastic.elastic import Elastic
from axlearn_like.elastic.experts import SpreadExperts
from axlearn_like.elastic.member import Member
from axlearn_like.elastic.membership import MemberTimeouts
from axlearn_like.input import SupervisedInput
from axlearn_like.layers.base import bind, build_abstract, first_params
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from axlearn_like.training.step import init_state
from axlearn_like.training.trainer import Trainer
from axlearn_like.training.updates.spread.placed import ExpertPlaces
from axlearn_like.training.updates.spread.programs import SpreadPrograms
from axlearn_like.training.updates.spread.step import SpreadStep
from mesh import shard_batch
from mesh.rules import use_mesh
from tests.axlearn_like.tiny import Counting, Preemption, tiny_model
from tests.axlearn_like.training.updates.zebra.test_step import furthest, mixture, trainer
from tests.bounds import within

STEPS, PARTS, KEY = 6, 4, b"key"
SPREAD = SpreadExperts.Config(slots=3, copies=2, every=2)


def config(**changes: Any) -> Trainer.Config:
    cfg = trainer(mixture(), elastic=Elastic.Config(parts=PARTS, experts=SPREAD)).set(**changes)
    cfg.input = SupervisedInput.Config(source=Counting.Config(), seq_len=16, batch_size=8)
    return cfg


class Run:
    """A run whose members are threads; they share the compiled programs."""

    def __init__(self, folder: Path):
        cfg = config()
        cfg.check()
        self.cfg, self.mesh, learner = cfg, cfg.check_sizes(), cfg.learner.build()
        self.log = EventLog(folder / "events.jsonl")
        with use_mesh(self.mesh):
            self.program = cfg.clone(elastic=None).program(self.mesh, learner)
            self.programs = SpreadPrograms(resolve(cfg.model, build_abstract), cfg.loss.build(), learner)
            self.first = init_state(first_params(self.program.init, 3, self.program.state["params"]), learner)
        source = cfg.input.build()
        self.batches = [next(source) for _ in range(STEPS)]
        self.states: dict[int, Any] = {}
        self.norms: dict[int, list[float]] = {}
        self.errors: list[BaseException] = []

    def step(self, member: Member | None) -> SpreadStep:
        places = ExpertPlaces(SPREAD, self.programs.shape, member, self.log)
        return SpreadStep(self.programs, places, PARTS, member, self.program.state)

    def train(self, index: int, member: Member | None = None, leave: int | None = None) -> None:
        """Make all updates, or leave without a word in the middle of one."""
        with use_mesh(self.mesh):
            step = self.step(member)
            state, norms = step.parted(jax.tree.map(np.array, self.first)), []
            for number, batch in enumerate(self.batches):
                if number == leave:
                    assert member is not None
                    return member.close()
                state, metrics = step(state, batch)
                norms.append(float(metrics["grad_norm"]))
            held = {key: jax.tree.map(np.asarray, one) for key, one in state["experts"].items()}
            self.states[index] = {"rest": jax.tree.map(np.asarray, state["rest"]), "experts": held}
            self.norms[index] = norms
            if member is None:
                self.whole: Any = step.gathered(state)

    def together(self, members: int, leaving: int, leave: int) -> None:
        coordinator = Coordinator(members, KEY, self.log, MemberTimeouts(silence=60.0))
        threads: list[threading.Thread] = []

        def run(index: int) -> None:
            try:
                member = Member(index, coordinator.address, KEY, patience=30.0)
                member.join()
                self.train(index, member, leave if index == leaving else None)
            except BaseException as error:
                self.errors.append(error)
                raise

        for index in range(members):
            threads.append(threading.Thread(target=run, args=(index,), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join(120.0)
        coordinator.close()


@pytest.mark.slow
@pytest.mark.numerics
def test_spread_experts_change_no_bit_and_one_who_leaves_neither(tmp_path: Path):
    run = Run(tmp_path)
    run.train(-1)
    run.together(3, leaving=1, leave=3)
    assert not run.errors and sorted(run.states) == [-1, 0, 2]
    alone = run.states[-1]
    for index in (0, 2):
        jax.tree.map(np.testing.assert_array_equal, run.states[index]["rest"], alone["rest"])
        for key, one in run.states[index]["experts"].items():
            jax.tree.map(np.testing.assert_array_equal, one, alone["experts"][key])
        assert run.norms[index] == run.norms[-1]
    held = [set(run.states[index]["experts"]) for index in (0, 2)]
    assert (
        len(alone["experts"]) == 8
        and all(len(some) == 6 for some in held)
        and held[0] | held[1] == set(alone["experts"])
    )
    placed = [row for row in read_rows(run.log.path) if row["event"] == "experts_placed" and row["members"] > 1]
    assert {row["copies"] for row in placed} == {1, 2} and any(row["moves"] for row in placed)


@pytest.mark.slow
@pytest.mark.numerics
def test_gradients_are_those_of_the_model(tmp_path: Path):
    run = Run(tmp_path)
    run.batches = run.batches[:1]
    params = jax.tree.map(np.array, run.first["params"])
    run.train(-1)
    with use_mesh(run.mesh):
        loss, batch = run.cfg.loss.build(), shard_batch(run.batches[0])
        grads = jax.jit(jax.grad(lambda params: loss(bind(run.program.graphdef, params), batch)[0]))(params)
    # After one update AdamW's first moment is a tenth of the clipped gradient.
    scale = 0.1 * min(1.0, 0.1 / run.norms[-1][0])
    moments = next(tree for tree in _dicts(run.whole["opt_state"]) if "embedding" in tree)
    assert within(furthest(moments, jax.tree.map(lambda g: scale * g, grads)), 1e-5)


def _dicts(tree: Any) -> list[dict[str, Any]]:
    """The dicts like the parameters in an optimizer's state, first moments in front."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, dict) and "embedding" in x)
    return [leaf for leaf in leaves if isinstance(leaf, dict)]


def dense(cfg: Trainer.Config) -> None:
    cfg.model = tiny_model()


def evaluated(cfg: Trainer.Config) -> None:
    cfg.evaluators = (Preemption.Config(),)


def unsaved(cfg: Trainer.Config) -> None:
    cfg.checkpoint.save_every = None


@pytest.mark.parametrize(
    "change, message",
    [
        (dense, "feed_forward: expected MoE.Config with elastic.experts"),
        (evaluated, r"evaluators: expected \(\) with elastic.experts: no member has all parameters"),
        (unsaved, "save_every: expected a number with elastic.experts"),
    ],
)
def test_what_members_cannot_do_with_a_part_of_the_experts_is_refused(
    change: Callable[[Trainer.Config], None], message: str
):
    cfg = config()
    cfg.check()
    change(cfg)
    with pytest.raises(ConfigError, match=message):
        cfg.check()


def test_the_mesh_of_a_member_shards_rows_alone():
    cfg: Any = config()
    cfg.check()
    for size in (1, 2, 8):
        cfg.elastic.check_mesh(jax.sharding.AbstractMesh((size, 1), ("data", "fsdp")))
    for sizes in ((1, 2), (3, 1)):
        expected = "elastic.experts: expected None on a mesh of . devices; with experts the axis data alone"
        with pytest.raises(ConfigError, match=expected):
            cfg.elastic.check_mesh(jax.sharding.AbstractMesh(sizes, ("data", "fsdp")))
