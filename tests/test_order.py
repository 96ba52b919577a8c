from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import panelflow as pf
from panelflow.order import Order

WORLDS = (1, 2, 3, 5, 8)


@st.composite
def orders(draw: st.DrawFn, shuffle: bool | None = None) -> Order:
    batch = draw(st.integers(1, 70))
    return Order(
        num_rows=draw(st.integers(1, 700)),
        chunk_rows=draw(st.sampled_from([1, 2, 8, 16, 64, 256])),
        batch_size=batch,
        lanes=draw(st.integers(1, min(batch, 40))),
        seed=draw(st.integers(-5, 5)),
        shuffle=draw(st.booleans()) if shuffle is None else shuffle,
        drop_last=draw(st.booleans()),
        window_chunks=draw(st.integers(1, 3)),
    )


@given(orders(), st.integers(0, 3))
def test_every_row_once_in_batches_of_the_right_size(order: Order, number: int) -> None:
    epoch, lanes = order.epoch(number), range(order.lanes)
    batches = [epoch.rows(step, lanes) for step in range(order.steps)]
    assert all(len(batch) == order.batch_size for batch in batches[: order.full_steps])
    assert len(batches) == (order.num_rows // order.batch_size if order.drop_last else -(-order.num_rows // order.batch_size))
    rows = np.concatenate([*batches, np.empty(0, np.int64)])
    assert len(np.unique(rows)) == len(rows)
    assert len(rows) == (order.full_steps * order.batch_size if order.drop_last else order.num_rows)
    assert rows.size == 0 or (rows.min() >= 0 and rows.max() < order.num_rows)
    if not order.shuffle:
        np.testing.assert_array_equal(rows, np.arange(len(rows)))


@given(orders(), st.integers(0, 2))
@settings(max_examples=25)
def test_ranks_only_divide_the_global_batch(order: Order, number: int) -> None:
    epoch = order.epoch(number)
    for world in (world for world in WORLDS if world <= order.lanes):
        shares = [order.lanes_of(rank, world) for rank in range(world)]
        for step in range(order.steps):
            joined = np.concatenate([epoch.rows(step, lanes) for lanes in shares])
            np.testing.assert_array_equal(joined, epoch.rows(step, range(order.lanes)))


@given(orders(shuffle=True), st.integers(0, 2))
def test_windows_tile_each_lane_and_chunks_are_read_once_per_lane(order: Order, number: int) -> None:
    epoch, read = order.epoch(number), []
    for lane in range(order.lanes):
        row, length = 0, int(np.diff(order.lane_starts)[lane])
        while row < length:
            window = epoch.window_at(lane, row)
            assert window.start == row
            assert sorted(window.permutation.tolist()) == list(range(window.stop - window.start))
            assert sum(stop - start for _, start, stop in window.pieces) == window.stop - window.start
            assert len(window.pieces) <= order.window_chunks
            read += [chunk for chunk, _, _ in window.pieces]
            row = window.stop
    chunks = -(-order.num_rows // order.chunk_rows)
    assert set(read) == set(range(chunks))
    assert len(read) <= chunks + order.lanes - 1  # once each, and once more for each lane boundary inside one


def test_epochs_seeds_and_lanes_change_the_order() -> None:
    def first(**changes: int) -> list[int]:
        order = Order(**{"num_rows": 1000, "chunk_rows": 16, "batch_size": 50, "lanes": 8, "seed": 0, **changes})  # type: ignore[arg-type]
        return order.epoch(0).rows(0, range(order.lanes)).tolist()

    base = Order(num_rows=1000, chunk_rows=16, batch_size=50, lanes=8)
    assert first() == base.epoch(0).rows(0, range(8)).tolist()
    others = [first(seed=1), first(lanes=4), base.epoch(1).rows(0, range(8)).tolist()]
    assert all(set(first()) != set(other) for other in others)


def test_the_order_is_fixed_for_ever() -> None:
    order = Order(num_rows=100, chunk_rows=8, batch_size=10, lanes=3, seed=7)
    assert order.epoch(2).rows(0, range(3)).tolist() == [68, 71, 70, 78, 30, 96, 97, 59, 89, 94]


def test_lanes_and_ranks_that_do_not_fit_are_refused() -> None:
    order = Order(num_rows=100, chunk_rows=8, batch_size=10, lanes=3)
    with pytest.raises(pf.OptionError, match=r"4 ranks.*lanes=4.*lanes=3"):
        order.lanes_of(0, 4)
    with pytest.raises(pf.OptionError, match="rank=3"):
        order.lanes_of(3, 3)
    with pytest.raises(pf.OptionError, match="lanes=11"):
        Order(num_rows=100, chunk_rows=8, batch_size=10, lanes=11)
    with pytest.raises(pf.OptionError, match="batch_size=0"):
        Order(num_rows=100, chunk_rows=8, batch_size=0, lanes=1)
    assert Order(num_rows=10, chunk_rows=8, batch_size=32, lanes=32).efficiency(24) == pytest.approx(32 / 48)


def test_neighbours_on_disk_part() -> None:
    order = Order(num_rows=4096, chunk_rows=256, batch_size=64, lanes=8)
    rows = np.concatenate([order.epoch(0).rows(step, range(8)) for step in range(order.steps)])
    assert np.mean(np.abs(np.diff(rows)) == 1) < 0.02


def test_ten_to_the_ten_rows_start_at_once() -> None:
    started = time.process_time()
    tracemalloc.start()
    order = Order(num_rows=10**10, chunk_rows=8192, batch_size=8192, lanes=32)
    step = order.steps // 2
    rows = order.epoch(1).rows(step, order.lanes_of(3, 8))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(rows) == 8192 // 8
    assert time.process_time() - started < 2
    assert peak < 200e6
