"""Bad input of an import: one message with file, tensor, expected and found; nothing is written."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import experiments
from axlearn_like.tokenizers.embedding import tokenizer_fault
from mesh.errors import UserError
from models.huggingface.checkpoints.directory import HuggingFaceDirectory
from models.huggingface.checkpoints.importing import import_checkpoint
from tests.models.huggingface.checkpoints.made import dense_model, make, write
from tools.cli import main

QUERY = "model.layers.1.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"
SMALL_BPE = Path(experiments.__file__).parent / "small_bpe"
SECOND = "model-00002-of-00002.safetensors"


def edit_header(path: Path, change: Callable[[dict], object]) -> None:
    """Change the header of a file, and keep the bytes of the tensors."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def single(change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: change(folder / "model.safetensors")


def header(change: Callable[[dict], object]) -> Callable[[Path], object]:
    return single(lambda path: edit_header(path, change))


def tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], object]:
    def rewrite(folder: Path) -> None:
        found = {name: stored.map().copy() for name, stored in HuggingFaceDirectory.open(folder).tensors.items()}
        change(found)
        write(folder, found)

    return rewrite


def edit_json(name: str, **fields: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def twice(path: Path) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + length].rstrip()[:-1] + b', "norm": {}, "norm": {}}'
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def moved(path: Path) -> None:
    """Two tensors with the same bytes."""

    def overlap(header: dict) -> None:
        header["model.norm.weight"]["data_offsets"] = [0, 32]

    edit_header(path, overlap)


ONE = {
    "truncated": (
        single(lambda path: path.write_bytes(path.read_bytes()[:-10])),
        r"model\.safetensors: truncated: expected [\d,]+ bytes up to the end of model\.norm\.weight, got",
    ),
    "truncated header": (
        single(lambda path: path.write_bytes(path.read_bytes()[:100])),
        r"model\.safetensors: a header of [\d,]+ bytes in a file of 100: truncated, or no safetensors",
    ),
    "empty": (single(lambda path: path.write_bytes(b"")), r"model\.safetensors: a header of 0 bytes in a file of 0"),
    "not safetensors": (
        single(lambda path: path.write_bytes(b"\x80\x02}q\x00" * 100)),
        r"model\.safetensors: a header of",
    ),
    "header is no JSON": (
        single(lambda path: path.write_bytes((20).to_bytes(8, "little") + b"x" * 40)),
        r"model\.safetensors: the header is not JSON",
    ),
    "bytes after the end": (
        single(lambda path: path.write_bytes(path.read_bytes() + b"12345")),
        r"model\.safetensors: bytes after the last tensor",
    ),
    "size against shape": (
        header(lambda h: h[QUERY].update(shape=[32, 15])),
        rf"model\.safetensors: {QUERY}: BF16 \(32, 15\) has 960 bytes, the file 1,024",
    ),
    "overlap": (single(moved), r"model\.safetensors: .* and .* (overlap|are [\d,]+ bytes apart)"),
    "negative": (header(lambda h: h[QUERY].update(shape=[-1, 2])), rf"{QUERY}: shape \(-1, 2\) and data_offsets"),
    "no offsets": (header(lambda h: h[QUERY].pop("data_offsets")), rf"{QUERY}: expected dtype, shape and data_offsets"),
    "unknown dtype": (header(lambda h: h[QUERY].update(dtype="F4")), rf"{QUERY}: dtype 'F4'; expected one of BOOL"),
    "integers": (
        header(lambda h: h[QUERY].update(dtype="I16")),
        rf"{QUERY}: expected dtype F32 or BF16 or F16, got I16",
    ),
    "twice in the header": (single(twice), r"model\.safetensors: the header is not JSON .norm is there twice"),
    "missing tensor": (
        tensors(lambda t: t.pop(QUERY)),
        rf"the tensors are not those of this Qwen2ForCausalLM; missing: {QUERY}",
    ),
    "extra tensor": (
        tensors(lambda t: t.update({"model.layers.4.mlp.up_proj.weight": t[QUERY]})),
        r"unknown: model\.layers\.4\.mlp\.up_proj\.weight",
    ),
    "wrong shape": (
        tensors(lambda t: t.update({QUERY: t[QUERY].T.copy()})),
        rf"wrong shape: {QUERY} \(16, 32\), expected \(32, 16\)",
    ),
    "vocabulary": (
        edit_json("config.json", vocab_size=40),
        r"model\.safetensors: model\.embed_tokens\.weight: expected 40 rows, vocab_size of config\.json, got 37",
    ),
    "a head that is no copy": (
        edit_json("config.json", tie_word_embeddings=True),
        r"model\.safetensors: lm_head\.weight differs from model\.embed_tokens\.weight, of which it should be a copy: "
        'config.json ties them; expected "tie_word_embeddings": false there',
    ),
    "unknown architecture": (
        edit_json("config.json", architectures=["Qwen22ForCausalLM"]),
        r"config\.json: architectures: unknown architecture 'Qwen22ForCausalLM'; did you mean 'Qwen2ForCausalLM'",
    ),
    "rope type": (
        edit_json("config.json", rope_parameters={"rope_type": "su", "rope_theta": 1e4}),
        r"config\.json: rope_parameters: rope_type: expected 'default' or .*, got 'su', which none of our",
    ),
    "activation": (
        edit_json("config.json", hidden_act="xielu"),
        r"config\.json: hidden_act: expected 'silu' .* 'xielu'",
    ),
    "layers without number": (
        edit_json("config.json", num_hidden_layers=10**9),
        r"config\.json: num_hidden_layers: expected an integer from 1 to 2,000, got 1000000000",
    ),
    "far too many layers": (
        edit_json("config.json", num_hidden_layers=1_999),
        r"config\.json: describes a model of [\d,]+ tensors, but the files hold 51",
    ),
    "no heads": (edit_json("config.json", num_attention_heads=0), r"num_attention_heads: expected an integer from 1"),
    "not finite": (
        edit_json("config.json", rms_norm_eps=float("nan")),
        r"rms_norm_eps: expected a number above 0, got nan",
    ),
    "two rope types": (
        edit_json("config.json", rope_scaling={"rope_type": "linear", "factor": 2.0}),
        r"config\.json: rope_scaling: expected the rotary embedding of rope_parameters, or one of the two, got another",
    ),
    "too few layer types": (
        edit_json("config.json", layer_types=["full_attention"] * 3),
        r"config\.json: layer_types: expected 4 times sliding_attention or full_attention, got 3 entries",
    ),
    "config.json without end": (
        lambda folder: (folder / "config.json").write_text("[" * 100_000),
        r"config\.json: expected JSON, it is nested too deeply",
    ),
    "header without end": (
        single(lambda path: path.write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)),
        r"model\.safetensors: the header is not JSON \(it is nested too deeply",
    ),
    "dtype is a list": (header(lambda h: h[QUERY].update(dtype=["F32"])), rf"{QUERY}: dtype \['F32'\]; expected one"),
    "control characters": (
        header(lambda h: h.update({"\x1b[31m\n": h.pop(QUERY)})),
        r"model\.safetensors: '\\x1b\[31m\\n': not the name of a tensor",
    ),
    "a pipe": (
        single(lambda path: (path.unlink(), os.mkfifo(path.with_name("only.safetensors")))),
        r"only\.safetensors: cannot be read .expected a regular file, got a pipe",
    ),
    "another form": (
        single(lambda path: path.rename(path.with_name("model.gguf"))),
        r"hf: expected model\.safetensors or .*, got model\.gguf, which is in another form",
    ),
    "an adapter": (
        lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
        r"hf: expected a model, got an adapter of PEFT; .* axl convert import BASE TARGET --adapter",
    ),
    "no config.json": (lambda folder: (folder / "config.json").unlink(), r"config\.json: there is no such file"),
    "config.json cut off": (
        lambda folder: (folder / "config.json").write_text('{"vocab'),
        r"config\.json: expected JSON, Unterminated string",
    ),
    "pickled": (
        single(lambda path: path.rename(path.parent / "pytorch_model.bin")),
        r"pytorch_model\.bin: expected safetensors, got a pickled file, which runs code .*save_pretrained\('OUT'\)",
    ),
    "nothing": (
        single(lambda path: path.unlink()),
        r"hf: expected model\.safetensors or model\.safetensors\.index\.json",
    ),
}

TWO = {
    "missing shard": (
        lambda folder: (folder / SECOND).unlink(),
        rf"{SECOND}: there is no such file; the index has \d+ tensors in it, such as",
    ),
    "path traversal": (
        edit_json(INDEX, weight_map={QUERY: "../../etc/passwd"}),
        rf"{INDEX}: {QUERY}: expected the name of a file beside the index, got '\.\./\.\./etc/passwd'",
    ),
    "absolute path": (
        edit_json(INDEX, weight_map={QUERY: "/etc/passwd"}),
        r"the name of a file beside the index, got '/etc",
    ),
    "a number as file": (edit_json(INDEX, weight_map={QUERY: 3}), rf"{QUERY}: expected the name of a file .*, got 3"),
    "a name without end": (edit_json(INDEX, weight_map={QUERY: "a" * 5000}), r"expected the name of a file beside"),
    "twice in the index": (
        lambda folder: (folder / INDEX).write_text(
            (folder / INDEX).read_text().replace('"weight_map": {', f'"weight_map": {{"{QUERY}": "x", ')
        ),
        rf"{INDEX}: expected JSON with `weight_map`, tensor to file \({QUERY} is there twice\)",
    ),
    "index without a map": (edit_json(INDEX, weight_map=None), rf"{INDEX}: expected JSON with `weight_map`"),
    "index without a tensor": (
        lambda folder: edit_map(folder, lambda m: m.pop(QUERY)),
        rf"{QUERY}: not in {INDEX}, which has every other tensor",
    ),
    "index with another tensor": (
        lambda folder: edit_map(folder, lambda m: m.update(other=SECOND)),
        rf"{SECOND}: other: expected here by {INDEX}, got it in no file",
    ),
    "in the other file": (
        lambda folder: edit_map(folder, lambda m: m.update(swapped(m))),
        rf"{QUERY}: expected here by {INDEX}, got it in model-0000",
    ),
    "in both files": (
        lambda folder: (folder / SECOND).write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes()),
        rf"{SECOND}: .* is in model-00001-of-00002\.safetensors already",
    ),
    "no index": (lambda folder: (folder / INDEX).unlink(), rf"hf: expected {INDEX} beside several files"),
}


def edit_map(folder: Path, change: Callable[[dict], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def swapped(weight_map: dict[str, str]) -> dict[str, str]:
    return {QUERY: next(file for file in weight_map.values() if file != weight_map[QUERY])}


@pytest.mark.slow
@pytest.mark.parametrize("files", [1, 2])
def test_each_is_refused_in_one_message_and_nothing_is_written(tmp_path, files, subtests):
    """One test for all: that a model is made once, and copied."""
    for name, (damage, message) in (ONE if files == 1 else TWO).items():
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        make(folder / "hf", dense_model(), files=files)
        damage(folder / "hf")
        before = sorted(folder.rglob("*"))
        with subtests.test(name):
            with pytest.raises(UserError, match=message) as error:
                import_checkpoint(HuggingFaceDirectory.open(folder / "hf"), folder / "run")
            assert "\n" not in str(error.value)
            assert sorted(folder.rglob("*")) == before


def test_a_file_that_is_no_safetensors_is_refused(tmp_path):
    make(tmp_path / "hf", dense_model())
    (tmp_path / "hf" / "model.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"model\.pt: expected safetensors, got a pickled file"):
        HuggingFaceDirectory.open(tmp_path / "hf" / "model.pt")
    with pytest.raises(UserError, match="there is no such file or directory$"):
        HuggingFaceDirectory.open(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no such file or directory; if .* Hub, download it first: hf download Org/M"):
        HuggingFaceDirectory.open("Org/M")
    with pytest.raises(UserError, match=r"config\.json: expected a directory or a safetensors file; name .*hf$"):
        HuggingFaceDirectory.open(tmp_path / "hf" / "config.json")
    make(tmp_path / "two", dense_model(), files=2)
    with pytest.raises(UserError, match=r"00002\.safetensors: one of 2 files of a model; name the directory .*two$"):
        HuggingFaceDirectory.open(tmp_path / "two" / SECOND)


def test_a_target_that_cannot_be_one_is_refused_before_the_copy(tmp_path):
    make(tmp_path / "hf", dense_model())
    source = HuggingFaceDirectory.open(tmp_path / "hf")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(UserError, match="link: expected a directory, got a link to nothing"):
        import_checkpoint(source, tmp_path / "link")
    with pytest.raises(UserError, match=r"cannot be written \(File name too long\)"):
        import_checkpoint(source, tmp_path / ("r" * 250))


def test_a_tokenizer_that_does_not_fit_is_named(tmp_path):
    assert tokenizer_fault(tmp_path, 37) is None
    shutil.copytree(SMALL_BPE, tmp_path / "bpe")
    assert tokenizer_fault(tmp_path / "bpe", 2048) is None
    fault = tokenizer_fault(tmp_path / "bpe", 37)
    assert fault and fault.endswith("tokenizer.json: the tokenizer has 2048 ids, but the embedding 37 rows")
    (tmp_path / "tokenizer.json").write_text('{"cut')
    assert "tokenizer.json is not JSON" in str(tokenizer_fault(tmp_path, 37))


def test_links_of_the_hubs_cache_are_followed(tmp_path):
    """The cache keeps files under their digests, and links to them."""
    cache = tmp_path / "models--org--name"
    folder = cache / "snapshots" / "revision"
    folder.parent.mkdir(parents=True)
    make(folder, dense_model())
    (cache / "blobs").mkdir()
    for file in list(folder.iterdir()):
        file.rename(cache / "blobs" / file.name)
        file.symlink_to(Path("../../blobs") / file.name)
    (tmp_path / "named").symlink_to(folder)
    import_checkpoint(HuggingFaceDirectory.open(tmp_path / "named"), tmp_path / "run")
    assert not (tmp_path / "run" / "huggingface" / "config.json").is_symlink()


@pytest.mark.parametrize("name", ["README.md", "chat_template.jinja", "model.safetensors", "LICENSE"])
def test_a_link_out_of_a_model_is_refused(tmp_path, name, capsys):
    """An import would copy the file, an export publish it, and a server put it into every prompt."""
    (tmp_path / "secret").write_text("a key")
    make(tmp_path / "hf", dense_model())
    import_checkpoint(HuggingFaceDirectory.open(tmp_path / "hf"), tmp_path / "run")
    for folder in (tmp_path / "hf", tmp_path / "run" / "huggingface"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("../" * (folder.name != "hf") + "../secret")
    said = rf"{name} is a link to '.*secret', outside of .*: copy the file into the directory if you know it"
    for words in (["import", "hf", "other"], ["export", "run", "out"]):
        assert main(["convert", words[0], *(str(tmp_path / word) for word in words[1:])]) == 2
        assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "other").exists() and not (tmp_path / "out").exists()


def test_tables_of_rotations_in_old_files_are_ignored(tmp_path):
    found = make(tmp_path / "hf", dense_model(tied=True))
    found["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    found["lm_head.weight"] = found["model.embed_tokens.weight"]
    write(tmp_path / "hf", found)
    assert HuggingFaceDirectory.open(tmp_path / "hf").check_copies() is None
