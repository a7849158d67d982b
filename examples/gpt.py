"""A byte-level GPT of three million parameters: fit for a laptop, shaped like its big relatives.

It has what makes checkpoints of large models hard to move between layouts: grouped-query attention
with one fused QKV matrix, a gated MLP, tied embeddings, and parameters that tensor parallelism cuts
next to some that it leaves whole.

The rows of the fused QKV matrix are grouped by key/value head, each group `[its query heads, key,
value]`. A contiguous chunk of rows is then whole groups, so tensor parallelism is a plain cut along
dim 0:

    model = build(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  its usual name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model; `num_kv_heads` is also the largest tensor-parallel degree."""

    dim: int = 256
    hidden: int = 704
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    context: int = 128
    vocab: int = 256
    dropout: float = 0.0


def rotary_angles(context: int, head_dim: int) -> Tensor:
    """Angles of the rotary position embedding, (context, head_dim / 2). RoFormer, section 3.4.2."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    return torch.outer(torch.arange(context), frequencies)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn each pair of channels of x (batch, heads, time, head_dim) by its position's angle."""
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention; the number of heads is read off qkv, so a local chunk will do."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.dim // shape.num_heads
        self.group = (
            shape.num_heads // shape.num_kv_heads + 2
        )  # query heads of one key/value head, the key, the value
        self.qkv = nn.Linear(shape.dim, shape.num_kv_heads * self.group * self.head_dim, bias=False)
        self.proj = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, time, _ = x.shape
        groups = self.qkv(x).view(batch, time, -1, self.group, self.head_dim)
        q, k, v = groups.split((self.group - 2, 1, 1), dim=3)
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(
            rotate(q, angles), rotate(k, angles), v, is_causal=True, enable_gqa=True
        )
        return self.proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU, with gate and up apart so that both can be cut by rows."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A pre-norm block; dropout sees whole activations, so tensor-parallel ranks draw the same mask."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)
        self.attn, self.mlp = Attention(shape), MLP(shape)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x), angles))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Bytes (batch, time) in, logits (batch, time, vocab) out; the embedding is also the output matrix."""

    angles: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.dim)
        self.register_buffer(
            "angles", rotary_angles(shape.context, shape.dim // shape.num_heads), persistent=False
        )
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.angles[: tokens.shape[1]])
        return F.linear(self.norm(x), self.embed.weight)


def tensor_parallel_plan() -> dict[str, ParallelStyle]:
    """Cut the matrices of each block by rows going in and by columns coming out.

    The norms and the tied embedding stay whole on every tensor-parallel rank: what flows between the
    cut matrices is whole too, so their gradients come out the same there without a word exchanged.
    """
    rows, columns = (
        ColwiseParallel,
        RowwiseParallel,
    )  # torch names them after the transpose of the weight
    return {
        "blocks.*.attn.qkv": rows(),
        "blocks.*.attn.proj": columns(),
        "blocks.*.mlp.gate": rows(),
        "blocks.*.mlp.up": rows(),
        "blocks.*.mlp.down": columns(),
    }


def build(mesh: DeviceMesh | None = None, shape: Shape = Shape(), device: str = "cpu") -> nn.Module:
    """A model laid out over the mesh axes "dp" and "tp"; an axis absent or of size 1 changes nothing."""
    model = GPT(shape).to(device)
    if mesh is None:
        return model
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape))
    if (tp := sizes.get("tp", 1)) > 1:
        if shape.num_kv_heads % tp:
            raise ValueError(f"tp={tp} must divide the {shape.num_kv_heads} key/value heads")
        parallelize_module(model, mesh["tp"], tensor_parallel_plan())
    if sizes.get("dp", 1) > 1:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model
