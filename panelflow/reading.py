"""Read ahead: the windows of a lane, permuted as they arrive, and ranges of stored rows."""

from __future__ import annotations

import threading
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


class Windows:
    """Reads the windows of an epoch, each permuted as it arrives.

    Every thread keeps one buffer of whole chunks, in which they are checked and from which rows go to their permuted places.
    """

    def __init__(self, readers: dict[str, ShardReader], epoch: Epoch, order: Order) -> None:
        self.readers, self.order = readers, order
        self._epoch = epoch
        self._staged = threading.local()

    def read(self, lane: int, row: int, out: Arrays) -> Window:
        """Read the window that holds a lane's row into the first rows of ``out``."""
        window = self._epoch.window_at(lane, row)
        places = window.places(self.order.chunk_rows)
        for name, reader in self.readers.items():
            chunks = self._read_chunks(reader, [piece[0] for piece in window.pieces])
            np.take(chunks, places, axis=0, out=out[name][: len(places)], mode="clip")
        return window

    def _read_chunks(self, reader: ShardReader, chunks: list[int]) -> npt.NDArray[Any]:
        """Whole chunks, one after another; the checksum of each lies where the next one begins, and goes when that comes."""
        grid = reader.grid
        chunk_bytes = grid.chunk_rows * grid.row_bytes
        staged = self._stage(len(chunks) * chunk_bytes + reader.buffer_bytes - chunk_bytes)
        for number, chunk in enumerate(chunks):
            reader.read_chunk(chunk, staged[number * chunk_bytes :][: reader.buffer_bytes])
        values = staged[: len(chunks) * chunk_bytes].view(np.dtype(grid.dtype).newbyteorder("<"))
        return values.reshape(len(chunks) * grid.chunk_rows, *grid.shape[1:])

    def _stage(self, size: int) -> npt.NDArray[np.uint8]:
        buffer: npt.NDArray[np.uint8] | None = getattr(self._staged, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._staged.buffer = np.empty(size, dtype=np.uint8)
        return buffer[:size]


class Lane:
    """One lane: the window in use, and the next one being read."""

    def __init__(self, pool: ThreadPoolExecutor, windows: Windows, lane: int, row: int) -> None:
        order = windows.order
        self._pool, self._windows, self._lane, self._row = pool, windows, lane, row
        self._length = int(order.lane_starts[lane + 1] - order.lane_starts[lane])
        self._start, self._stop = row, row
        self._rows: Arrays = {}
        self._window_rows = min(self._length, order.window_chunks * order.chunk_rows)
        self._next = self._read_ahead(row, {})

    def _read_ahead(self, row: int, spare: Arrays) -> Future[tuple[Window, Arrays]] | None:
        return self._pool.submit(self._read, row, spare) if row < self._length else None

    def _read(self, row: int, spare: Arrays) -> tuple[Window, Arrays]:
        arrays = spare or allocate(self._windows.readers, self._window_rows)
        return self._windows.read(self._lane, row, arrays), arrays

    def take(self, count: int, out: Arrays, at: int) -> None:
        """Copy the next ``count`` rows of the lane to row ``at`` of ``out``."""
        while count:
            if self._row == self._stop:
                self._turn()
            rows = min(count, self._stop - self._row)
            inside = self._row - self._start
            for name, values in self._rows.items():
                out[name][at : at + rows] = values[inside : inside + rows]
            self._row, at, count = self._row + rows, at + rows, count - rows

    def _turn(self) -> None:
        """Go on to the window that was read ahead, and read the one after it in the place of the one that is used up."""
        assert self._next is not None, "a lane was asked for more rows than it holds"
        spare = self._rows
        window, self._rows = self._next.result()
        self._start, self._stop = window.start, window.stop
        self._next = self._read_ahead(window.stop, spare)


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
