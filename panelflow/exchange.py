"""The work of one task: scan a unit, scatter it, count a bucket, gather a shard. No Dask here; every function can run again.

Rows travel through files, nothing else does: a task returns counts, checksums and statistics.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from panelflow.columns import fill_floats, to_dates, to_entities
from panelflow.errors import PanelError
from panelflow.files import Folder
from panelflow.hashing import add_checksums, fold, hash_entities, key_checksum
from panelflow.panel import Columns, Piece, Unit, locator, read_piece
from panelflow.plan import Plan, Shard
from panelflow.scratch import Block, Keys, Reader, UnitSummary, read_summary, write_unit
from panelflow.shards import ArrayGrid, digest_rows, encode_shard
from panelflow.splits import OUTSIDE, PURGED
from panelflow.statistics import Moments

SHOWN_DUPLICATES = 10


# Scan: keys only -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scan:
    """Keys of some units: rows, distinct dates with their rows, distinct entities, checksum.

    Attributes
    ----------
    kinds, zones
        Kind of entity (``text``, ``int``) and zone of dates -> the first file that has it.
    """

    rows: int
    dates: npt.NDArray[np.int64]
    rows_per_date: npt.NDArray[np.int64]
    names: list[Any]
    kinds: dict[str, str]
    zones: dict[str | None, str]
    checksum: int


def scan_unit(unit: Unit, columns: Columns, seed: int, options: dict[str, Any]) -> Scan:
    """Read and check the keys of a unit; of CSV also that its numbers are numbers."""
    return merge_scans([_scan_piece(piece, columns, seed, options) for piece in unit.pieces])


def _scan_piece(piece: Piece, columns: Columns, seed: int, options: dict[str, Any]) -> Scan:
    checked = columns.floats if piece.file.format == "csv" else ()
    table = read_piece(piece, columns.keys, checked, options)
    locate = locator(piece, options)
    entities = to_entities(columns.entity, table[columns.entity], locate)
    dates = to_dates(columns.date, table[columns.date], locate)
    if table.num_rows == 0:
        return Scan(0, dates.values, dates.values, [], {}, {}, 0)
    distinct, counts = np.unique(dates.values, return_counts=True)
    hashes = fold(seed, hash_entities(entities.names)[entities.codes], dates.values)
    path = piece.file.shown
    return Scan(
        table.num_rows, distinct, counts, entities.names, {entities.kind: path}, {dates.zone: path}, key_checksum(hashes)
    )


def merge_scans(scans: Sequence[Scan]) -> Scan:
    """Join scans in any grouping.

    Raises
    ------
    PanelError
        Kinds of entities or zones of dates differ between files.
    """
    kinds = {kind: path for scan in reversed(scans) for kind, path in scan.kinds.items()}
    zones = {zone: path for scan in reversed(scans) for zone, path in scan.zones.items()}
    if len(kinds) > 1:
        raise PanelError(
            f"The entity is text in {kinds['text']} and an integer in {kinds['int']}; 7 and '007' would be two "
            f"instruments or one. Convert one of them."
        )
    if len(zones) > 1:
        (zone, path), (other, other_path) = sorted(zones.items(), key=lambda item: str(item[0]))[:2]
        raise PanelError(
            f"Dates have {_zone(zone)} in {path} and {_zone(other)} in {other_path}; convert all to one zone or to none."
        )
    dates, inverse = np.unique(np.concatenate([scan.dates for scan in scans]), return_inverse=True)
    counts = np.concatenate([scan.rows_per_date for scan in scans])
    return Scan(
        rows=sum(scan.rows for scan in scans),
        dates=dates,
        rows_per_date=np.bincount(inverse, weights=counts, minlength=len(dates)).astype(np.int64),
        names=sorted({name for scan in scans for name in scan.names}),
        kinds=kinds,
        zones=zones,
        checksum=add_checksums(scan.checksum for scan in scans),
    )


def _zone(zone: str | None) -> str:
    return "no time zone" if zone is None else f"time zone {zone}"


# Scatter: one unit -> one scratch file -------------------------------------------------------------------------------------


@dataclass(eq=False)
class Routed:
    """Rows of a unit that will be written, and the account of the others."""

    keys: list[Keys] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    buckets: list[npt.NDArray[np.int64]] = field(default_factory=list)
    summaries: list[UnitSummary] = field(default_factory=list)


def scatter_unit(unit: Unit, plan: Plan, scratch: Folder, run: str, options: dict[str, Any]) -> UnitSummary:
    """Read a unit, convert and place its rows, and write its scratch file; a finished file of the same run is kept."""
    summary = read_summary(scratch, run, unit.index)
    if summary is not None:
        return summary
    keys, block, buckets, summary = route_unit(unit, plan, options)
    num_buckets = len(plan.buckets.split)
    write_unit(
        scratch, run, unit.index, buckets=buckets, num_buckets=num_buckets, keys=keys, block=block, summary=summary
    )
    return summary


def route_unit(
    unit: Unit, plan: Plan, options: dict[str, Any]
) -> tuple[Keys, Block, npt.NDArray[np.int64], UnitSummary]:
    """Keys, row block and bucket of each row of a unit that will be written, in source order, and its summary.

    Raises
    ------
    PanelError
        A value that cannot be written: infinite, too large for the dtype, a bad weight.
    """
    routed = Routed()
    for piece in unit.pieces:
        _route_piece(piece, plan, options, routed)
    block = np.concatenate(routed.blocks)
    return (
        np.concatenate(routed.keys),
        block,
        np.concatenate(routed.buckets),
        add_summaries(routed.summaries, block.nbytes),
    )


def _route_piece(piece: Piece, plan: Plan, options: dict[str, Any], routed: Routed) -> None:
    columns, locate = plan.columns, locator(piece, options)
    table = read_piece(piece, columns.keys, columns.floats, options)
    entities = to_entities(columns.entity, table[columns.entity], locate)
    dates = to_dates(columns.date, table[columns.date], locate)
    codes = plan.vocabulary.get_indexer(entities.names).astype(np.int32)[entities.codes]
    date_index = np.searchsorted(plan.dates, dates.values).astype(np.int32)
    if (codes < 0).any() or (plan.dates[np.minimum(date_index, len(plan.dates) - 1)] != dates.values).any():
        raise PanelError(f"{piece.file.shown} changed while it was being prepared; run again once it is still.")
    block = np.empty((table.num_rows, plan.layout.width), dtype=plan.layout.dtype)
    for position, name in enumerate(columns.floats):
        fill_floats(table[name], block[:, position])
    hashes = plan.hashes(codes, date_index)
    split = plan.assignment.labels[date_index]
    declared = plan.assignment.declared[date_index]
    missing = _missing_targets(plan, block, split)
    if plan.rules.missing_target == "error" and missing.any():
        row = int(missing.argmax())
        raise PanelError(
            f"{locate(row)}: a target of {list(columns.targets)} is missing in {int(missing.sum()):,} rows of the file "
            f"that belong to a split; fill it, or pass missing_target='drop' or 'keep'."
        )
    written = (split >= 0) & ~missing
    made_missing = _check_values(plan, table, block, written, locate)
    reasons = {
        "outside_splits": split == OUTSIDE,
        "purged": split == PURGED,
        "missing_target": missing,
        "written": written,
    }
    count = len(plan.assignment.names)
    routed.summaries.append(
        UnitSummary(
            rows=table.num_rows,
            outside=int(reasons["outside_splits"].sum()),
            purged=np.bincount(declared[split == PURGED], minlength=count).tolist(),
            missing_target=np.bincount(split[missing], minlength=count).tolist(),
            written=np.bincount(split[written], minlength=count).tolist(),
            checksums={reason: key_checksum(hashes[rows]) for reason, rows in reasons.items()},
            made_missing=made_missing,
        )
    )
    routed.keys.append(np.stack([codes[written], date_index[written]], axis=1))
    routed.blocks.append(block[written])
    routed.buckets.append(plan.buckets.of(date_index[written], hashes[written]))


def _missing_targets(plan: Plan, block: Block, split: npt.NDArray[np.int16]) -> npt.NDArray[np.bool_]:
    """Rows of a split that are to be dropped, or refused, for want of a target."""
    first = plan.layout.num_features
    missing: npt.NDArray[np.bool_] = np.isnan(block[:, first : first + plan.layout.num_targets]).any(axis=1) & (split >= 0)
    if plan.rules.missing_target == "keep":
        missing &= plan.training[split]
    return missing


def _check_values(
    plan: Plan, table: pa.Table, block: Block, written: npt.NDArray[np.bool_], locate: Any
) -> dict[str, int]:
    """Refuse what no training run could bear; returns infinite features turned to NaN, by name."""
    made_missing: dict[str, int] = {}
    infinite = np.isinf(block).any(axis=0)
    for position in np.flatnonzero(infinite):
        rows = np.isinf(block[:, position]) & written
        if not rows.any():
            continue
        name, row = plan.columns.floats[position], int(rows.argmax())
        value = table[name][row].as_py()
        if np.isfinite(float(value)):
            raise PanelError(
                f"{locate(row)}: column {name!r} exceeds the range of {plan.layout.dtype}; scale it or pass a wider dtype: {value}"
            )
        if position < plan.layout.num_features and plan.rules.infinite == "missing":
            block[rows, position] = np.nan
            made_missing[name] = int(rows.sum())
            continue
        remedy = "correct it, or pass infinite='missing'" if position < plan.layout.num_features else "correct or drop the row"
        raise PanelError(f"{locate(row)}: column {name!r} is infinite in {int(rows.sum()):,} rows of the file; {remedy}: {value}")
    if plan.layout.weighted:
        weight = block[:, -1]
        bad = ~(weight >= 0) & written
        if bad.any():
            row = int(bad.argmax())
            value = table[plan.columns.floats[-1]][row].as_py()
            raise PanelError(
                f"{locate(row)}: weight {plan.columns.weight!r} is missing or negative; weights are finite and >= 0: {value}"
            )
    return made_missing


def add_summaries(summaries: Sequence[UnitSummary], nbytes: int = 0) -> UnitSummary:
    """Sum of summaries, ``nbytes`` beside those they hold."""

    def total(lists: list[list[int]]) -> list[int]:
        return [sum(column) for column in zip(*lists, strict=True)]

    return UnitSummary(
        rows=sum(summary.rows for summary in summaries),
        outside=sum(summary.outside for summary in summaries),
        purged=total([summary.purged for summary in summaries]),
        missing_target=total([summary.missing_target for summary in summaries]),
        written=total([summary.written for summary in summaries]),
        checksums={
            reason: add_checksums(summary.checksums[reason] for summary in summaries) for reason in summaries[0].checksums
        },
        made_missing={
            name: sum(summary.made_missing.get(name, 0) for summary in summaries)
            for name in sorted({name for summary in summaries for name in summary.made_missing})
        },
        nbytes=nbytes + sum(summary.nbytes for summary in summaries),
    )



# Count: the keys of one bucket ---------------------------------------------------------------------------------------------


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
    return BucketCount(
        bucket, len(kept), int(repeated.sum()), key_checksum(hashes[order[repeated]]), shown, by_date
    )


def _repeats(codes: npt.NDArray[np.int32], dates: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Rows, in order, whose key is that of the row before."""
    repeated = np.zeros(len(codes), dtype=bool)
    repeated[1:] = (codes[1:] == codes[:-1]) & (dates[1:] == dates[:-1])
    return repeated


# Gather: one shard ---------------------------------------------------------------------------------------------------------


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
    block = _place_rows(shard, plan, reader, [len(segment) for segment in segments], chosen)
    arrays = _split_arrays(plan, block, codes[chosen], dates[chosen])
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
) -> Block:
    """Row block of the shard, filled one segment at a time."""
    destination = np.full(sum(lengths), -1, dtype=np.int64)
    destination[chosen] = np.arange(len(chosen))
    block = np.empty((len(chosen), plan.layout.width), dtype=plan.layout.dtype)
    start = 0
    for length, segment in zip(lengths, reader.blocks(shard.first_bucket, shard.stop_bucket), strict=True):
        target = destination[start : start + length]
        wanted = target >= 0
        block[target[wanted]] = segment[wanted]
        start += length
    return block


def _split_arrays(
    plan: Plan, block: Block, codes: npt.NDArray[np.int32], dates: npt.NDArray[np.int32]
) -> dict[str, npt.NDArray[Any]]:
    targets_at = plan.layout.num_features
    weight_at = targets_at + plan.layout.num_targets
    arrays = {"features": block[:, :targets_at], "targets": block[:, targets_at:weight_at]}
    if plan.layout.weighted:
        arrays["weight"] = block[:, weight_at]
    return arrays | {"entity": codes, "date": plan.dates[dates]}


def _done_name(shard: Shard) -> str:
    return f"shards/{shard.split:03d}-{shard.index:08d}.json"


def _read_done(
    shard: Shard, grids: Sequence[ArrayGrid], dataset: Folder, scratch: Folder, run: str
) -> ShardSummary | None:
    if not scratch.exists(_done_name(shard)):
        return None
    done = json.loads(scratch.read(_done_name(shard)))
    if done["run"] != run:
        return None
    summary = ShardSummary(**done["summary"] | {"reused": True, "keys": tuple(done["summary"]["keys"])})
    whole = all(dataset.size(grid.key(shard.index)) == summary.sizes[grid.path.rsplit("/", 1)[-1]] for grid in grids)
    return summary if whole else None
