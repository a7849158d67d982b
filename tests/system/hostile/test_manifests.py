"""Manifests made to harm: sealed with the right digest, so that every structural check is reached.

Each must end in a HoldfastError, in bounded time and memory.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from holdfast.core.checkpoint.names import committed, manifest_key
from holdfast.core.codec.digest import hexdigest
from holdfast.core.format.manifest import decode_manifest
from holdfast.errors import FormatError, HoldfastError, UnsupportedVersion
from system.hostile.everything import read_everything


def sealed(body: bytes) -> bytes:
    """`body`: a JSON object without its closing brace."""
    return body + b',"digest":"' + hexdigest(body).encode() + b'"}'


TENSOR = {"name": "w", "dtype": "uint8", "shape": [8]}
FILE = {
    "rank": 0, "path": "0001-000001/r00000.safetensors", "bytes": 4096 + 8 + 8,
    "data": 4096, "extras": 4104, "table": 4104, "digest": "0" * 16,
}  # fmt: skip
SOUND: dict[str, Any] = {
    "holdfast": 1, "step": 1, "run": 1, "attempt": "0001-000001", "created": "", "software": {},
    "mesh": [["dp", 2]], "chunk_bytes": 262144, "algorithm": "xxh3_64", "shardings": [{}],
    "tensors": [TENSOR], "aliases": {}, "files": [FILE], "extras": {}, "per_rank": {},
}  # fmt: skip


def raw(changes: dict[str, Any]) -> bytes:
    return sealed(json.dumps({**SOUND, **changes}, separators=(",", ":")).encode()[:-1])


def file(**changes: Any) -> dict[str, Any]:
    return {"files": [{**FILE, **changes}]}


def tensor(**changes: Any) -> dict[str, Any]:
    return {"tensors": [{**TENSOR, **changes}]}


def held(*boxes: tuple[list[int], list[int]], rank: int = 0, **changes: Any) -> dict[str, Any]:
    fragments = [{"rank": rank, "start": a, "stop": b} for a, b in boxes]
    return {"shardings": [{"held": fragments}], **tensor(**changes)}


def sharding(**fields: Any) -> dict[str, Any]:
    return {"shardings": [fields]}


def cut(dim: int, *axes: str) -> dict[str, Any]:
    return {"dim": dim, "axes": list(axes)}


HUGE = 1 << 62
ALIKE = [{"$int": str(n * ((1 << 61) - 1))} for n in range(300)]
"""Numbers that all have one hash: a set of n takes n * n steps."""
ATTACKS: dict[str, dict[str, Any]] = {
    "negative step": {"step": -1},
    "negative run": {"run": -1},
    "huge step": {"step": 10**17},
    "attempt climbs": {"attempt": "../../x"},
    "attempt is nothing": {"attempt": ""},
    "attempt is a path": {"attempt": "a/b"},
    "unknown algorithm": {"algorithm": "md5"},
    "chunk_bytes 0": {"chunk_bytes": 0},
    "chunk_bytes negative": {"chunk_bytes": -4096},
    "chunk_bytes odd": {"chunk_bytes": 1000},
    "chunk_bytes huge": {"chunk_bytes": 1 << 50},
    "unknown field": {"surprise": 1},
    "a null field": {"mesh": None},
    "a number for a list": {"tensors": 5},
    "mesh of 2**60 ranks": {"mesh": [["dp", 1 << 60]]},
    "mesh of many axes": {"mesh": [[f"a{i}", 1 << 20] for i in range(60)]},
    "mesh of 1000 axes": {"mesh": [[f"a{i}", 1] for i in range(1000)]},
    "mesh axis of 0": {"mesh": [["dp", 0]]},
    "mesh axis negative": {"mesh": [["dp", -2], ["tp", -1]]},
    "mesh axis twice": {"mesh": [["dp", 2], ["dp", 2]]},
    "mesh axis of too many digits": {"mesh": [["dp", 10**4000]]},
    "ranks times shardings": {"mesh": [["dp", 1 << 20]], "shardings": [{}] * 1000},
    "no shardings": {"shardings": []},
    "sharding out of range": tensor(sharding=5),
    "sharding negative": tensor(sharding=-1),
    "cut over an unknown axis": sharding(cuts=[cut(0, "tp")]),
    "cut over one axis twice": sharding(cuts=[cut(0, "dp", "dp")]),
    "cut along a missing dim": sharding(cuts=[cut(1, "dp")]),
    "cut along a negative dim": sharding(cuts=[cut(-1, "dp")]),
    "cut along a huge dim": sharding(cuts=[cut(HUGE, "dp")]),
    "restricted to no coordinate": sharding(on={"dp": []}),
    "restricted to coordinates out of range": sharding(on={"dp": [2]}),
    "restricted to a coordinate twice": sharding(on={"dp": [1, 1]}),
    "restricted on an unknown axis": sharding(on={"tp": [0]}),
    "cut and restricted": sharding(cuts=[cut(0, "dp")], on={"dp": [0]}),
    "listed and cut": sharding(cuts=[cut(0, "dp")], held=[]),
    "listed nothing": held(),
    "listed fragments overlap": held(([0], [5]), ([4], [8])),
    "listed fragments overlap and fill": held(([0], [4]), ([0], [4])),
    "listed fragments leave a hole": held(([0], [4]), ([5], [8])),
    "listed fragment out of range": held(([0], [9])),
    "listed fragment negative": held(([-1], [8])),
    "listed fragment inside out": held(([8], [0])),
    "listed fragment of other dims": held(([0, 0], [8, 1])),
    "listed fragment of dims that differ": held(([0], [8, 1])),
    "listed fragment of no such rank": held(([0], [8]), rank=7),
    "listed fragment of a negative rank": held(([0], [8]), rank=-1),
    "listed fragment of a rank without a file": held(([0], [8]), rank=1),
    "listed corners": held(*[([0] * 60, [2] * 60)] * 2, ([1] * 60, [2] * 60), shape=[2] * 50),
    "listed corners of 40 dims": held(([0] * 40, [1] * 40), ([1] * 40, [2] * 40), shape=[2] * 40),
    "more parts than files": {**sharding(cuts=[cut(0, "dp")]), "mesh": [["dp", 8]]},
    "two tensors of one name": {"tensors": [TENSOR, TENSOR]},
    "negative shape": tensor(shape=[-8]),
    "two negatives": tensor(shape=[-2, -4]),
    "overflowing shape": tensor(shape=[HUGE, HUGE]),
    "overflowing beside zero": tensor(shape=[0, 1 << 59, 1 << 59]),
    "shape of 2**59": tensor(shape=[1 << 59]),
    "shape of 100 dims": tensor(shape=[1] * 100),
    "shape of fractions": tensor(shape=[1.5]),
    "shape of too many digits": tensor(shape=[10**4000]),
    "unknown dtype": tensor(dtype="float7"),
    "dtype of ml_dtypes that is none": tensor(dtype="float8_zzz"),
    "unknown replica rule": tensor(replica="any"),
    "more bytes than the files hold": tensor(shape=[9]),
    "fewer bytes than the files hold": tensor(shape=[7]),
    "alias of nothing": {"aliases": {"v": "x"}},
    "alias of an alias": {"aliases": {"v": "w", "u": "v"}},
    "alias of itself": {"aliases": {"v": "v"}},
    "aliases in a circle": {"aliases": {"u": "v", "v": "u"}},
    "alias that hides a tensor": {"aliases": {"w": "w"}},
    "no files": {"files": []},
    "two files of one rank": {"files": [FILE, FILE]},
    "two files of one path": {"files": [FILE, {**FILE, "rank": 1}]},
    "file of a rank out of range": file(rank=2),
    "file of a negative rank": file(rank=-1),
    "path climbs out": file(path="../../secret"),
    "path climbs in the middle": file(path="a/../../../b"),
    "path absolute": file(path="/etc/passwd"),
    "path with a backslash": file(path="..\\secret"),
    "path with NUL": file(path="a\0b"),
    "path empty": file(path=""),
    "path of a dot": file(path="./a"),
    "path too long": file(path="x" * 2000),
    "path of a file under way": file(path=".tmp-x"),
    "path not UTF-8": file(path="\ud800"),
    "data before the header": file(data=0),
    "data past extras": file(data=5000),
    "table before extras": file(extras=5000),
    "no table": file(table=4112),
    "table too short": file(bytes=4104 + 4),
    "bytes huge": file(bytes=1 << 62),
    "offsets negative": file(data=-8, extras=0, table=0, bytes=8),
    "table of 2**41 chunks": {
        **file(extras=4096 + (1 << 58), table=4096 + (1 << 58), bytes=4096 + (1 << 58) + (8 << 40) + 8),
        **tensor(shape=[1 << 58]),
    },
    "table of 2**26 chunks": {
        "chunk_bytes": 4096,
        **file(extras=4104, table=1 << 38, bytes=(1 << 38) + (8 << 26)),
    },
    "extras of 2**36 bytes": file(extras=4104, table=1 << 36, bytes=(1 << 36) + (8 << 18)),
    "digest not hex": file(digest="g" * 16),
    "digest too short": file(digest="0"),
    "digest wrong": file(digest="1" * 16),
    "extras 350 deep, walked": {"extras": {"k": json.loads("[" * 600 + "]" * 600)}},
    "extras of an unknown tag": {"extras": {"k": {"$what": 1}}},
    "extras of bad base64": {"extras": {"k": {"$bytes": "*é"}}},
    "extras int of letters": {"extras": {"k": {"$int": "x"}}},
    "extras int of many digits": {"extras": {"k": {"$int": "9" * 100_000}}},
    "extras array of objects": {"extras": {"k": {"$array": ["O", [1], "AAAAAAAAAAA="]}}},
    "extras array of a strange dtype": {"extras": {"k": {"$array": [{"a": 1}, [1], ""]}}},
    "extras array of the wrong size": {"extras": {"k": {"$array": ["f4", [HUGE, HUGE], "AAAAAA=="]}}},
    "extras array that wants a guess": {"extras": {"k": {"$array": ["f4", [-1, 0], ""]}}},
    "extras deque of negative length": {"extras": {"k": {"$deque": [-1, []]}}},
    "extras deque of huge length": {"extras": {"k": {"$deque": [10**30, []]}}},
    "extras set of numbers of one hash": {"extras": {"k": {"$set": ALIKE}}},
    "extras dict of numbers of one hash": {"extras": {"k": {"$dict": [[n, 0] for n in ALIKE]}}},
    "extras set of complex numbers of one hash": {
        "extras": {"k": {"$set": [{"$complex": [str(-1_000_003 * n), str(n)]} for n in range(300)]}}
    },
    "extras set of lists": {"extras": {"k": {"$set": [[1]]}}},
    "extras dict of unhashable keys": {"extras": {"k": {"$dict": [[[1], 2]]}}},
    "extras tensor of no dtype": {"extras": {"k": {"$tensor": ["float8_zzz", [1], "AA=="]}}},
    "extras tensor of two parts": {"extras": {"k": {"$tensor": ["uint8", [1]]}}},
    "extras tensor of the wrong size": {"extras": {"k": {"$tensor": ["uint8", [5], "AA=="]}}},
    "extras optimizer of nothing": {"extras": {"k": {"$optimizer": {}}}},
    "extras optimizer of a number": {"extras": {"k": {"$optimizer": 3}}},
}  # fmt: skip


def test_the_sound_one_is_sound() -> None:
    assert decode_manifest(raw({}), "m").tensors[0].name == "w"


@pytest.mark.parametrize("name", ATTACKS)
def test_attack(store, name) -> None:
    for key in store.list():
        store.delete(key)
    image = bytes(4104) + bytes(8)
    store.put("steps/0000000001/0001-000001/r00000.safetensors", image)
    store.put(manifest_key(1), raw(ATTACKS[name]))
    began = time.monotonic()
    with pytest.raises(HoldfastError) as caught:
        read_everything(store)
    assert time.monotonic() - began < 600
    assert len(str(caught.value)) < 20_000
    assert [s.step for s in committed(store)] == [1]


BYTES: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"hello",
    "another format": b"PK\3\4" * 40,
    "only a head": b'{"holdfast":1,"step":1,"run":1,',
    "only a seal": sealed(b'{"holdfast":1,"step":1,"run":1,'),
    "nothing else": sealed(b'{"holdfast":1,"step":1,"run":1'),
    "bad UTF-8": sealed(raw({})[:-30].replace(b'"w"', b'"\xff\xfe"')),
    "half of a surrogate": sealed(raw({})[:-30].replace(b'"w"', b'"\\ud800"')),
    "step stated twice": sealed(raw({})[:-30] + b',"step":2'),
    "run stated twice": sealed(raw({})[:-30] + b',"run":2'),
    "version stated twice": sealed(raw({})[:-30] + b',"holdfast":2'),
    "version 0": sealed(b'{"holdfast":0,"step":1,"run":1,"x":0'),
    "NaN": sealed(raw({})[:-30] + b',"step":NaN'),
    "a step of 10**18 digits": b'{"holdfast":1,"step":' + b"9" * 1000 + b',"run":1,',
    "seal in capitals": raw({}).replace(raw({})[-18:-2], raw({})[-18:-2].upper() + b"A"),
    "text after the seal": raw({}) + b"x",
    "sealed twice": sealed(raw({})[:-1]),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_that_are_no_manifest(store, name) -> None:
    store.put(manifest_key(1), BYTES[name])
    with pytest.raises(FormatError) as caught:
        read_everything(store)
    assert caught.value.key == manifest_key(1)
    assert [s.step for s in committed(store)] == [1]


def test_a_version_from_the_future(store) -> None:
    future = raw({}).replace(b'"holdfast":1', b'"holdfast":2')
    store.put(manifest_key(1), future)
    with pytest.raises(UnsupportedVersion) as caught:
        read_everything(store)
    assert "version 2" in str(caught.value)
    assert "newer" in caught.value.hint


def test_a_future_step_keeps_its_place_in_time(store) -> None:
    """Else an older holdfast would silently go on from an older step."""
    store.put(manifest_key(5), b'{"holdfast":2,"step":5,"run":9,"anything":[' + b" " * 80)
    assert [s.step for s in committed(store)] == [1, 5]
    with pytest.raises(UnsupportedVersion):
        read_everything(store, committed(store)[-1].step)
