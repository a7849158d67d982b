"""Small files of other formats that would cost much, or be taken for what they are not."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import (
    Corrupt,
    FormatError,
    HoldfastError,
    NotFound,
    NotRecoverable,
    UsageError,
)
from holdfast.formats.read.verifying import verify_foreign
from holdfast.store import LocalStore
from holdfast.tiers.records.writer_registry import writers, writing_key


def saved(path: Path, value: Any) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    torch.save(value, path)
    return path


@pytest.mark.parametrize("rows", [200, 4000])
def test_an_expanded_tensor_is_not_a_thousand_times_its_file(tmp_path: Path, rows: int) -> None:
    path = saved(tmp_path / "m.pt", {"w": torch.zeros(1_000_000).expand(rows, 1_000_000)})
    with pytest.raises(FormatError, match="bytes share those of files"):
        holdfast.open(f"torch:{path}")


def test_many_tensors_over_one_storage(tmp_path: Path) -> None:
    """Views that torch keeps, two of a name each; thousands are a bomb."""
    one = torch.arange(1_000_000.0)
    two = holdfast.open(f"torch:{saved(tmp_path / 'two.pt', {'a': one, 'b': one})}")
    assert (two.read("model.a") == two.read("model.b")).all()
    path = saved(tmp_path / "m.pt", {f"w{i}": one for i in range(100)})
    with pytest.raises(FormatError, match="bytes share those of files"):
        holdfast.open(f"torch:{path}")


def test_a_members_entry_that_points_at_another_member(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.pt", {"v": torch.zeros(16), "w": torch.ones(16)})
    data, entries, at = bytearray(path.read_bytes()), {}, -1
    while (at := data.find(b"PK\1\2", at + 1)) >= 0:
        length = int.from_bytes(data[at + 28 : at + 30], "little")
        entries[bytes(data[at + 46 : at + 46 + length])] = at
    first, other = entries[b"m/data/0"], entries[b"m/data/1"]
    data[first + 42 : first + 46] = data[other + 42 : other + 46]
    path.write_bytes(data)
    with pytest.raises(Corrupt, match="is that of another"):
        holdfast.open(f"torch:{path}")


def of_ranks(root: Path, world: Any, number: int = 1, **said: Any) -> str:
    """A directory of torch_checkpointing whose metadata says this of tensor `w`."""
    for rank in range(number):
        saved(root / f"model_{rank}.pt", {"w": torch.arange(16.0).reshape(4, 4)})
    item: dict[str, Any] = {
        "rank_to_layout_info": {
            0: {"serialization_format": {"type": "TorchSerialization"}, "file_path": "model_0.pt"}
        },
        "nested_path_to_metadata": {
            said.pop("path", json.dumps(["w"])): [
                {
                    "ranks": [0],
                    "sharding_metadata": {
                        "type": said.pop("type", "default_tensor_v1"),
                        "data": {"global_shape": (4, 4), "dtype": "torch.float32", **said},
                    },
                }
            ]
        },
    }
    metadata = {"version": "2.0", "world_size": world, "metadata": {"model": item}}
    (root / "metadata.pkl").write_bytes(pickle.dumps(metadata, 2))
    return f"torch_checkpointing:{root}"


WHOLE = {"global_offsets": [(0, 0)], "local_offsets": [(0, 0)], "local_sizes": [(4, 4)]}
MESH = {"type": "DTensorShardingMetadata", "placements": [{"type": "Shard", "dim": 0}]}


def test_sound_metadata(tmp_path: Path) -> None:
    mesh = {"mesh_shape": [1], "mesh_data": [0]}
    for number, said in enumerate((WHOLE, MESH | {"mesh_spec": mesh})):
        found = holdfast.open(of_ranks(tmp_path / str(number), 1, **said))
        assert found.read("model.w").ravel().tolist() == list(range(16))


@pytest.mark.parametrize(
    ("error", "world", "number", "said"),
    [
        (NotFound, 10**12, 1, WHOLE),
        (FormatError, -1, 1, WHOLE),
        (FormatError, 0, 1, WHOLE),
        (FormatError, 1, 2, WHOLE),
        (FormatError, [1], 1, WHOLE),
        (FormatError, 1, 1, WHOLE | {"local_offsets": [(-4, 0)]}),
        (FormatError, 1, 1, WHOLE | {"local_sizes": [(-4, -4)]}),
        (FormatError, 1, 1, WHOLE | {"path": "[" * 1_000_000}),
        (FormatError, 1, 1, MESH | {"mesh_spec": {"mesh_shape": [0], "mesh_data": [0]}}),
        (FormatError, 1, 1, MESH | {"mesh_spec": {"mesh_shape": [2, 0], "mesh_data": [0]}}),
        (FormatError, 1, 1, MESH | {"mesh_spec": {"mesh_shape": [10**5000], "mesh_data": [0]}}),
    ],
)
def test_metadata_that_lies(
    tmp_path: Path, error: type[Exception], world: Any, number: int, said: dict[str, Any]
) -> None:
    with pytest.raises(error):
        holdfast.open(of_ranks(tmp_path, world, number, **said))


def test_ranks_far_apart(tmp_path: Path) -> None:
    for rank in (0, 999_999_999):
        saved(tmp_path / f"model_{rank}.pt", {"w": torch.zeros(2)})
    with pytest.raises(NotFound, match="no file of rank 1 "):
        holdfast.open(f"torch_checkpointing:{tmp_path}")


def test_values_nested_too_deep(tmp_path: Path) -> None:
    value: list[Any] = []
    for _ in range(300):
        value = [value]
    with pytest.raises(HoldfastError):
        holdfast.open(f"torch:{saved(tmp_path / 'm.pt', {'a': value})}")


@pytest.mark.parametrize("state", ["exp_avg", "exp_avg_sq"])
def test_a_universal_checkpoint_without_one_states_file(tmp_path: Path, state: str) -> None:
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    holdfast.save(tmp_path / "own", {"model": net, "optim": optimizer}, step=1)
    holdfast.convert(tmp_path / "own", tmp_path / "ds", to="deepspeed")
    source = f"deepspeed:{tmp_path / 'ds'}"
    assert verify_foreign(holdfast.open(source)).good
    (file,) = tmp_path.glob(f"ds/*/zero/bias/{state}.pt")
    file.unlink()
    with pytest.raises(NotFound, match=f"'bias' has no {state}.pt"):
        holdfast.convert(source, tmp_path / "out")


def test_convert_compares_the_sums_of_its_source(tmp_path: Path) -> None:
    value = torch.arange(100.0)
    path = saved(tmp_path / "m.pt", {"w": value})
    data = bytearray(path.read_bytes())
    data[data.find(struct.pack("<4f", 10, 11, 12, 13)) + 2] ^= 64
    path.write_bytes(data)
    with pytest.raises(Corrupt, match="the source is damaged"):
        holdfast.convert(f"torch:{path}", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.pt"]
    holdfast.convert(f"torch:{path}", tmp_path / "out", verify=False)


def test_json_that_no_reader_can_take(tmp_path: Path) -> None:
    """It is nested too deep, or is no UTF-8; each is as good as not there."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron/metadata.json").write_bytes(b'{"a":' + b"[" * 60_000)
    with pytest.raises(NotRecoverable, match="no checkpoint in"):
        holdfast.open(tmp_path / "megatron")
    holdfast.save(tmp_path / "root", {"w": torch.zeros(2)}, step=1)
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/holdfast-conversion.json").write_bytes(b'{"\xff":1}')
    with pytest.raises(UsageError, match="is not of a conversion"):
        holdfast.convert(tmp_path / "root", tmp_path / "out")
    store = LocalStore(tmp_path / "root")
    store.put(writing_key(1, 0, 123), b'{"z":' + b"[" * 200_000)
    assert [*writers(store, store.list("log/"), 2)] == [writing_key(1, 0, 123)]
