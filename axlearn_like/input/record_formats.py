"""Files of records: ArrayRecord and Parquet."""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from axlearn_like.config import config_function
from axlearn_like.input.encoding import columns_of
from axlearn_like.input.file_source import FileSource, Record
from axlearn_like.input.source import InputError
from mesh.errors import did_you_mean, install_hint

_AT_ONCE = 256  # records


@config_function
def text_record(data: bytes) -> Mapping[str, Any]:
    """Return a record that is a UTF-8 text: one field, `text`."""
    return {"text": data}


@config_function
def json_record(data: bytes) -> Mapping[str, Any]:
    """Return a record that is a JSON object."""
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError(f"a JSON object was expected, got {data[:40]!r}")
    return found


@config_function
def tf_example_record(data: bytes) -> Mapping[str, Any]:
    """Return a record that is a `tf.train.Example` (TensorFlow Datasets); lists of one byte string become that."""
    message = _tf_example().FromString(data)
    fields: dict[str, Any] = {}
    for name, feature in message.features.feature.items():
        kind = feature.WhichOneof("kind")
        values = list(getattr(feature, kind).value) if kind else []
        fields[name] = values[0] if kind == "bytes_list" and len(values) == 1 else values
    return fields


class ArrayRecord(FileSource):
    """Files of the library `array_record`. `decode` makes the fields of a record from its bytes."""

    class Config(FileSource.Config):
        decode: Callable[[bytes], Mapping[str, Any]] = tf_example_record

    def __init__(self, cfg: Config):
        self._decode = cfg.decode
        super().__init__(cfg)

    def check(self, path: Path, fields: tuple[str, ...]) -> None:
        """Refuse a file without records (InputError)."""
        with _array_record(path) as reader:
            records = reader.num_records()
        if not records:
            raise InputError(f"{path} has no records")

    def records(self, path: Path, fields: tuple[str, ...]) -> Iterator[Record]:
        """Yield the records of a file."""
        with _array_record(path) as reader:
            count = reader.num_records()
            for begin in range(0, count, _AT_ONCE):
                end = min(begin + _AT_ONCE, count)
                for number, data in enumerate(reader.read(list(range(begin, end))), start=begin):
                    where = f"{path}, record {number}"
                    yield self._fields(data, where), where, (number + 1) / count

    def _fields(self, data: bytes, where: str) -> Mapping[str, Any]:
        try:
            return self._decode(data)
        except InputError:
            raise
        except Exception as error:  # any library that `decode` uses may raise
            name = getattr(self._decode, "__name__", self._decode)
            raise InputError(
                f"{where}: {name} cannot read it ({type(error).__name__}: {error}); another `decode`?"
            ) from error


@contextlib.contextmanager
def _array_record(path: Path) -> Iterator[Any]:
    from array_record.python.array_record_module import ArrayRecordReader

    try:
        reader = ArrayRecordReader(str(path))
        yield reader
        reader.close()
    except (RuntimeError, IndexError, OSError) as error:
        raise InputError(f"{path} is not a complete ArrayRecord file: {error}") from error


class Parquet(FileSource):
    """Parquet files, read by row groups. Needs the extra `data`."""

    def check(self, path: Path, fields: tuple[str, ...]) -> None:
        """Refuse a file without rows or columns of these names (InputError)."""
        with _parquet(path) as file:
            names = file.schema_arrow.names
            for name in columns_of(fields, names):
                if name not in names:
                    raise InputError(f"{path}: there is no column {name!r}{did_you_mean(name, names)}")
            if not file.metadata.num_rows:
                raise InputError(f"{path} has no rows")

    def records(self, path: Path, fields: tuple[str, ...]) -> Iterator[Record]:
        """Yield the records of a file."""
        return read_parquet(path, fields)


def read_parquet(path: Path, fields: Sequence[str] | None = None) -> Iterator[Record]:
    """Yield the rows of a Parquet file, with the columns of these fields or all; InputError if it is damaged."""
    with _parquet(path) as file:
        count, number = file.metadata.num_rows, 0
        columns = None if fields is None else columns_of(fields, file.schema_arrow.names)
        batches = file.iter_batches(batch_size=_AT_ONCE, columns=columns)
        while True:
            try:
                records = batch_rows(next(batches))
            except StopIteration:
                return
            except (OSError, ValueError) as error:  # Arrow's own are of these
                raise InputError(f"{path} is damaged behind row {number}: {error}") from error
            for record in records:
                yield record, f"{path}, row {number}", (number + 1) / count
                number += 1


def batch_rows(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of an Arrow batch as Python values. Floats of 16 and 32 bits keep the value that they stand for.

    The float32 nearest to 0.1 is 0.1 there, as it is written, and not the 0.10000000149 of the same bits as a float64.
    Times that Python has no values for, such as those in nanoseconds, are texts, alone and within lists and structs.
    """
    rows: list[dict[str, Any]] = [{} for _ in range(batch.num_rows)]
    for field, column in zip(batch.schema, batch.columns, strict=True):
        try:
            values = column.to_pylist()
        except UnicodeDecodeError:
            raise
        except (ValueError, OverflowError):
            values = column.cast(_with_texts(field.type)).to_pylist()
        if "float" in str(field.type):  # a column, or within a list or a struct
            values = [_at_own_width(value, field.type) for value in values]
        for row, value in zip(rows, values, strict=True):
            row[field.name] = value
    return rows


def _with_texts(kind: Any) -> Any:
    """Return an Arrow type with texts in place of times."""
    import pyarrow  # pyright: ignore[reportMissingImports]

    types = pyarrow.types
    if types.is_struct(kind):
        return pyarrow.struct([part.with_type(_with_texts(part.type)) for part in kind])
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pyarrow.list_(_with_texts(kind.value_type))
    if types.is_map(kind):
        return pyarrow.map_(_with_texts(kind.key_type), _with_texts(kind.item_type))
    if types.is_dictionary(kind):
        return _with_texts(kind.value_type)
    return pyarrow.string() if types.is_temporal(kind) else kind


def short_float(value: Any) -> float:
    """Return the float64 with the shortest text that is this numpy float of any width."""
    return float(str(value))


def _at_own_width(value: Any, kind: Any) -> Any:
    """Return a value of this Arrow type whose narrow floats are the numbers with the shortest text."""
    import pyarrow.types as types  # pyright: ignore[reportMissingImports]

    if value is None:
        return None
    if types.is_float32(kind) or types.is_float16(kind):
        return short_float(np.float32(value) if types.is_float32(kind) else np.float16(value))
    if types.is_struct(kind):
        return {part.name: _at_own_width(value[part.name], part.type) for part in kind}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_at_own_width(one, kind.value_type) for one in value]
    return value


def _parquet(path: Path) -> Any:
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError(f"{path}: Parquet needs pyarrow; {install_hint('data')}") from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path} is not a Parquet file: {error}") from error


@functools.cache
def _tf_example() -> Any:
    """Return the message class `tf.train.Example`, built from its fields: TensorFlow is not needed."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="axlearn_like/example.proto", package="axlearn_like", syntax="proto3"
    )

    def message(name: str, *fields: tuple[str, int, int, str | None, bool], within: Any = file.message_type) -> Any:
        added = within.add(name=name)
        for field, number, kind, of, repeated in fields:
            label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            added.field.add(name=field, number=number, type=kind, label=label, type_name=of and f".axlearn_like.{of}")
        return added

    message("BytesList", ("value", 1, kinds.TYPE_BYTES, None, True))
    message("FloatList", ("value", 1, kinds.TYPE_FLOAT, None, True))
    message("Int64List", ("value", 1, kinds.TYPE_INT64, None, True))
    lists = (("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List"))
    feature = message("Feature", *((name, n, kinds.TYPE_MESSAGE, of, False) for n, (name, of) in enumerate(lists, 1)))
    feature.oneof_decl.add(name="kind")
    for field in feature.field:
        field.oneof_index = 0
    features = message("Features", ("feature", 1, kinds.TYPE_MESSAGE, "Features.FeatureEntry", True))
    entry = message(
        "FeatureEntry",
        ("key", 1, kinds.TYPE_STRING, None, False),
        ("value", 2, kinds.TYPE_MESSAGE, "Feature", False),
        within=features.nested_type,
    )
    entry.options.map_entry = True
    message("Example", ("features", 1, kinds.TYPE_MESSAGE, "Features", False))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("axlearn_like.Example"))
