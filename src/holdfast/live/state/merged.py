"""Merged adapters: the saved weights then have the adapter in them.

PEFT's layers (`merge_adapter()`) and loralib's, which merge in `eval()`, add the adapter to the weight and
note that in an attribute, which no `state_dict()` has.  A restart builds a model whose adapters are not
merged, and adds them a second time to the restored weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from holdfast.base.errors import warn_user
from holdfast.base.text import listed
from holdfast.live.state.ignoring import trainable_marks
from holdfast.live.state.modules import unwrap
from holdfast.live.state.recognising import State, modules_in

Layers = list[tuple[str, nn.Module]]


def layers_with_adapters(state: State) -> Layers:
    """The layers of a state that may merge an adapter into weights that are saved, by name."""
    return [
        (f"{key}.{name}" if name else key, part)
        for key, module in modules_in(state)
        for root in [unwrap(module)]
        if not (trainable_marks and any(m in trainable_marks for m in root.modules()))
        for name, part in root.named_modules()
        if _can_merge(part)
    ]


def _can_merge(part: nn.Module) -> bool:
    kept = part.__dict__
    return "merged_adapters" in kept or ("merged" in kept and hasattr(part, "lora_A"))


def merged_in(layers: Iterable[tuple[str, nn.Module]]) -> Iterator[str]:
    """Yield the names of layers whose adapters are merged now."""
    for name, part in layers:
        kept: dict[str, Any] = part.__dict__
        if kept.get("merged_adapters") or kept.get("merged") is True:
            yield name


def merged_text(names: list[str]) -> str:
    """The notice of layers whose adapters are merged at a save."""
    return (
        f"{listed(names, 1)}: the adapter is merged into the weights that are saved, which a restart "
        "takes for those of the base model, and adds it once more: save after unmerge_adapter()"
    )


def tell_merged(state: State) -> None:
    """HoldfastWarning for adapters that are merged into what is saved."""
    if names := list(merged_in(layers_with_adapters(state))):
        warn_user(merged_text(names), notice="merged-adapters")
