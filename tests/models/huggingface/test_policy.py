"""Directories in Hugging Face's form as policy, as beginning of a run, and to be served."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.checkpoint.plain.plain_arrays import EntriesStruct, StackEntries
from axlearn_like.checkpoint.pretrained import Pretrained
from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.checkpoint.versions import CheckpointError
from axlearn_like.config import ConfigError, from_text, to_text
from axlearn_like.training.trainer import Trainer
from mesh import UserError, make_mesh
from models.huggingface import hf, hf_weights
from models.huggingface.architectures import architecture_for
from models.huggingface.checkpoints.directory import HuggingFaceDirectory
from models.huggingface.checkpoints.importing import import_checkpoint
from models.huggingface.convert import abstract_params, by_name, from_huggingface
from rl.serving.policy import load_params
from tests.axlearn_like.checkpoint.test_checkpointer import abstract
from tests.axlearn_like.tiny import tiny_trainer
from tests.elsewhere import elsewhere
from tests.models.huggingface.checkpoints.made import SHAPE, dense_model, make, mixture_model
from tests.rl.tiny import tiny_experiment
from tools.experiment import find_policy

VOCABULARY = 272  # of the byte tokenizer


def byte_model():
    return dense_model().set(vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory, its parameters as they are here, and an import of it."""
    root = tmp_path_factory.mktemp("models")
    wanted = from_huggingface(make(root / "hf", byte_model()), byte_model())
    import_checkpoint(HuggingFaceDirectory.open(root / "hf"), root / "run")
    return root, wanted


def assert_equal(found, wanted):
    found, wanted = by_name(found), by_name(wanted)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(found[name]), array, err_msg=name)


@pytest.mark.parametrize("form", ["hf", "run"])
def test_a_policy_is_the_decoder_and_its_parameters(made, form):
    root, wanted = made
    policy = hf(root / form, remat="everything")
    assert isinstance(policy, Pretrained.Config) and policy.remat == "everything" and policy.dtype == "bfloat16"
    assert from_text(to_text(policy)) == policy
    assert architecture_for(policy).name == "Qwen2ForCausalLM"
    experiment = tiny_experiment(policy=policy).build()
    experiment.check_start()
    assert experiment.first_params is not None
    assert_equal(load_params(experiment, None, make_mesh()), wanted)


@pytest.mark.parametrize("form", ["hf", "run"])
def test_an_engine_reads_them_in_its_own_type(made, form):
    """Numbers that are stored in it are copied, however many rows there are."""
    root, wanted = made
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), abstract_params(byte_model()))
    found = hf_weights(root / form).build().params(like)
    assert_equal(found, jax.tree.map(lambda array: array.astype(jnp.bfloat16), wanted))


@pytest.mark.parametrize(("experts", "layers", "dtype"), [(False, 2, "bfloat16"), (True, 1, "float32")])
def test_stacks_may_come_as_their_entries(tmp_path, experts, layers, dtype):
    """An engine takes layers one by one: of a tensor for each layer, and of one for each expert of it."""
    cfg = (mixture_model() if experts else dense_model()).set(num_layers=layers)
    wanted = from_huggingface(make(tmp_path / "hf", cfg), cfg)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype), sharding=device), wanted)
    apart = jax.tree.map(lambda x: EntriesStruct(x.shape, x.dtype, sharding=device), plain["layers"])
    found = hf_weights(tmp_path / "hf").build().params({**plain, "layers": apart})
    assert all(isinstance(leaf, StackEntries) for leaf in by_name(found["layers"]).values())
    stacked = {**found, "layers": jax.tree.map(lambda x: np.stack(list(x)), found["layers"])}
    assert_equal(stacked, jax.tree.map(lambda x: x.astype(dtype), wanted))
    assert_equal(hf_weights(tmp_path / "hf").build().params(plain), jax.tree.map(lambda x: x.astype(dtype), wanted))


@pytest.mark.parametrize("form", ["hf", pytest.param("run", marks=pytest.mark.full)])
def test_a_trainer_starts_from_the_parameters(made, form, tmp_path):
    root, wanted = made
    frozen = tiny_trainer(1, model=hf(root / form).set(dtype="float32"))
    frozen.learner.schedule.set(peak_lr=0.0)
    frozen.learner.optimizer.set(weight_decay=0.0)
    Trainer(frozen).run(tmp_path / "run", progress=False)
    assert_equal(restore_params(tmp_path / "run"), wanted)


def test_start_from_reads_mixtures_and_refuses_another_model(made, tmp_path):
    tensors = make(tmp_path / "moe", mixture_model())
    start = hf_weights(tmp_path / "moe").build()
    wanted = from_huggingface(tensors, mixture_model())
    described = abstract(jax.tree.map(jax.numpy.asarray, wanted))
    assert_equal(start.params(described), wanted)
    with pytest.raises(CheckpointError, match=r"moe is of another model or learner: it has no .*Qwen3MoeForCausalLM"):
        start.check(abstract_params(dense_model()))
    trainer = tiny_trainer(1, model=byte_model(), start_from=hf_weights(tmp_path / "moe"))
    with pytest.raises(CheckpointError, match="another model"):
        Trainer(trainer).run(tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_policy_whose_files_are_damaged_is_refused_before_a_run(made, tmp_path):
    root, _ = made
    shutil.copytree(root / "hf", tmp_path / "hf")
    policy = hf(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"RLExperiment\.policy: .*model\.safetensors: truncated") as error:
        tiny_experiment(policy=policy).build().check_start()
    assert error.value.path == "RLExperiment.policy"


def test_a_directory_that_is_no_run_is_refused_with_what_to_use(made):
    root, _ = made
    with pytest.raises(
        ConfigError, match=r"StartFrom\.path: expected a run's directory; .* models\.huggingface\.hf_weights"
    ):
        StartFrom.Config(path=str(root / "hf")).build()
    with pytest.raises(UserError, match="there is no such directory"):
        hf(root / "nowhere")


def read_sharded(path):
    """Parameters over four devices by two axes, compared with what is read at once; returns how they are sharded."""
    mesh = make_mesh({"fsdp": 2, "tensor": 2})
    experiment = tiny_experiment(policy=hf(path)).build()
    found = load_params(experiment, None, mesh)
    directory = HuggingFaceDirectory.open(path)
    tensors = {name: stored.map() for name, stored in directory.tensors.items()}
    assert_equal(found, from_huggingface(tensors, directory.decoder))
    return {name: str(array.sharding.spec) for name, array in by_name(found).items()}


def test_each_device_gets_its_part(tmp_path):
    make(tmp_path / "hf", byte_model().set(num_layers=2))
    environ = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    specs = elsewhere(read_sharded, str(tmp_path / "hf"), environ=environ)
    assert "tensor" in specs["layers.attention.q_dkqh"] and "fsdp" in specs["layers.attention.q_dkqh"]


def add_tokenizer(folder):
    """A tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0, **{text: number for number, text in enumerate(alphabet, 1)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (folder / "generation_config.json").unlink(missing_ok=True)


def test_a_directory_is_served(tmp_path):
    tensors = make(tmp_path / "hf", byte_model())
    add_tokenizer(tmp_path / "hf")
    import_checkpoint(HuggingFaceDirectory.open(tmp_path / "hf"), tmp_path / "run")
    for form in ("hf", "run"):
        cfg, weights, name = find_policy(
            str(tmp_path / form), ["max_new_tokens=8"], random_weights=False, command="serve"
        )
        assert (name, weights, cfg.max_prompt_tokens, cfg.max_new_tokens) == (form, None, SHAPE["max_length"] // 2, 8)
        experiment = cfg.build()
        assert_equal(load_params(experiment, None, make_mesh()), from_huggingface(tensors, byte_model()))
        assert experiment.tokenizer.decode(experiment.tokenizer.encode("a b")) == "a b"
        random, _, _ = find_policy(str(tmp_path / form), [], random_weights=True, command="serve")
        assert not isinstance(random.policy, Pretrained.Config)


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(tmp_path):
    make(tmp_path / "hf", dense_model())  # 37 rows
    add_tokenizer(tmp_path / "hf")
    with pytest.raises(UserError, match=r"the tokenizer has 257 ids, but the embedding 37 rows"):
        find_policy(str(tmp_path / "hf"), [], random_weights=False, command="serve")
