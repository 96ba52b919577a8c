"""A split -> batches of torch tensors, read ahead by threads, resumable at any step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from panelflow.errors import CheckpointError, OptionError
from panelflow.order import DEFAULT_LANES, WINDOW_CHUNKS, Order
from panelflow.reading import Arrays, LaneStream, Windows, allocate, make_groups, read_ranges
from panelflow.store import Split

_STATE_VERSION = 1
_WAITING_WORTH_A_WARNING = 0.9


@dataclass(frozen=True)
class Batch:
    """This rank's rows of one global batch.

    Attributes
    ----------
    features
        [rows, num_features] in the dtype of the dataset; missing values are NaN.
    targets
        [rows, num_targets], same dtype.
    weight
        [rows], same dtype, or ``None`` where the dataset has no weights.
    entity
        int32 [rows], codes into ``dataset.entity_names``; ``None`` under ``keys=False``.
    date
        int64 [rows], nanoseconds since 1970 (UTC); ``None`` under ``keys=False``.
    epoch, step
        Position of the batch.
    global_rows
        Rows of the batch over all ranks.
    """

    features: torch.Tensor
    targets: torch.Tensor
    weight: torch.Tensor | None
    entity: torch.Tensor | None
    date: torch.Tensor | None
    epoch: int
    step: int
    global_rows: int

    def __len__(self) -> int:
        return len(self.features)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device."""

        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return replace(
            self,
            features=self.features.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            weight=moved(self.weight),
            entity=moved(self.entity),
            date=moved(self.date),
        )


class Loader(IterableDataset[Batch]):
    """Streams one rank's part of every global batch of a split.

    Iterate it as it is, or under ``torch.utils.data.DataLoader(loader, batch_size=None)``: worker processes take turns.

    Parameters
    ----------
    split
        A split of an open dataset.
    batch_size
        Rows of a global batch, over all ranks.
    shuffle
        A new order every epoch; ``False`` gives stored order, in which ranks divide each batch.
    drop_last
        Leave out the short batch that ends an epoch.
    seed
        Seed of the order, apart from the dataset's.
    rank, world_size
        By default those of the default process group, else 0 and 1.
    lanes
        See :mod:`panelflow.order`; by default 32, or ``batch_size`` where that is smaller. Part of the order: keep it.
    keys
        Whether batches carry ``entity`` and ``date``.
    threads
        Threads that read ahead.
    window_chunks
        Chunks that a lane permutes at a time.

    Raises
    ------
    OptionError
        Sizes that do not fit each other.
    CorruptDatasetError
        While iterating: a damaged shard; names the file and rows.

    Notes
    -----
    Iterating yields the batches of one epoch and then moves to the next epoch; :meth:`set_epoch` chooses one. Every rank gets
    ``len(loader)`` batches, a last one without rows included. The order is a function of dataset, seed, epoch, batch size and
    lanes; neither ``rank``, ``world_size`` nor ``threads`` changes a global batch. Memory:
    ``memory_bytes``, for any number of rows.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        lanes: int | None = None,
        keys: bool = True,
        threads: int = 2,
        window_chunks: int = WINDOW_CHUNKS,
    ) -> None:
        grouped = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if grouped else 0
        self.world_size = world_size if world_size is not None else dist.get_world_size() if grouped else 1
        self.split = split
        self.order = Order(
            num_rows=split.num_rows,
            chunk_rows=split.chunk_rows,
            batch_size=int(batch_size),
            lanes=min(DEFAULT_LANES, int(batch_size)) if lanes is None else int(lanes),
            seed=int(seed),
            shuffle=shuffle,
            drop_last=drop_last,
            window_chunks=window_chunks,
        )
        if threads < 1:
            raise OptionError(f"At least one thread reads ahead; threads={threads}")
        self._threads = threads
        self._lanes = self.order.lanes_of(self.rank, self.world_size)
        efficiency = self.order.efficiency(self.world_size)
        if efficiency < _WAITING_WORTH_A_WARNING and self.rank == 0:
            even = self.world_size * -(-self.order.lanes // self.world_size)
            even = even if even <= batch_size else even - self.world_size
            warnings.warn(
                f"{self.order.lanes} lanes over {self.world_size} ranks keep them {efficiency:.0%} busy; lanes={even} would "
                f"divide evenly.",
                stacklevel=2,
            )
        self._readers = {name: r for name, r in split.readers().items() if keys or name not in ("entity", "date")}
        self._epoch, self._step, self._loaded = 0, 0, False
        self._turns = 1  # worker processes that the position counts in
        self._groups = make_groups(self.order, self._lanes)
        self._spare: list[list[Arrays]] = []  # rings of the groups, kept from epoch to epoch

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_spare": []}

    def __len__(self) -> int:
        return self.order.steps

    @property
    def lanes(self) -> range:
        """Lanes of this rank."""
        return self._lanes

    @property
    def epoch(self) -> int:
        """Epoch of the next batch."""
        return self._epoch

    @property
    def memory_bytes(self) -> int:
        """Bytes that reading ahead holds: for each lane of this rank a ring of two windows, and a window for each thread."""
        row_bytes = sum(reader.grid.row_bytes for reader in self._readers.values())
        if not self.order.shuffle:
            return 2 * (self.order.batch_size + self.order.chunk_rows) * row_bytes
        widest = max(reader.grid.row_bytes for reader in self._readers.values())
        staged_bytes = self.order.window_chunks * self.order.chunk_rows * widest
        ring_rows = sum(len(group.lanes) * group.ring_rows for group in self._groups)
        return ring_rows * row_bytes + self._threads * staged_bytes

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate; a step restored by :meth:`load_state_dict` for this very epoch is kept."""
        if epoch != self._epoch or not self._loaded:
            self._epoch, self._step, self._loaded = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Position after the last batch yielded: constant size, valid on any number of ranks."""
        return {
            "version": _STATE_VERSION,
            "dataset_id": self.split.dataset.dataset_id,
            "split": self.split.name,
            "seed": self.order.seed,
            "epoch": self._epoch,
            "step": self._step,
            "batch_size": self.order.batch_size,
            "lanes": self.order.lanes,
            "shuffle": self.order.shuffle,
            "drop_last": self.order.drop_last,
            "window_chunks": self.order.window_chunks,
            "workers": self._turns,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last batch of a saved position.

        Raises
        ------
        CheckpointError
            The position belongs to another dataset or another order.
        """
        own = self.state_dict()
        for name, value in own.items():
            if name not in ("epoch", "step", "workers") and state.get(name) != value:
                raise CheckpointError(f"The saved position has {name}={state.get(name)!r}, this loader {value!r}: another order.")
        workers, here = state["workers"], _worker()[1]
        if workers not in (1, here):
            raise CheckpointError(
                f"The saved position is that of one of {workers} worker processes of a DataLoader, not of {here}."
            )
        self._epoch, self._step, self._loaded, self._turns = int(state["epoch"]), int(state["step"]), True, workers
        if self._step >= len(self):
            self._epoch, self._step, self._turns = self._epoch + 1, 0, 1

    def __iter__(self) -> Iterator[Batch]:
        worker, workers = _worker()
        if not self._loaded:
            self._step, self._turns = 0, 1
        # A position that this worker process saved is its own next step; any other is the next step of all.
        first = self._step if self._turns == workers else self._step + worker
        self._loaded, self._turns = False, workers
        epoch, steps = self._epoch, range(first, len(self), workers)
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="panelflow-read")
        try:
            stream = self._shuffled(pool, epoch, steps) if self.order.shuffle else self._stored(pool, steps)
            for step, arrays in zip(steps, stream, strict=True):
                self._step = step + workers
                yield self._batch(arrays, epoch, step)
        finally:
            pool.shutdown(cancel_futures=True)
        self._epoch, self._step, self._turns = epoch + 1, 0, 1

    def _batch(self, arrays: Arrays, epoch: int, step: int) -> Batch:
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return Batch(
            tensors["features"],
            tensors["targets"],
            tensors.get("weight"),
            tensors.get("entity"),
            tensors.get("date"),
            epoch,
            step,
            self.order.batch_rows(step),
        )

    def _shuffled(self, pool: ThreadPoolExecutor, epoch: int, steps: range) -> Iterator[Arrays]:
        if not steps:
            return
        windows = Windows(self._readers, self.order.epoch(epoch), self.order)
        rings = self._spare.pop() if self._spare else [group.allocate(self._readers) for group in self._groups]
        streams = [LaneStream(pool, windows, group, steps[0], ring) for group, ring in zip(self._groups, rings, strict=True)]
        for step in range(steps[0], steps[-1] + 1):
            shares = self.order.lane_shares(step).tolist()
            parts = [shares[group.lanes.start : group.lanes.stop] for group in self._groups]
            if step not in steps:  # another worker process's turn
                for stream, part in zip(streams, parts, strict=True):
                    stream.skip(part)
                continue
            out, at = allocate(self._readers, sum(map(sum, parts))), 0
            for stream, part in zip(streams, parts, strict=True):
                stream.take(part, out, at)
                at += sum(part)
            yield out
        self._spare.append(rings)

    def _stored(self, pool: ThreadPoolExecutor, steps: range) -> Iterator[Arrays]:
        return read_ranges(pool, self._readers, (self.order.stored_range(step, self._lanes) for step in steps))


def _worker() -> tuple[int, int]:
    """Number of this worker process of a DataLoader, and how many there are; 0 of 1 outside of any."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)
