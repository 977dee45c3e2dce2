"""Sequence and token classifiers of every family: its decoder with `score` in the place of `lm_head`.

Reward models are sequence classifiers with one label. transformers takes a sequence's scores at its last token that is
no padding, as a `ScoreHead` without pooling does; a token classifier's head has a bias.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.heads import ScoreHead
from models.huggingface.architecture import Architecture
from models.huggingface.config_json import ConfigJson
from models.huggingface.rows import Row

# With a bias or not.
_TASKS = {"SequenceClassification": False, "TokenClassification": True}
_ROWS = {"head.weight_dv": Row("score.weight", "v,d"), "head.bias": Row("score.bias", "d")}
_NO_TOKEN_CLASSIFIER = ("Gemma3ForCausalLM", "DeepseekV3ForCausalLM", "GPT2LMHeadModel")  # none, or one of other names


def classifiers(families: Iterable[Architecture]) -> Iterator[Architecture]:
    """Yield the classifiers of these architectures of language models."""
    for family in families:
        for task, bias in _TASKS.items():
            if bias and family.name in _NO_TOKEN_CLASSIFIER:
                continue
            name = family.name.replace("ForCausalLM", "").replace("LMHeadModel", "").replace("Gemma3", "Gemma3Text")
            yield dataclasses.replace(
                family,
                name=f"{name}For{task}",
                read=partial(_read, family, bias),
                write=partial(_write, family, bias),
                root={**family.root, **_ROWS},
                copies={},
                vocabulary=tuple(name for name in family.vocabulary if name not in family.copies),
                base_prefix="",
            )


def _read(family: Architecture, bias: bool, json: ConfigJson) -> Decoder.Config:
    json.ignore("classifier_dropout", "tie_word_embeddings", "final_logit_softcapping")
    labels = json.size("id2label", json.integer("num_labels", 2))
    return family.read(json).set(head=ScoreHead.Config(outputs=labels, bias=bias))


def _write(family: Architecture, bias: bool, cfg: Decoder.Config) -> dict[str, Any]:
    head = cfg.head
    if not isinstance(head, ScoreHead.Config) or head.bias != bias:
        raise AttributeError("a head of another kind")
    names = [f"LABEL_{index}" for index in range(head.outputs)]
    labels = {str(index): name for index, name in enumerate(names)}
    numbers = {name: index for index, name in enumerate(names)}
    return {**family.write(cfg.clone(head=None)), "id2label": labels, "label2id": numbers}
