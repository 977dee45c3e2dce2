"""Durations by the TPU compiler: steps of its programs, taken apart."""

from typing import Any

import pytest

from mesh import UserError
from mesh.topology import find_compiler, parse_topology, topology_devices
from rl.fleet import memory
from rl.fleet.fleet import Fleet, place
from rl.runtime.simulated.sources.compiled import compiled
from tests.rl.tiny import tiny_experiment


def placed(trainer: str = "v5e:1x1", workers: str = "2 x v5e:1x1", **changes: Any):
    return place(tiny_experiment(fleet=Fleet.Config(trainer=trainer, workers=workers), num_steps=1, **changes))


def test_devices_that_no_compiler_knows_are_refused():
    with pytest.raises(UserError, match=r"the trainer is on here; expected TPUs, as by --fleet trainer=v5p"):
        compiled(placed("here", "here"))


@pytest.mark.full
@pytest.mark.skipif(find_compiler() is None, reason="libtpu is not installed")
def test_a_step_of_a_full_batch_at_its_greatest_length_takes_what_the_compiler_says(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    there = placed()
    found, engine = compiled(there), there.cfg.build().engine_cfg
    topology = parse_topology("v5e:1x1")
    known = there.cfg.programs(topology_devices(topology))
    seconds = {name: memory.program_memory(known[name](), topology).seconds for name in ("train", "decode", "prefill")}
    assert all(seconds.values())
    longest = engine.max_num_seqs * engine.longest * found.decode_context
    assert seconds["decode"] == pytest.approx((found.decode_step + longest) * engine.steps_per_dispatch)
    assert found.update == seconds["train"] and found.update_token == 0.0
    prefill = known["prefill"]()
    assert found.prefill_token * prefill.rows * prefill.length == pytest.approx(seconds["prefill"])
