# SPDX-License-Identifier: Apache-2.0
"""Reads rows of the input, in order or by index. Memory does not grow with the number of rows.

A source yields (number, raw row) for each row, in the order of the input. `load` decodes a raw row. Reading does not
decode, because a resumed run skips most rows.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from dmi_connector.bulk.prompts import BadRow, Columns
from dmi_connector.wording import show

LONGEST_LINE = 1 << 26
"""Maximum bytes of a JSON line. A longer line is a bad row."""
_BUFFER, _SAMPLE = 1 << 20, 1 << 20
"""Bytes to read at a time, and bytes at each end of a file that are hashed to identify it."""
_BATCH = 256
"""Number of Parquet rows to decode at a time."""


class Source(Protocol):
    """The rows of an input. line_offset: the line number of row 0; None if rows are not lines."""

    line_offset: int | None

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield (number, raw row) for each row, from row 0 on."""

    def load(self, raw: Any) -> object:
        """The decoded row; None if the row is blank. Raises BadRow for a row that cannot be decoded."""

    def fraction(self) -> float:
        """Fraction of the input that the latest iteration has read, from 0 to 1."""

    def count(self) -> int | None:
        """Number of rows; None if it is not known yet."""

    def random_access(self, scratch: Path) -> RandomAccess:
        """The same rows by index. scratch: directory for temporary files, which the system deletes with the process."""


class RandomAccess(Protocol):
    """The rows of an input by index. `len` is the number of rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Any:
        """The raw row with this number. Only `load` of the same object decodes it."""

    def load(self, raw: Any) -> object:
        """See `Source.load`."""


def open_source(path: Path, columns: Columns) -> Source:
    """Open the input of a run. Raises ValueError.

    path: a file of JSON lines (.jsonl, .ndjson, .json), a Parquet file, a directory of Parquet files, or a Hugging Face
    data set saved with `save_to_disk`. columns: the columns to read.
    """
    kind, files = _look(path)
    if kind == "lines":
        return Lines(open(files[0], "rb", buffering=_BUFFER))
    if find_spec("pyarrow") is None:
        raise ValueError(f"--prompts {path}: pyarrow, which reads it, is not installed; install dmi_connector[run]")
    return Parquet(files, columns) if kind == "parquet" else Arrow(files, columns)


def identity(path: Path) -> list[dict[str, Any]]:
    """The identity of an input: name, bytes and a hash of both ends of each file. Raises ValueError, OSError."""
    _, files = _look(path)
    return [_identity(file) for file in files]


def _identity(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(_SAMPLE))
        file.seek(max(0, size - _SAMPLE))
        digest.update(file.read(_SAMPLE))
    return {"name": path.name, "bytes": size, "ends_sha256": digest.hexdigest()}


def _look(path: Path) -> tuple[str, list[Path]]:
    """(kind of an input, its files). The kind is "lines", "parquet" or "arrow". Raises ValueError."""
    kinds = "a file of JSON lines (.jsonl), of Parquet (.parquet), or a data set's directory"
    if not path.exists():
        raise ValueError(f"--prompts {path} does not exist; give {kinds}")
    if path.is_file():
        if path.suffix in (".jsonl", ".ndjson", ".json"):
            return "lines", [path]
        if path.suffix == ".parquet":
            return "parquet", [path]
        raise ValueError(
            f"--prompts {path} {f'ends in {path.suffix}' if path.suffix else 'has no suffix'}; give {kinds}"
        )
    if (path / "dataset_dict.json").exists():
        splits = ", ".join(_part(path / "dataset_dict.json", lambda held: [str(name) for name in held["splits"]]))
        raise ValueError(f"--prompts {path} holds several data sets; give the directory of one of them: {splits}")
    if (path / "state.json").exists():
        if _part(path / "state.json", lambda state: state.get("_indices_files")):
            raise ValueError(f"--prompts {path} selects rows of its files; call flatten_indices() before you save it")
        return "arrow", _part(
            path / "state.json", lambda state: [path / file["filename"] for file in state["_data_files"]]
        )
    if files := sorted(path.glob("*.parquet")):
        return "parquet", files
    raise ValueError(f"--prompts {path} holds no state.json of a saved data set and no *.parquet; give {kinds}")


def _part(path: Path, take: Callable[[Any], Any]) -> Any:
    """The result of `take` for the contents of a JSON file. Raises ValueError, also if `take` fails on the contents."""
    try:
        return take(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"--prompts {path} is damaged ({error!r}); save the data set again") from error


class Lines:
    """A file of JSON lines. The number of a row is the number of its line, counted from 0."""

    line_offset: int | None = 1

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._at = 0

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        self._file.seek(0)
        self._at = number = 0
        while line := self._file.readline(LONGEST_LINE + 1):
            self._at += len(line)
            rest = line
            while len(rest) > LONGEST_LINE and not rest.endswith(b"\n"):
                rest = self._file.readline(LONGEST_LINE + 1)
                self._at += len(rest)
                if not rest or rest.endswith(b"\n"):
                    break
            yield number, line
            number += 1

    def load(self, raw: bytes) -> object:
        """Parse a line; None for a blank line. Raises BadRow."""
        return _parsed(raw)

    def fraction(self) -> float:
        """Fraction of the bytes that were read."""
        return min(1.0, self._at / self._size) if self._size else 1.0  # the file may have grown

    def count(self) -> int | None:
        """None: the lines are not counted."""
        return None

    def random_access(self, scratch: Path) -> RandomLines:
        """Lines by index. The call reads the whole file."""
        return RandomLines(self._file, scratch)


def _parsed(raw: bytes) -> object:
    if len(raw) > LONGEST_LINE:
        raise BadRow(f"the line is longer than {LONGEST_LINE} bytes")
    if not raw.strip():
        return None
    try:
        row: object = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"the line is not JSON: {error}") from error
    if row is None:
        raise BadRow("the line is null; give an object with columns, or leave the line blank")
    return row


class RandomLines:
    """Lines of a file by index. A temporary file in `scratch` holds the byte offset of each line, 8 bytes per line."""

    def __init__(self, file: BinaryIO, scratch: Path) -> None:
        self._file = file
        with tempfile.TemporaryFile(dir=scratch) as starts:
            count = self._write_starts(starts)
            starts.flush()
            self._starts = np.memmap(starts, np.uint64, "r", shape=(count + 1,))

    def _write_starts(self, starts: Any) -> int:
        self._file.seek(0)
        at = count = 0
        begins = True  # whether the next byte begins a line
        while block := self._file.read(_BUFFER):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")).astype(np.uint64) + np.uint64(at + 1)
            if begins:
                ends = np.concatenate([np.array([at], np.uint64), ends])
            at += len(block)
            begins = block.endswith(b"\n")
            if begins:
                ends = ends[:-1]  # a line begins there only if more follows
            starts.write(ends.tobytes())
            count += len(ends)
        starts.write(np.uint64(at).tobytes())  # the end of the last line
        return count

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> bytes:
        start, stop = (int(at) for at in self._starts[number : number + 2])
        return os.pread(self._file.fileno(), min(stop - start, LONGEST_LINE + 1), start)

    def load(self, raw: bytes) -> object:
        """See `Lines.load`."""
        return _parsed(raw)


class _CopiedRows(RandomLines):
    """Rows of Parquet files, copied to JSON lines. A line that is a string says why its row is bad."""

    def load(self, raw: bytes) -> object:
        row = super().load(raw)
        if isinstance(row, str):
            raise BadRow(row)
        return row


class _Columnar:
    """Rows of Arrow record batches. A raw row is (record batch, index of the row in the batch)."""

    line_offset: int | None = None

    def __init__(self, files: Sequence[Path], columns: Columns) -> None:
        self.files, self.columns = files, columns
        self._passed, self._total = 0, 0

    def load(self, raw: tuple[Any, int]) -> object:
        """{column: value} of `Columns.names`. Raises BadRow if Arrow cannot convert a value to a Python object."""
        batch, row = raw
        try:
            return {name: batch.column(name)[row].as_py() for name in batch.schema.names if name in self.columns.names}
        except (ValueError, OverflowError) as error:
            raise BadRow(f"the row cannot be read: {show(str(error))}") from error

    def fraction(self) -> float:
        """Fraction of the rows that were read."""
        return self._passed / self._total if self._total else 1.0

    def _numbered(self, batches: Iterator[Any]) -> Iterator[tuple[int, tuple[Any, int]]]:
        self._passed = number = 0
        for batch in batches:
            for row in range(batch.num_rows):
                self._passed = number + 1
                yield number, (batch, row)
                number += 1


def _check_columns(path: Path, names: Sequence[str], columns: Columns) -> None:
    """Raise ValueError if a file has no column that can hold a prompt, or has two columns with a wanted name."""
    twice = [name for name in columns.names if names.count(name) > 1]
    if twice:
        raise ValueError(f"--prompts {path} has several columns named {twice[0]!r}; rename all but one")
    if not set(names) & set(columns.prompts):
        raise ValueError(
            f"--prompts {path} has none of the columns {', '.join(columns.prompts)}; its columns: "
            f"{', '.join(names)}; name one, as in --column prompt=text"
        )


@contextmanager
def _whole_parquet(path: Path) -> Iterator[None]:
    """Turn errors about a file that cannot be read into a ValueError that names the file."""
    import pyarrow as pa

    try:
        yield
    except (FileNotFoundError, PermissionError) as error:
        raise ValueError(f"--prompts {path} cannot be read: {error.strerror}; correct that, and start again") from error
    except (pa.ArrowException, OSError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"--prompts {path} cannot be read as Parquet ({why}); write it again") from error


class Parquet(_Columnar):
    """Rows of Parquet files."""

    def __init__(self, files: Sequence[Path], columns: Columns) -> None:
        import pyarrow.parquet as pq

        super().__init__(files, columns)
        for file in files:
            with _whole_parquet(file):
                footer = pq.read_metadata(file)
            _check_columns(file, footer.schema.to_arrow_schema().names, columns)
            self._total += footer.num_rows

    def __iter__(self) -> Iterator[tuple[int, tuple[Any, int]]]:
        return self._numbered(self._batches())

    def _batches(self) -> Iterator[Any]:
        import pyarrow.parquet as pq

        for path in self.files:
            with _whole_parquet(path), pq.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
                there = [name for name in file.schema_arrow.names if name in self.columns.names]
                yield from file.iter_batches(batch_size=_BATCH, columns=there)

    def count(self) -> int | None:
        """Number of rows of all files, from their footers."""
        return self._total

    def random_access(self, scratch: Path) -> RandomLines:
        """Rows by index. The call copies all rows to JSON lines, because Parquet cannot decode single rows."""
        with tempfile.TemporaryFile(dir=scratch, buffering=_BUFFER) as file:
            for _, raw in self:
                try:
                    row = self.load(raw)
                except BadRow as error:
                    row = str(error)
                file.write(json.dumps(row, default=lambda value: {type(value).__name__: show(value)}).encode() + b"\n")
            file.flush()
            return _CopiedRows(open(os.dup(file.fileno()), "rb", buffering=_BUFFER), scratch)


class Arrow(_Columnar):
    """Rows of a Hugging Face data set. Its files are Arrow streams, which are memory-mapped."""

    def __init__(self, files: Sequence[Path], columns: Columns) -> None:
        super().__init__(files, columns)
        self._total = sum(batch.num_rows for batch in self._batches())

    def __iter__(self) -> Iterator[tuple[int, tuple[Any, int]]]:
        return self._numbered(self._batches())

    def _batches(self) -> Iterator[Any]:
        import pyarrow as pa

        for path in self.files:
            try:
                with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as stream:
                    _check_columns(path, stream.schema.names, self.columns)
                    yield from stream
            except FileNotFoundError as error:
                raise ValueError(f"--prompts {path} does not exist; save the data set again") from error
            except (pa.ArrowException, OSError) as error:
                why = " ".join(str(error).split())
                raise ValueError(f"--prompts {path} is not an Arrow stream: {why}; save the data set again") from error

    def count(self) -> int | None:
        """Number of rows of all files."""
        return self._total

    def random_access(self, scratch: Path) -> RandomBatches:
        """Rows by index, from the memory-mapped files."""
        return RandomBatches(list(self._batches()), self)


class RandomBatches:
    """Rows of record batches by index."""

    def __init__(self, batches: Sequence[Any], source: _Columnar) -> None:
        self._batches = batches
        self._ends = np.cumsum([batch.num_rows for batch in batches])
        self.load = source.load

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> tuple[Any, int]:
        at = int(np.searchsorted(self._ends, number, side="right"))
        return self._batches[at], number - int(self._ends[at - 1] if at else 0)
