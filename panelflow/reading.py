"""Read ahead: the windows of a lane, permuted as they arrive, and ranges of stored rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from panelflow.order import Epoch, Order, Window
from panelflow.shards import ShardReader

Arrays = dict[str, npt.NDArray[Any]]


def allocate(readers: dict[str, ShardReader], rows: int) -> Arrays:
    """Uninitialised arrays of some rows, one for each reader."""
    return {name: np.empty((rows, *r.grid.shape[1:]), dtype=r.grid.dtype) for name, r in readers.items()}


class Lane:
    """One lane: the window in use, and the next one being read."""

    def __init__(
        self, pool: ThreadPoolExecutor, readers: dict[str, ShardReader], epoch: Epoch, order: Order, lane: int, row: int
    ) -> None:
        self._pool, self._readers, self._epoch, self._lane, self._row = pool, readers, epoch, lane, row
        self._length = int(order.lane_starts[lane + 1] - order.lane_starts[lane])
        self._start, self._stop = row, row
        self._rows: Arrays = {}
        self._next = self._read_ahead(row)

    def _read_ahead(self, row: int) -> Future[tuple[Window, Arrays]] | None:
        return self._pool.submit(_read_window, self._readers, self._epoch, self._lane, row) if row < self._length else None

    def take(self, count: int, out: Arrays, at: int) -> None:
        """Copy the next ``count`` rows of the lane to row ``at`` of ``out``."""
        while count:
            if self._row == self._stop:
                assert self._next is not None, "a lane was asked for more rows than it holds"
                window, self._rows = self._next.result()
                self._start, self._stop = window.start, window.stop
                self._next = self._read_ahead(window.stop)
            rows = min(count, self._stop - self._row)
            inside = self._row - self._start
            for name, values in self._rows.items():
                out[name][at : at + rows] = values[inside : inside + rows]
            self._row, at, count = self._row + rows, at + rows, count - rows


def _read_window(readers: dict[str, ShardReader], epoch: Epoch, lane: int, row: int) -> tuple[Window, Arrays]:
    window = epoch.window_at(lane, row)
    place = np.empty_like(window.permutation)
    place[window.permutation] = np.arange(len(place))
    arrays = allocate(readers, len(place))
    start = 0
    for chunk, first, stop in window.pieces:  # one chunk at a time, straight to its permuted place
        for name, reader in readers.items():
            arrays[name][place[start : start + stop - first]] = reader.read_chunk(chunk)[first:stop]
        start += stop - first
    return window, arrays


def read_ranges(pool: ThreadPoolExecutor, readers: dict[str, ShardReader], ranges: Iterator[tuple[int, int]]) -> Iterator[Arrays]:
    """Stored rows of each range in turn, one range read ahead; a chunk that two neighbours share is read once."""
    cursors = {name: _Cursor(reader) for name, reader in readers.items()}

    def read(start: int, stop: int) -> Arrays:
        return {name: cursor.read(start, stop) for name, cursor in cursors.items()}

    ahead: deque[Future[Arrays]] = deque()
    for start, stop in ranges:
        if ahead:
            ahead[-1].result()  # one reader at a time: cursors keep their last chunk
        ahead.append(pool.submit(read, start, stop))
        if len(ahead) > 1:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


class _Cursor:
    """Reads ranges of stored rows and remembers its last chunk."""

    def __init__(self, reader: ShardReader) -> None:
        self._reader = reader
        self._chunk = -1
        self._rows: npt.NDArray[Any] = np.empty(0)

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        grid = self._reader.grid
        out = np.empty((max(stop - start, 0), *grid.shape[1:]), dtype=grid.dtype)
        position = start
        while position < stop:
            chunk, inside = divmod(position, grid.chunk_rows)
            if chunk != self._chunk:
                self._chunk, self._rows = chunk, self._reader.read_chunk(chunk)
            rows = self._rows[inside : inside + stop - position]
            out[position - start : position - start + len(rows)] = rows
            position += len(rows)
        return out
