"""A base model that learns a conversation: it stops by itself where it is served, and wherever its export is.

The base ends texts with `</s>`, ChatML ends turns with `<|im_end|>`, which is in no file but the template.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.config import from_text
from axlearn_like.input import Chat, JsonLines, SupervisedInput
from axlearn_like.learner import AdamW, Constant, Learner
from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from experiments.start.served import served_model
from models.huggingface import hf
from models.tiny import tiny
from rl.serving.policy import ServedModel, find_run, make_engine, newest_weights, recorded_config
from tests.axlearn_like.tiny import tiny_trainer
from tests.axlearn_like.tokenizers.kinds import directory, tokenizer
from tests.rl.serving.running import MODEL, running
from tools.cli import main

SAID = [{"role": "user", "content": "is the sum"}, {"role": "assistant", "content": "the answer"}]
KIND = "llama2"  # puts a blank before a text


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned one conversation by heart."""
    folder = tmp_path_factory.mktemp("chat")
    (folder / "a.jsonl").write_text((json.dumps({"messages": SAID}) + "\n") * 8)
    path = directory(KIND)
    named = HuggingFaceTokenizer.Config(path=path, chat_template=f"{path}/chatml.jinja")
    source = JsonLines.Config(files=str(folder / "a.jsonl"), tokenizer=named, example=Chat.Config(), cache="")
    trainer = tiny_trainer(
        30,
        model=tiny(vocab_size=named.build().vocab_size, dim=32, num_layers=1, num_heads=2, num_kv_heads=1, hidden=48),
        input=SupervisedInput.Config(source=source, seq_len=96, batch_size=2, seed=1),
        learner=Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=1e-2)),
        evaluators=(),
    )
    trainer.build().run(folder / "run", progress=False)
    return folder / "run"


def ends_of(folder: Path) -> Any:
    return json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


@pytest.mark.full
def test_it_stops_by_itself_and_its_export_does(trained: Path, tmp_path: Path) -> None:
    run, chatml = find_run(trained), tokenizer(KIND, "chatml")
    assert run is not None
    cfg = recorded_config(run)
    assert isinstance(cfg, ServedModel.Config)
    served = cfg.set(max_prompt_tokens=64, max_new_tokens=32).build()
    engine, _ = make_engine(served, newest_weights(run))
    with running(engine, tokenizer=served.tokenizer) as server:
        asked: Any = {"model": MODEL, "messages": SAID[:1], "temperature": 0.0, "max_tokens": 24}
        (choice,) = server.client().chat.completions.create(**asked).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "the answer")

    assert main(["convert", "export", str(trained), str(tmp_path / "hf")]) == 0
    ends = [chatml.token_id("</s>"), chatml.token_id("<|im_end|>")]
    assert ends_of(tmp_path / "hf") == ends == list(chatml.stop_ids)
    exported = served_model(tmp_path / "hf").build().tokenizer
    assert exported.stop_ids == chatml.stop_ids and exported.chat_template is not None


@pytest.mark.full
def test_an_original_that_ends_otherwise_gets_the_end_that_was_learned(trained: Path, tmp_path: Path) -> None:
    """Base models such as Qwen's: `generation_config.json` and the tokenizer know the end of a text alone."""
    base, chatml = tmp_path / "base", tokenizer(KIND, "chatml")
    assert main(["convert", "export", str(trained), str(base)]) == 0
    (base / "chat_template.jinja").unlink()
    text = f'{{"eos_token_id": {chatml.eos}, "temperature": 0.7}}\n'
    (base / "generation_config.json").write_text(text)
    assert served_model(base).build().tokenizer.stop_ids == (chatml.eos,)

    run = find_run(trained)
    assert run is not None
    cfg: Any = from_text(run.read_config())
    cfg.set(model=hf(base), num_steps=1).build().run(tmp_path / "run", progress=False)
    assert main(["convert", "export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert ends_of(tmp_path / "out") == list(chatml.stop_ids)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.7
    found = HuggingFaceTokenizer.Config(path=str(tmp_path / "out")).build()
    assert found.stop_ids == chatml.stop_ids and found.chat_template is not None
    # Text that was not trained is given back as it was.
    assert main(["convert", "import", str(base), str(tmp_path / "imported")]) == 0
    assert main(["convert", "export", str(tmp_path / "imported"), str(tmp_path / "back")]) == 0
    assert (tmp_path / "back" / "generation_config.json").read_text() == text
