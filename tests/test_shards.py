from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec

import panelflow as pf
from panelflow.files import Folder
from panelflow.shards import ArrayGrid, ShardReader, digest_rows, encode_shard

COMPRESSIONS = pytest.mark.parametrize("compression", [None, "zstd"])


def make_grid(rows: int, dtype: str, inner: tuple[int, ...], compression: str | None) -> ArrayGrid:
    return ArrayGrid("train/features", dtype, (rows, *inner), 16, 64, compression)


def make_rows(rows: int, dtype: str, inner: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(rows).integers(-1000, 1000, size=(rows, *inner)).astype(dtype)


def make_zarr(path: Path, grid: ArrayGrid) -> zarr.Array:
    codecs = [ZstdCodec(level=3)] if grid.compression else []
    return zarr.open_group(path, mode="a").create_array(
        grid.path,
        shape=grid.shape,
        dtype=grid.dtype,
        chunks=(grid.chunk_rows, *grid.shape[1:]),
        shards=(grid.shard_rows, *grid.shape[1:]),
        compressors=[*codecs, Crc32cCodec()],
        filters=None,
        fill_value=grid.fill_value,
        config={"write_empty_chunks": True},
    )


@COMPRESSIONS
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 63, 64, 65, 128, 150])
@pytest.mark.parametrize(("dtype", "inner"), [("float32", (3,)), ("float16", (3,)), ("int64", ()), ("int32", ())])
def test_zarr_reads_what_we_write_and_we_read_what_zarr_writes(
    tmp_path: Path, rows: int, dtype: str, inner: tuple[int, ...], compression: str | None
) -> None:
    grid, values = make_grid(rows, dtype, inner, compression), make_rows(rows, dtype, inner)
    array = make_zarr(tmp_path / "ours", grid)
    for shard in range(grid.num_shards):
        start, stop = grid.shard_range(shard)
        size = Folder(str(tmp_path / "ours")).write(grid.key(shard), encode_shard(grid, [values[start:stop]]))
        assert compression or size == grid.plain_size(shard)
    np.testing.assert_array_equal(array[:], values)
    make_zarr(tmp_path / "theirs", grid)[:] = values
    reader = ShardReader(Folder(str(tmp_path / "theirs")), grid)
    np.testing.assert_array_equal(reader.read_rows(0, rows), values)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(reader)).read_rows(rows // 2, rows), values[rows // 2 :])
    assert digest_rows(reader.read_rows(0, rows)) == digest_rows(values)


@COMPRESSIONS
def test_every_bit_survives(tmp_path: Path, compression: str | None) -> None:
    bits = np.array([0x80000000, 0x7FC00001, 0xFFC12345, 0x7F800001, 1, 0, 0x7F800000], dtype=np.uint32)
    values = np.tile(bits, 16)[:96].view(np.float32).reshape(32, 3)
    grid = make_grid(32, "float32", (3,), compression)
    folder = Folder(str(tmp_path))
    folder.write(grid.key(0), encode_shard(grid, [values]))
    np.testing.assert_array_equal(ShardReader(folder, grid).read_rows(0, 32).view(np.uint32), values.view(np.uint32))
    zeros = np.full((32, 3), -0.0, dtype=np.float32)
    folder.write(grid.key(0), encode_shard(grid, [zeros]))
    assert np.signbit(ShardReader(folder, grid).read_rows(0, 32)).all()


@COMPRESSIONS
def test_damage_is_loud_and_names_file_and_rows(tmp_path: Path, compression: str | None) -> None:
    grid = make_grid(150, "float32", (3,), compression)
    values, folder = make_rows(150, "float32", (3,)), Folder(str(tmp_path))
    for shard in range(3):
        folder.write(grid.key(shard), encode_shard(grid, [values[slice(*grid.shard_range(shard))]]))
    path = tmp_path / grid.key(1)
    whole = path.read_bytes()

    def read() -> None:
        reader = ShardReader(folder, grid)
        np.testing.assert_array_equal(reader.read_rows(0, 64), values[:64])
        reader.read_rows(64, 128)

    read()
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        with pytest.raises(pf.CorruptDatasetError, match=rf"{path}.*rows \d+ to \d+ of train/features"):
            read()
    for length in (0, 1, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(pf.CorruptDatasetError, match=rf"{path}.*truncated"):
            read()
    path.unlink()
    with pytest.raises(pf.CorruptDatasetError, match=rf"{path}: the file is missing \(rows 64 to 128"):
        read()


def test_a_shard_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))

    def parts() -> object:
        yield b"half of it"
        raise RuntimeError("killed here")

    with pytest.raises(RuntimeError):
        folder.write("train/features/c/0/0", parts())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_misaligned_shard_is_refused() -> None:
    grid = make_grid(150, "float32", (3,), None)
    with pytest.raises(AssertionError):
        list(encode_shard(grid, [make_rows(65, "float32", (3,))]))
