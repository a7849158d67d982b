"""Names: from Megatron-Core's keys to those of a model that lies whole in one process.

A key stands for the same weight of all layers, and of all experts: their tensors are stacked along axes
that come first, and the key has no number for them.  Here each index is a tensor of its own again, by the
name that a live model gives it:

    decoder.layers.mlp.linear_fc2.weight                  decoder.layers.{}.mlp.linear_fc2.weight
    decoder.layers.mlp.experts.experts.linear_fc2.weight  decoder.layers.{}.mlp.experts.local_experts.{}...

Checkpoints whose layers differ carry the numbers in their keys; they come out the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
MASTERS = ("fp32_param", "param")
"""States under which optimizers keep the fp32 weights."""


def split(key: str) -> tuple[str | None, str]:
    """(state, weight) of an optimizer's key; (None, key) of a weight's."""
    match = _STATE.fullmatch(key)
    return (match[1], match[2]) if match else (None, key)


def template(key: str) -> tuple[str, int]:
    """A key with `{}` for each number that it leaves out, and how many these are."""
    found: list[str] = []
    words = key.replace("{", "").replace("}", "").split(".")
    for i, word in enumerate(words):
        stacked = i + 1 < len(words) and not words[i + 1].isdigit()
        if word == "experts" and i and words[i - 1] == "experts":
            found += ["local_experts", *["{}"] * stacked]
        elif word == "layers" and stacked:
            found += [word, "{}"]
        else:
            found.append(word)
    return ".".join(found), found.count("{}")


def unfused(names: Iterable[str]) -> dict[str, str]:
    """Further names: a norm that Transformer Engine fuses into a linear layer is a module of its own in
    Megatron's local layers; both are stored under the fused name."""
    found = {}
    for name in names:
        for fused, alone in _NORMS:
            if fused in name:
                found[name.replace(fused, alone)] = name
    return found
