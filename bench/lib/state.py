"""The state that is saved and loaded: GPT-2 small (context 2048, fp32) with AdamW's two moments, 1.5 GB."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

Shape = tuple[int, ...]


def shapes(small: bool = False, width: int = 768) -> dict[str, Shape]:
    """GPT-2's names and shapes: 125 M parameters, or more if wider; `small`: a tenth."""
    layers, width, vocab, context = (8, 384, 5024, 512) if small else (12, width, 50304, 2048)
    found: dict[str, Shape] = {"wte.weight": (vocab, width), "wpe.weight": (context, width)}
    for i in range(layers):
        for name, *shape in (
            ("ln_1.weight", width), ("ln_1.bias", width),
            ("attn.c_attn.weight", 3 * width, width), ("attn.c_attn.bias", 3 * width),
            ("attn.c_proj.weight", width, width), ("attn.c_proj.bias", width),
            ("ln_2.weight", width), ("ln_2.bias", width),
            ("mlp.c_fc.weight", 4 * width, width), ("mlp.c_fc.bias", 4 * width),
            ("mlp.c_proj.weight", width, 4 * width), ("mlp.c_proj.bias", width),
        ):  # fmt: skip
            found[f"h.{i}.{name}"] = tuple(shape)
    return found | {"ln_f.weight": (width,), "ln_f.bias": (width,)}


class Weights(nn.Module):
    """A module that only holds parameters, under their dotted names."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            at: nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in at._modules:
                    at.add_module(part, nn.Module())
                at = at._modules[part]
            at.register_parameter(leaf, nn.Parameter(tensor))


class State:
    """A model and its optimizer on this rank: plain tensors on one rank, else DTensors cut along `dim`.

    A tensor that lacks the dim is cut along dim 0.  The moments are made by hand.
    """

    def __init__(
        self, ranks: int, *, small: bool = False, width: int = 768, dim: int = 0, seed: int = 0
    ) -> None:
        self.mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)) if ranks > 1 else None
        self.dim = dim
        torch.manual_seed(seed)
        self.model = Weights(
            {name: self._tensor(shape) for name, shape in shapes(small, width).items()}
        )
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        for p in self.model.parameters():
            self.optim.state[p] = {
                "step": torch.tensor(1.0),
                "exp_avg": self._tensor(p.shape),
                "exp_avg_sq": self._tensor(p.shape),
            }

    def _tensor(self, shape: Shape) -> torch.Tensor:
        if self.mesh is None:
            return torch.rand(shape)
        dim = self.dim if self.dim < len(shape) else 0
        local = list(shape)
        assert local[dim] % self.mesh.size() == 0
        local[dim] //= self.mesh.size()
        return DTensor.from_local(torch.rand(local), self.mesh, [Shard(dim)], run_check=False)

    def for_holdfast(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optim}

    def for_dcp(self) -> dict[str, Any]:
        """The same live tensors under the same names; made once, outside of what is timed."""
        names = dict(self.model.named_parameters())
        return {
            "model": {n: p.detach() for n, p in names.items()},
            "optim": {n: dict(self.optim.state[p]) for n, p in names.items()},
        }

    def locals(self) -> list[torch.Tensor]:
        """This rank's tensors, plain."""
        tree = self.for_dcp()
        found = [*tree["model"].values(), *(t for s in tree["optim"].values() for t in s.values())]
        return [t.to_local() if isinstance(t, DTensor) else t for t in found]

    def local_dict(self) -> dict[str, Any]:
        """`for_dcp` with plain local tensors, as `torch.save` by rank takes it."""

        def plain(x: Any) -> Any:
            if isinstance(x, dict):
                return {k: plain(v) for k, v in x.items()}
            return x.to_local() if isinstance(x, DTensor) else x

        return plain(self.for_dcp())

    @property
    def local_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.locals())

    def checksums(self) -> list[int]:
        """One number per local tensor, of its bits."""
        return [int(t.reshape(-1).view(torch.int32).sum(dtype=torch.int64)) for t in self.locals()]

    def wipe(self) -> None:
        """Zero everything, so that a load must have happened if the checksums agree."""
        with torch.no_grad():
            for t in self.locals():
                t.zero_()
