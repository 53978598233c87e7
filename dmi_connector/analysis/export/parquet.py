# SPDX-License-Identifier: Apache-2.0
"""Export as Parquet files, one per store, with one row per token."""

from __future__ import annotations

from pathlib import Path

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise ImportError("parquet: pyarrow is not installed; install dmi_connector[run]") from error

from dmi_connector.analysis.export.columns import TOKENS, columns_of, parts
from dmi_connector.analysis.export.progress import Done, Progress, export_by_name
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.captures import Captures
from dmi_connector.captures.finite import FiniteCheck


def export(captures: Captures, out: Path, progress: Progress, finite: FiniteCheck, hook: str) -> Done:
    """Write `out/NAME.parquet` for each store, with the columns key, token_ids, positions, phase and one per hook.

    A hook's column has the Arrow type fixed_size_list, with the width of the hook as list size. hook: comma-separated
    hooks, each with one layer, such as "resid_pre@3,q@3". Raises the errors of `columns_of` and `export_by_name`.
    """
    columns = columns_of(captures, hook)

    def write(capture: Capture, path: Path) -> None:
        tokens = {name: getattr(capture, name) for name in TOKENS}
        writer = None
        try:
            blocks = zip(*(column.blocks(capture, finite) for column in columns), strict=True)
            for rows, values in zip(parts(capture), blocks, strict=True):
                lists = [pa.FixedSizeListArray.from_arrays(pa.array(v.reshape(-1)), v.shape[1]) for v in values]
                arrays = {"key": pa.array([capture.attrs.get("key")] * len(values[0]), pa.string())}
                arrays |= {name: pa.array(ids[rows]) for name, ids in tokens.items()}
                arrays |= {column.name: made for column, made in zip(columns, lists, strict=True)}
                table = pa.table(arrays)
                writer = writer or pq.ParquetWriter(path, table.schema)
                writer.write_table(table)
        finally:
            if writer is not None:
                writer.close()

    return export_by_name(captures, out, ".parquet", write, progress, {"to": "parquet", "hook": hook}, finite)
