"""One scratch file per input unit: its rows grouped by bucket, so that any run of buckets is one contiguous range.

::

    magic, run            8 + 32 bytes
    offsets               int64 [num_buckets + 1]    first row of each bucket
    keys                  int32 [rows, 2]            entity code, date index
    rows                  dtype [rows, width]        features, targets, weight, row-major
    summary               JSON, then its length as 8 bytes

All numbers are little-endian. The summary stands in the file so that a run that continues finds it without reading rows.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from panelflow.allocator import reused_array
from panelflow.files import Folder
from panelflow.plan import Layout

_MAGIC = b"pfunit01"
_HEAD = 40
_TILE_ROWS = 4096

Keys = npt.NDArray[np.int32]
"""int32 [rows, 2]: entity code and date index."""
Block = npt.NDArray[Any]
"""float [rows, width]: features, targets, weight."""


@dataclass(frozen=True)
class UnitSummary:
    """Where the rows of a unit went; lists have one entry per split.

    Attributes
    ----------
    checksums
        Order-independent key checksum of each reason and of the written rows.
    made_missing
        Infinite values turned to NaN, for each feature.
    groups
        Written rows of each group of buckets.
    """

    rows: int
    outside: int
    purged: list[int]
    missing_target: list[int]
    written: list[int]
    checksums: dict[str, int]
    made_missing: dict[str, int] = field(default_factory=dict)
    groups: list[int] = field(default_factory=list)
    nbytes: int = 0
    reused: bool = False


class Reader(Protocol):
    """Rows of buckets ``[first, stop)``, in segments that stand in source order.

    ``rows`` counts them, int64 [stop - first], without reading any; ``keys`` lists the keys of each segment, and
    ``read_segment`` fills ``out`` with the rows of one.
    """

    def rows(self, first: int, stop: int) -> npt.NDArray[np.int64]: ...

    def keys(self, first: int, stop: int) -> list[Keys]: ...

    def read_segment(self, number: int, first: int, stop: int, out: Block) -> None: ...


UNITS = "units"
"""Where in scratch the files of units lie."""


def _name(place: str, unit: int) -> str:
    return f"{place}/{unit:08d}.rows"


@dataclass(frozen=True, eq=False)
class Routed:
    """Rows of a unit that will be written, in source order.

    Attributes
    ----------
    columns
        Features, targets and weight of all rows of the unit, each [rows].
    rows
        int64 [written]: which of them are written.
    keys
        int32 [written, 2]: entity code and date index.
    buckets
        int64 [written].
    """

    columns: list[npt.NDArray[Any]]
    rows: npt.NDArray[np.int64]
    keys: Keys
    buckets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)


def write_unit(
    folder: Folder, run: str, unit: int, routed: Routed, *, num_buckets: int, layout: Layout, summary: UnitSummary
) -> None:
    """Group the rows of a unit by bucket, stable, and write its file whole."""
    order = bucket_order(routed.buckets, num_buckets)
    rows = _group_rows(routed, order, layout)
    counts = np.bincount(routed.buckets, minlength=num_buckets)
    write_rows(folder, run, UNITS, unit, counts, routed.keys[order], rows, summary)


def bucket_order(buckets: npt.NDArray[np.int64], num_buckets: int) -> npt.NDArray[np.intp]:
    """Stable order by bucket; numpy sorts 16-bit integers by counting."""
    return np.argsort(buckets.astype(np.uint16 if num_buckets < 2**16 else np.int64), kind="stable")


def write_rows(
    folder: Folder, run: str, place: str, unit: int, counts: npt.NDArray[np.int64], keys: Keys, rows: Block, summary: UnitSummary
) -> None:
    """Write a file of rows that are grouped already, ``counts`` of each bucket."""
    offsets = np.concatenate(([0], np.cumsum(counts))).astype("<i8")
    text = json.dumps(asdict(summary)).encode()
    tail = text + len(text).to_bytes(8, "little")
    folder.write(_name(place, unit), [_MAGIC + bytes.fromhex(run), offsets, keys, rows, tail])


def _group_rows(routed: Routed, order: npt.NDArray[np.intp], layout: Layout) -> Block:
    """The block of a unit, row-major, in the order of its file.

    Columns are laid side by side in tiles that stay in the processor's cache, and rows move on from there as opaque records:
    column by column, every line of the block would travel once for each column.
    """
    block = reused_array("rows", (len(routed), layout.width), layout.dtype)
    if not len(routed):
        return block
    destination = np.full(len(routed.columns[0]), -1, dtype=np.int64)
    destination[routed.rows[order]] = np.arange(len(routed))
    records = as_records(block)
    for start in range(0, len(destination), _TILE_ROWS):
        target = destination[start : start + _TILE_ROWS]
        tile = np.empty((len(target), layout.width), dtype=layout.dtype)
        for position, column in enumerate(routed.columns):
            tile[:, position] = column[start : start + _TILE_ROWS]
        wanted = target >= 0
        if wanted.all():
            records[target] = as_records(tile)
        else:
            records[target[wanted]] = as_records(tile)[wanted]
    return block


def as_records(block: Block) -> npt.NDArray[Any]:
    """Rows of a contiguous block as opaque records [rows], which move by one copy of bytes each."""
    return block.reshape(-1).view(f"V{block.shape[1] * block.dtype.itemsize}")


def read_summary(folder: Folder, run: str, place: str, unit: int, num_buckets: int, layout: Layout) -> UnitSummary | None:
    """Summary of a finished unit of this run, ``None`` where there is no such file or a torn one."""
    name, rows_at = _name(place, unit), _HEAD + 8 * (num_buckets + 1)
    size = folder.size(name)
    if size is None or size < rows_at + 8 or folder.read(name, 0, _HEAD) != _MAGIC + bytes.fromhex(run):
        return None
    rows = int.from_bytes(folder.read(name, rows_at - 8, 8), "little")
    length = int.from_bytes(folder.read(name, size - 8, 8), "little")
    row_bytes = 8 + layout.width * np.dtype(layout.dtype).itemsize
    if size != rows_at + rows * row_bytes + length + 8:
        return None
    summary = json.loads(folder.read(name, size - 8 - length, length))
    return UnitSummary(**summary | {"reused": True})


class ScratchReader:
    """Reads buckets from the files of some units; a segment is what one unit has of them."""

    def __init__(self, folder: Folder, place: str, units: range, num_buckets: int, layout: Layout) -> None:
        self.units = units
        self._place, self._folder, self._num_buckets, self._layout = place, folder, num_buckets, layout
        self._ranges: dict[tuple[int, int, int], tuple[int, int, int]] = {}

    def rows(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        counts = np.zeros(stop - first, dtype=np.int64)
        for unit in self.units:
            counts += np.diff(self._bounds(unit, first, stop))
        return counts

    def keys(self, first: int, stop: int) -> list[Keys]:
        return [self._keys(unit, first, stop) for unit in self.units]

    def read_segment(self, number: int, first: int, stop: int, out: Block) -> None:
        unit = self.units[number]
        start, end, rows = self._range(unit, first, stop)
        assert out.shape == (end - start, self._layout.width), (number, first, stop, out.shape)
        row_bytes = self._layout.width * out.dtype.itemsize
        filled = self._folder.read_into(_name(self._place, unit), self._keys_at + 8 * rows + row_bytes * start, out)
        assert filled == out.nbytes, (unit, first, stop, filled)

    def _keys(self, unit: int, first: int, stop: int) -> Keys:
        start, end, _ = self._range(unit, first, stop)
        keys = np.empty((end - start, 2), dtype="<i4")
        filled = self._folder.read_into(_name(self._place, unit), self._keys_at + 8 * start, keys)
        assert filled == keys.nbytes, (unit, first, stop, filled)
        return keys

    def _range(self, unit: int, first: int, stop: int) -> tuple[int, int, int]:
        """First and last row of the buckets in a unit, and the number of all its rows."""
        if (unit, first, stop) not in self._ranges:
            bounds = self._bounds(unit, first, stop)
            rows = int.from_bytes(self._folder.read(_name(self._place, unit), _HEAD + 8 * self._num_buckets, 8), "little")
            self._ranges[unit, first, stop] = int(bounds[0]), int(bounds[-1]), rows
        return self._ranges[unit, first, stop]

    def _bounds(self, unit: int, first: int, stop: int) -> npt.NDArray[np.int64]:
        return np.frombuffer(self._folder.read(_name(self._place, unit), _HEAD + 8 * first, 8 * (stop - first + 1)), dtype="<i8")

    @property
    def _keys_at(self) -> int:
        return _HEAD + 8 * (self._num_buckets + 1)
