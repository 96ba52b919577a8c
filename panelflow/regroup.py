"""Between scatter and gather, where there are too many units and shards to read each shard from every unit.

Scatter's files are then read by group of buckets: a slice of neighbouring units becomes one file of the group, sorted by bucket,
and a shard is gathered from the files of its group. Each row is written once more; segments stay long enough to be read fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from panelflow.allocator import reused_array
from panelflow.files import Folder
from panelflow.plan import Layout, Plan
from panelflow.scratch import UNITS, Block, Keys, ScratchReader, UnitSummary, as_records, bucket_order, read_summary, write_rows


@dataclass(frozen=True)
class Slice:
    """Units ``[first, stop)`` of a group, which become its file number ``index``."""

    group: int
    index: int
    first: int
    stop: int


def make_slices(summaries: Sequence[UnitSummary], row_bytes: int, slice_bytes: int) -> list[Slice]:
    """Cut the units of every group into slices of at most ``slice_bytes``, of one unit at least."""
    most = max(slice_bytes // row_bytes, 1)
    slices: list[Slice] = []
    for group in range(len(summaries[0].groups)):
        first = rows = index = 0
        for unit, summary in enumerate(summaries):
            if unit > first and rows + summary.groups[group] > most:
                slices.append(Slice(group, index, first, unit))
                first, rows, index = unit, 0, index + 1
            rows += summary.groups[group]
        slices.append(Slice(group, index, first, len(summaries)))
    return slices


def regroup_slice(part: Slice, plan: Plan, scratch: Folder, run: str) -> UnitSummary:
    """Write one file of a group from those of its slice of units; a finished file of the same run is kept."""
    first, stop = (int(bound) for bound in plan.groups[part.group : part.group + 2])
    place, layout = _place_of(part.group), plan.layout
    summary = read_summary(scratch, run, place, part.index, stop - first, layout)
    if summary is not None:
        return summary
    reader = ScratchReader(scratch, UNITS, range(part.first, part.stop), len(plan.buckets.split), layout)
    segments = reader.keys(first, stop)
    keys = np.concatenate(segments)
    block = reused_array("segment", (len(keys), layout.width), layout.dtype)
    start = 0
    for number, segment in enumerate(segments):
        reader.read_segment(number, first, stop, block[start : start + len(segment)])
        start += len(segment)
    buckets = plan.buckets.of(keys[:, 1], plan.hashes(keys[:, 0], keys[:, 1])) - first
    order = bucket_order(buckets, stop - first)
    rows = reused_array("rows", block.shape, layout.dtype)
    if len(order):
        np.take(as_records(block), order, out=as_records(rows), mode="clip")
    summary = UnitSummary(len(keys), 0, [], [], [], {}, nbytes=len(keys) * layout.row_bytes)
    counts = np.bincount(buckets, minlength=stop - first)
    write_rows(scratch, run, place, part.index, counts, keys[order], rows, summary)
    return summary


def _place_of(group: int) -> str:
    return f"groups/{group:05d}"


class GroupedReader:
    """Reads buckets from the files of their groups.

    Parameters
    ----------
    files
        Number of files of each group.
    bounds
        Bounds of the groups, as buckets.
    """

    def __init__(self, scratch: Folder, files: Sequence[int], bounds: npt.NDArray[np.int64], layout: Layout) -> None:
        self._readers = [
            ScratchReader(scratch, _place_of(group), range(count), int(bounds[group + 1] - bounds[group]), layout)
            for group, count in enumerate(files)
        ]
        self._bounds = bounds

    def rows(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        return np.concatenate([reader.rows(low, high) for reader, low, high in self._parts(first, stop)])

    def keys(self, first: int, stop: int) -> list[Keys]:
        return [keys for reader, low, high in self._parts(first, stop) for keys in reader.keys(low, high)]

    def read_segment(self, number: int, first: int, stop: int, out: Block) -> None:
        for reader, low, high in self._parts(first, stop):
            if number < len(reader.units):
                reader.read_segment(number, low, high, out)
                return
            number -= len(reader.units)

    def _parts(self, first: int, stop: int) -> Iterator[tuple[ScratchReader, int, int]]:
        """Readers of the groups that hold buckets ``[first, stop)``, each with its own share, counted within the group."""
        for reader, low, high in zip(self._readers, self._bounds[:-1].tolist(), self._bounds[1:].tolist(), strict=True):
            if low < stop and first < high:
                yield reader, max(first, low) - low, min(stop, high) - low
