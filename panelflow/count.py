"""Final rows of each bucket, from which the rows of every shard follow.

Where a repeated key is an error, they are the rows that scatter wrote; gather, which sorts all keys anyway, then meets the
repeated ones. Where one of each key is kept, a bucket's keys are sorted and counted first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from panelflow.hashing import key_checksum
from panelflow.plan import Plan
from panelflow.scratch import Reader
from panelflow.sorting import Order, sort_rows

SHOWN_DUPLICATES = 10


@dataclass(frozen=True)
class BucketCount:
    """Final rows of a bucket and the duplicates in it.

    Attributes
    ----------
    checksum
        Key checksum of the duplicates.
    shown
        Up to ten duplicate keys: date in nanoseconds, entity, number of rows.
    """

    rows: int
    duplicates: int = 0
    checksum: int = 0
    shown: tuple[tuple[int, Any, int], ...] = ()


def count_written(first: int, stop: int, reader: Reader) -> list[BucketCount]:
    """Counts of buckets ``[first, stop)`` as they were written, reading no row."""
    return [BucketCount(int(rows)) for rows in reader.rows(first, stop)]


def count_distinct(bucket: int, plan: Plan, reader: Reader) -> BucketCount:
    """Sort the keys of a bucket, find equal neighbours, and count what stays."""
    keys = np.concatenate(reader.keys(bucket, bucket + 1))
    codes, dates = keys[:, 0], keys[:, 1]
    hashes = plan.hashes(codes, dates)
    order, repeated = sort_keys(plan, int(plan.buckets.split[bucket]), codes, dates, hashes)
    starts = np.flatnonzero(repeated & ~np.concatenate((repeated[1:], [False]))) if len(order) else np.empty(0, np.int64)
    shown = []
    for last in starts[:SHOWN_DUPLICATES]:
        row = order[last]
        size = int(np.sum((codes == codes[row]) & (dates == dates[row])))
        shown.append((int(plan.dates[dates[row]]), plan.names[codes[row]], size))
    duplicates = int(repeated.sum())
    return BucketCount(len(order) - duplicates, duplicates, key_checksum(hashes[order[repeated]]), tuple(shown))


def sort_keys(
    plan: Plan, split: int, codes: npt.NDArray[np.int32], dates: npt.NDArray[np.int32], hashes: npt.NDArray[np.uint64]
) -> tuple[Order, npt.NDArray[np.bool_]]:
    """Order of the rows of a split, and which of them, in that order, repeat the key of the row before."""
    order = sort_rows(codes, dates, hashes, by_date=plan.orders[split] == "date")
    repeated = np.zeros(len(order), dtype=bool)
    ordered = hashes[order]
    repeated[1:] = ordered[1:] == ordered[:-1]
    if repeated.any():  # equal hashes are nearly always equal keys
        codes, dates = codes[order], dates[order]
        repeated[1:] &= (codes[1:] == codes[:-1]) & (dates[1:] == dates[:-1])
    return order, repeated
