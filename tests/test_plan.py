from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import panelflow as pf
from panelflow.budget import BASE_BYTES, Budget, check_budget, make_budget, unit_bytes_for
from panelflow.plan import MiB, make_buckets, make_layout, make_shards
from panelflow.source import Columns
from panelflow.splits import Assignment


def columns(features: int, targets: int = 1, weight: str | None = None) -> Columns:
    return Columns("e", "d", tuple(f"f{i}" for i in range(features)), tuple(f"t{i}" for i in range(targets)), weight)


@pytest.mark.parametrize("features", [1, 2, 5, 32, 200, 5000])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_chunks_are_of_one_to_two_mib_and_shards_near_their_size(features: int, dtype: str) -> None:
    layout = make_layout(columns(features), dtype, None, 64 * MiB)
    row_bytes = features * np.dtype(dtype).itemsize
    assert MiB < layout.chunk_rows * row_bytes <= 2 * MiB
    assert layout.chunk_rows & (layout.chunk_rows - 1) == 0
    assert layout.shard_rows % layout.chunk_rows == 0
    counted = max(row_bytes, 32)  # a narrow row counts as 32 bytes, so that sorting the keys of a shard stays cheap
    assert 64 * MiB - layout.chunk_rows * counted < layout.shard_rows * counted <= 64 * MiB
    assert make_budget(layout, MiB, 0, 1, 2**30).worker < 2**30


@st.composite
def panels(draw: st.DrawFn) -> tuple[Assignment, np.ndarray, list[str], int]:
    splits = draw(st.integers(1, 3))
    rows = np.array(draw(st.lists(st.integers(0, 50), min_size=1, max_size=30)), dtype=np.int64)
    labels = np.array([draw(st.integers(-2, splits - 1)) for _ in rows], dtype=np.int16)
    orders = [draw(st.sampled_from(["hash", "date"])) for _ in range(splits)]
    return Assignment(tuple("abc"[:splits]), labels, labels), rows, orders, draw(st.integers(1, 60))


@given(panels(), st.integers(0, 2**32))
def test_buckets_follow_the_order_of_their_split(case: tuple[Assignment, np.ndarray, list[str], int], seed: int) -> None:
    assignment, rows, orders, bucket_rows = case
    buckets = make_buckets(assignment, rows, orders, bucket_rows)
    date_index = np.repeat(np.arange(len(rows)), rows)
    hashes = np.random.default_rng(seed).integers(0, 2**64, size=len(date_index), dtype=np.uint64, endpoint=False)
    for index, order in enumerate(orders):
        mine = assignment.labels[date_index] == index
        dates, keys = date_index[mine], hashes[mine]
        found = buckets.of(dates, keys)
        assert (buckets.split[found] == index).all()
        position = np.lexsort((keys,)) if order == "hash" else np.lexsort((keys, dates))
        assert (np.diff(found[position]) >= 0).all()
        if order == "date" and len(found):
            assert np.bincount(found)[found].max() <= max(bucket_rows, rows.max())


@given(st.lists(st.lists(st.integers(0, 40), max_size=12), min_size=1, max_size=3), st.integers(1, 30))
def test_shards_tile_their_split(rows: list[list[int]], shard_rows: int) -> None:
    from panelflow.plan import Buckets

    split = np.array([i for i, counts in enumerate(rows) for _ in counts], dtype=np.int16)
    counts = np.array([count for part in rows for count in part], dtype=np.int64)
    none = np.zeros(1, np.int32)
    shards = make_shards(Buckets(none, none, split), counts, len(rows), shard_rows)
    for index, part in enumerate(rows):
        mine = [shard for shard in shards if shard.split == index]
        stream = [(b, i) for b in np.flatnonzero(split == index) for i in range(counts[b])]
        assert [shard.num_rows for shard in mine[:-1]] == [shard_rows] * max(len(mine) - 1, 0)
        assert sum(shard.num_rows for shard in mine) == sum(part)
        for shard in mine:
            within = [(b, i) for b, i in stream if shard.first_bucket <= b < shard.stop_bucket]
            assert within[shard.skip : shard.skip + shard.num_rows] == stream[shard.start : shard.stop]
            assert shard.skip < max(counts[shard.first_bucket], 1)


def test_memory_does_not_know_the_number_of_rows_and_is_refused_with_numbers() -> None:
    layout = make_layout(columns(32), "float32", None, 64 * MiB)
    budget = make_budget(layout, unit_bytes_for(2 * 2**30, 1, 2 + layout.width), 0, 1, 2 * 2**30)
    assert budget.worker < 2**30
    assert unit_bytes_for(2**30, 4, 35) < unit_bytes_for(4 * 2**30, 1, 35) <= 64 * MiB
    assert unit_bytes_for(2**30, 4, 4) < unit_bytes_for(2**30, 4, 35)
    check_budget(budget, None)
    check_budget(budget, budget.worker)
    with pytest.raises(pf.MemoryBudgetError, match=rf"memory_limit={budget.worker - 1}"):
        check_budget(budget, budget.worker - 1)
    assert Budget(1, 2, 3, threads=2).worker == BASE_BYTES + 6
