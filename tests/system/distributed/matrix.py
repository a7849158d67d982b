"""Worker: saves every layout of this world size, or loads all checkpoints into each of them.

save ROOT       ROOT/<layout> becomes a checkpoint; ROOT/save-<ranks>.json tells what torch gathered
load ROOT       ROOT/load-<ranks>.json tells, by layout and checkpoint, what is wrong, what was read

Names of layouts may follow: no others are saved and loaded then.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

import holdfast
from holdfast import events

from .layouts import LAYOUTS, STATES, Held, buffers, first_name, values

STEP = 7


def everyone(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def union(value: list[str]) -> list[str]:
    """What any rank found, with its rank."""
    return [f"rank {rank}: {x}" for rank, found in enumerate(everyone(value)) for x in found]


# -- save -----------------------------------------------------------------------------------------


def save(root: Path, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        layout = LAYOUTS[name]
        if layout.num_ranks == dist.get_world_size():
            held = Held(layout)
            holdfast.save(root / name, held.state(), step=STEP, deadline_s=240)
            found[name] = union(differences(root / name, held, layout.leads(dist.get_rank())))
    return found


def differences(url: Path, held: Held, lead: bool) -> list[str]:
    """Tensors that torch gathers to other bytes than holdfast reads, or that are not as filled."""
    whole = {}
    for state in STATES:
        for n, p in held.params.items():
            if state in held.optimizer.state.get(p, {}):
                whole[f"optim.{n}.{state}"] = gathered(held.optimizer.state[p][state])
    for part in held.parts:
        options = StateDictOptions(full_state_dict=True)
        for n, tensor in get_model_state_dict(part, options=options).items():
            whole[f"model.{n}"] = tensor
    if not lead:
        return []
    expected = {f"model.{n}" for n in (*held.params, *saved_buffers(held))}
    found = [f"{n} was not gathered" for n in expected - whole.keys()]
    with holdfast.open(str(url)) as checkpoint:
        for n, tensor in whole.items():
            if checkpoint.read(n).tobytes() != as_bytes(tensor):
                found.append(f"{n} is not what torch gathers")
            if as_bytes(known(n, tensor)) != as_bytes(tensor):
                found.append(f"{n} was not filled as planned")
    return found


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def known(name: str, tensor: torch.Tensor) -> torch.Tensor:
    key, _, name = name.partition(".")
    kind = "param"
    if key == "optim":
        name, _, kind = name.rpartition(".")
    return values(first_name(name), kind, tuple(tensor.shape), tensor.dtype)


def saved_buffers(held: Held) -> list[str]:
    return [n for n in buffers(held.parts) if n.rpartition(".")[2] != "scratch"]


def as_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return np.asarray(flat.view(torch.uint8)).tobytes() if flat.numel() else b""


# -- load -----------------------------------------------------------------------------------------


def load(root: Path, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        layout = LAYOUTS[name]
        if layout.num_ranks != dist.get_world_size():
            continue
        held = Held(layout)
        found[name] = {
            saved: load_one(root / saved, held, fresh=i % 2 == 0)
            for i, saved in enumerate(names)
            if (root / saved).exists()
        }
    return found


def load_one(url: Path, held: Held, *, fresh: bool) -> dict[str, Any]:
    held.spoil(fresh=fresh)
    before, started = events.counters["read.bytes"], time.perf_counter()
    try:
        holdfast.load(url, held.state(), deadline_s=240)
        wrong = held.wrong()
    except holdfast.HoldfastError as error:
        wrong = [repr(error)]
    seconds = time.perf_counter() - started
    read = events.counters["read.bytes"] - before
    with holdfast.open(str(url)) as checkpoint:
        places = everyone(wanted(checkpoint, held))
        names = set().union(*places)
        size = sum(checkpoint.info(n).bytes for n in names)
        chunks = chunk_bytes(url, names, checkpoint) if dist.get_rank() == 0 else 0
    return {
        "wrong": union(wrong),
        "read": sum(everyone(read)),
        "wanted": size,
        "chunks": chunks,
        "seconds": seconds,
    }


def chunk_bytes(url: Path, names: set[str], checkpoint: holdfast.Checkpoint) -> int:
    """Bytes of the chunks that hold any byte of these tensors, by the headers of the files."""
    total, size = 0, checkpoint.manifest.chunk_bytes
    for path in url.rglob("*.safetensors"):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        chunks: set[int] = set()
        for name, entry in header.items():
            if name.partition("@")[0] in names:
                start, stop = (8 + length + offset for offset in entry["data_offsets"])
                chunks |= set(range(start // size, -(-stop // size)))
        end = 8 + length + header["holdfast.digests"]["data_offsets"][0]
        total += sum(min(size, end - chunk * size) for chunk in chunks)
    return total


def wanted(checkpoint: holdfast.Checkpoint, held: Held) -> set[str]:
    """Tensors of the checkpoint that this rank needs any part of, each by its first name."""
    names = [f"model.{n}" for n in (*held.params, *saved_buffers(held))]
    names += [f"optim.{n}.{s}" for n in held.params for s in (*STATES, "step")]
    tensors, aliases = checkpoint.manifest.tensors, checkpoint.manifest.aliases
    saved = {t.name for t in tensors}
    resolved = {aliases.get(n, n) for n in names}
    tied = {n.replace("head.weight", "embed.weight") for n in resolved - saved}
    return (resolved | tied) & saved


def main() -> None:
    verb, root = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    found = {"save": save, "load": load}[verb](root, sys.argv[3:] or list(LAYOUTS))
    if dist.get_rank() == 0:
        path = root / f"{verb}-{dist.get_world_size()}.json"
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
