"""The memory that tasks take, known before any of them runs, and the size of units that follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from panelflow.errors import MemoryBudgetError
from panelflow.panel import Unit
from panelflow.plan import Layout, MiB
from panelflow.source import FileInfo

BASE_BYTES = 240 * MiB
"""What a worker process holds beside rows: Python, Dask, Arrow, pandas, and the gaps between blocks on its heap."""
KEY_BYTES = 64
"""Bytes that sorting takes for each row: codes, dates, hash, order and its inverse."""
_ROUTED_BYTES = 96
"""Bytes that scatter takes for each row beside its values: codes, dates, hashes, buckets, order and destination."""
_PAGE_BYTES, _COLUMN_BYTES = 2 * MiB, 48 * 1024
"""What a reader of a Parquet column holds beside its result: a page and a dictionary, at most, and its own state."""
_SHARE = 0.8
"""Part of its memory at which Dask pauses a worker."""
_WRITE_BYTES = 16 * MiB
"""Blocks on their way into a shard: copied, compressed, as float64 for statistics."""


@dataclass(frozen=True)
class Budget:
    """Bytes that one task of each kind holds at most, and what a worker needs for them.

    ``spare`` are freed pages that a worker keeps, to use them again.
    """

    scatter: int
    count: int
    gather: int
    threads: int
    spare: int = 0

    @property
    def worker(self) -> int:
        return BASE_BYTES + self.spare + self.threads * max(self.scatter, self.count, self.gather)

    def as_dict(self) -> Mapping[str, int]:
        return {"scatter": self.scatter, "count": self.count, "gather": self.gather, "worker": self.worker}


def make_budget(layout: Layout, unit_bytes: int, page_bytes: int, threads: int, memory_limit: int | None) -> Budget:
    """The memory formula.

    * scatter: a unit as Arrow table, as text or text columns, and grouped by bucket, with what places its rows, beside the pages
      of all columns; a slice of the second pass takes less;
    * count: the keys of a bucket, where duplicates are kept;
    * gather: the rows of a shard, those of a unit that holds some of them, and the keys around it.

    Parameters
    ----------
    unit_bytes
        Bytes of the largest unit, at eight for each value.
    page_bytes
        See :func:`page_bytes_of`.
    """
    bucket_rows, shard_rows = layout.bucket_rows, layout.shard_rows
    return Budget(
        scatter=int(_scatter_growth(2 + layout.width) * unit_bytes) + page_bytes,
        count=2 * bucket_rows * KEY_BYTES,
        gather=shard_rows * layout.row_bytes + unit_bytes + (shard_rows + 2 * bucket_rows) * KEY_BYTES + _WRITE_BYTES,
        threads=threads,
        spare=spare_bytes(memory_limit),
    )


def page_bytes_of(infos: Sequence[FileInfo], num_columns: int) -> int:
    """What is open while a row group is read: for each column a reader, and a page no larger than it in the largest group."""
    rows = max((group for info in infos for group in info.groups), default=0)
    return num_columns * (min(8 * rows, _PAGE_BYTES) + _COLUMN_BYTES) if rows else 0


def row_bytes_of(num_columns: int) -> int:
    """Decoded bytes of a row, at eight for each value."""
    return 8 * num_columns


def _scatter_growth(num_columns: int) -> float:
    """Bytes that scatter takes for each decoded byte of a unit: three copies, and what places the rows."""
    return 3 + _ROUTED_BYTES / row_bytes_of(num_columns)


def unit_bytes_for(memory_limit: int | None, threads: int, num_columns: int, page_bytes: int = 0) -> int:
    """Decoded bytes of an input unit that leave room for scatter in each thread, between 1 and 64 MiB."""
    if memory_limit is None:
        return 64 * MiB
    room = (int(memory_limit * _SHARE) - BASE_BYTES - spare_bytes(memory_limit)) // threads - page_bytes
    return int(np.clip(room / _scatter_growth(num_columns), MiB, 64 * MiB))


def spare_bytes(memory_limit: int | None) -> int:
    """Freed bytes that a worker may keep: a sixteenth of its memory, between 16 and 128 MiB."""
    return 128 * MiB if memory_limit is None else int(np.clip(memory_limit // 16, 16 * MiB, 128 * MiB))


def largest_of(units: Sequence[Unit]) -> int:
    """Bytes of the largest unit, decoded."""
    return max((unit.nbytes for unit in units), default=0)


def check_budget(budget: Budget, memory_limit: int | None) -> None:
    """Refuse options that do not fit.

    Raises
    ------
    MemoryBudgetError
        With all the numbers and the options that change them.
    """
    if memory_limit is not None and budget.worker > memory_limit:
        parts = ", ".join(f"{name} {size / MiB:,.0f} MiB" for name, size in budget.as_dict().items() if name != "worker")
        raise MemoryBudgetError(
            f"A worker needs {budget.worker / MiB:,.0f} MiB ({(BASE_BYTES + budget.spare) / MiB:,.0f} MiB and {budget.threads} "
            f"threads at the largest of: {parts}), but it has {memory_limit / MiB:,.0f} MiB. Lower shard_bytes, give a worker "
            f"fewer threads or more memory, or write the source in smaller row groups; memory_limit={memory_limit}"
        )
