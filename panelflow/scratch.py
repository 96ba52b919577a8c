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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from panelflow.files import Folder
from panelflow.plan import Layout

_MAGIC = b"pfunit01"
_HEAD = 40
_ROWS_PER_WRITE = 8192

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
    """

    rows: int
    outside: int
    purged: list[int]
    missing_target: list[int]
    written: list[int]
    checksums: dict[str, int]
    made_missing: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0
    reused: bool = False


class Reader(Protocol):
    """Rows of buckets ``[first, stop)`` as segments; ``keys`` and ``blocks`` list the same segments in the same order."""

    def keys(self, first: int, stop: int) -> list[Keys]: ...

    def blocks(self, first: int, stop: int) -> Iterator[Block]: ...


def unit_name(unit: int) -> str:
    return f"units/{unit:08d}.rows"


def write_unit(
    folder: Folder,
    run: str,
    unit: int,
    *,
    buckets: npt.NDArray[np.int64],
    num_buckets: int,
    keys: Keys,
    block: Block,
    summary: UnitSummary,
) -> None:
    """Group the rows of a unit by bucket, stable, and write its file whole."""
    kind = np.uint16 if num_buckets < 2**16 else np.int64  # numpy sorts 16-bit integers by radix
    order = np.argsort(buckets.astype(kind), kind="stable")
    offsets = np.concatenate(([0], np.cumsum(np.bincount(buckets, minlength=num_buckets)))).astype("<i8")
    text = json.dumps(asdict(summary)).encode()

    def parts() -> Iterator[bytes | npt.NDArray[Any]]:
        yield _MAGIC + bytes.fromhex(run)
        yield offsets
        yield keys[order]
        part = np.empty((_ROWS_PER_WRITE, *block.shape[1:]), dtype=block.dtype)  # used again: fresh pages cost more than copying
        for start in range(0, len(order), _ROWS_PER_WRITE):
            rows = order[start : start + _ROWS_PER_WRITE]
            yield np.take(block, rows, axis=0, out=part[: len(rows)], mode="clip")
        yield text + len(text).to_bytes(8, "little")

    folder.write(unit_name(unit), parts())


def read_summary(folder: Folder, run: str, unit: int, num_buckets: int, layout: Layout) -> UnitSummary | None:
    """Summary of a finished unit of this run, ``None`` where there is no such file or a torn one."""
    name, rows_at = unit_name(unit), _HEAD + 8 * (num_buckets + 1)
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
    """Reads buckets from the files of all units, in the order of the units."""

    def __init__(self, folder: Folder, num_units: int, num_buckets: int, layout: Layout) -> None:
        self._folder, self._num_units, self._num_buckets, self._layout = folder, num_units, num_buckets, layout

    def keys(self, first: int, stop: int) -> list[Keys]:
        return [self._keys(unit, *self._range(unit, first, stop)) for unit in range(self._num_units)]

    def blocks(self, first: int, stop: int) -> Iterator[Block]:
        for unit in range(self._num_units):
            yield self._block(unit, *self._range(unit, first, stop))

    def _range(self, unit: int, first: int, stop: int) -> tuple[int, int, int]:
        """First and last row of the buckets in a unit, and its number of rows."""
        name = unit_name(unit)
        bounds = np.frombuffer(self._folder.read(name, _HEAD + 8 * first, 8 * (stop - first + 1)), dtype="<i8")
        rows = int.from_bytes(self._folder.read(name, _HEAD + 8 * self._num_buckets, 8), "little")
        return int(bounds[0]), int(bounds[-1]), rows

    def _keys(self, unit: int, start: int, stop: int, _rows: int) -> Keys:
        data = self._folder.read(unit_name(unit), self._keys_at + 8 * start, 8 * (stop - start))
        return np.frombuffer(data, dtype="<i4").reshape(-1, 2)

    def _block(self, unit: int, start: int, stop: int, rows: int) -> Block:
        dtype = np.dtype(self._layout.dtype).newbyteorder("<")
        row_bytes = self._layout.width * dtype.itemsize
        at = self._keys_at + 8 * rows + row_bytes * start
        return np.frombuffer(self._folder.read(unit_name(unit), at, row_bytes * (stop - start)), dtype=dtype).reshape(
            -1, self._layout.width
        )

    @property
    def _keys_at(self) -> int:
        return _HEAD + 8 * (self._num_buckets + 1)
