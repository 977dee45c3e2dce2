"""An experiment says what it can run; the tools ask it, and know no kinds of experiments."""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from axlearn_like.config import ConfigBase, Configurable
from experiments import registry
from mesh import UserError, make_mesh
from mesh.cost.program import Program, Programs
from rl.training.packing import Packing
from tools.aot.run import find_program, tuning_of
from tools.experiment import check_command

KINDS = {"Trainer", "RLExperiment", "PolicyTrainer", "LossEvaluator"}


def kind_questions(source: str) -> list[int]:
    """Lines of `isinstance` or `issubclass` with a kind of experiment."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [one for one in calls if isinstance(one.func, ast.Name) and one.func.id in ("isinstance", "issubclass")]
    return [
        one.lineno
        for one in named
        if KINDS & {part.id for part in ast.walk(one.args[1]) if isinstance(part, ast.Name)}
        or KINDS & {part.attr for part in ast.walk(one.args[1]) if isinstance(part, ast.Attribute)}
    ]


def test_no_tool_asks_for_the_kind_of_an_experiment(checkout: Path):
    found = {path: kind_questions(path.read_text()) for path in sorted((checkout / "tools").rglob("*.py"))}
    assert {str(path): lines for path, lines in found.items() if lines} == {}


def test_such_a_question_would_be_found():
    assert kind_questions("if isinstance(cfg, Trainer.Config):\n    pass") == [1]
    assert kind_questions("x = 1\nassert isinstance(cfg, rl.experiment.RLExperiment.Config | None)") == [2]
    assert kind_questions("isinstance(value, bool)") == []


class Doubling(Configurable):
    """An experiment of another kind: one program that the tools have never heard of."""

    class Config(ConfigBase["Doubling"]):
        rows: int = 4

        def programs(self, devices: Sequence[Any]) -> Programs:
            mesh = make_mesh({"data": -1}, devices)

            def trace() -> Any:
                with jax.set_mesh(mesh):
                    return jax.jit(lambda x: 2 * x).trace(jnp.zeros(self.rows))

            return {"double": lambda: Program("double", mesh, trace, self.rows, 1, 0.0, "nothing")}


def test_an_experiment_of_any_kind_is_asked():
    program = find_program(Doubling.Config(), "double", jax.devices()[:1])
    assert (program.name, program.rows, program.mesh.size) == ("double", 4, 1)
    assert program.trace().jaxpr.in_avals[0].shape == (4,)
    with pytest.raises(UserError, match="--step train: this experiment has no such step; known: double"):
        find_program(Doubling.Config(), "train", jax.devices()[:1])
    with pytest.raises(UserError, match="Doubling.Config has nothing to compile; expected .* `tuning`"):
        tuning_of(Doubling.Config())
    with pytest.raises(UserError, match="test_programs:Doubling, which `axl train` does not run$"):
        check_command(Doubling.Config(), "train", "double")


@pytest.mark.slow
def test_the_programs_of_the_registered_experiments():
    devices = jax.devices()[:1]
    supervised: Any = registry.get("demo_sft")
    reinforcement: Any = registry.get("demo")
    assert set(supervised.programs(devices)) == {"train", "eval"}
    assert set(reinforcement.programs(devices)) == {"train", "score", "prefill", "decode"}
    train, evaluation = (find_program(supervised, name, devices) for name in ("train", "eval"))
    assert (train.rows, train.length) == (supervised.input.batch_size, supervised.input.seq_len)
    assert evaluation.counted.startswith("forward pass of ")
    assert "dot_general" in str(evaluation.trace().jaxpr)


def test_an_update_and_a_scoring_of_an_rl_experiment():
    cfg: Any = registry.get("demo")
    train, score = (find_program(cfg, name, jax.devices()[:1]) for name in ("train", "score"))
    assert (
        train.rows * (cfg.trainer.samples_per_row or cfg.samples_per_prompt)
        >= cfg.prompts_per_step * cfg.samples_per_prompt
    )
    assert (
        score.rows >= cfg.prompts_per_step * cfg.samples_per_prompt
        and score.length >= cfg.max_prompt_tokens + cfg.max_new_tokens - 1
    )
    assert train.flops > score.flops > 0
    assert cfg.tuning().edits({"fsdp": 2}, "nothing", 2)["trainer.mesh"] == {"fsdp": 2}


@pytest.mark.full  # tests/rl/training/test_packed_trainer.py runs them
def test_an_update_by_packed_rows_has_a_program_for_each_length():
    cfg: Any = registry.get("demo")
    cfg.trainer.set(packing=Packing.Config(lengths=(2 * cfg.max_new_tokens, cfg.max_new_tokens), rows=3))
    known = cfg.programs(jax.devices()[:1])
    assert set(known) == {"train", f"train_{cfg.max_new_tokens}", "update", "score", "prefill", "decode"}
    train, short = known["train"](), known[f"train_{cfg.max_new_tokens}"]()
    prefix = cfg.max_prompt_tokens - 1
    assert (train.rows, train.length, short.length) == (3, prefix + 2 * cfg.max_new_tokens, prefix + cfg.max_new_tokens)
    assert train.flops > short.flops > 0
    for program in (train, short):
        assert "dot_general" in str(program.trace().jaxpr)
    assert known["update"]().trace().jaxpr


def test_the_wrong_command_is_named():
    with pytest.raises(UserError, match="RLExperiment, which `axl train` does not run; use `axl rl`"):
        check_command(registry.get("demo"), "train", "demo")
    with pytest.raises(UserError, match="which `axl serve` does not run; use `axl train`"):
        check_command(registry.get("demo_sft"), "serve", "demo_sft")
