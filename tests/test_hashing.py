from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from panelflow.hashing import add_checksums, fold, hash_entities, key_checksum, mix

# Written down once and never to change under HASH_VERSION 1; the documentation of the data format repeats them.
MIX_VECTORS = {0: 0, 1: 0x5692161D100B05E5, 0x9E3779B97F4A7C15: 0xE220A8397B1DCDAF}
VECTORS = (
    ["55ece9c6f8421b12", "15f0eb1449969cc1", "69b11c259596c4d8"],
    ["76882b82690a1cd9", "e21fae3538aa00a3", "d5e37cbb1335e9ba"],
)


def test_mix_is_the_splitmix64_finaliser() -> None:
    # 0xE220A8397B1DCDAF is the first output of splitmix64 seeded with 0 in the reference implementation.
    words = np.array(list(MIX_VECTORS), dtype=np.uint64)
    np.testing.assert_array_equal(mix(words), np.array(list(MIX_VECTORS.values()), dtype=np.uint64))


def test_vectors_are_fixed() -> None:
    dates = np.array([0, 1577836800000000000, -1], dtype=np.int64)
    hashes = fold(0, hash_entities(["AAPL", "BRK.B", "NA"]), dates)
    assert [f"{value:016x}" for value in hashes.tolist()] == VECTORS[0]
    hashes = fold(-5, hash_entities([7, 2**60, -1]), dates)
    assert [f"{value:016x}" for value in hashes.tolist()] == VECTORS[1]


def test_text_and_integers_differ() -> None:
    text, number, padded = hash_entities(["7", 7, "007"]).tolist()
    assert len({text, number, padded}) == 3


def test_any_seed_gives_another_order() -> None:
    words = hash_entities([f"S{i}" for i in range(100)])
    assert not np.array_equal(np.argsort(fold(0, words)), np.argsort(fold(1, words)))
    np.testing.assert_array_equal(fold(-1, words), fold(2**64 - 1, words))


@pytest.mark.parametrize("base", [0, 2**60], ids=["small", "near 2**60"])
def test_buckets_are_even_where_floats_would_collapse(base: int) -> None:
    entities = hash_entities([base + i for i in range(2000)])
    dates = np.arange(20, dtype=np.int64)[:, None] * 86_400_000_000_000
    hashes = fold(0, entities[None, :], dates).ravel()
    counts = np.bincount((hashes >> np.uint64(58)).astype(np.int64), minlength=64)
    expected = len(hashes) / 64
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert len(np.unique(hashes)) == len(hashes)
    assert 30 < chi_square < 110  # 63 degrees of freedom: far beyond the 99.9 % interval


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_no_process_hashes_differently(seed: str) -> None:
    code = "from panelflow.hashing import *; print(int(fold(3, hash_entities(['AAPL']), hash_entities([7]))[0]))"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
    assert int(done.stdout) == int(fold(3, hash_entities(["AAPL"]), hash_entities([7]))[0])


def test_checksum_is_of_a_set() -> None:
    hashes = hash_entities([f"S{i}" for i in range(1000)])
    whole = key_checksum(hashes)
    assert key_checksum(hashes[::-1]) == whole
    assert add_checksums([key_checksum(hashes[:300]), key_checksum(hashes[300:])]) == whole
    assert key_checksum(np.concatenate([hashes, hashes[:1]])) != whole
    assert key_checksum(hashes[1:]) != whole
