"""Pure arithmetic of a run: rows per chunk and shard, buckets, row ranges of shards, and the memory that all of it takes.

A bucket is a contiguous range of a split's order that one count task sorts. In hash order all dates of a split share a run of
buckets, cut by the hash; in date order each date has its own run, and small neighbouring dates share one. So one table, date ->
(first bucket, number of parts), serves both orders, and the hash picks the part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from panelflow.errors import OptionError
from panelflow.hashing import Words, fold, hash_entities
from panelflow.source import Columns
from panelflow.splits import Assignment

MiB = 2**20
CHUNK_BYTES = 2 * MiB
_BUCKETS_PER_SHARD = 4
_LEAST_ROW_BYTES = 32
"""What a row counts at least when shards are sized: keys of a narrow panel are sorted too, and take more than its features."""


@dataclass(frozen=True)
class Layout:
    """Rows and bytes of chunks and shards, the same for every array of every split.

    Attributes
    ----------
    dtype
        Type of features, targets and weight.
    chunk_rows
        Rows of an inner chunk, a power of two.
    shard_rows
        Rows of a shard, a multiple of ``chunk_rows``.
    """

    num_features: int
    num_targets: int
    weighted: bool
    dtype: str
    chunk_rows: int
    shard_rows: int

    @property
    def width(self) -> int:
        """Columns of a row block: features, targets, weight."""
        return self.num_features + self.num_targets + int(self.weighted)

    @property
    def row_bytes(self) -> int:
        return self.width * np.dtype(self.dtype).itemsize + 12

    @property
    def bucket_rows(self) -> int:
        return max(self.shard_rows // _BUCKETS_PER_SHARD, 1)


def make_layout(columns: Columns, dtype: str, chunk_rows: int | None, shard_bytes: int) -> Layout:
    """Choose chunk and shard rows from the width of the panel alone.

    Raises
    ------
    OptionError
        A chunk that is no power of two or does not fit into a shard.
    """
    row_bytes = len(columns.features) * np.dtype(dtype).itemsize
    if chunk_rows is None:
        chunk_rows = _power_of_two(min(CHUNK_BYTES, shard_bytes) // row_bytes)
    elif not isinstance(chunk_rows, int | np.integer) or chunk_rows < 1 or chunk_rows & (chunk_rows - 1):
        raise OptionError(f"chunk_rows is a power of two; chunk_rows={chunk_rows}")
    widest = max(row_bytes, len(columns.targets) * np.dtype(dtype).itemsize, _LEAST_ROW_BYTES)
    chunks = shard_bytes // (widest * chunk_rows) or int(shard_bytes >= row_bytes * chunk_rows)
    if chunks < 1:
        raise OptionError(
            f"A chunk of {chunk_rows:,} rows takes {chunk_rows * row_bytes:,} bytes and does not fit into a shard; "
            f"shard_bytes={shard_bytes}"
        )
    weighted = columns.weight is not None
    return Layout(len(columns.features), len(columns.targets), weighted, dtype, chunk_rows, chunk_rows * chunks)


def _power_of_two(limit: int) -> int:
    return int(2 ** max(int(limit).bit_length() - 1, 0))


@dataclass(frozen=True, eq=False)
class Buckets:
    """Where each (date, hash) goes.

    Attributes
    ----------
    first, parts
        int32 [num_dates]: first bucket of a date and the number of hash ranges it is cut into.
    split
        int16 [num_buckets]: split of each bucket; buckets of one split are neighbours, in the order of its rows.
    """

    first: npt.NDArray[np.int32]
    parts: npt.NDArray[np.int32]
    split: npt.NDArray[np.int16]

    def of(self, date_index: npt.NDArray[Any], hashes: Words) -> npt.NDArray[np.int64]:
        """Bucket of each row, int64 [rows]: the top half of the hash scales to the parts of the date."""
        parts = self.parts[date_index].astype(np.uint64)
        part = ((hashes >> np.uint64(32)) * parts) >> np.uint64(32)
        buckets: npt.NDArray[np.int64] = self.first[date_index].astype(np.int64) + part.astype(np.int64)
        return buckets


def make_buckets(
    assignment: Assignment, rows_per_date: npt.NDArray[np.int64], orders: Sequence[str], bucket_rows: int
) -> Buckets:
    """Lay out buckets of about ``bucket_rows`` rows; ``orders`` holds ``"hash"`` or ``"date"`` for each split."""
    first = np.zeros(len(rows_per_date), dtype=np.int32)
    parts = np.ones(len(rows_per_date), dtype=np.int32)
    split: list[int] = []
    for index, order in enumerate(orders):
        members = np.flatnonzero(assignment.labels == index)
        if order == "hash":
            count = max(1, -(-int(rows_per_date[members].sum()) // bucket_rows))
            first[members], parts[members] = len(split), count
            split += [index] * count
            continue
        fill = bucket_rows
        for date in members:
            rows = int(rows_per_date[date])
            if fill + rows > bucket_rows:
                parts[date] = max(1, -(-rows // bucket_rows))
                first[date] = len(split)
                split += [index] * int(parts[date])
                fill = bucket_rows if parts[date] > 1 else rows
            else:
                first[date] = len(split) - 1
                fill += rows
    return Buckets(first, parts, np.array(split, dtype=np.int16))


SEGMENT_BYTES = 256 * 1024
"""What a task reads at once of a scratch file, at least, where there are many files."""
FEW_SEGMENTS = 4096
"""Segments that cost nothing, however small."""


def make_groups(scratch_bytes: int, shard_bytes: int, num_units: int, num_buckets: int) -> npt.NDArray[np.int64]:
    """Bounds of groups of neighbouring buckets, int64 [groups + 1].

    One group: every shard is read from the files of all units, at once. More: where its segments would be too small for that,
    units are first sorted by group only, and each group then anew; of about the square root of the shards each.
    """
    shards = max(1, -(-scratch_bytes // shard_bytes))
    if num_units * shards <= FEW_SEGMENTS or scratch_bytes // (num_units * shards) >= SEGMENT_BYTES:
        return np.array([0, num_buckets], dtype=np.int64)
    most = min(num_buckets, max(scratch_bytes // num_units // SEGMENT_BYTES, 2))
    count = min(math.isqrt(shards - 1) + 1, most)
    return np.linspace(0, num_buckets, count + 1).astype(np.int64)


@dataclass(frozen=True)
class Rules:
    """What happens to rows that cannot be written as they are; see :func:`panelflow.prepare`."""

    duplicates: str
    missing_target: str
    infinite: str


@dataclass(frozen=True, eq=False)
class Plan:
    """All that a task needs to know, sent to each worker once.

    Attributes
    ----------
    names
        Distinct entities, sorted: object (text) or int64 [num_entities].
    dates
        Distinct observed dates, ascending, int64 nanoseconds (UTC).
    orders
        ``"hash"`` or ``"date"`` for each split.
    groups
        Bounds of groups of buckets; see :func:`make_groups`.
    rows_expected
        Rows on the dates of all splits, before missing targets and duplicates are gone.
    """

    columns: Columns
    layout: Layout
    rules: Rules
    seed: int
    names: npt.NDArray[Any]
    kind: str
    dates: npt.NDArray[np.int64]
    zone: str | None
    assignment: Assignment
    orders: tuple[str, ...]
    buckets: Buckets
    groups: npt.NDArray[np.int64]
    rows_expected: int
    compression: str | None

    @cached_property
    def vocabulary(self) -> Any:
        """A pandas index that turns names into codes, its table filled: pandas 2 fills it at the first use, on any thread."""
        index = pd.Index(self.names, dtype=self.names.dtype)
        index.get_indexer(index[:1])
        return index

    @cached_property
    def entity_hashes(self) -> Words:
        return hash_entities(self.names.tolist())

    @cached_property
    def training(self) -> npt.NDArray[np.bool_]:
        """Whether each split is for training, bool [num_splits]."""
        return np.array([name.startswith("train") for name in self.assignment.names])

    def hashes(self, codes: npt.NDArray[Any], date_index: npt.NDArray[Any]) -> Words:
        """Hash of (seed, entity, date) of each row, uint64 [rows]."""
        return fold(self.seed, self.entity_hashes[codes], self.dates[date_index])


@dataclass(frozen=True)
class Shard:
    """Rows ``[start, stop)`` of a split, found in buckets ``[first_bucket, stop_bucket)`` after ``skip`` rows of them."""

    split: int
    index: int
    start: int
    stop: int
    first_bucket: int
    stop_bucket: int
    skip: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


def make_shards(buckets: Buckets, rows: npt.NDArray[np.int64], num_splits: int, shard_rows: int) -> list[Shard]:
    """Cut every split into shards of exactly ``shard_rows`` rows, but for its last.

    Parameters
    ----------
    rows
        int64 [num_buckets]: final rows of each bucket, duplicates gone.
    """
    shards = []
    for split in range(num_splits):
        members = np.flatnonzero(buckets.split == split)
        bounds = np.concatenate(([0], np.cumsum(rows[members])))
        total = int(bounds[-1])
        for index, start in enumerate(range(0, total, shard_rows)):
            stop = min(start + shard_rows, total)
            low = int(np.searchsorted(bounds, start, side="right")) - 1
            high = int(np.searchsorted(bounds, stop, side="left"))
            shards.append(
                Shard(split, index, start, stop, int(members[low]), int(members[high - 1]) + 1, start - int(bounds[low]))
            )
    return shards
