"""Let worker processes keep freed pages while an exchange runs.

Every block of a unit or a shard is freed before the next is taken. glibc, as Dask starts its workers, hands each back to the
kernel, which then clears the same pages again: about a third of an exchange's processor time. Elsewhere than on glibc these
functions do nothing.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of mallopt(3)
_DASK_TRIM_THRESHOLD = 65536


def keep_pages() -> None:
    """Serve blocks of up to 32 MiB, the most that glibc allows, from the heap, and keep 128 MiB of it when they are freed."""
    _set({_MMAP_THRESHOLD: 32 * 2**20, _TRIM_THRESHOLD: 128 * 2**20, _TOP_PAD: 16 * 2**20})


def release_pages() -> None:
    """Give the pages back and return to what Dask set."""
    trim = int(os.environ.get("MALLOC_TRIM_THRESHOLD_", _DASK_TRIM_THRESHOLD))
    _set({_MMAP_THRESHOLD: 128 * 1024, _TRIM_THRESHOLD: trim, _TOP_PAD: 0})


def _set(options: dict[int, int]) -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        for name, value in options.items():
            library.mallopt(name, value)
        library.malloc_trim(0)
