"""A pandas or Dask data frame as source: written down once as Parquet in scratch, then read like any other files.

So a Dask graph is computed exactly once, its partitions never meet in one process, and what follows is the same for all
sources. The order of partitions, then of rows, is the canonical order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from dask import delayed, is_dask_collection
from distributed import Client

from panelflow.cluster import collect, guarded
from panelflow.errors import PanelError
from panelflow.files import Folder
from panelflow.source import FileInfo, SourceFile

_SLICE_BYTES = 64 * 2**20
_DONE = "spool/done"
_UNFIT = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError, OverflowError)


def is_frame(source: Any) -> TypeGuard[Any]:
    """Whether a source is a pandas or a Dask data frame."""
    tabular = hasattr(source, "columns") and getattr(source, "ndim", 0) == 2
    return isinstance(source, pd.DataFrame) or (is_dask_collection(source) and tabular)


def frame_info(frame: Any) -> FileInfo:
    """Columns of a frame, index levels included; whether they are numeric shows when they are written down."""
    names = [*(name for name in frame.index.names if name is not None)] if isinstance(frame, pd.DataFrame) else [frame.index.name]
    columns = [name for name in (*names, *frame.columns) if name is not None]
    repeated = sorted({str(name) for name in columns if columns.count(name) > 1})
    if repeated:
        raise PanelError(f"The data frame has a column twice; rename one: {repeated[0]!r}")
    odd = [name for name in columns if not isinstance(name, str)]
    if odd:
        raise PanelError(f"Columns of a data frame are named by text; rename: {odd[0]!r}")
    return FileInfo(SourceFile("", "parquet", label="the data frame"), dict.fromkeys(columns), {}, (), 0)


def spool(client: Client, frame: Any, columns: Sequence[str], scratch: Folder) -> list[SourceFile]:
    """Write each partition, or each slice of a pandas frame, as one Parquet file; all of them are kept once all are there.

    Raises
    ------
    PanelError
        A column that Arrow cannot hold, such as one of mixed objects; names partition, column and value.
    """
    if isinstance(frame, pd.DataFrame):
        row_bytes = frame.memory_usage(index=True).sum() / max(len(frame), 1)
        rows = max(1, int(_SLICE_BYTES / max(row_bytes, 1)))
        starts = range(0, max(len(frame), 1), rows)
        labels = [f"the data frame from row {start}" for start in starts]
        parts: list[Any] = [frame.iloc[start : start + rows] for start in starts]
    else:
        parts = frame.to_delayed()
        labels = [f"partition {number} of the Dask data frame" for number in range(len(parts))]
    files = [
        SourceFile(_input_path(scratch, f"spool/{number:08d}.parquet"), "parquet", label=label)
        for number, label in enumerate(labels)
    ]
    if scratch.exists(_DONE):
        return files
    arguments = [(part, list(columns), scratch, f"spool/{i:08d}.parquet", labels[i]) for i, part in enumerate(parts)]
    if isinstance(frame, pd.DataFrame):  # it is in this process already; through the scheduler it would be there twice
        for argument in arguments:
            _write_part(*argument)
    else:
        collect(client, client.compute([delayed(guarded)(_write_part, *argument) for argument in arguments]))
    scratch.write(_DONE, [b""])
    return files


def _input_path(scratch: Folder, name: str) -> str:
    return scratch.path(name) if scratch.is_local else f"{str(scratch.url).rstrip('/')}/{name}"


def _write_part(frame: pd.DataFrame, columns: list[str], scratch: Folder, name: str, label: str) -> None:
    if any(level in columns for level in frame.index.names):
        frame = frame.reset_index()
    frame = frame[columns]
    try:
        table = pa.Table.from_pandas(frame, preserve_index=False)
    except _UNFIT as error:
        raise _explain(frame, label, error) from error
    for position, column in enumerate(columns):  # NaN stays the NaN it is: from_pandas makes it null, and bits are lost
        if isinstance(frame[column].dtype, np.dtype) and frame[column].dtype.kind == "f":
            table = table.set_column(position, column, pa.array(frame[column].to_numpy(), from_pandas=False))
    sink = pa.BufferOutputStream()
    row_bytes = max(table.nbytes // max(table.num_rows, 1), 1)
    pq.write_table(table, sink, compression="lz4", row_group_size=max(int(8 * 2**20 // row_bytes), 1))
    scratch.write(name, [memoryview(sink.getvalue())])


def _explain(frame: pd.DataFrame, label: str, error: Exception) -> PanelError:
    for name in frame.columns:
        if isinstance(frame[name].dtype, pd.SparseDtype):
            return PanelError(f"{label}: column {name!r} is sparse; make it dense by frame[{name!r}].sparse.to_dense()")
        try:
            pa.array(frame[name], from_pandas=True)
        except _UNFIT:
            kinds = frame[name].map(type)
            odd = kinds != kinds.iloc[0]
            row = int(odd.to_numpy().argmax())
            value = frame[name].iloc[row]
            found = ", ".join(sorted({kind.__name__ for kind in kinds}))
            return PanelError(f"{label}, row {row}: column {name!r} mixes types ({found}); convert it to one: {value!r}")
    return PanelError(f"{label}: {error}")
