"""Fourth pass: collect the rows of each shard, put them in order, and write it whole."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from panelflow.allocator import reused_array
from panelflow.count import sort_keys
from panelflow.errors import CorruptDatasetError, DuplicateKeysError
from panelflow.files import Folder
from panelflow.hashing import key_checksum
from panelflow.plan import Layout, Plan, Shard
from panelflow.scratch import Block, Keys, Reader, as_records
from panelflow.shards import ArrayGrid, RowDigest, ShardReader, digest_rows, encode_shard
from panelflow.statistics import Moments

_ROWS_PER_BLOCK = 16384


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
    dates
        (Date index, rows) of each of its dates, for splits in date order.
    """

    split: int
    index: int
    rows: int
    checksum: int
    keys: tuple[str, str]
    digests: dict[str, str]
    sizes: dict[str, int]
    moments: dict[str, list[Any]] | None
    dates: list[list[int]]
    reused: bool = False


def gather_shard(
    shard: Shard, plan: Plan, reader: Reader, grids: Sequence[ArrayGrid], dataset: Folder, scratch: Folder, run: str
) -> ShardSummary:
    """Collect the rows of a shard in order and write its file of each array; a finished shard of the same run is kept.

    Raises
    ------
    DuplicateKeysError
        Two rows have one key and the rules forbid it.
    """
    summary = _read_done(shard, grids, dataset, scratch, run)
    if summary is not None:
        return summary
    segments = reader.keys(shard.first_bucket, shard.stop_bucket)
    keys = np.concatenate(segments)
    hashes = plan.hashes(keys[:, 0], keys[:, 1])
    chosen = _choose_rows(shard, plan, keys, hashes)
    assert len(chosen) == shard.num_rows, (shard, len(chosen))
    codes, dates = keys[:, 0][chosen], keys[:, 1][chosen]
    hashes = hashes[chosen]
    block, index = _collect_rows(shard, plan, reader, [len(segment) for segment in segments], chosen)
    writer = _Writer(grids, shard.index, dataset)
    writer.write("entity", [codes])
    writer.write("date", [plan.dates[dates]])
    for name, blocks in _arrays_of(plan.layout, block, index):
        writer.write(name, blocks, with_moments=name == "features" and bool(plan.training[shard.split]))
    dated = plan.orders[shard.split] == "date"
    positions = dates if dated else hashes
    summary = ShardSummary(
        split=shard.split,
        index=shard.index,
        rows=shard.num_rows,
        checksum=key_checksum(hashes),
        keys=(f"{int(positions[0]):016x}", f"{int(positions[-1]):016x}"),
        digests=writer.digests,
        sizes=writer.sizes,
        moments=writer.moments.as_lists() if writer.moments else None,
        dates=np.stack(np.unique(dates, return_counts=True), axis=1).tolist() if dated else [],
    )
    scratch.write(_done_name(shard), [json.dumps({"run": run, "summary": asdict(summary)}).encode()])
    return summary


def _choose_rows(shard: Shard, plan: Plan, keys: Keys, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    """Rows of the shard among those of its buckets, in order; of equal keys the first or the last of the source stays."""
    order, repeated = sort_keys(plan, shard.split, keys[:, 0], keys[:, 1], hashes)
    if plan.rules.duplicates == "error" and repeated.any():
        raise DuplicateKeysError("rows repeat a key")  # the driver then counts them all, and says so in full
    if plan.rules.duplicates == "last":
        repeated = np.concatenate((repeated[1:], [False]))
    kept = order[~repeated]
    return kept[shard.skip : shard.skip + shard.num_rows]


def _collect_rows(
    shard: Shard, plan: Plan, reader: Reader, lengths: Sequence[int], chosen: npt.NDArray[np.intp]
) -> tuple[Block, npt.NDArray[np.int64]]:
    """The rows of the shard in the order they come in, and the position among them of each row of the shard."""
    wanted = np.zeros(sum(lengths), dtype=bool)
    wanted[chosen] = True
    layout, buckets = plan.layout, (shard.first_bucket, shard.stop_bucket)
    block = reused_array("rows", (len(chosen), layout.width), layout.dtype)
    start = filled = 0
    for number, length in enumerate(lengths):
        part = wanted[start : start + length]
        count = int(part.sum())
        if count == length:
            reader.read_segment(number, *buckets, block[filled : filled + count])
        elif count:
            segment = reused_array("segment", (length, layout.width), layout.dtype)
            reader.read_segment(number, *buckets, segment)
            as_records(block)[filled : filled + count] = as_records(segment)[part]
        start, filled = start + length, filled + count
    return block, (np.cumsum(wanted) - 1)[chosen]


def _arrays_of(layout: Layout, block: Block, index: npt.NDArray[np.int64]) -> Iterator[tuple[str, Iterator[npt.NDArray[Any]]]]:
    """Features, targets and weight of the rows ``block[index]``, each array in blocks that stay in the processor's cache.

    Rows move as opaque records, one copy of bytes for each.
    """
    widths = {"features": layout.num_features, "targets": layout.num_targets, **({"weight": 1} if layout.weighted else {})}
    records = block.reshape(-1).view([(name, f"V{width * block.dtype.itemsize}") for name, width in widths.items()])
    step = layout.chunk_rows * max(1, _ROWS_PER_BLOCK // layout.chunk_rows)

    def blocks(name: str, shape: tuple[int, ...]) -> Iterator[npt.NDArray[Any]]:
        for start in range(0, len(index), step):
            yield records[name][index[start : start + step]].view(block.dtype).reshape(shape)

    for name, width in widths.items():
        yield name, blocks(name, (-1,) if name == "weight" else (-1, width))


class _Writer:
    """Writes the arrays of a shard and notes size, digest and moments of what passes."""

    def __init__(self, grids: Sequence[ArrayGrid], shard: int, dataset: Folder) -> None:
        self._grids = {grid.path.rsplit("/", 1)[-1]: grid for grid in grids}
        self._shard, self._dataset = shard, dataset
        self.sizes: dict[str, int] = {}
        self.digests: dict[str, str] = {}
        self.moments: Moments | None = None

    def write(self, name: str, blocks: Iterable[npt.NDArray[Any]], *, with_moments: bool = False) -> None:
        grid, digest = self._grids[name], RowDigest()

        def watched() -> Iterator[npt.NDArray[Any]]:
            for block in blocks:
                digest.update(block)
                if with_moments:
                    moments = Moments.of(block)
                    self.moments = moments if self.moments is None else Moments.merge([self.moments, moments])
                yield block

        self.sizes[name] = self._dataset.write(grid.key(self._shard), encode_shard(grid, watched()))
        self.digests[name] = digest.hexdigest()


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
