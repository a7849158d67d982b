"""Small sound checkpoints, one of each kind that holdfast reads, for `damage` to damage."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import nn

import holdfast
from builders import Tensor, build
from capabilities import ALONE
from holdfast.checkpoint import notes
from holdfast.layout import Cut, Mesh, Sharding
from holdfast.store import LocalStore

BIG = torch.arange(3000.0).reshape(60, 50)
SMALL = torch.arange(9, dtype=torch.int32)


def trained(*sizes: int) -> tuple[nn.Linear, torch.optim.Optimizer]:
    net = nn.Linear(*sizes)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.ones(2, sizes[0])).sum().backward()
    optimizer.step()
    return net, optimizer


def own(root: Path) -> None:
    """Two ranks, two steps, extras of all and of each, a tied name, a label."""
    store, rows = LocalStore(str(root)), Sharding((Cut(0, ("dp",)),))
    for step in (1, 2):
        big = (np.arange(90_000, dtype=np.float32) + step).reshape(300, 300)
        tensors = {
            "model.w": Tensor(big, rows),
            "model.b": Tensor(np.arange(7, dtype=np.int16) + step),
            "model.s": Tensor(np.array(3.0 + step)),
            "optim.w.exp_avg": Tensor(big[:50] * 2, rows, "exp_avg"),
        }
        build(
            store,
            Mesh((("dp", 2),)),
            tensors,
            step=step,
            extras={"sched": {"lr": 0.5, "t": (1, step)}},
            per_rank={"rng": ("fresh", [{"seed": b"\1" * 300}, {"seed": b"\2" * 300}])},
            aliases={"tied.w": "model.w"},
        )
    notes.pin(store, 1, "best")


def attached(root: Path) -> None:
    """Two steps of one rank, with files beside the state."""
    net, optimizer = trained(40, 30)
    for step in (1, 2):
        state = {"model": net, "optim": optimizer, "n": step}
        files = {"config.json": b'{"a": 1}', "sub/x.txt": b"y" * 5000}
        holdfast.save(root, state, step=step, files=files)


def live() -> tuple[nn.Linear, dict[str, object]]:
    """What `records` trains."""
    net = nn.Linear(20, 10)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    return net, {"model": net, "optim": optimizer, "progress": {"tokens": 0}}


def keeper(root: Path, state: dict[str, object]) -> holdfast.Checkpointer:
    every = holdfast.Every(durable=4, delta=1)
    return holdfast.Checkpointer(
        root, state, every=every, delta=holdfast.Delta(batch=2), deadline_s=60
    )


def records(root: Path) -> None:
    """Eleven steps, of which two are full ones; `truth.pt` beside the root has all of them."""
    torch.manual_seed(0)
    net, state = live()
    optimizer, progress, seen = state["optim"], state["progress"], {}
    assert isinstance(optimizer, torch.optim.Optimizer) and isinstance(progress, dict)
    with keeper(root, state) as checkpointer:
        checkpointer.restore()
        for step in range(1, 12):
            optimizer.zero_grad()
            net(torch.randn(4, 20)).square().mean().backward()
            optimizer.step()
            progress["tokens"] += 7
            checkpointer.step(step)
            seen[step] = {k: v.clone() for k, v in net.state_dict().items()}
            if step % 4 == 0:
                checkpointer.wait()
    torch.save(seen, root.parent / "truth.pt")


def torch_file(root: Path) -> None:
    root.mkdir()
    _, optimizer = trained(20, 10)
    state = {"model": {"w": BIG, "b": SMALL}, "optimizer": optimizer.state_dict()}
    more = {"epoch": 3, "lr": [0.1, (2, 3)], "array": np.arange(5)}
    torch.save(state | more, root / "m.pt")


def dcp(root: Path) -> None:
    import torch.distributed.checkpoint

    model = {"w": BIG, "b": SMALL, "s": torch.tensor(2.5)}
    state = {"model": model, "step": 7, "config": {"lr": 0.5, "names": ["a", "b"]}}
    torch.distributed.checkpoint.save(state, checkpoint_id=root, **ALONE)


def safetensors(root: Path) -> None:
    """One file in `one`, two and an index in `two`."""
    from safetensors.torch import save_file

    (root / "one").mkdir(parents=True)
    whole = {"w": BIG, "b": SMALL, "e": torch.zeros(0, 3)}
    save_file(whole, root / "one/model.safetensors", metadata={"format": "pt"})
    (root / "two").mkdir()
    names = {n: f"model-0000{i}-of-00002.safetensors" for i, n in enumerate("wb", 1)}
    save_file({"w": BIG[0].clone()}, root / "two" / names["w"])
    save_file({"b": SMALL}, root / "two" / names["b"])
    index = {"metadata": {"total_size": 236}, "weight_map": names}
    (root / "two/model.safetensors.index.json").write_text(json.dumps(index))


def deepspeed(root: Path) -> None:
    """DeepSpeed's universal format, as `convert` writes it."""
    net, optimizer = trained(16, 8)
    holdfast.save(root.parent / "source", {"model": net, "optim": optimizer}, step=1)
    holdfast.convert(root.parent / "source", root, to="deepspeed")
