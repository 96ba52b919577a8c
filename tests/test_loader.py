from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_order import orders
from torch.utils.data import DataLoader

import panelflow as pf
from panelflow.order import Order
from panelflow.shards import ArrayGrid

WORLDS = (1, 2, 3, 5, 8)


def joined(split: pf.Split, world: int, epoch: int = 0, **options: Any) -> list[dict[str, np.ndarray]]:
    """Global batches put together from all ranks."""
    loaders = [pf.Loader(split, rank=rank, world_size=world, **options) for rank in range(world)]
    for loader in loaders:
        loader.set_epoch(epoch)
    batches = []
    for parts in zip(*loaders, strict=True):
        assert sum(len(part) for part in parts) == parts[0].global_rows
        names = ("features", "targets", "weight", "entity", "date")
        batches.append({name: torch.cat([getattr(part, name) for part in parts]).numpy() for name in names})
    assert all(len(batches) == len(loader) for loader in loaders)
    return batches


def assert_equal(left: list[dict[str, np.ndarray]], right: list[dict[str, np.ndarray]]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_are_the_rows_that_the_order_says(dataset: pf.Dataset, shuffle: bool) -> None:
    split = dataset["train"]
    stored = split.to_pandas()
    loader = pf.Loader(split, 100, shuffle=shuffle, lanes=7)
    for epoch in range(2):
        for step, batch in enumerate(loader):
            rows = stored.iloc[loader.order.epoch(epoch).rows(step, range(7))]
            np.testing.assert_array_equal(batch.features.numpy(), rows[dataset.features])
            np.testing.assert_array_equal(batch.targets.numpy(), rows[["ret"]])
            np.testing.assert_array_equal(batch.weight.numpy(), rows["size"])
            np.testing.assert_array_equal(dataset.entity_names[batch.entity.numpy()], rows["stock"])
            np.testing.assert_array_equal(batch.date.numpy(), rows["date"].to_numpy().astype("M8[ns]").view(np.int64))
            assert (batch.epoch, batch.step, batch.global_rows) == (epoch, step, len(rows))
        assert loader.epoch == epoch + 1


@pytest.mark.parametrize("batch_size", [1, 64, 100, 897, 898, 2000])
@pytest.mark.parametrize("drop_last", [True, False])
def test_no_world_size_changes_a_batch_or_the_steps(dataset: pf.Dataset, batch_size: int, drop_last: bool) -> None:
    split = dataset["train"]
    if batch_size == 1:
        split = dataset["test"]
    one = joined(split, 1, epoch=1, batch_size=batch_size, drop_last=drop_last)
    keys = [key for batch in one for key in zip(batch["entity"], batch["date"], strict=True)]
    assert len(set(keys)) == len(keys)
    assert len(keys) == (split.num_rows // batch_size * batch_size if drop_last else split.num_rows)
    assert all(len(batch["features"]) == batch_size for batch in one[: split.num_rows // batch_size])
    for world in WORLDS[1:]:
        if world <= batch_size:
            assert_equal(joined(split, world, epoch=1, batch_size=batch_size, drop_last=drop_last), one)


@pytest.mark.parametrize("shuffle", [True, False])
def test_stopped_at_any_step_and_resumed_on_another_world(dataset: pf.Dataset, shuffle: bool) -> None:
    options = {"batch_size": 128, "shuffle": shuffle, "seed": 3}
    whole = [joined(dataset["train"], 1, epoch, **options) for epoch in range(4)]
    steps = len(whole[0])
    for stop in range(1, steps + 1):
        loader = pf.Loader(dataset["train"], rank=0, world_size=2, **options)
        for _, _batch in zip(range(stop), loader, strict=False):
            state = json.loads(json.dumps(loader.state_dict()))
        resumed = [pf.Loader(dataset["train"], rank=rank, world_size=3, **options) for rank in range(3)]
        for loader in resumed:
            loader.load_state_dict(state)
        seen = []
        while resumed[0].epoch < 4:
            for parts in zip(*resumed, strict=True):
                seen.append({name: torch.cat([getattr(p, name) for p in parts]).numpy() for name in ("features", "date")})
        expected = [{name: b[name] for name in ("features", "date")} for epoch in whole for b in epoch][stop:]
        assert_equal(seen, expected)


def test_position_is_small_and_found_at_once(dataset: pf.Dataset) -> None:
    loader = pf.Loader(dataset["train"], 64)
    next(iter(loader))
    assert len(json.dumps(loader.state_dict())) < 1024
    started = time.process_time()  # of this process alone, however busy the machine
    for _ in range(100):
        loader.load_state_dict(loader.state_dict())
    assert (time.process_time() - started) / 100 < 0.01


def test_breaking_off_starts_the_epoch_again_and_set_epoch_keeps_a_restored_step(dataset: pf.Dataset) -> None:
    loader = pf.Loader(dataset["train"], 64)
    first = next(iter(loader))
    assert torch.equal(next(iter(loader)).features, first.features)
    state = loader.state_dict()
    again = pf.Loader(dataset["train"], 64)
    again.load_state_dict(state)
    again.set_epoch(0)
    assert next(iter(again)).step == 1
    again.set_epoch(5)
    batch = next(iter(again))
    assert (batch.epoch, batch.step) == (5, 0)


def test_a_position_of_another_order_is_refused(dataset: pf.Dataset, unweighted: pf.Dataset) -> None:
    state = pf.Loader(dataset["train"], 64).state_dict()
    for loader in (
        pf.Loader(dataset["train"], 65),
        pf.Loader(dataset["train"], 64, seed=1),
        pf.Loader(dataset["train"], 64, lanes=8),
        pf.Loader(unweighted["train"], 64),
        pf.Loader(dataset["test"], 64),
    ):
        with pytest.raises(pf.CheckpointError, match="another order"):
            loader.load_state_dict(state)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_threads_do_not_change_the_order(dataset: pf.Dataset, threads: int) -> None:
    assert_equal(
        joined(dataset["train"], 2, epoch=2, batch_size=100, threads=threads),
        joined(dataset["train"], 2, epoch=2, batch_size=100),
    )


def test_options_are_checked_and_waiting_ranks_are_told(dataset: pf.Dataset) -> None:
    with pytest.raises(pf.OptionError, match="lanes=40"):
        pf.Loader(dataset["train"], 64, rank=0, world_size=40)
    with pytest.raises(pf.OptionError, match="threads=0"):
        pf.Loader(dataset["train"], 64, threads=0)
    with pytest.warns(UserWarning, match=r"32 lanes over 24 ranks keep them 67% busy; lanes=48"):
        pf.Loader(dataset["train"], 64, rank=0, world_size=24)


def test_keys_can_be_left_out(dataset: pf.Dataset) -> None:
    batch = next(iter(pf.Loader(dataset["train"], 64, keys=False)))
    assert batch.entity is None
    assert batch.date is None
    assert batch.to("cpu").features is batch.features


def damaged(dataset: pf.Dataset, tmp_path: Path) -> tuple[pf.Dataset, Path]:
    copy = Path(shutil.copytree(dataset.folder.path(), tmp_path / "copy.zarr"))
    return pf.open(copy), copy / "train" / "features" / "c" / "1" / "0"


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_damage_stops_the_rank_that_reads_it(dataset: pf.Dataset, tmp_path: Path, damage: str) -> None:
    copy, shard = damaged(dataset, tmp_path)
    whole = shard.read_bytes()
    if damage == "flip":
        shard.write_bytes(whole[:500] + bytes([whole[500] ^ 1]) + whole[501:])
    elif damage == "truncate":
        shard.write_bytes(whole[: len(whole) // 2])
    else:
        shard.unlink()
    with pytest.raises(pf.CorruptDatasetError, match=rf"{shard}.*rows \d+ to \d+ of train/features"):
        for _ in pf.Loader(copy["train"], 64):
            pass


def test_twenty_epochs_leave_no_thread_descriptor_or_memory(dataset: pf.Dataset) -> None:
    loader, process = pf.Loader(dataset["train"], 64), psutil.Process()

    def epochs(count: int) -> tuple[int, int, int]:
        for _ in range(count):
            for _batch in loader:
                pass
        return threading.active_count(), len(os.listdir("/proc/self/fd")), process.memory_info().rss

    epochs(5)
    threads, files, memory = epochs(5)
    later = epochs(20)
    assert later[:2] == (threads, files)
    assert later[2] - memory < 8e6


def test_reading_ahead_holds_what_the_formula_says(prepare: Any) -> None:
    from panels import make_panel

    panel = make_panel(num_stocks=100, num_dates=500, num_features=8)
    split = pf.DateSplit(train=(None, None))
    ds = prepare(panel, split=split, chunk_rows=1024, shard_bytes="1MiB")
    loader = pf.Loader(ds["train"], 1000, lanes=8, rank=0, world_size=2)
    for batch in loader:
        assert len(batch) == 500
    rings = sum(array.nbytes for group in loader._spare[0] for array in group.values())
    assert 0.8 * loader.memory_bytes < rings <= loader.memory_bytes
    assert all(not ring.base for ring in loader._spare[0][0].values())
    for _ in loader:  # the second epoch takes the same memory again
        assert loader._spare == []
    assert len(loader._spare) == 1


def test_rings_hold_any_relation_of_batches_windows_and_lanes(dataset: pf.Dataset) -> None:
    """Batches larger than a window and than an epoch, shares that differ, a start in the middle of a window."""
    split = dataset["train"]
    for batch_size, lanes, window_chunks in [(1, 1, 1), (7, 5, 3), (64, 3, 1), (700, 2, 1), (1001, 6, 2), (10**6, 9, 2)]:
        options = {"lanes": lanes, "window_chunks": window_chunks}
        loader = pf.Loader(split, batch_size, **options)
        for first in {0, 1, len(loader) // 2, len(loader) - 1} & set(range(len(loader))):
            if len(loader) - first > 60:
                continue
            loader.load_state_dict(loader.state_dict() | {"epoch": 3, "step": first})
            for step, batch in enumerate(loader, start=first):
                rows = loader.order.epoch(3).rows(step, range(lanes))
                np.testing.assert_array_equal(batch.features, split.features[:][rows])
                np.testing.assert_array_equal(batch.date, split.date[:][rows])


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_worker_processes_of_a_data_loader_take_turns(dataset: pf.Dataset, workers: int, shuffle: bool) -> None:
    """Every batch once and in order, epoch after epoch, from a restored step, and with workers that stay."""
    split = dataset["train"]
    alone = pf.Loader(split, 100, shuffle=shuffle, lanes=5)
    epochs = [list(alone) for _ in range(2)]
    assert len(epochs[0]) > 7
    for stay in {False, workers > 0}:
        loader = pf.Loader(split, 100, shuffle=shuffle, lanes=5)
        under = DataLoader(loader, batch_size=None, num_workers=workers, persistent_workers=stay)
        assert len(under) == len(epochs[0])
        for epoch, expected in enumerate(epochs):
            if not stay:
                loader.set_epoch(epoch)
            same_batches(list(under), expected)
    loader = pf.Loader(split, 100, shuffle=shuffle, lanes=5)
    loader.load_state_dict(loader.state_dict() | {"epoch": 1, "step": 3})
    same_batches(list(DataLoader(loader, batch_size=None, num_workers=workers)), epochs[1][3:])


def test_a_position_saved_in_a_worker_process_continues_there(dataset: pf.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = pf.Loader(dataset["train"], 100)
    expected = list(loader)
    monkeypatch.setattr("panelflow.loader.get_worker_info", lambda: SimpleNamespace(id=1, num_workers=3))
    loader.set_epoch(0)
    reading = iter(loader)
    same_batches([next(reading), next(reading)], [expected[1], expected[4]])
    again = pf.Loader(dataset["train"], 100)
    again.load_state_dict(loader.state_dict())
    same_batches([next(iter(again))], [expected[7]])
    monkeypatch.undo()
    with pytest.raises(pf.CheckpointError, match="one of 3 worker processes"):
        again.load_state_dict(loader.state_dict())


def same_batches(left: list[pf.Batch], right: list[pf.Batch]) -> None:
    assert [(batch.epoch, batch.step) for batch in left] == [(batch.epoch, batch.step) for batch in right]
    for one, other in zip(left, right, strict=True):
        for name in ("features", "targets", "weight", "entity", "date"):
            assert getattr(one, name).equal(getattr(other, name))


class Numbers:
    """A reader whose rows are their own numbers, of an array of any size that is nowhere."""

    def __init__(self, rows: int, chunk_rows: int) -> None:
        self.grid = ArrayGrid("train/features", "<i8", (rows, 1), chunk_rows, chunk_rows, None)
        self.buffer_bytes = 8 * chunk_rows + 4

    def read_chunk(self, chunk: int, buffer: np.ndarray | None = None) -> np.ndarray:
        size = self.grid.chunk_rows
        buffer = np.empty(self.buffer_bytes, np.uint8) if buffer is None else buffer
        rows = buffer[: 8 * size].view(np.int64).reshape(size, 1)
        rows[:, 0] = np.arange(chunk * size, (chunk + 1) * size)
        return rows[: max(self.grid.num_rows - chunk * size, 0)]


def numbered(order: Order, world: int, rank: int) -> pf.Loader:
    reader = Numbers(order.num_rows, order.chunk_rows)
    split = SimpleNamespace(
        num_rows=order.num_rows,
        chunk_rows=order.chunk_rows,
        name="train",
        dataset=SimpleNamespace(dataset_id="numbers"),
        readers=lambda: {"features": reader, "targets": reader},
    )
    options = {name: getattr(order, name) for name in ("shuffle", "drop_last", "seed", "lanes", "window_chunks")}
    return pf.Loader(split, order.batch_size, rank=rank, world_size=world, **options)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.* lanes over .* ranks keep them")
@settings(max_examples=60, deadline=None)
@given(orders(), st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1, 2, 3])), max_size=5))
def test_any_sequence_of_stops_and_worlds_is_one_uninterrupted_run(order: Order, segments: list[tuple[int, int]]) -> None:
    """Train k steps, stop, go on with another number of ranks: every global batch is what the order says, none twice."""
    state = numbered(order, 1, 0).state_dict()
    epoch, step = 0, 0
    for steps, world in segments:
        world = min(world, order.lanes)
        loaders = [numbered(order, world, rank) for rank in range(world)]
        for loader in loaders:
            loader.load_state_dict(state)
        parts = [list(itertools.islice(loader, steps)) for loader in loaders]
        for batches in zip(*parts, strict=True):
            assert {(batch.epoch, batch.step) for batch in batches} == {(epoch, step)}
            rows = np.concatenate([batch.features[:, 0] for batch in batches])
            np.testing.assert_array_equal(rows, order.epoch(epoch).rows(step, range(order.lanes)))
            step += 1
        assert len(parts[0]) == min(steps, max(order.steps - (step - len(parts[0])), 0))
        state = loaders[-1].state_dict()
        if step == order.steps:
            epoch, step = epoch + 1, 0
