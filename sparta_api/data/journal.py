"""Files that survive a crash: JSON lines that only grow, and whole files that are replaced atomically."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from sparta_api.errors import DiskError

CHUNK = 1 << 20


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces a file as a whole: readers see the old or the new content, a crash leaves one of them.

    Raises DiskError when the directory cannot be written.
    """
    _replace(path, [data])


def write_lines(path: Path, rows: Iterable[Any]) -> int:
    """Writes a whole JSON-lines file atomically from an iterable of JSON values; returns how many."""
    count = 0

    def lines() -> Iterator[bytes]:
        nonlocal count
        for row in rows:
            count += 1
            yield encode(row)

    _replace(path, lines())
    return count


def _replace(path: Path, chunks: Iterable[bytes]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise disk_error(path, error) from error


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_error(path: Path, error: OSError) -> DiskError:
    """The sentence for a failed write."""
    return DiskError(f"{path}: cannot write ({error.strerror}); free space or fix permissions, then resume the run")


def encode(row: Any) -> bytes:
    """One JSON line, UTF-8, ending in a line feed. Lone surrogates become U+FFFD."""
    try:
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
    except (TypeError, orjson.JSONEncodeError):
        return orjson.dumps(without_surrogates(row), option=orjson.OPT_APPEND_NEWLINE)


def without_surrogates(value: Any) -> Any:
    """A JSON value with the lone surrogates in its texts replaced by U+FFFD."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_text(str(key)): without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_surrogates(item) for item in value]
    return value


def clean_text(text: str) -> str:
    """The text with lone surrogates replaced by U+FFFD, so that it can be written as UTF-8."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def drop_torn_tail(path: Path) -> int:
    """Cuts a half-written last line off; returns how many bytes were cut (0 for a whole or absent file)."""
    try:
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            end = size
            while end > 0:
                start = max(0, end - CHUNK)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                if newline >= 0:
                    end = start + newline + 1
                    break
                end = start
            if end < size:
                file.truncate(end)
            return size - end
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise disk_error(path, error) from error


def read_lines(path: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int, int]]:
    """The objects of a JSON-lines file from a byte offset on, each with its own offset and length.

    An unfinished last line is not returned. Raises DiskError for a damaged line, naming file and byte.
    """
    if not path.exists():
        return
    loads = orjson.loads
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            if line != b"\n":
                try:
                    row = loads(line)
                except orjson.JSONDecodeError as error:
                    raise DiskError(
                        f"{path}: the line at byte {offset} is not JSON; remove that line to have its work done again"
                    ) from error
                yield row, offset, len(line)
            offset += len(line)


def read_line_at(path: Path, offset: int, length: int) -> dict[str, Any]:
    """The object of one line whose place `read_lines` told."""
    with path.open("rb") as file:
        file.seek(offset)
        row: dict[str, Any] = orjson.loads(file.read(length))
        return row


class Journal:
    """An append-only JSON-lines file; every line is handed to the operating system as it is appended.

    Opening it drops a torn tail. `append` raises DiskError, after taking a half-written line back.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = drop_torn_tail(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self.size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise disk_error(path, error) from error

    def append(self, row: dict[str, Any]) -> None:
        """Appends one object as one line."""
        data = encode(row)
        try:
            written = os.write(self._descriptor, data)
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self.size)
            raise disk_error(self.path, error) from error
        self.size += len(data)

    def sync(self) -> None:
        """Waits until what was appended would survive a power cut."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise disk_error(self.path, error) from error

    def close(self) -> None:
        """Syncs and closes; more than once does no harm."""
        if self._descriptor >= 0:
            try:
                self.sync()
            finally:
                os.close(self._descriptor)
                self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
