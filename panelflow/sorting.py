"""Order of rows by their 64-bit position, in time linear in the rows.

Positions are hashes, or dates with hashes behind them. Rows are sorted by the upper half of what tells their positions apart, two
radix passes of 16 bits (numpy sorts 16-bit integers by counting); the few rows that tie are sorted once more by the whole key.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from panelflow.hashing import Words

Order = npt.NDArray[np.intp]


def sort_rows(codes: npt.NDArray[Any], date_index: npt.NDArray[Any], hashes: Words, *, by_date: bool) -> Order:
    """Order of rows by (hash, date, entity), or by (date, hash, entity).

    Parameters
    ----------
    codes, date_index
        int32 [rows]: entity codes, in the order of their names, and date indices.
    hashes
        uint64 [rows].

    Returns
    -------
    intp [rows]
        Stable: rows with equal keys keep the order they came in.
    """
    if len(hashes) == 0:
        return np.empty(0, dtype=np.intp)
    position = _position(date_index, hashes) if by_date else hashes
    low = position.min()
    bits = max(int(position.max() - low).bit_length() - 32, 0)
    upper = ((position - low) >> np.uint64(bits)).astype(np.uint32)
    order = _radix_sort(upper)
    upper = upper[order]
    equal = upper[1:] == upper[:-1]
    if equal.any():
        tied = np.flatnonzero(np.concatenate((equal, [False])) | np.concatenate(([False], equal)))
        rows = np.sort(order[tied])
        keys = (codes[rows], date_index[rows], hashes[rows])
        order[tied] = rows[np.lexsort((*keys, keys[1]) if by_date else keys)]
    return order


def _position(date_index: npt.NDArray[Any], hashes: Words) -> Words:
    """Date in the highest bits that its range takes, hash below."""
    date = (date_index - date_index.min()).astype(np.uint64)
    bits = int(date.max()).bit_length()
    return (date << np.uint64(64 - bits)) | (hashes >> np.uint64(bits)) if bits else hashes


def _radix_sort(keys: npt.NDArray[np.uint32]) -> Order:
    """Stable order of 32-bit keys: by their lower, then by their upper 16 bits."""
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    upper = (keys >> np.uint32(16)).astype(np.uint16)
    return order[np.argsort(upper[order], kind="stable")]
