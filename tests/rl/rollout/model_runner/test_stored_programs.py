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
ASKED = [Request(make_prompt(number, 4 + 20 * number), samples=2, seed=3) for number in range(2)]
CFG = RolloutEngine.Config(
    model=POLICY, stop_tokens=tuple(range(6)), max_prompt_tokens=30, max_new_tokens=4, max_num_seqs=2, prefill_tokens=64
)


def test_a_worker_with_the_programs_of_its_run_compiles_nothing_and_draws_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mesh, dispatches = programs_of_run(CFG, jax.devices())
    drawing = ["prefill 2 x 32", "prefill 1 x 32", "decode 2, plain"]
    assert [one.name for one in dispatches] == [*drawing, *["copy pages"] * 5, "zero pages"]
    with jax.set_mesh(mesh):
        keep_executables([one.trace().lower() for one in dispatches], list(mesh.devices.flat), tmp_path)
    compiled: list[str] = []

    def listener(event: str, duration_secs: float, **kwargs: str | int) -> None:
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    found, counts = [], []
    try:
        for folder in (
            "",
            str(tmp_path),
        ):  # the first run compiles arrays of zeros, too
            monkeypatch.setenv(VARIABLE, folder)
            forget_programs()
            compiled.clear()
            engine = CFG.build()
            engine.set_weights(tiny_params(POLICY), 1)
            found.append(engine.generate(ASKED))
            counts.append(sum("backend_compile" in event for event in compiled))
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert engine.stats()["loaded_programs"] == 3  # both prompts at once; decoding; the copy of a page that rows share
    assert counts[0] >= 3 and counts[1] == 0
    assert_same(*found)
    assert sum(len(one.tokens) for one in found[0]) > 8
