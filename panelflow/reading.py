"""Read ahead: the windows of a lane, permuted as they arrive, and ranges of stored rows."""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from panelflow.order import Epoch, Order
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
        self.readers, self.epoch, self.order = readers, epoch, order
        self._staged = threading.local()

    def read(self, lane: int, row: int, ring: Arrays) -> None:
        """Read a lane's rows from ``row`` to the end of its window; row r goes to row r % len of each array of ``ring``."""
        window = self.epoch.window_at(lane, row)
        places = window.places(self.order.chunk_rows)[row - window.start :]
        for name, reader in self.readers.items():
            chunks, rows = self._read_chunks(reader, [piece[0] for piece in window.pieces]), ring[name]
            start = row % len(rows)
            before_end = min(len(rows) - start, len(places))
            np.take(chunks, places[:before_end], axis=0, out=rows[start : start + before_end], mode="clip")
            np.take(chunks, places[before_end:], axis=0, out=rows[: len(places) - before_end], mode="clip")

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


@dataclass(frozen=True)
class LaneGroup:
    """Neighbouring lanes that give equally many rows to every full batch, each with a ring that its windows are read into.

    Row r of a lane lies at row ``r % ring_rows`` of its ring. Since that is a multiple of ``share``, what a batch takes of all
    lanes is one block of the rings, copied at once: the work of a step does not grow with the number of lanes.
    """

    lanes: range
    share: int
    ring_rows: int

    def allocate(self, readers: dict[str, ShardReader]) -> Arrays:
        """Rings, [lanes, ring_rows, ...] for each array."""
        return {
            name: np.empty((len(self.lanes), self.ring_rows, *reader.grid.shape[1:]), dtype=reader.grid.dtype)
            for name, reader in readers.items()
        }


def make_groups(order: Order, lanes: range) -> list[LaneGroup]:
    """Groups of some lanes: those that give one row more to a batch, and the others."""
    shares, groups = order.full_shares, []
    for share in dict.fromkeys(shares[lanes.start : lanes.stop].tolist()):
        members = [lane for lane in lanes if shares[lane] == share]
        # Room for a window in use and the next one, and for a batch that begins in one window and ends in another.
        least = max(2 * order.window_rows, share + order.window_rows)
        groups.append(LaneGroup(range(members[0], members[-1] + 1), share, -(-least // share) * share))
    return groups


class LaneStream:
    """The rows of a group of lanes, batch after batch, windows being read ahead by threads.

    Parameters
    ----------
    step
        The batch to begin with.
    rings
        From :meth:`LaneGroup.allocate`.
    """

    def __init__(self, pool: ThreadPoolExecutor, windows: Windows, group: LaneGroup, step: int, rings: Arrays) -> None:
        self._pool, self._windows, self._group, self._rings = pool, windows, group, rings
        starts = windows.order.lane_starts
        self._lengths = {lane: int(starts[lane + 1] - starts[lane]) for lane in group.lanes}
        self._row = step * group.share  # the next row, in each lane
        self._reads: list[tuple[int, int, Future[None]]] = []  # heap of (first row, lane, the window being read)
        self._later: list[tuple[int, int, int]] = []  # heap of (end, first row, lane) of each lane's first window not asked for
        for lane in group.lanes:
            self._plan_next(lane, self._row)
        self._read_ahead()

    def take(self, shares: list[int], out: Arrays, at: int) -> None:
        """Copy what each lane gives to the next batch to row ``at`` of ``out`` and following."""
        group, block = self._group, self._row % self._group.ring_rows
        self._wait(self._row + max(shares))
        if min(shares) == group.share:
            rows = sum(shares)
            for name, ring in self._rings.items():
                target = out[name][at : at + rows].reshape(len(shares), group.share, *ring.shape[2:])
                np.copyto(target, ring[:, block : block + group.share])
        else:  # the short batch that ends an epoch
            for number, share in enumerate(shares):
                for name, ring in self._rings.items():
                    out[name][at : at + share] = ring[number, block : block + share]
                at += share
        self._go_on()

    def skip(self, shares: list[int]) -> None:
        """Leave out what each lane gives to the next batch."""
        self._wait(self._row + max(shares))  # a ring is not read into while it is still being read into
        self._go_on()

    def _go_on(self) -> None:
        self._row += self._group.share
        self._read_ahead()

    def _wait(self, row: int) -> None:
        """Wait for all rows before ``row``; the rings have room for them, so that they were asked for."""
        while self._reads and self._reads[0][0] < row:
            heapq.heappop(self._reads)[2].result()

    def _read_ahead(self) -> None:
        """Ask for the windows for which there is room in their rings."""
        while self._later and self._later[0][0] <= self._row + self._group.ring_rows:
            stop, row, lane = heapq.heappop(self._later)
            ring = {name: rows[lane - self._group.lanes.start] for name, rows in self._rings.items()}
            heapq.heappush(self._reads, (row, lane, self._pool.submit(self._windows.read, lane, row, ring)))
            self._plan_next(lane, stop)

    def _plan_next(self, lane: int, row: int) -> None:
        if row < self._lengths[lane]:
            heapq.heappush(self._later, (self._windows.epoch.window_stop(lane, row), row, lane))


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
