"""`axl convert import` and `export`, on a small model and on a run of a trainer."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.layers.base import build_abstract, split
from axlearn_like.layers.wrappers.base import plain_config, plain_params
from experiments.modifiers import low_rank
from experiments.start.served import read_adapter
from mesh import UserError
from models.huggingface.checkpoints.directory import HuggingFaceDirectory
from models.huggingface.convert import to_huggingface
from models.tiny import tiny
from tests.axlearn_like.tiny import tiny_trainer
from tests.models.huggingface.checkpoints.made import dense_model, make
from tools.cli import main

SIZES = {"vocab_size": 48, "dim": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "hidden": 48}


def last_json(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_import_and_export(tmp_path, capsys):
    tensors = make(tmp_path / "hf", dense_model())
    assert main(["convert", "import", str(tmp_path / "hf"), str(tmp_path / "run"), "--json"]) == 0
    done = last_json(capsys)
    assert done["architecture"] == "Qwen2ForCausalLM" and done["tensors"] == len(tensors)
    assert done["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    size = ["--max-shard-size", "2KB"]
    assert main(["convert", "export", str(tmp_path / "run"), str(tmp_path / "back"), *size, "--json"]) == 0
    done = last_json(capsys)
    assert done["files"] > 1 and done["tensors"] == len(tensors)
    assert main(["convert", "export", str(tmp_path / "run" / "checkpoints" / "0"), str(tmp_path / "one")]) == 0
    assert "Qwen2ForCausalLM" in capsys.readouterr().out
    for folder in ("back", "one"):
        for name, stored in HuggingFaceDirectory.open(tmp_path / folder).tensors.items():
            np.testing.assert_array_equal(stored.map(), tensors[name])


@pytest.mark.full  # a policy is exported in every run, above
def test_a_run_of_a_trainer_is_exported(tmp_path, capsys):
    """A model that never had another form, by the newest of its checkpoints."""
    trainer = tiny_trainer(2, model=tiny(**SIZES))
    trainer.build().run(tmp_path / "run", progress=False)
    assert (
        main(["convert", "export", str(tmp_path / "run"), str(tmp_path / "hf"), "--dtype", "bfloat16", "--json"]) == 0
    )
    done = last_json(capsys)
    assert done["architecture"] == "Qwen3ForCausalLM" and done["checkpoint"].endswith("checkpoints/2")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    kinds = {name: stored.dtype for name, stored in HuggingFaceDirectory.open(tmp_path / "hf").tensors.items()}
    assert kinds == {name: "F32" if "norm" in name else "BF16" for name in kinds}  # norms are computed with unrounded


@pytest.mark.numerics
@pytest.mark.full  # a policy is exported below, and adapters in test_with_adapter.py
def test_the_adapter_of_a_run_is_exported(tmp_path, capsys):
    """The base, which is an item of its own in checkpoints, is not read."""
    trainer = tiny_trainer(2, model=tiny(**SIZES))
    low_rank(trainer)
    trainer.build().run(tmp_path / "run", progress=False)
    run, out = str(tmp_path / "run"), tmp_path / "adapter"
    assert main(["convert", "export", run, str(out)]) == 2
    assert "--adapter exports those alone" in capsys.readouterr().err and not out.exists()
    assert main(["convert", "export", run, str(out), "--adapter", "--merge"]) == 2
    assert "expected one of them" in capsys.readouterr().err
    assert main(["convert", "export", run, str(tmp_path / "merged"), "--merge", "--json"]) == 0
    assert last_json(capsys)["architecture"] == "Qwen3ForCausalLM"
    check_merged(tmp_path / "merged", tmp_path / "run", trainer.model)
    shutil.rmtree(next((tmp_path / "run" / "checkpoints" / "2" / "frozen").glob("ocdbt*")))
    assert main(["convert", "export", run, str(out), "--adapter", "--json"]) == 0
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 4
    tensors = load_file(out / "adapter_model.safetensors")
    assert last_json(capsys)["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert len(tensors) == 2 * 2 * 7  # layers, factors, matrices
    assert all(np.any(tensor) for tensor in tensors.values()), "the second factors have been trained"
    assert main(["convert", "export", run, str(out), "--adapter"]) == 0
    assert "finished before" in capsys.readouterr().out

    base = plain_config(trainer.model)
    ours, theirs = read_adapter(tmp_path / "run", base).factors, read_adapter(out, base).factors
    assert ours.keys() == theirs.keys() and len(ours) == 7
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    check_adapters_that_cannot_be_read(out, base)


def check_merged(folder, run, model):
    """The tensors are those of the model that an engine would compute with."""
    params = restore_params(run)
    graphdef, _ = split(build_abstract(model))
    expected = to_huggingface(plain_params(graphdef, params), plain_config(model))
    tensors = load_file(folder / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        np.testing.assert_allclose(tensor, expected[name], rtol=0, atol=1e-6)
    base = tensors["model.layers.0.mlp.down_proj.weight"].T - params["layers"]["feed_forward"]["inner"]["down_fd"][0]
    assert np.abs(base).max() > 1e-4, "the update is larger than what is compared"


def check_adapters_that_cannot_be_read(folder, base):
    """Refused with the directory's name: another base, other fields, no files."""

    def refusal(model=base):
        with pytest.raises(UserError, match=f"^(adapter )?{folder}") as caught:
            read_adapter(folder, model)
        return str(caught.value)

    assert "is (4, 32); expected (4, 48)" in refusal(tiny(**{**SIZES, "dim": 48, "num_heads": 3}))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    assert "missing: ['base_model.model.model.layers.0.mlp.down_proj.lora_magnitude_vector'" in refusal()
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 0}))
    assert "adapter_config.json: r is 0; expected a number above 0" in refusal()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "there is no adapter_model.safetensors; adapter_model.bin runs code when it is read" in refusal()
    (folder / "adapter_config.json").unlink()
    assert "expected adapter_config.json in it, as PEFT writes it, or a run directory" in refusal()
    shutil.rmtree(folder)
    assert "there is no such directory" in refusal()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "nowhere", "run"], "nowhere: there is no such file or directory"),
        (["export", "nowhere", "out"], "nowhere: expected RUN, RUN@best, RUN@STEP or a checkpoint's path"),
        (
            ["export", ".", "out", "--max-shard-size", "5 parsecs"],
            "expected a size such as 5GB or 500MB, got '5 parsecs'",
        ),
    ],
)
def test_bad_arguments_are_one_message(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["convert", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_that_does_not_fit_is_refused_and_can_be_left_out(tmp_path, capsys):
    make(tmp_path / "hf", dense_model())
    vocabulary = {f"token {number}": number for number in range(38)}  # the embedding has 37 rows
    fields = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    fields["model"]["vocab"] = vocabulary
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(fields))
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    command = ["convert", "import", str(tmp_path / "hf"), str(tmp_path / "run")]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "tokenizer.json: the tokenizer has 38 ids, but the embedding 37 rows; put the model's own" in error
    assert "import the model alone with --no-tokenizer" in error and [*tmp_path.iterdir()] == [tmp_path / "hf"]

    (tmp_path / "hf" / "tokenizer.json").write_text('{"cut')
    assert main(command) == 2 and "tokenizer.json is not JSON" in capsys.readouterr().err
    assert main([*command, "--no-tokenizer"]) == 0
    kept = {path.name for path in (tmp_path / "run" / "huggingface").iterdir()}
    assert kept == {"config.json", "generation_config.json"}


def test_unknown_fields_are_named_and_ignored(tmp_path, capsys):
    make(tmp_path / "hf", dense_model())
    fields = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**fields, "unsloth_version": "2026.1"}))
    assert main(["convert", "import", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    assert "warning" in (error := capsys.readouterr().err) and "unsloth_version" in error
