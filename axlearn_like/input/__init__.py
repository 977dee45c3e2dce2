"""Input of training: sources, their mixture, packing into rows, and batches that resume to the bit.

Our own, except for prefetching, which is Grain's. On the same machine Grain 0.2.18 (`MapDataset.shuffle`,
`FirstFitPackIterDataset`) packs 0.6 M tokens per CPU second where this packs 12 M, and its packed rows depend on the
number of hosts: of 64 rows, 1 was the same on two hosts. A Grain `MapDataset`, or other `RandomAccessDataSource`, of
examples is a source.
"""

from axlearn_like.input.chat import Chat
from axlearn_like.input.encoding import Document, PromptAnswer, TokenIds
from axlearn_like.input.labelled import LabelledInput, LabelledLines, StepLabels, TextLabel, labelled_text
from axlearn_like.input.line_formats import JsonLines, PlainText
from axlearn_like.input.mixture import Mixture, Part, Stage
from axlearn_like.input.packing import FirstFit, OneARow
from axlearn_like.input.preferences import (
    EncodedCompletion,
    Preference,
    PreferenceInput,
    UnpairedInput,
    UnpairedPreference,
    preference,
    unpaired,
)
from axlearn_like.input.record_formats import ArrayRecord, Parquet, json_record, text_record, tf_example_record
from axlearn_like.input.source import InputError, Source
from axlearn_like.input.supervised import SupervisedInput

__all__ = [
    "ArrayRecord",
    "Chat",
    "EncodedCompletion",
    "Document",
    "FirstFit",
    "InputError",
    "JsonLines",
    "LabelledInput",
    "LabelledLines",
    "Mixture",
    "OneARow",
    "Parquet",
    "Part",
    "PlainText",
    "Preference",
    "PreferenceInput",
    "PromptAnswer",
    "Source",
    "Stage",
    "StepLabels",
    "SupervisedInput",
    "TextLabel",
    "TokenIds",
    "UnpairedInput",
    "UnpairedPreference",
    "json_record",
    "labelled_text",
    "preference",
    "text_record",
    "tf_example_record",
    "unpaired",
]
