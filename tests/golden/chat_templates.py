"""Conversations rendered by Hugging Face transformers: for tests/axlearn_like/tokenizers/test_jinja_template.py.

Not run by the tests and not by the project's environment; any Python >= 3.10 with transformers >= 5 will do:

    python -m venv golden && golden/bin/pip install transformers==5.23.0 jinja2
    golden/bin/python tests/golden/chat_templates.py tests/axlearn_like/tokenizers/golden

The folder's `templates/*.jinja` and `conversations.json` are written by hand, in the shapes of published templates.
Written here are two small tokenizers in directories, as transformers saves them, and `rendered.json.gz`: for each
tokenizer, template and conversation the text and the ids, or null where transformers refuses the conversation.
"""

# pyright: reportMissingImports=false

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<unk>", "<|start|>", "<|turn_end|>", "<|sep|>", "<|channel|>", "<|call_end|>"]
PLAIN = ["<think>", "</think>", "<call>", "</call>"]  # added, but text: as Qwen 3 has them
TEXT = ["What is the weather in a place, now? The time is 2 + 2. Hello there, be brief and answer well. " * 3]
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def byte_level() -> Tokenizer:
    """A byte-level encoding, in the shape of GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Characters that fall back to bytes, with a blank before each text, in the shape of Llama 2 and Mistral."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=90, show_progress=False))
    spec = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *spec["vocab"]]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    merges = [tuple(pair) for pair in spec["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", vocab["<s>"])]
    )
    return tokenizer


def saved(tokenizer: Tokenizer, directory: Path) -> Any:
    """Save a tokenizer as transformers does, and return it as transformers loads it."""
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **NAMES).save_pretrained(directory)
    return PreTrainedTokenizerFast.from_pretrained(directory, chat_control_tokens=[])


def rendered(tokenizer: Any, template: str, case: dict[str, Any]) -> dict[str, Any] | None:
    """Return text and ids of a conversation; None where the template refuses it."""
    case = dict(case)
    options = {**case.pop("variables", {}), **case, "chat_template": template, "conversation": case["messages"]}
    del options["messages"]
    try:
        text = tokenizer.apply_chat_template(**options, tokenize=False)
        # Words that users spell are text; only special tokens count (`chat_control_tokens` is empty).
        ids = tokenizer.apply_chat_template(**options, sanitize_control_tokens=True, return_dict=True)["input_ids"]
    except Exception as error:
        print(f"refused: {error!r:.160}")
        return None
    return {"text": text, "ids": ids}


def main() -> None:
    """Write the tokenizers and what they make of the conversations."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    cases = json.loads((directory / "conversations.json").read_text())
    out: dict[str, Any] = {}
    for name, made in {"byte_level": byte_level(), "byte_fallback": byte_fallback()}.items():
        tokenizer = saved(made, directory / name)
        for path in sorted((directory / "templates").glob("*.jinja")):
            for title, case in cases.items():
                out[f"{name} | {path.stem} | {title}"] = rendered(tokenizer, path.read_text(), case)
        texts = ["Hello there", " a  b", "世界 🙂 é", "<s>hi<|start|><think>", ""]
        out[f"{name} | encode"] = [
            [text, tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)] for text in texts
        ]
    path = directory / "rendered.json.gz"
    path.write_bytes(gzip.compress(json.dumps(out, ensure_ascii=False).encode(), mtime=0))
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
