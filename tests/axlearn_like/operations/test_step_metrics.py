import json
from types import SimpleNamespace

import jax
import pytest

from axlearn_like.operations.goodput import Account, CauseClock
from axlearn_like.operations.step_metrics import StepMetrics
from axlearn_like.operations.utilisation import peak_flops, step_flops
from axlearn_like.run.events import EventLog
from tests.axlearn_like.tiny import VOCAB, tiny_model


def figures(tmp_path, **known):
    clock = CauseClock(EventLog(tmp_path / "events.jsonl"))
    clock.totals.update(startup=10.0)  # is in the account
    past = Account({"startup": 10.0, "step": 50.0, "lost": 20.0}, 2)
    return clock, StepMetrics(clock, past, jax.devices()[:1] * 4, **known)


@pytest.mark.numerics
def test_a_row_tells_speed_waiting_and_where_all_time_went(tmp_path):
    clock, live = figures(tmp_path)
    for seconds, waited in ((0.5, 2.0), (0.25, 1.0)):
        clock.totals["input"] += waited
        clock.totals["step"] += 8.5
        row = live.row(seconds=seconds, tokens=4000.0, steps=20)
        assert row["step_seconds"] == seconds
        assert row["tokens_per_second"] == 4000 / (20 * seconds)
        assert row["input_seconds"] == waited / 20  # since the last row
    assert row["goodput"] == 0.67 and row["time/lost"] == 0.2 and row["time/input"] == 0.03  # of 100 s
    assert row["goodput"] + sum(value for name, value in row.items() if name.startswith("time/")) == pytest.approx(1)
    assert row["host_memory_bytes"] > 50e6 and "mfu" not in row
    json.dumps(row)


def test_mfu_is_model_flops_against_the_peak_of_all_devices(tmp_path):
    _, live = figures(tmp_path, peak=1e13)
    assert live.row(seconds=0.5, tokens=1.0, steps=2, flops=12e12)["mfu"] == 0.3  # 6e12 / (0.5 s x 4 x 1e13)


@pytest.mark.parametrize(
    ("platform", "kind", "peak"),
    [
        ("cpu", "cpu", None),
        ("gpu", "NVIDIA H100 80GB HBM3", 989e12),
        ("gpu", "NVIDIA H100 PCIe", 756e12),
        ("gpu", "NVIDIA H200", 989e12),
        ("gpu", "NVIDIA GeForce RTX 4090", None),
        ("tpu", "TPU v5", 459e12),
        ("tpu", "TPU v5 lite", 197e12),
        ("tpu", "TPU v6 lite", 918e12),
    ],
)
def test_peaks_by_kind_of_device(platform, kind, peak):
    assert peak_flops([SimpleNamespace(platform=platform, device_kind=kind)]) == peak


def test_flops_of_a_step_by_hand():
    model, rows, length = tiny_model(), 8, 16
    dim, hidden, layers = 16, 24, 2
    weights = layers * (4 * dim * dim + 3 * dim * hidden) + VOCAB * dim  # the embedding's table is the head
    pairs = rows * length * (length + 1) / 2
    forward = 2 * rows * length * weights + layers * pairs * 4 * dim
    assert step_flops(model, rows, length) == 3 * forward
