"""A refused command leaves every directory byte for byte as it was, `--force` included, and makes no new one."""

import json
from pathlib import Path

import pytest

from axlearn_like.training.trainer import Trainer
from tests.axlearn_like.tiny import tiny_trainer
from tools import cli

HERE = "tests.tools.test_refusals"
SHORT = "tests.rl.runtime.ray.experiments:short"


def supervised() -> Trainer.Config:
    """Two steps of a tiny model."""
    return tiny_trainer(2)


TRAIN = f"train {HERE}:supervised --quiet --run-dir"
RL = f"rl {SHORT} --runtime inprocess --run-dir"
# In the directory of a finished run.
OF_A_RUN = {
    "another seed": f"{TRAIN} {{sft}} --set seed=5",
    "fewer steps": f"{TRAIN} {{sft}} --set num_steps=1",
    "another model, forced": f"{TRAIN} {{sft}} --force --set model.num_layers=3",
    "another optimizer, forced": f"{TRAIN} {{sft}} --force --set learner.optimizer={{adafactor}}",
    "other rows, forced": f"{TRAIN} {{sft}} --force --set num_steps=4 --set input.seq_len=12",
    "an unknown field, forced": f"{TRAIN} {{sft}} --force --set modle=3",
    "a mesh that does not fit, forced": f"{TRAIN} {{sft}} --force --set mesh={{'data':3}}",
    "a supervised run's directory": f"{RL} {{sft}}",
    "a supervised run's directory, forced": f"{RL} {{sft}} --force",
    "an RL run's directory": f"{TRAIN} {{rl}}",
    "an RL run's directory, forced": f"{TRAIN} {{rl}} --force",
    "rl: another seed": f"{RL} {{rl}} --set seed=7",
    "rl: another model, forced": f"{RL} {{rl}} --force --set policy.num_layers=3",
    "rl: more updates of another model, forced": f"{RL} {{rl}} --force --set policy.num_layers=3 --set num_steps=4",
    "rl: an unknown field, forced": f"{RL} {{rl}} --force --set polcy=3",
    "rl: prompts that are too long, forced": f"{RL} {{rl}} --force --set max_prompt_tokens=3",
    "rl: no worker to kill, forced": f"{RL} {{rl}} --force --kill-worker-after 0.5",
    "eval: of another evaluation": "eval {rl} --problems 2 --samples 4 --seed 9 --out {eval}",
    "eval: out is a run": "eval {rl} --problems 2 --samples 4 --out {rl}",
    "eval: no such version": "eval {rl}@9 --problems 2 --out {root}/new/eval",
    "eval: no such tasks": "eval {rl} --tasks mine={root}/none.jsonl --out {root}/new/eval",
    "eval: too few samples": "eval {rl} --samples 2 -k 4 --out {root}/new/eval",
    "serve: no such version": "serve {rl}@9",
    "serve: no run": "serve {eval}",
    "serve: an unknown field": "serve {rl} --set sampler.tempreature=1",
    "export: into a run": "convert export {rl} {sft}",
    "export: no such version": "convert export {rl}@9 {root}/new",
    "export: a model without a counterpart": "convert export {sft} {root}/new --adapter",
    "import: a run": "convert import {rl} {root}/new",
    "import: into a run": "convert import {hf} {rl}",
    "report: no run": "report {eval}",
    "report: of a step": "report {rl}/checkpoints",
    "launch: no device": f"launch {HERE}:supervised --dry-run {{root}}/new",
    "launch: into a run": "launch {mine}:supervised --tpu v5e:1x1 --dry-run {sft}",
    "data: over what it reads": "data dedup {rows} --out {rows}",
    "data: two parts in one file": "data split {rows} --every 2 --train {root}/one.jsonl --test {root}/one.jsonl",
    "data: nothing left": "data filter {rows} --shortest 500 --out {root}/new/kept.jsonl",
    "tokenizer: into another": "data train-tokenizer {rows} --field prompt --vocab-size 261 --out {bpe}",
    "tokenizer: no such field": "data train-tokenizer {rows} --field promt --vocab-size 262 --out {root}/new",
}


def tree(root: Path) -> dict[str, bytes | None]:
    """Return all files with their bytes, and all folders, but for Python's byte code."""
    paths = [path for path in root.rglob("*") if "__pycache__" not in path.parts]
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Finished runs of both kinds, an evaluation, and a tokenizer."""
    root = tmp_path_factory.mktemp("refused") / "all"
    root.mkdir()
    (root / "refused_job.py").write_text("from tests.tools.test_refusals import supervised\n")
    lines = [json.dumps({"prompt": text, "answer": "x"}) + "\n" for text in ("a b", "c d", "e f", "g h")]
    (root / "rows.jsonl").write_text("".join(lines))
    found = {name: str(root / name) for name in ("sft", "rl", "eval", "hf", "bpe")}
    found |= {"root": str(root), "rows": str(root / "rows.jsonl"), "mine": str(root / "refused_job.py")}
    found |= {"adafactor": "axlearn_like.learner:Adafactor.Config()"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
        for words in (
            f"{TRAIN} {{sft}}",
            f"{RL} {{rl}}",
            "eval {rl} --problems 2 --samples 4 --out {eval}",
            "convert export {rl} {hf}",
            "data train-tokenizer {rows} --field prompt --vocab-size 262 --out {bpe} --quiet",
        ):
            assert cli.main(words.format(**found).split()) == 0
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_A_RUN)
def test_a_refused_command_changes_nothing(
    name: str, places: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    root = Path(places["root"])
    monkeypatch.chdir(root)
    before = tree(root)
    words = OF_A_RUN[name]
    for key, value in places.items():  # braces of values stay
        words = words.replace(f"{{{key}}}", value)
    assert cli.main(words.split()) == 2
    assert capfd.readouterr().err.count("axl: error: ") == 1
    after = tree(root)
    assert after.keys() ^ before.keys() == set()
    assert [path for path in after if after[path] != before[path]] == []
