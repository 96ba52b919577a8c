"""Which row is in which global batch, at which rank, after which epoch and step: arithmetic, nothing stored.

1. Epoch e permutes the inner chunks of the split by sorting a 64-bit hash of (seed, e, chunk).
2. The permuted sequence of rows is cut into L lanes. With B rows a batch, T = N // B full batches and r = N - T B rows left,
   lane l gives b_l = B // L + (l < B mod L) rows to every full batch and r_l = r // L + (l < r mod L) to the short batch that
   ends the epoch; it holds T b_l + r_l consecutive rows.
3. Inside a lane, windows of a few chunks are permuted again by a hash, so that rows that were neighbours on disk part.
4. Rank k of W owns the lanes [k L // W, (k + 1) L // W).

So a global batch is the union of what its lanes give, whatever the number of ranks, and any step can be found without
replaying those before it. Unshuffled, batch t is the stored rows [t B, (t + 1) B), of which each lane takes its share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from panelflow.errors import OptionError
from panelflow.hashing import Words, absorbed, fold, mix

DEFAULT_LANES = 32
WINDOW_CHUNKS = 2

Rows = npt.NDArray[np.int64]

_NUMBERS = 2**15  # as many at least are kept ready
_CHUNKS, _WINDOW = 1, 2  # domains of the hash, so that no two of its uses share a stream


@dataclass(frozen=True)
class Order:
    """The order of one split under one seed and batch size.

    Parameters
    ----------
    num_rows, chunk_rows
        Rows of the split and of its inner chunks.
    batch_size
        Rows of a global batch, over all ranks.
    lanes
        Number of lanes, at most ``batch_size``.
    seed
        Seed of the order of epochs, apart from the seed of the dataset.
    shuffle, drop_last
        As in :class:`torch.utils.data.DataLoader`.
    window_chunks
        Chunks that a lane permutes at a time.
    """

    num_rows: int
    chunk_rows: int
    batch_size: int
    lanes: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    window_chunks: int = WINDOW_CHUNKS

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise OptionError(f"A batch has at least one row; batch_size={self.batch_size}")
        if not 1 <= self.lanes <= self.batch_size:
            raise OptionError(f"There is at least one lane and at most one for each row of a batch; lanes={self.lanes}")
        if self.window_chunks < 1:
            raise OptionError(f"A window has at least one chunk; window_chunks={self.window_chunks}")

    @property
    def full_steps(self) -> int:
        return self.num_rows // self.batch_size

    @property
    def rest(self) -> int:
        """Rows of the short batch that ends the epoch, 0 where there is none."""
        return self.num_rows - self.full_steps * self.batch_size

    @property
    def steps(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return self.full_steps + (self.rest > 0 and not self.drop_last)

    def batch_rows(self, step: int) -> int:
        """Rows of global batch ``step``."""
        return self.batch_size if step < self.full_steps else self.rest

    def lane_shares(self, step: int) -> Rows:
        """Rows that each lane gives to batch ``step``, int64 [lanes]."""
        return _shares(self.batch_rows(step), self.lanes)

    @cached_property
    def full_shares(self) -> Rows:
        """Rows that each lane gives to a full batch, int64 [lanes]; to the short one it gives no more."""
        return _shares(self.batch_size, self.lanes)

    @cached_property
    def lane_starts(self) -> Rows:
        """First row of each lane in the permuted sequence, and the end of the last, int64 [lanes + 1]."""
        lengths = self.full_steps * self.full_shares + _shares(self.rest, self.lanes)
        return np.concatenate(([0], np.cumsum(lengths)))

    def lanes_of(self, rank: int, world_size: int) -> range:
        """Lanes that a rank owns.

        Raises
        ------
        OptionError
            More ranks than lanes.
        """
        if not 0 <= rank < world_size:
            raise OptionError(f"A rank lies between 0 and world_size - 1 = {world_size - 1}; rank={rank}")
        if world_size > self.lanes:
            raise OptionError(
                f"{world_size} ranks need at least as many lanes; pass lanes={world_size} or a multiple of it (and "
                f"batch_size >= lanes); lanes={self.lanes}"
            )
        return range(rank * self.lanes // world_size, (rank + 1) * self.lanes // world_size)

    @property
    def window_rows(self) -> int:
        """Rows of the largest window."""
        return min(self.window_chunks * self.chunk_rows, int(np.diff(self.lane_starts).max()))

    def efficiency(self, world_size: int) -> float:
        """Share of time that ranks are busy: those with fewer lanes wait for those with more."""
        return self.lanes / (world_size * -(-self.lanes // world_size))

    def epoch(self, epoch: int) -> Epoch:
        return Epoch(self, epoch)

    def stored_range(self, step: int, lanes: range) -> tuple[int, int]:
        """Stored rows ``[start, stop)`` that some lanes give to a batch that is not shuffled."""
        bounds = np.concatenate(([0], np.cumsum(self.lane_shares(step)))) + step * self.batch_size
        return int(bounds[lanes.start]), int(bounds[lanes.stop])


def _shares(rows: int, lanes: int) -> Rows:
    return rows // lanes + (np.arange(lanes) < rows % lanes).astype(np.int64)


def _permutation(state: Words, size: int) -> Rows:
    """A permutation of ``size`` numbers, int64: ordered by the hash of a state and each number.

    The number takes the place of the lowest bits of its hash, so that one sort of plain words, which numpy vectorises, does it.
    """
    lowest = np.uint64((1 << max(size - 1, 1).bit_length()) - 1)
    numbers, words = _numbers(max(int(lowest) + 1, _NUMBERS))
    keys = mix(state ^ words[:size])
    keys &= ~lowest
    keys |= numbers[:size]
    keys.sort()
    keys &= lowest
    return keys.view(np.int64)


@lru_cache(maxsize=2)  # every window begins with the same numbers
def _numbers(size: int) -> tuple[Words, Words]:
    """The first numbers, and each as :func:`fold` absorbs it."""
    numbers = np.arange(size, dtype=np.uint64)
    return numbers, absorbed(numbers)


@dataclass(frozen=True)
class Window:
    """A run of lane rows ``[start, stop)`` that is read and permuted at once.

    Attributes
    ----------
    pieces
        (chunk, first, stop): rows of chunks, in the order in which they are read.
    permutation
        int64 [stop - start]: lane row ``start + i`` is row ``permutation[i]`` of the pieces joined.
    """

    start: int
    stop: int
    pieces: tuple[tuple[int, int, int], ...]
    permutation: Rows

    def places(self, chunk_rows: int) -> Rows:
        """Where each row of the window lies in its whole chunks joined, int64 [stop - start]."""
        if all(stop == chunk_rows for _, _, stop in self.pieces[:-1]):
            return self.permutation + self.pieces[0][1]  # one run of rows: only the first piece begins within its chunk
        ranges = [np.arange(first, stop) + number * chunk_rows for number, (_, first, stop) in enumerate(self.pieces)]
        return np.concatenate(ranges)[self.permutation]


class Epoch:
    """The permuted sequence of one epoch of a shuffled :class:`Order`."""

    def __init__(self, order: Order, epoch: int) -> None:
        self._order, self._epoch = order, epoch
        chunks = -(-order.num_rows // order.chunk_rows)
        self._chunk_of = _permutation(fold(order.seed, _CHUNKS, epoch), chunks)
        self._missing = chunks * order.chunk_rows - order.num_rows  # rows that the last chunk lacks
        self._short_slot = int(np.flatnonzero(self._chunk_of == chunks - 1)[0]) if chunks else 0

    def _slot_start(self, slot: int) -> int:
        """First row, in the permuted sequence, of the chunk at position ``slot``."""
        return min(slot * self._order.chunk_rows - (self._missing if slot > self._short_slot else 0), self._order.num_rows)

    def _slot_of(self, row: int) -> int:
        after_short = self._slot_start(self._short_slot + 1)
        if row < after_short:
            return min(row // self._order.chunk_rows, self._short_slot)
        return (row + self._missing) // self._order.chunk_rows

    def window_at(self, lane: int, row: int) -> Window:
        """The window that holds lane row ``row``; windows begin and end where chunks do, or the lane does."""
        number, start, stop = self._window_range(lane, row)
        state = fold(self._order.seed, _WINDOW, self._epoch, lane, number)
        lane_start = int(self._order.lane_starts[lane])
        pieces = tuple(self._pieces(lane_start + start, lane_start + stop))
        return Window(start, stop, pieces, _permutation(state, stop - start))

    def window_stop(self, lane: int, row: int) -> int:
        """Lane row at which the window that holds lane row ``row`` ends."""
        return self._window_range(lane, row)[2]

    def _window_range(self, lane: int, row: int) -> tuple[int, int, int]:
        """Number of a window in its lane, and its lane rows ``[start, stop)``."""
        order = self._order
        lane_start, lane_stop = int(order.lane_starts[lane]), int(order.lane_starts[lane + 1])
        first_slot = self._slot_of(lane_start)
        number = (self._slot_of(lane_start + row) - first_slot) // order.window_chunks
        slot = first_slot + number * order.window_chunks
        start = max(self._slot_start(slot), lane_start)
        stop = min(self._slot_start(slot + order.window_chunks), lane_stop)
        return number, start - lane_start, stop - lane_start

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        while start < stop:
            slot = self._slot_of(start)
            slot_start = self._slot_start(slot)
            end = min(self._slot_start(slot + 1), stop)
            yield int(self._chunk_of[slot]), start - slot_start, end - slot_start
            start = end

    def rows(self, step: int, lanes: range) -> Rows:
        """Stored row numbers that some lanes give to a batch, in the order in which a loader yields them.

        The plain definition of the order: the loader reads the same windows, tests compare with it.
        """
        order = self._order
        if not order.shuffle:
            return np.arange(*order.stored_range(step, lanes))
        shares = order.lane_shares(step)
        parts = [self._lane_rows(lane, step * int(order.full_shares[lane]), int(shares[lane])) for lane in lanes]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _lane_rows(self, lane: int, row: int, count: int) -> Rows:
        parts = [np.empty(0, np.int64)]
        while count:
            window = self.window_at(lane, row)
            chunk_rows = self._order.chunk_rows
            stored = np.concatenate([chunk * chunk_rows + np.arange(first, stop) for chunk, first, stop in window.pieces])
            part = stored[window.permutation][row - window.start : row - window.start + count]
            parts.append(part)
            row, count = row + len(part), count - len(part)
        return np.concatenate(parts)
