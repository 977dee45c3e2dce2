"""Tokenizers of each kind, trained here on a few words, and chat templates in the shapes of published ones."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|eot|>", "<|assistant|>", "<|user|>")
_TEXT = ["the answer is the sum of the other answers, and another one", "user assistant system the the\nanswer: 42. is"]

# Texts that they write around a question and its answer; DeepSeek's and Mistral's have no token but the end.
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama2": "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}",
    "mistral": "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
    "zephyr": "{% for m in messages %}<|{{ 'other' if m.role == 'user' else 'the' }}|>\n{{ m.content }}</s>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|the|>\n{% endif %}",
    "llama3": "<s>{% for m in messages %}<|header|>{{ m.role }}<|header|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|header|>\n\n{% endif %}",
    "phi3": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "deepseek": "<s>{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
    "{% else %}<|assistant|>{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "qwen3": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}
# By name: model, normalizer, pre-tokenizer, decoder.
_SPIECE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
KINDS = (
    "byte_level",
    "byte_level_blank",
    "llama2",
    "rstrip",
    "gemma",
    "metaspace_first",
    "metaspace_always",
    "unigram",
)


@functools.cache
def library(kind: str) -> Tokenizer:
    """Return the library's tokenizer of a kind, special tokens parsed."""
    if kind == "unigram":
        built, trainer = (
            Tokenizer(models.Unigram()),
            trainers.UnigramTrainer(
                vocab_size=90, special_tokens=list(SPECIAL), unk_token="<unk>", show_progress=False
            ),
        )
    else:
        bytes_ = (
            {} if kind.startswith("byte_level") else {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
        )
        built = Tokenizer(models.BPE(**bytes_))
        alphabet = pre_tokenizers.ByteLevel.alphabet() if kind.startswith("byte_level") else []
        fallback = [] if kind.startswith("byte_level") else [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=len(alphabet) + len(fallback) + 90,
            special_tokens=[*SPECIAL, *fallback],
            initial_alphabet=alphabet,
            show_progress=False,
        )
    if kind.startswith("byte_level"):
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "byte_level_blank")
        built.decoder = decoders.ByteLevel()
    elif kind in ("llama2", "rstrip", "gemma"):
        blank = [] if kind == "gemma" else [normalizers.Prepend("▁")]
        built.normalizer = normalizers.Sequence([*blank, normalizers.Replace(" ", "▁")])
        built.decoder = decoders.Sequence(_SPIECE[: 3 if kind == "gemma" else 4])
    else:
        scheme = "first" if kind == "metaspace_first" else "always"
        built.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=kind != "metaspace_first")
        built.decoder = decoders.Sequence(_SPIECE)
    built.train_from_iterator(_TEXT * 40, trainer)
    spec = json.loads(built.to_str())
    # Bytes are tokens of the vocabulary, not special ones.
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in SPECIAL]
    built = Tokenizer.from_str(json.dumps(spec))
    if kind == "rstrip":  # Phi 3's: they swallow the blanks behind them
        built.add_special_tokens([AddedToken(text, rstrip=True) for text in ("<|assistant|>", "<|user|>", "<|eot|>")])
    return built


@functools.cache
def directory(kind: str) -> str:
    """Return a directory with a tokenizer of a kind, whose pad is its end."""
    folder = Path(tempfile.mkdtemp(prefix=f"tokenizer-{kind}-"))
    library(kind).save(str(folder / "tokenizer.json"))
    names: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
    names["add_bos_token"] = not kind.startswith("byte_level")
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    for name, source in TEMPLATES.items():
        (folder / f"{name}.jinja").write_text(source)
    return str(folder)


@functools.cache
def tokenizer(kind: str, template: str = "") -> HuggingFaceTokenizer:
    """Return a tokenizer of a kind with a template of that name; "": without."""
    path = f"{directory(kind)}/{template}.jinja" if template else ""
    return HuggingFaceTokenizer.Config(path=directory(kind), chat_template=path).build()
