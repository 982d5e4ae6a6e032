"""Rows of data files: .jsonl .json .csv .tsv .parquet .txt and data sets of the Hugging Face hub.

Every reader yields (position, row): the line for text files, the number of the item or row for the others. Text is
UTF-8 whatever the locale says, with or without a byte-order mark; only a newline ends a line.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from sparta_api.errors import ConfigError

Row = tuple[int, dict[str, Any]]

TEXT_COLUMN = "text"
"""The only column of a .txt file."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_BOM = b"\xef\xbb\xbf"
_DATA_EXTRA = "pip install 'sparta-api[data]'"


class Rows(NamedTuple):
    """An open source of rows, and how its places are called: `{name}:{position}` or `{name}, row {position}`."""

    rows: Iterator[Row]
    place: Callable[[int], str]


def open_rows(name: str, path: Path | None) -> Rows:
    """The rows of the file at `path`, or of the hub's data set when `path` is None and `name` is hf:ORG/NAME[:SPLIT].

    Raises ConfigError, also while rows are read, naming the file and line and what to do.
    """
    if path is None:
        return Rows(_hub(name), lambda position: f"{name}, row {position}")
    readers: dict[str, tuple[Callable[[Path], Iterator[Row]], str]] = {
        ".jsonl": (_jsonl, ":"),
        ".ndjson": (_jsonl, ":"),
        ".json": (_json, ", item "),
        ".csv": (lambda file: _table(file, ","), ":"),
        ".tsv": (lambda file: _table(file, "\t"), ":"),
        ".parquet": (_parquet, ", row "),
        ".txt": (_lines, ":"),
    }
    if path.suffix.lower() not in readers:
        known = " ".join(readers)
        raise ConfigError(f"{path}: files of the kind '{path.suffix}' cannot be read; use {known} or hf:ORG/NAME")
    reader, joint = readers[path.suffix.lower()]
    return Rows(_disk_errors(path, reader), lambda position: f"{path}{joint}{position}")


def _disk_errors(path: Path, reader: Callable[[Path], Iterator[Row]]) -> Iterator[Row]:
    try:
        yield from reader(path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{path}: {reason}; paths are relative to the configuration file") from error


def _decode(content: bytes, path: Path, line: int = 1) -> str:
    """The text of bytes that start at that line."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
        guess = "UTF-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "another encoding"
        raise ConfigError(
            f"{path}:{line}: byte 0x{content[error.start]:02x} is not UTF-8, the file is probably in {guess};"
            " save it as UTF-8"
        ) from error


def _whole(path: Path) -> str:
    text = _decode(path.read_bytes(), path)
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ConfigError(f"{path}:{line}: the file holds NUL characters, it is probably UTF-16; save it as UTF-8")
    return text


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for line, content in enumerate(file, 1):
            if line == 1:
                content = content.removeprefix(_BOM)
            if content := content.strip():
                yield line, _object(_parse(content, path, line), f"{path}:{line}")


def _parse(content: bytes, path: Path, line: int) -> Any:
    """The JSON value in bytes that start at that line; lone surrogates become U+FFFD."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        text = _decode(content, path, line)
    try:
        return _replace_surrogates(json.loads(text))
    except RecursionError as error:
        raise ConfigError(f"{path}:{line}: this is nested too deeply") from error
    except json.JSONDecodeError as error:
        hint = "; a file with one object a line is named .jsonl" if error.msg == "Extra data" else ""
        where = f"{path}:{line + error.lineno - 1}"
        raise ConfigError(f"{where}: this is not JSON ({error.msg.lower()} at column {error.colno}){hint}") from error


def _replace_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_replace_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_replace_surrogates(key): _replace_surrogates(item) for key, item in value.items()}
    return value


def _object(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: this is no JSON object with named fields, but {type(row).__name__}")
    return row


def _json(path: Path) -> Iterator[Row]:
    content = path.read_bytes().removeprefix(_BOM)
    if not content.strip():
        return
    items = _parse(content, path, 1)
    if not isinstance(items, list):
        raise ConfigError(f"{path}:1: the file has to hold a list of objects")
    for position, item in enumerate(items, 1):
        yield position, _object(item, f"{path}, item {position}")


def _lines(path: Path) -> Iterator[Row]:
    for line, text in enumerate(_whole(path).split("\n"), 1):
        if text.strip():
            yield line, {TEXT_COLUMN: text.strip()}


def _table(path: Path, delimiter: str) -> Iterator[Row]:
    text = _whole(path)
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    start = 1
    try:
        for cells in reader:
            if header is None and cells:
                header = _header(cells, f"{path}:{start}")
            elif header is not None and any(cell.strip() for cell in cells):
                if len(cells) != len(header):
                    found = f"this record has {len(cells)} fields, the header {len(header)}"
                    raise ConfigError(f"{path}:{start}: {found}; quote a field that holds {delimiter!r}")
                yield start, dict(zip(header, cells, strict=True))
            start = reader.line_num + 1
    except csv.Error as error:
        line = _quote_line(text, delimiter, start)
        raise ConfigError(
            f"{path}:{line}: the quote that opens here is not closed properly ({error}); close it, double quotes within"
        ) from error


def _header(cells: list[str], place: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"{place}: the column {min(twice)!r} is named twice")
    return names


def _quote_line(text: str, delimiter: str, start: int) -> int:
    """The line in which the quoted field opens that breaks the record starting at line `start`."""
    opened, quoted, closed, fresh = start, False, False, True
    for number, line in enumerate(io.StringIO(text, newline=""), 1):
        for character in line if number >= start else "":
            if quoted:
                quoted, closed = character != '"', character == '"'
                continue
            if character == '"' and (closed or fresh):
                opened = opened if closed else number
                quoted = True
            elif closed and character not in (delimiter, "\n", "\r"):
                return opened
            closed, fresh = False, character in (delimiter, "\n", "\r")
    return opened


def _parquet(path: Path) -> Iterator[Row]:
    if not path.is_file():
        raise FileNotFoundError(2, "no such file")
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{path}: reading .parquet needs pyarrow; {_DATA_EXTRA}") from error
    try:
        position = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                position += 1
                yield position, row
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path}: this is no readable Parquet file ({_first_line(error)})") from error


def _hub(name: str) -> Iterator[Row]:
    dataset, _, split = name.removeprefix("hf:").partition(":")
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"{name}: reading from the hub needs datasets; {_DATA_EXTRA}") from error
    try:
        table = datasets.load_dataset(dataset, split=split or "train")
    except Exception as error:  # datasets raises whatever its readers and the network raise
        raise ConfigError(f"{name}: the data set cannot be loaded ({_first_line(error)})") from error
    yield from enumerate(table, 1)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
