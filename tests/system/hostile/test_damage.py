"""Bit flips, cuts and deletions in every file of a checkpoint: each is found, and the file is named."""

from __future__ import annotations

import pytest

from holdfast.core.checkpoint.names import manifest_key, read_manifest, step_prefix
from holdfast.core.checkpoint.verifying import verify
from holdfast.errors import Corrupt, FormatError, HoldfastError, NotFound
from system.hostile.everything import read_everything

REGIONS = [
    "length",
    "header",
    "padding",
    "data start",
    "data",
    "data end",
    "extras",
    "table",
    "end",
]


def at(file, region: str) -> int:
    """A byte of each region of an image."""
    return {
        "length": 2,
        "header": 60,
        "padding": file.data - 1,
        "data start": file.data,
        "data": file.data + 200_001,
        "data end": file.extras - 1,
        "extras": file.extras + 40,
        "table": file.table + 3,
        "end": file.bytes - 1,
    }[region]


def flip(store, key: str, byte: int, bit: int = 3) -> None:
    data = bytearray(store.get(key))
    data[byte] ^= 1 << bit
    store.put(key, bytes(data))


def images(store):
    return [(step_prefix(1) + f.path, f) for f in read_manifest(store, 1).files]


def test_nothing_is_wrong_with_the_sound_one(store) -> None:
    read_everything(store)
    assert verify(store, 1).problems == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("region", REGIONS)
def test_a_flipped_bit_in_an_image(store, region, rank) -> None:
    key, file = images(store)[rank]
    flip(store, key, at(file, region))
    with pytest.raises(Corrupt) as caught:
        read_everything(store)
    assert caught.value.key == key
    assert caught.value.start <= at(file, region) < caught.value.stop
    assert caught.value.expected != caught.value.found
    (problem,) = verify(store, 1).problems
    assert problem.key == key
    assert problem.start <= at(file, region) < problem.stop


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("region", REGIONS)
def test_an_image_cut_short(store, region, rank) -> None:
    key, file = images(store)[rank]
    store.put(key, store.get(key)[: at(file, region)])
    with pytest.raises(Corrupt) as caught:
        read_everything(store)
    assert caught.value.key == key
    assert {p.key for p in verify(store, 1).problems} == {key}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_deleted_image(store, rank) -> None:
    key, _ = images(store)[rank]
    store.delete(key)
    with pytest.raises(NotFound) as caught:
        read_everything(store)
    assert caught.value.key == key
    assert {p.key for p in verify(store, 1).problems} == {key}


def test_a_deleted_manifest(store) -> None:
    store.delete(manifest_key(1))
    with pytest.raises(NotFound, match="no step 1"):
        read_everything(store)


def test_swapped_images(store) -> None:
    (one, _), (two, _) = images(store)
    first, second = store.get(one), store.get(two)
    store.put(one, second)
    store.put(two, first)
    with pytest.raises(Corrupt):
        read_everything(store)
    assert {p.key for p in verify(store, 1).problems} == {one, two}


def test_a_flipped_bit_anywhere_in_the_manifest(store) -> None:
    key = manifest_key(1)
    sound = store.get(key)
    for byte in range(len(sound)):
        flip(store, key, byte, byte % 8)
        with pytest.raises(FormatError) as caught:
            read_everything(store)
        assert caught.value.key == key, byte
        store.put(key, sound)


def test_a_manifest_cut_anywhere(store) -> None:
    key = manifest_key(1)
    sound = store.get(key)
    for length in range(len(sound)):
        store.put(key, sound[:length])
        with pytest.raises(FormatError) as caught:
            read_everything(store)
        assert caught.value.key == key, length


def test_damaged_manifests_are_problems_of_verify_not_crashes(store) -> None:
    key = manifest_key(1)
    sound = store.get(key)
    for byte in (0, 2, 14, 40, len(sound) // 2, len(sound) - 12, len(sound) - 1):
        flip(store, key, byte)
        assert {p.key for p in verify(store, 1).problems} == {key}, byte
        store.put(key, sound)


def test_a_manifest_of_another_step(store) -> None:
    store.put(manifest_key(7), store.get(manifest_key(1)))
    with pytest.raises(Corrupt, match="step 1, not 7"):
        read_everything(store, 7)


def test_unverified_reading_still_refuses_what_is_not_there(store) -> None:
    from holdfast.core.checkpoint.opened import Checkpoint

    key, file = images(store)[0]
    store.put(key, store.get(key)[: file.data + 100])
    with pytest.raises(HoldfastError):
        Checkpoint.open(store.url, 1, verify=False).read("model.w")
