"""Programs of an engine that were compiled where its run was submitted."""

from pathlib import Path

import jax
import pytest

from mesh.programs.executables import VARIABLE, keep_executables
from mesh.programs.shared import forget_programs
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.aot import programs_of_run
from rl.rollout.request import Request
from tests.rl.rollout.small import assert_same
from tests.rl.tiny import make_prompt, tiny_params, tiny_policy

POLICY = tiny_policy(num_layers=1)
CFG = RolloutEngine.Config(
    model=POLICY, stop_tokens=tuple(range(6)), max_prompt=30, max_new=4, max_num_seqs=2, prefill_tokens=64
)


def test_a_run_finds_all_its_programs_and_draws_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mesh, dispatches = programs_of_run(CFG, jax.devices())
    assert [one.name for one in dispatches] == ["prefill 2 x 32", "prefill 1 x 32", "decode 2, plain"]
    with jax.set_mesh(mesh):
        keep_executables([one.trace().lower() for one in dispatches], list(mesh.devices.flat), tmp_path)
    asked = [Request(make_prompt(number, 4 + 20 * number), samples=2, seed=3) for number in range(2)]
    forget_programs()  # those above, which were traced with arrays described
    found = []
    for folder in (None, tmp_path):
        if folder is not None:
            monkeypatch.setenv(VARIABLE, str(folder))
        engine = CFG.build()
        engine.set_weights(tiny_params(POLICY), 1)
        found.append(engine.generate(asked))
        assert engine.stats()["loaded_programs"] == (0 if folder is None else 2)  # both prompts at once
    assert_same(*found)
    assert sum(len(one.tokens) for one in found[0]) > 8
