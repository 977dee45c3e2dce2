"""`axl bench weights`: its sections on tiny weights with real processes, the arithmetic of the result, the command."""

import json

import numpy as np
import pytest

from tools.bench.weights import yardsticks
from tools.bench.weights.sections import first_token, model, moving, pause
from tools.cli import EXIT_USER_ERROR, main


def step(wall: float, cpu: float, **more: float) -> dict[str, float]:
    return {"nbytes": 10**9, "wall_s": wall, "cpu_s": cpu, **more}


def test_the_model_is_a_gigabyte_in_about_a_hundred_tensors() -> None:
    sizes = [shape for part in model.shapes().values() for shape in part.values()]
    assert 100 <= len(sizes) <= 120
    assert sum(4 * shape[0] * (shape[1:] or (1,))[0] for shape in sizes) == pytest.approx(1e9, rel=0.02)


def test_ratios_are_of_the_slower_of_push_and_pull_in_the_same_round() -> None:
    def one(raw: float, push: float, pull: float) -> moving.Round:
        steps = {"push": step(push, 1.0, server_cpu_s=0.5), "pull": step(pull, 2.0, server_cpu_s=1.0)}
        ways = {f"{way}.{name}": figures for way in moving.WAYS for name, figures in steps.items()}
        unverified = {f"{way}.pull_unverified": steps["pull"] for way in moving.WAYS}
        return {"raw_stream": step(raw, 0.6), "memcpy": step(0.1, 0.1), **ways, **unverified}

    result = moving.summarise([one(1.0, 2.0, 4.0), one(3.0, 4.0, 2.0), one(1.0, 1.0, 2.0)])
    assert result["ratio_to_raw"] == pytest.approx(0.5)  # of 1/4, 3/4 and 1/2
    assert result["moving"]["sockets"]["cpu_ratio_to_raw"] == pytest.approx(0.6 / 3.0)
    assert (result["push_gbps"], result["pull_gbps"], result["raw_stream_gbps"]) == (0.5, 0.5, 1.0)
    assert result["moving"]["sockets"]["push"]["cpu_s"] == 1.5  # of both sides


def test_weights_are_as_old_as_the_next_version() -> None:
    published = [[5, 10.0], [6, 20.0], [7, 30.0]]
    ages, behind = pause._ages([(5, 15.0), (5, 21.0), (5, 32.0), (7, 40.0)], published)
    assert ages == [0.0, 1.0, 12.0, 0.0]
    assert behind == [0, 1, 2, 0]


@pytest.mark.full
def test_a_version_moves_between_processes_by_sockets_and_by_shared_memory() -> None:
    result = moving.measure(quick=True)
    for figure in ("push_gbps", "pull_gbps", "raw_stream_gbps", "ratio_to_raw", "memcpy_gbps"):
        assert result[figure] > 0, figure
    for way in moving.WAYS:
        for name in ("push", "pull", "pull_unverified"):
            assert result["moving"][way][name]["server_cpu_s"] >= 0
        assert result["moving"][way]["push"]["copy_s"] > 0


@pytest.mark.full
def test_weights_come_in_while_the_engine_draws() -> None:
    found = pause.measure(quick=True)
    assert 0 < found["pause_ms_p50"] <= found["pause_ms_p99"]
    for way in pause.WAYS:
        one = found["pause"][way]
        assert one["swaps"] == 3 and one["published"] > 3
        assert one["pause_ms_p50"] >= one["set_weights_ms_p50"] > 0 and one["transfer_s_p50"] > 0


@pytest.mark.full
def test_the_first_token_of_a_version_comes_after_push_pull_swap_and_draw() -> None:
    found = first_token.measure(quick=True)
    total, parts = found["update_to_first_token_s"]["delta"], found["first_token"]["delta"]
    assert total == pytest.approx(sum(parts[f"{part}_s"] for part in ("push", "pull", "swap", "draw")))
    assert total > parts["draw_s"] > 0
    assert 0 < parts["network_bytes"] < parts["nbytes"] / 3


@pytest.mark.full
def test_command_measures_the_sections_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "weights", "--sections", "moving", "--quick", "--json"]) == 0
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert result["sections"] == ["moving"] and result["quick"] and not result["errors"]
    assert result["versions"]["jax"] and result["date"] and result["machine"]["cores"] >= 1
    assert main(["bench", "weights", "--sections", "movin"]) == EXIT_USER_ERROR
    assert "did you mean 'moving'" in capfd.readouterr().err


def test_the_payload_has_no_two_equal_megabytes() -> None:
    whole = yardsticks.payload(40 << 20)
    assert not np.array_equal(whole[: 1 << 20], whole[1 << 20 : 2 << 20])
