"""A rank of a contestant of the claim `recover`: it stamps what it does, and goes on after a kill.

    python -m bench.lib.recover_train KIND ROOT [--large] [--small] [--queue] [--every K] [--digests STEPS]

place     marked as recoverable; a snapshot in memory of every step, by holdfast (also under torchrun)
dcp       not marked; `torch.distributed.checkpoint.save` of every K-th step, and `load`
whole     keeps nothing: what the others have to come to
cost      marked, and told by the driver how many steps to do; saves nothing

The model has the parameters of GPT-2 small (`--large`) or eight layers of 512 by 512, under FSDP2; batches
are tiny, since it is the state that matters.  Both come from seeds, so that every run does the same steps.
The driver says when it is enough, by a file ROOT/end with the number of the last step.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  its usual name
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.lib.stamps import Stamps

WIDTH, LAYERS = 512, 8
TOKENS = 16


def parsed() -> argparse.Namespace:
    p = argparse.ArgumentParser()
    p.add_argument("kind")
    p.add_argument("root", type=Path)
    p.add_argument("--large", action="store_true")
    p.add_argument("--small", action="store_true")
    p.add_argument("--queue", action="store_true", help="wait for a snapshot when the next is due")
    p.add_argument("--every", type=int, default=1)
    p.add_argument("--digests", default="", help="steps after which to tell it, by comma")
    return p.parse_args()


# -- models ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.attn_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.attn(self.ln_1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attn_proj(y)
        return x + self.mlp_proj(F.gelu(self.mlp(self.ln_2(x))))


class GPT2(nn.Module):
    """The parameters of GPT-2 small with a context of 2048: 125 million; `small`: a tenth."""

    def __init__(self, small: bool) -> None:
        super().__init__()
        layers, width, self.vocab, context = (
            (8, 384, 5024, 512) if small else (12, 768, 50304, 2048)
        )
        self.wte, self.wpe = nn.Embedding(self.vocab, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.ln_f(x), self.wte.weight)

    def loss(self, generator: torch.Generator) -> Tensor:
        tokens = torch.randint(self.vocab, (1, TOKENS + 1), generator=generator)
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Layers(nn.Module):
    """The small model: two million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x

    def loss(self, generator: torch.Generator) -> Tensor:
        return self(torch.randn(8, WIDTH, generator=generator)).square().mean()


def model_of(given: argparse.Namespace) -> Any:
    return GPT2(given.small) if given.large else Layers()


class Training:
    """A model, its optimizer and its data, on this rank; under FSDP2 unless it `is_whole`."""

    def __init__(self, given: argparse.Namespace, *, is_whole: bool = False) -> None:
        self.rank = 0 if is_whole else dist.get_rank()
        with torch.device("meta"):
            self.model = model_of(given)
        if not is_whole:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=False)
            fully_shard(self.model, mesh=mesh, reshard_after_forward=False)
        self.model.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(1_000_000 + self.rank)
        with torch.no_grad():
            for _, local in self.locals():
                local.normal_(0.0, 0.02, generator=generator)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.number = 0

    def locals(self) -> list[tuple[str, Tensor]]:
        """This rank's part of every parameter, plain."""
        plain = ((name, p.detach()) for name, p in self.model.named_parameters())
        return [(name, p.to_local() if hasattr(p, "to_local") else p) for name, p in plain]

    def backward(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(1000 * self.number + rank)
        self.model.loss(generator).backward()

    def step(self) -> None:
        self.backward(self.rank)
        self.optim.step()
        self.optim.zero_grad()
        self.number += 1

    def digest(self) -> str:
        """Of this rank's part of all parameters."""
        found = hashlib.sha256()
        for name, local in self.locals():
            found.update(name.encode())
            found.update(local.contiguous().numpy())
        return found.hexdigest()


# -- contestants ----------------------------------------------------------------------------------


def trained(given: argparse.Namespace, stamps: Stamps, training: Training, after: Any) -> None:
    """Do the steps that are left; `after` each of them, what the contestant does."""
    told = [int(step) for step in given.digests.split(",") if step]
    end = Path(given.root / "end")
    try:
        while not (end.exists() and training.number >= int(end.read_text())):
            training.step()
            stamps("step", step=training.number)
            if training.number in told:
                stamps("digest", step=training.number, digest=training.digest())
            after(training.number)
    except BaseException:
        stamps("raised")
        raise
    stamps("digest", step=training.number, digest=training.digest())


def place(given: argparse.Namespace, stamps: Stamps) -> None:
    """What a user writes: a group, a model, a Checkpointer, steps."""
    import holdfast

    dist.init_process_group("gloo")
    stamps("group")
    training = Training(given)
    stamps("model")
    with holdfast.Checkpointer(
        given.root / "steps",
        {"model": training.model, "optim": training.optim},
        every=holdfast.Every(memory=1),
        memory=holdfast.Memory(),
        when_busy="queue" if given.queue else None,
        on_error="raise",
    ) as ckpt:
        stamps("checkpointer")
        training.number = int(ckpt.restore())
        stamps("restored", step=training.number)
        trained(given, stamps, training, ckpt.step)
    dist.destroy_process_group()


def recoverable(given: argparse.Namespace, stamps: Stamps, function: Any) -> None:
    import holdfast

    @holdfast.recoverable
    def main() -> None:
        stamps.begin()
        is_over = False
        try:
            function(given, stamps)
            is_over = True
        finally:
            if not is_over:
                stamps("left")

    stamps.ready()
    main()


class Saves:
    """Steps that `dcp.save` has written, in folders of their own."""

    def __init__(self, given: argparse.Namespace, training: Training) -> None:
        self.every, self.training = given.every, training
        self.folder = given.root / "steps"

    def tree(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optim = get_state_dict(self.training.model, self.training.optim)
        return {"model": model, "optim": optim}

    def complete(self) -> list[int]:
        return sorted(int(p.parent.name) for p in self.folder.glob("*/.metadata"))

    def restore(self) -> int:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        newest = [max(self.complete(), default=0)]
        dist.broadcast_object_list(newest)
        if newest[0]:
            tree = self.tree()
            dcp.load(tree, checkpoint_id=self.folder / str(newest[0]))
            set_state_dict(
                self.training.model, self.training.optim,
                model_state_dict=tree["model"], optim_state_dict=tree["optim"],
            )  # fmt: skip
        return newest[0]

    def after(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        if step % self.every:
            return
        dcp.save(self.tree(), checkpoint_id=self.folder / str(step))
        if dist.get_rank() == 0:
            for old in self.complete()[:-2]:
                shutil.rmtree(self.folder / str(old))


def script(given: argparse.Namespace, stamps: Stamps) -> None:
    """A script as there are many: not marked, with DCP; or with nothing at all."""
    import torch.distributed.checkpoint  # noqa: F401

    stamps.ready()
    stamps.begin()
    dist.init_process_group("gloo")
    stamps("group")
    training = Training(given)
    stamps("model")
    saves = Saves(given, training)
    if given.kind == "dcp":
        training.number = saves.restore()
        stamps("restored", step=training.number)
        trained(given, stamps, training, saves.after)
    else:
        trained(given, stamps, training, lambda _: None)
    dist.destroy_process_group()


def cost(given: argparse.Namespace, stamps: Stamps) -> None:
    """Blocks of steps, as the driver asks for them; the answer is how long a block took."""
    import holdfast

    dist.init_process_group("gloo")
    training = Training(given)
    state = {"model": training.model, "optim": training.optim}
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with holdfast.Checkpointer(given.root / "steps", state, every=1_000_000) as ckpt:
        training.number = int(ckpt.restore())
        channel.connect(str(given.root / "gate"))
        while count := int(channel.recv(100) or 0):
            began = time.perf_counter()
            for _ in range(count):
                training.step()
                ckpt.step(training.number)
            channel.send(repr(time.perf_counter() - began).encode())
        stamps("digest", step=training.number, digest=training.digest())
    dist.destroy_process_group()


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    given = parsed()
    stamps = Stamps(given.root / "stamps")
    if given.kind in ("place", "cost"):
        recoverable(given, stamps, place if given.kind == "place" else cost)
    elif given.kind in ("dcp", "whole"):
        script(given, stamps)
    else:
        from bench.lib import recover_peers

        getattr(recover_peers, given.kind)(given, stamps)


if __name__ == "__main__":
    main()
