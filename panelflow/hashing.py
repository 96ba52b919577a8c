"""(entity, date, seed) -> a stable 64-bit hash: the one source of randomness in a dataset.

The function is fixed for ever under its version number, so that a dataset can be rebuilt bit for bit on any machine:

* ``mix`` is the finaliser of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
  OOPSLA 2014), a bijection of 64-bit words;
* ``fold(seed, w1, w2, ...)`` starts with ``h = mix(seed + GAMMA)`` and absorbs each word by ``h = mix(h ^ mix(w + GAMMA))``;
* an entity becomes a word once per distinct value: blake2b with an 8-byte digest, read as little-endian, of a type tag
  (``text:`` or ``int:``) and the canonical text in UTF-8;
* a date is its int64 count of nanoseconds since 1970-01-01T00:00 UTC, reinterpreted as uint64.

Test vectors stand in ``tests/test_hashing.py`` and in the documentation of the data format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

HASH_VERSION = 1

Words = npt.NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def mix(words: Words) -> Words:
    """Finalise 64-bit words by splitmix64; a bijection, vectorised."""
    with np.errstate(over="ignore"):
        words = words ^ (words >> np.uint64(30))
        words *= _MULTIPLIER_1
        words ^= words >> np.uint64(27)
        words *= _MULTIPLIER_2
        words ^= words >> np.uint64(31)
    return words


def fold(seed: int, *words: npt.NDArray[Any] | int) -> Words:
    """Hash a seed and any number of 64-bit words, broadcast against each other.

    Parameters
    ----------
    seed
        Any Python integer; its lowest 64 bits count.
    words
        Integers or arrays of int64 or uint64; int64 is reinterpreted, not converted.

    Returns
    -------
    uint64 array of the broadcast shape
    """
    state = absorbed(_as_words(seed))
    for word in words:
        state = mix(state ^ absorbed(_as_words(word)))
    return state


def absorbed(words: Words) -> Words:
    """What :func:`fold` takes of a word: ``fold(seed, v, w)`` is ``mix(fold(seed, v) ^ absorbed(w))``."""
    with np.errstate(over="ignore"):
        return mix(words + _GAMMA)


def _as_words(value: npt.NDArray[Any] | int) -> Words:
    if isinstance(value, int):
        return np.array([value & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    assert value.dtype in (np.int64, np.uint64), value.dtype
    return value.view(np.uint64)


def hash_entities(names: Iterable[str | int]) -> Words:
    """Hash each distinct entity once: blake2b of its type tag and canonical text, shape [len(names)]."""
    return np.fromiter((_hash_entity(name) for name in names), dtype=np.uint64)


@lru_cache(maxsize=2**16)  # a worker meets the same names in every file
def _hash_entity(name: str | int) -> int:
    tag = b"text:" if isinstance(name, str) else b"int:"
    digest = hashlib.blake2b(tag + str(name).encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def key_checksum(hashes: Words) -> int:
    """Order-independent checksum of key hashes: their sum modulo 2**64 after one more mix."""
    return int(mix(hashes).sum(dtype=np.uint64))


def add_checksums(checksums: Iterable[int]) -> int:
    """Checksum of a union of rows from the checksums of its parts."""
    return sum(checksums) & 0xFFFFFFFFFFFFFFFF
