from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from panelflow.sorting import sort_rows

WORDS = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 3), st.integers(2**63, 2**63 + 2))
ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2**31 - 1) | st.integers(0, 4), WORDS), max_size=60)


@given(ROWS, st.booleans())
def test_the_order_is_that_of_a_plain_stable_sort(rows: list[tuple[int, int, int]], by_date: bool) -> None:
    """Hashes that share their upper half, equal hashes of different keys and equal keys included."""
    codes, dates = (np.array([row[i] for row in rows], dtype=np.int32) for i in (0, 1))
    hashes = np.array([row[2] for row in rows], dtype=np.uint64)
    keys = [(dates[i], hashes[i], codes[i]) if by_date else (hashes[i], dates[i], codes[i]) for i in range(len(rows))]
    expected = sorted(range(len(rows)), key=keys.__getitem__)
    assert sort_rows(codes, dates, hashes, by_date=by_date).tolist() == expected


@pytest.mark.parametrize("by_date", [False, True])
def test_many_rows(by_date: bool) -> None:
    generator = np.random.default_rng(0)
    hashes = generator.integers(0, 2**64, size=300_000, dtype=np.uint64, endpoint=False)
    hashes[1::2] = hashes[::2]
    codes, dates = np.arange(len(hashes), dtype=np.int32) % 7, generator.integers(0, 40, len(hashes)).astype(np.int32)
    order = sort_rows(codes, dates, hashes, by_date=by_date)
    expected = np.lexsort((codes, hashes, dates)) if by_date else np.lexsort((codes, dates, hashes))
    np.testing.assert_array_equal(order, expected)
