"""Input pipeline: sources, mixtures, packing, and batches that resume to the bit (docs/concepts/data.md)."""

from axlearn_like.input.encoding import Document, PromptAnswer, TokenIds
from axlearn_like.input.line_formats import JsonLines, PlainText
from axlearn_like.input.mixture import Mixture, Part, Stage
from axlearn_like.input.packing import FirstFit, FirstFitDecreasing, OneARow
from axlearn_like.input.record_formats import ArrayRecord, Parquet, json_record, text_record, tf_example_record
from axlearn_like.input.source import InputError, Source
from axlearn_like.input.supervised import SupervisedInput

__all__ = [
    "ArrayRecord",
    "Document",
    "FirstFit",
    "FirstFitDecreasing",
    "InputError",
    "JsonLines",
    "Mixture",
    "OneARow",
    "Parquet",
    "Part",
    "PlainText",
    "PromptAnswer",
    "Source",
    "Stage",
    "SupervisedInput",
    "TokenIds",
    "json_record",
    "text_record",
    "tf_example_record",
]
