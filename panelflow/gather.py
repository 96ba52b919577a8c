"""Third pass: count the keys of each bucket, then collect each shard in order and write it whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from panelflow.errors import CorruptDatasetError
from panelflow.files import Folder
from panelflow.hashing import key_checksum
from panelflow.plan import Plan, Shard
from panelflow.scratch import Reader
from panelflow.shards import ArrayGrid, ShardReader, digest_rows, encode_shard
from panelflow.statistics import Moments

SHOWN_DUPLICATES = 10


@dataclass(frozen=True)
class BucketCount:
    """Final rows of a bucket and the duplicates in it.

    Attributes
    ----------
    shown
        Up to ten duplicate keys: date in nanoseconds, entity, number of rows.
    dates
        Date index -> final rows, for splits in date order only.
    """

    bucket: int
    rows: int
    duplicates: int
    checksum: int
    shown: list[tuple[int, Any, int]]
    dates: dict[int, int]


def count_bucket(bucket: int, plan: Plan, reader: Reader) -> BucketCount:
    """Sort the keys of a bucket, find equal neighbours, and count what stays."""
    split = int(plan.buckets.split[bucket])
    keys = np.concatenate(reader.keys(bucket, bucket + 1))
    codes, dates = keys[:, 0], keys[:, 1]
    hashes = plan.hashes(codes, dates)
    order = plan.sorted_order(split, codes, dates, hashes)
    repeated = _repeats(codes[order], dates[order])
    kept = order[~repeated]
    starts = np.flatnonzero(repeated & ~np.concatenate((repeated[1:], [False]))) if len(order) else np.empty(0, np.int64)
    shown = []
    for last in starts[:SHOWN_DUPLICATES]:
        row = order[last]
        size = int(np.sum((codes == codes[row]) & (dates == dates[row])))
        shown.append((int(plan.dates[dates[row]]), plan.names[codes[row]], size))
    by_date: dict[int, int] = {}
    if plan.orders[split] == "date":
        values, counts = np.unique(dates[kept], return_counts=True)
        by_date = dict(zip(values.tolist(), counts.tolist(), strict=True))
    return BucketCount(bucket, len(kept), int(repeated.sum()), key_checksum(hashes[order[repeated]]), shown, by_date)


def _repeats(codes: npt.NDArray[np.int32], dates: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Rows, in order, whose key is that of the row before."""
    repeated = np.zeros(len(codes), dtype=bool)
    repeated[1:] = (codes[1:] == codes[:-1]) & (dates[1:] == dates[:-1])
    return repeated


@dataclass(frozen=True)
class ShardSummary:
    """What a shard holds.

    Attributes
    ----------
    keys
        Position key of its first and last row, hexadecimal.
    digests, sizes
        SHA-256 of the decoded values and bytes on disk, for each array.
    moments
        Statistics of its features, for training splits.
    """

    split: int
    index: int
    rows: int
    checksum: int
    keys: tuple[str, str]
    digests: dict[str, str]
    sizes: dict[str, int]
    moments: dict[str, list[Any]] | None
    reused: bool = False


def gather_shard(
    shard: Shard, plan: Plan, reader: Reader, grids: Sequence[ArrayGrid], dataset: Folder, scratch: Folder, run: str
) -> ShardSummary:
    """Collect the rows of a shard in order and write its file of each array; a finished shard of the same run is kept."""
    summary = _read_done(shard, grids, dataset, scratch, run)
    if summary is not None:
        return summary
    segments = reader.keys(shard.first_bucket, shard.stop_bucket)
    keys = np.concatenate(segments)
    codes, dates = keys[:, 0], keys[:, 1]
    hashes = plan.hashes(codes, dates)
    chosen = _choose_rows(shard, plan, codes, dates, hashes)
    assert len(chosen) == shard.num_rows, (shard, len(chosen))
    arrays = _place_rows(shard, plan, reader, [len(segment) for segment in segments], chosen)
    arrays |= {"entity": codes[chosen], "date": plan.dates[dates[chosen]]}
    sizes = {}
    for grid in grids:
        name = grid.path.rsplit("/", 1)[-1]
        sizes[name] = dataset.write(grid.key(shard.index), encode_shard(grid, arrays[name]))
    positions = dates[chosen] if plan.orders[shard.split] == "date" else hashes[chosen]
    moments = Moments.of(arrays["features"]).as_lists() if plan.training[shard.split] else None
    summary = ShardSummary(
        split=shard.split,
        index=shard.index,
        rows=shard.num_rows,
        checksum=key_checksum(hashes[chosen]),
        keys=(f"{int(positions[0]):016x}", f"{int(positions[-1]):016x}"),
        digests={name: digest_rows(array) for name, array in arrays.items()},
        sizes=sizes,
        moments=moments,
    )
    scratch.write(_done_name(shard), [json.dumps({"run": run, "summary": asdict(summary)}).encode()])
    return summary


def _choose_rows(
    shard: Shard, plan: Plan, codes: npt.NDArray[np.int32], dates: npt.NDArray[np.int32], hashes: npt.NDArray[np.uint64]
) -> npt.NDArray[np.intp]:
    """Rows of the shard among those of its buckets, in order; of equal keys the first or the last of the source stays."""
    order = plan.sorted_order(shard.split, codes, dates, hashes)
    repeated = _repeats(codes[order], dates[order])
    if plan.rules.duplicates == "last":
        repeated = np.concatenate((repeated[1:], [False]))
    kept = order[~repeated]
    return kept[shard.skip : shard.skip + shard.num_rows]


def _place_rows(
    shard: Shard, plan: Plan, reader: Reader, lengths: Sequence[int], chosen: npt.NDArray[np.intp]
) -> dict[str, npt.NDArray[Any]]:
    """Features, targets and weight of the shard, filled one segment at a time.

    Rows move as opaque records, one copy of bytes for each array: half the time of moving them as rows of floats.
    """
    destination = np.full(sum(lengths), -1, dtype=np.int64)
    destination[chosen] = np.arange(len(chosen))
    layout, dtype = plan.layout, np.dtype(plan.layout.dtype)
    widths = {"features": layout.num_features, "targets": layout.num_targets, **({"weight": 1} if layout.weighted else {})}
    record = np.dtype([(name, f"V{width * dtype.itemsize}") for name, width in widths.items()])
    arrays = {name: np.empty(len(chosen), dtype=record[name]) for name in widths}
    start = 0
    for length, segment in zip(lengths, reader.blocks(shard.first_bucket, shard.stop_bucket), strict=True):
        target = destination[start : start + length]
        records, wanted = segment.reshape(-1).view(record), target >= 0
        if not wanted.all():
            target, records = target[wanted], records[wanted]
        for name, array in arrays.items():
            array[target] = records[name]
        start += length
    floats: dict[str, npt.NDArray[Any]] = {
        name: array.view(dtype).reshape(len(chosen), widths[name]) for name, array in arrays.items()
    }
    return floats | ({"weight": floats["weight"][:, 0]} if layout.weighted else {})


def _done_name(shard: Shard) -> str:
    return f"shards/{shard.split:03d}-{shard.index:08d}.json"


def _read_done(shard: Shard, grids: Sequence[ArrayGrid], dataset: Folder, scratch: Folder, run: str) -> ShardSummary | None:
    """Summary of a shard that an earlier attempt finished, if the note is whole and every byte is what it says."""
    try:
        done = json.loads(scratch.read(_done_name(shard)))
        if done["run"] != run:
            return None
        summary = ShardSummary(**done["summary"] | {"reused": True, "keys": tuple(done["summary"]["keys"])})
        for grid in grids:
            name = grid.path.rsplit("/", 1)[-1]
            if digest_rows(ShardReader(dataset, grid).read_shard(shard.index)) != summary.digests[name]:
                return None
    except (FileNotFoundError, json.JSONDecodeError, CorruptDatasetError):
        return None
    return summary
