"""Bytes of one shard: the Zarr v3 sharding codec, written and read a chunk at a time.

A shard file is its inner chunks one after another, then an index of (offset, length) as little-endian uint64 pairs and the
crc32c of the index (Zarr specification, codec ``sharding_indexed`` 1.0, index at the end). Each inner chunk is its bytes, zstd
compressed where asked for, and their crc32c. zarr-python reads and writes the same files, which tests check both ways; it is
not used here because its whole-shard write holds more than two further copies of the shard, and because its event loop
does not survive a fork.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
from numcodecs.zstd import Zstd

from panelflow.errors import CorruptDatasetError
from panelflow.files import Folder

_ABSENT = np.iinfo(np.uint64).max
_ZSTD_LEVEL = 3
_CHECKSUM_BYTES = 4


@dataclass(frozen=True)
class ArrayGrid:
    """One array of a split and how it is cut.

    Attributes
    ----------
    path
        Path of the array in the dataset, for example ``train/features``.
    shape
        Its full shape; the first axis counts rows.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    chunk_rows: int
    shard_rows: int
    compression: str | None

    @property
    def num_rows(self) -> int:
        return self.shape[0]

    @property
    def num_shards(self) -> int:
        return -(-self.num_rows // self.shard_rows)

    @property
    def chunks_per_shard(self) -> int:
        return self.shard_rows // self.chunk_rows

    @cached_property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @property
    def fill_value(self) -> float | int:
        """What a plain Zarr reader sees in a shard that is gone; panelflow's own reader raises instead."""
        return float("nan") if np.dtype(self.dtype).kind == "f" else -1

    def key(self, shard: int) -> str:
        """Path of a shard's file in the dataset."""
        return f"{self.path}/c/{shard}" + "/0" * (len(self.shape) - 1)

    def shard_range(self, shard: int) -> tuple[int, int]:
        return shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.num_rows)

    def plain_size(self, shard: int) -> int:
        """Bytes of an uncompressed shard file."""
        start, stop = self.shard_range(shard)
        chunks = -(-(stop - start) // self.chunk_rows)
        return chunks * (self.chunk_rows * self.row_bytes + 4) + 16 * self.chunks_per_shard + 4


def encode_shard(grid: ArrayGrid, blocks: Iterable[npt.NDArray[Any]]) -> Iterator[bytes | memoryview]:
    """Bytes of a shard file, one inner chunk at a time.

    Parameters
    ----------
    blocks
        The rows of the shard, at most ``shard_rows``, in pieces; all but the last are whole chunks.
    """
    index = np.full((grid.chunks_per_shard, 2), _ABSENT, dtype="<u8")
    offset = number = 0
    for chunk in _chunks_of(grid, blocks):
        assert number < grid.chunks_per_shard, (grid, number)
        if len(chunk) < grid.chunk_rows:
            padding = np.full((grid.chunk_rows - len(chunk), *chunk.shape[1:]), grid.fill_value, dtype=chunk.dtype)
            chunk = np.concatenate([chunk, padding])
        payload = chunk.data.cast("B")
        encoded = payload if grid.compression is None else memoryview(Zstd(level=_ZSTD_LEVEL).encode(payload))
        yield encoded
        yield _crc32c(encoded)
        index[number] = offset, len(encoded) + 4
        offset += len(encoded) + 4
        number += 1
    assert number, grid
    yield index.tobytes()
    yield _crc32c(index.tobytes())


def _chunks_of(grid: ArrayGrid, blocks: Iterable[npt.NDArray[Any]]) -> Iterator[npt.NDArray[Any]]:
    whole = True
    for block in blocks:
        assert whole, (grid, "a block after one that ends within a chunk")
        assert block.dtype == np.dtype(grid.dtype), (grid, block.dtype)
        whole = len(block) % grid.chunk_rows == 0
        for start in range(0, len(block), grid.chunk_rows):
            yield np.ascontiguousarray(block[start : start + grid.chunk_rows])


class RowDigest:
    """SHA-256 of decoded little-endian values, row-major, block by block."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def update(self, rows: npt.NDArray[Any]) -> None:
        values = np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("<"))
        self._digest.update(values.reshape(-1).view(np.uint8).data)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def digest_rows(rows: npt.NDArray[Any]) -> str:
    """Digest of an array that is there as a whole; see :class:`RowDigest`."""
    digest = RowDigest()
    digest.update(rows)
    return digest.hexdigest()


def _crc32c(data: bytes | memoryview) -> bytes:
    return int(google_crc32c.value(_as_array(data))).to_bytes(4, "little")


def _as_array(data: bytes | memoryview) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, dtype=np.uint8)


class ShardReader:
    """Reads whole inner chunks of one array; thread-safe, picklable, opens no file between calls.

    Parameters
    ----------
    folder
        Root of the dataset.
    grid
        The array.
    """

    def __init__(self, folder: Folder, grid: ArrayGrid) -> None:
        self.folder, self.grid = folder, grid
        self._index = lru_cache(maxsize=4096)(self._read_index)

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardReader, (self.folder, self.grid)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a buffer for :meth:`read_chunk`: a chunk and its checksum."""
        return self.grid.chunk_rows * self.grid.row_bytes + _CHECKSUM_BYTES

    def read_chunk(self, chunk: int, buffer: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[Any]:
        """Rows of an inner chunk, without padding.

        Parameters
        ----------
        buffer
            uint8 [:attr:`buffer_bytes`], which the rows are then a view of, at its start; by default a new one.

        Raises
        ------
        CorruptDatasetError
            The shard is missing, truncated or altered; names the file and the rows.
        """
        grid = self.grid
        shard, number = divmod(chunk, grid.chunks_per_shard)
        offset, length = self._index(shard)[number].tolist()
        if offset == _ABSENT:
            raise self._corrupt(shard, f"chunk {number} is absent", chunk)
        buffer = np.empty(self.buffer_bytes, dtype=np.uint8) if buffer is None else buffer
        if grid.compression is None and length != self.buffer_bytes:
            raise self._corrupt(shard, f"chunk {number} has {length:,} bytes in place of {self.buffer_bytes:,}", chunk)
        encoded = buffer if grid.compression is None else np.empty(length, dtype=np.uint8)
        filled = self._read_into(shard, offset, encoded)
        if filled != length or length < _CHECKSUM_BYTES:
            raise self._corrupt(shard, f"chunk {number} wants {length:,} bytes and has {filled:,}: truncated", chunk)
        payload = encoded[:-_CHECKSUM_BYTES]
        if _crc32c(payload.data) != encoded[-_CHECKSUM_BYTES:].tobytes():
            raise self._corrupt(shard, f"the checksum of chunk {number} does not match: its bytes were altered", chunk)
        values = buffer[:-_CHECKSUM_BYTES]
        if grid.compression is not None:
            decoded = Zstd().decode(payload)
            if len(decoded) != len(values):
                raise self._corrupt(shard, f"chunk {number} decodes to {len(decoded):,} bytes in place of {len(values):,}", chunk)
            values[:] = np.frombuffer(decoded, dtype=np.uint8)
        rows = values.view(np.dtype(grid.dtype).newbyteorder("<")).reshape(grid.chunk_rows, *grid.shape[1:])
        return rows[: min(grid.chunk_rows, grid.num_rows - chunk * grid.chunk_rows)]

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows ``[start, stop)``, read by whole chunks into one new array."""
        out = np.empty((max(stop - start, 0), *self.grid.shape[1:]), dtype=self.grid.dtype)
        position = start
        while position < stop:
            chunk, inside = divmod(position, self.grid.chunk_rows)
            rows = self.read_chunk(chunk)[inside : inside + stop - position]
            out[position - start : position - start + len(rows)] = rows
            position += len(rows)
        return out

    def read_shard(self, shard: int) -> npt.NDArray[Any]:
        return self.read_rows(*self.grid.shard_range(shard))

    def _read_index(self, shard: int) -> npt.NDArray[np.uint64]:
        length = 16 * self.grid.chunks_per_shard + 4
        size = self.folder.size(self.grid.key(shard))
        if size is None:
            raise self._corrupt(shard, "the file is missing")
        data = self._read(shard, max(size - length, 0), length)
        if len(data) != length or _crc32c(data[:-4]) != data[-4:]:
            raise self._corrupt(shard, f"the chunk index at the end of {size:,} bytes is not whole: truncated or altered")
        return np.frombuffer(data[:-4], dtype="<u8").reshape(-1, 2)

    def _read(self, shard: int, start: int, length: int) -> bytes:
        try:
            return self.folder.read(self.grid.key(shard), start, length)
        except FileNotFoundError:
            raise self._corrupt(shard, "the file is missing") from None

    def _read_into(self, shard: int, start: int, target: npt.NDArray[np.uint8]) -> int:
        try:
            return self.folder.read_into(self.grid.key(shard), start, target)
        except FileNotFoundError:
            raise self._corrupt(shard, "the file is missing") from None

    def _corrupt(self, shard: int, what: str, chunk: int | None = None) -> CorruptDatasetError:
        start, stop = self.grid.shard_range(shard)
        if chunk is not None:
            start = chunk * self.grid.chunk_rows
            stop = min(start + self.grid.chunk_rows, self.grid.num_rows)
        return CorruptDatasetError(
            f"{self.folder.path(self.grid.key(shard))}: {what} (rows {start:,} to {stop:,} of {self.grid.path}). "
            f"Restore the file from a copy, or prepare the dataset again."
        )
