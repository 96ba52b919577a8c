"""Let worker processes keep freed pages while an exchange runs.

Every block of a unit or a shard is freed before the next is taken. glibc, as Dask starts its workers, hands each back to the
kernel, which then clears the same pages again: about a third of an exchange's processor time. Elsewhere than on glibc nothing is
set. The largest blocks, beyond what glibc keeps, are buffers that a thread uses again.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_BUFFERS = threading.local()
_ARROW_POOL: Any = None

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of mallopt(3)
_DASK_TRIM_THRESHOLD = 65536


def reused_array(name: str, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    """An array of undefined values in a buffer that this thread used before under the same name, grown where it is too small."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    buffer: npt.NDArray[np.uint8] | None = getattr(_BUFFERS, name, None)
    if buffer is None or len(buffer) < size:
        setattr(_BUFFERS, name, None)  # the old one goes before the new one comes
        buffer = np.empty(size, dtype=np.uint8)
        setattr(_BUFFERS, name, buffer)
    return buffer[:size].view(dtype).reshape(shape)


def keep_pages(spare: int) -> None:
    """Serve blocks of up to 32 MiB, the most that glibc allows, from the heap, and keep ``spare`` freed bytes of it.

    Arrow takes its memory there too, so that one bound holds for all.
    """
    global _ARROW_POOL
    if _set({_MMAP_THRESHOLD: 32 * 2**20, _TRIM_THRESHOLD: spare, _TOP_PAD: spare // 8}) and _ARROW_POOL is None:
        _ARROW_POOL = pa.default_memory_pool()
        pa.set_memory_pool(pa.system_memory_pool())


def release_pages() -> None:
    """Give the pages and all buffers back, and return to what Dask and Arrow had set."""
    global _BUFFERS, _ARROW_POOL
    _BUFFERS = threading.local()
    if _ARROW_POOL is not None:
        pa.set_memory_pool(_ARROW_POOL)
        _ARROW_POOL = None
    trim = int(os.environ.get("MALLOC_TRIM_THRESHOLD_", _DASK_TRIM_THRESHOLD))
    _set({_MMAP_THRESHOLD: 128 * 1024, _TRIM_THRESHOLD: trim, _TOP_PAD: 0})


def _set(options: dict[int, int]) -> bool:
    """Set options of glibc, where it is that."""
    library = ctypes.CDLL(None)
    if not (hasattr(library, "mallopt") and hasattr(library, "malloc_trim")):
        return False
    for name, value in options.items():
        library.mallopt(name, value)
    library.malloc_trim(0)
    return True
