"""The same GPT as transformers' Phi-3, and the rules that lead from one to the other.

Phi-3 keeps all queries, then all keys, then all values in its fused QKV; Megatron-Core keeps them group by
group.  Renames bridge the names, one rule bridges the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Phi3Config, Phi3ForCausalLM

import holdfast
from holdfast.layout import Fragment, Mesh
from holdfast.rules import RuleSet

from . import ucp_gpt as gpt

RULES = RuleSet.parse(
    f"""
let q = {gpt.HEADS // gpt.GROUPS * gpt.DIM}
let kv = {gpt.DIM}
model.layers.*.self_attn.qkv_proj.weight  unique, interleaved 0 {gpt.GROUPS} of (q, kv, kv)
model.**.weight                           unique

rename model.embed_tokens.weight -> embedding.word_embeddings.weight
rename model.norm.weight -> decoder.final_layernorm.weight
rename model.layers.{{n}}.input_layernorm.weight -> decoder.layers.{{n}}.input_layernorm.weight
rename model.layers.{{n}}.post_attention_layernorm.weight -> decoder.layers.{{n}}.pre_mlp_layernorm.weight
rename model.layers.{{n}}.self_attn.qkv_proj.weight -> decoder.layers.{{n}}.self_attention.linear_qkv.weight
rename model.layers.{{n}}.self_attn.o_proj.weight -> decoder.layers.{{n}}.self_attention.linear_proj.weight
rename model.layers.{{n}}.mlp.gate_up_proj.weight -> decoder.layers.{{n}}.mlp.linear_fc1.weight
rename model.layers.{{n}}.mlp.down_proj.weight -> decoder.layers.{{n}}.mlp.linear_fc2.weight
""",
    "phi3.rules",
)


def to_megatron(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of Phi-3's parameter `name` in Megatron-Core's order of rows."""
    stored = torch.empty_like(tensor)
    for logical, f in _fragments(name, tensor):
        stored.as_strided(f.box.shape, f.strides, f.offset).copy_(tensor[logical])
    return stored


def to_phi(name: str, stored: torch.Tensor) -> torch.Tensor:
    """The way back."""
    tensor = torch.empty_like(stored)
    for logical, f in _fragments(name, stored):
        tensor[logical] = stored.as_strided(f.box.shape, f.strides, f.offset)
    return tensor


def _fragments(name: str, tensor: torch.Tensor) -> Iterator[tuple[tuple[slice, ...], Fragment]]:
    shape = tuple(tensor.shape)
    for f in RULES.layout(name, shape, Mesh(())).fragments(0):
        yield f.box.within((0,) * len(shape)), f


class Loss(nn.Module):
    """Phi-3's mean loss, of tokens as `ucp_gpt.Gpt` takes them."""

    def __init__(self) -> None:
        super().__init__()
        config = Phi3Config(
            vocab_size=gpt.PADDED, hidden_size=gpt.HIDDEN, intermediate_size=gpt.INNER,
            num_hidden_layers=gpt.LAYERS, num_attention_heads=gpt.HEADS,
            num_key_value_heads=gpt.GROUPS, max_position_embeddings=gpt.SEQUENCE,
            original_max_position_embeddings=gpt.SEQUENCE, tie_word_embeddings=True,
            resid_pdrop=0.0, embd_pdrop=0.0, pad_token_id=None, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        self.phi = Phi3ForCausalLM(config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.phi(ids[:, :-1], use_cache=False).logits[..., : gpt.VOCAB]
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Phi(gpt.Plain):
    """Under torch's AdamW, at the common beginning."""

    def __init__(self) -> None:
        model = Loss()
        super().__init__(model, gpt.adamw(model))
        with torch.no_grad():
            for name, new, p in self.named():
                p.copy_(to_phi(name, gpt.value(new, tuple(p.shape))))

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model.phi, "optim": self.optim}

    def named(self) -> list[tuple[str, str, torch.nn.Parameter]]:
        """Each parameter with its name here and in Megatron-Core."""
        mine = dict(self.model.phi.named_parameters())
        new = RULES.renamed(mine)
        return [(name, new[name], p) for name, p in mine.items()]

    def save(self, folder: Path) -> None:
        """As transformers does: the weights."""
        self.model.phi.save_pretrained(folder)

    def gathered(self) -> dict[str, torch.Tensor]:
        """In Megatron-Core's names and order of rows."""
        found = {}
        for name, new, p in self.named():
            found[f"model.{new}"] = to_megatron(name, p.detach())
            for s in gpt.ADAM:
                found[f"optim.{new}.{s}"] = to_megatron(name, self.optim.state[p][s])
        return found

    @torch.no_grad()
    def load(self, url: Path) -> None:
        """A checkpoint in Megatron-Core's names: weights and moments."""
        with holdfast.open(url) as saved:
            for name, new, p in self.named():
                p.copy_(to_phi(name, torch.from_numpy(saved.read(f"model.{new}"))))
                self.optim.state[p] = {"step": torch.tensor(float(saved.step))} | {
                    s: to_phi(name, torch.from_numpy(saved.read(f"optim.{new}.{s}")))
                    for s in gpt.ADAM
                }


@torch.no_grad()
def load_from_phi(plain: gpt.Plain, url: Path, weights: str) -> None:
    """A checkpoint in Phi-3's names into a plain model: moments, and weights from `weights`."""
    mine = dict(plain.model.named_parameters())
    with holdfast.open(url) as saved, holdfast.open(weights) as pretrained:
        old = RULES.renamed_back(mine)
        for new, p in mine.items():
            name = old[new]
            p.copy_(to_megatron(name, torch.from_numpy(pretrained.read(f"model.{name}"))))
            plain.optim.state[p] = {"step": torch.tensor(float(saved.step))} | {
                s: to_megatron(name, torch.from_numpy(saved.read(f"optim.{name}.{s}")))
                for s in gpt.ADAM
            }
