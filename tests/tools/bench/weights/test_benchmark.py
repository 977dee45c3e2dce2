"""`axl bench weights`: tiny weights with real processes, the arithmetic of the result, the command."""

import json

import numpy as np
import pytest

from tools.bench.weights import benchmark as bench
from tools.bench.weights import model, roles
from tools.cli import main


def step(wall: float, cpu: float, **more: float) -> dict[str, float]:
    return {"nbytes": 10**9, "wall_s": wall, "cpu_s": cpu, **more}


def test_the_model_is_a_gigabyte_in_about_a_hundred_tensors() -> None:
    sizes = [shape for part in model.shapes().values() for shape in part.values()]
    assert 100 <= len(sizes) <= 120
    assert sum(4 * shape[0] * (shape[1:] or (1,))[0] for shape in sizes) == pytest.approx(1e9, rel=0.02)


def test_ratios_are_of_the_slower_of_push_and_pull_in_the_same_round() -> None:
    def one(raw: float, push: float, pull: float) -> bench.Round:
        steps = {"push": step(push, 1.0, server_cpu_s=0.5), "pull": step(pull, 2.0, server_cpu_s=1.0)}
        return {"raw_stream": step(raw, 0.6), "memcpy": step(0.1, 0.1), **steps, "pull_unverified": steps["pull"]}

    rounds = [one(1.0, 2.0, 4.0), one(3.0, 4.0, 2.0), one(1.0, 1.0, 2.0)]
    result = bench.summarise({"sockets": rounds})
    assert result["ratio_to_raw"] == pytest.approx(0.5)  # of 1/4, 3/4 and 1/2
    assert result["moving"]["sockets"]["cpu_ratio_to_raw"] == pytest.approx(0.6 / 3.0)
    assert (result["push_gbps"], result["pull_gbps"], result["raw_stream_gbps"]) == (0.5, 0.5, 1.0)
    assert result["moving"]["sockets"]["push"]["cpu_s"] == 1.5  # of both sides


@pytest.mark.full
def test_a_version_moves_between_processes_by_sockets_and_by_shared_memory(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "weights", "--quick", "--json"]) == 0
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    for figure in ("push_gbps", "pull_gbps", "raw_stream_gbps", "ratio_to_raw", "memcpy_gbps"):
        assert result[figure] > 0, figure
    for way in bench.WAYS:
        for name in ("push", "pull", "pull_unverified"):
            assert result["moving"][way][name]["server_cpu_s"] >= 0
        assert result["moving"][way]["push"]["copy_s"] > 0
    assert result["quick"] and result["versions"]["jax"] and result["date"] and result["machine"]["cores"] >= 1


def test_the_payload_has_no_two_equal_megabytes() -> None:
    whole = roles.payload(40 << 20)
    assert not np.array_equal(whole[: 1 << 20], whole[1 << 20 : 2 << 20])
