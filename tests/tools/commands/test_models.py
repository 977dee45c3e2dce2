"""`axl models`: the list is complete, and the figures of a model are those by hand."""

import json

import pytest
from click.testing import CliRunner

from axlearn_like.config import to_text
from experiments.registry import get
from mesh.errors import UserError
from models.catalog import FAMILIES, published_model
from models.huggingface.architectures import config_json
from tools.commands.models import command

PARAMETERS, LAYERS, WIDTH, HEADS, HEAD_WIDTH = 8_190_735_360, 36, 4096, 32, 128  # of Qwen3-8B


def answer(*args: str) -> dict:
    result = CliRunner().invoke(command, [*args, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.output.splitlines()[-1])


def test_published_models_are_listed_with_their_sizes_all_or_by_a_part_of_the_name(monkeypatch):
    listed = answer("list", "qwen3-8b", "gpt-2")["models"]
    assert list(listed) == ["Qwen3-8B", *FAMILIES["GPT-2"].names]
    sizes = {"layers": LAYERS, "dim": WIDTH, "vocab_size": 151_936}
    assert listed["Qwen3-8B"] == {"family": "Qwen", "parameters": PARAMETERS, **sizes}
    monkeypatch.setattr("axlearn_like.operations.flops.count_parameters", lambda cfg: 0)
    assert list(answer("list")["models"]) == [name for family in FAMILIES.values() for name in family.names]
    with pytest.raises(UserError, match="no published model has llma"):
        answer("list", "llma")


def test_flops_and_cache_of_a_token_are_those_by_hand():
    found = answer("show", "Qwen3-8B", "--length", "1000")
    table = 151_936 * WIDTH
    # All but the embedding, of which a row is read, and the norms.
    norms = LAYERS * (2 * WIDTH + 2 * HEAD_WIDTH) + WIDTH
    assert found["parameters"] == PARAMETERS
    assert found["active"] == PARAMETERS - table - norms
    attention = 2 * 2 * LAYERS * HEADS * HEAD_WIDTH  # of a pair of a query and a key
    assert found["forward_flops"] == pytest.approx(2 * found["active"] + attention * 1001 / 2)
    assert found["training_flops"] == pytest.approx(3 * found["forward_flops"])
    assert found["decode_flops"] == pytest.approx(2 * found["active"] + attention * 1000)
    assert found["cache_bytes"] == LAYERS * 2 * 8 * HEAD_WIDTH * 2
    assert found["kernels"]["tpu"].startswith("Splash")
    assert "not Splash" in found["kernels"]["gpu"]
    assert found["decode_kernels"]["tpu"] == "ragged paged attention"
    assert found["decode_kernels"]["gpu"] == "Xla, from its pages"
    assert "sinks" in answer("show", "gpt-oss-20b")["decode_kernels"]["tpu"]


@pytest.mark.slow
def test_latent_attention_caches_576_numbers_of_a_token_in_each_layer():
    found = answer("show", "DeepSeek-V3", "--topology", "h100:8")
    assert found["latent_bytes"] == 61 * 576 * 2
    assert found["decode_kernels"]["gpu"] == "Xla, from windows of the cache"
    assert found["cache_bytes"] == 61 * 2 * 128 * 192 * 2  # what the kernel for TPUs stores, values padded
    assert answer("show", "Qwen3-0.6B")["latent_bytes"] is None


def test_a_directory_is_a_model_too(tmp_path):
    fields = config_json(published_model("Qwen3-0.6B"), "bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    named, there = answer("show", "Qwen3-0.6B"), answer("show", str(tmp_path))
    assert {**there, "model": "Qwen3-0.6B"} == named
    (tmp_path / "config.txt").write_text(to_text(get("demo")))
    with pytest.raises(UserError, match="expected the directory of a model, got that of a run"):
        CliRunner().invoke(command, ["show", str(tmp_path)], catch_exceptions=False)


@pytest.mark.slow
def test_the_way_to_train_on_devices_is_shown_or_why_there_is_none():
    found = answer("show", "Qwen3-8B", "--length", "2048", "--topology", "v5p:2x2x1")
    assert found["sft"]["method"] == "full" and found["sft"]["holds"]["parameters"] == PARAMETERS
    assert "trainer=v5p:2x2x1,workers=trainer" in found["rl"]["said"] and found["rl"]["fits"]
    small = answer("show", "Llama-3.1-405B", "--topology", "v5e:2x2")
    assert not small["sft"]["fits"] and not small["rl"]["fits"] and "does not fit" in small["sft"]["said"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["show", "Qwen3-8"], "did you mean 'Qwen3-8B'"),
        (["show", "Qwen3-8B", "--topology", "v9:2x2"], "v9"),
    ],
)
def test_what_is_not_there_is_refused_by_name(args: list[str], message: str):
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(command, args, catch_exceptions=False)
