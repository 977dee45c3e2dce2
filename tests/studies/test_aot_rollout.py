"""The command of the study of rollout programs; what it compiles is tested in tests/rl/rollout/test_aot.py."""

import pytest
from click.testing import CliRunner

from mesh import UserError
from mesh.topology import compiler_version, find_compiler, parse_topology
from models.catalog import published_model
from rl.rollout.engine import RolloutEngine
from tests.elsewhere import elsewhere
from tests.studies.aot_rollout import bound, engine_mesh, main

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="the TPU compiler (libtpu) is not installed")


def refuse() -> list[str]:
    done = CliRunner().invoke(main, ["v9:2x2"])
    return [done.output, str(done.exception), type(done.exception).__name__]


@needs_compiler
def test_it_names_the_compiler_wherever_it_is_installed_and_refuses_an_unknown_topology():
    output, message, kind = elsewhere(refuse)
    assert f"libtpu {compiler_version()}," in output
    assert kind == UserError.__name__ and "no TPU generation 'v9'" in message


def test_the_bound_is_the_time_to_read_weights_keys_and_values_without_an_untied_embedding():
    cfg = RolloutEngine.Config(
        model=published_model("Qwen3-8B"),
        stop_tokens=(0,),
        max_prompt_tokens=4096,
        max_new_tokens=12_288,
        max_num_seqs=64,
    )
    parameters = 8_190_735_360
    text = bound(cfg, parse_topology("v6e:2x2"), weights=parameters * 2 // 4, token=36_864)
    # Keys and values of 36 layers, 8 heads of 128, two bytes each, on four chips; a table of 151,936 x 4,096.
    read = (parameters - 151_936 * 4096) * 2 / 4 + 64 * 4096 * (2 * 36 * 8 * 128 * 2 / 4)
    assert f"| 4,096 | {read / 1e9:.2f} | {1e3 * read / 1638e9:.2f} | {64 * 1638e9 / read:,.0f} |" in text
    assert [line.split(" | ")[0] for line in text.splitlines()[4:]] == ["| 1,024", "| 4,096", "| 16,384"]


@pytest.mark.parametrize(
    ("model", "experts", "message"),
    [
        ("Qwen3-30B-A3B", 3, "--experts 3: expected a divisor of the 4 devices of v5p:2x2x1"),
        ("Qwen3-8B", 2, "--experts 2: expected 1, for Qwen3-8B has no experts"),
    ],
)
def test_experts_that_do_not_lie_over_the_devices_are_refused(model: str, experts: int, message: str):
    with pytest.raises(UserError, match=message):
        engine_mesh(model, published_model(model), "v5p:2x2x1", experts)
