"""Runs in which Lightning's BaseFinetuning unfreezes parameters, and adds groups of them to the optimizer.

    saved     groups of the head, and of the backbone since epoch 10
    restored  setup() of the callback freezes the backbone, and a new optimizer has the head's group alone

Groups must exist before states are restored into them.  Lightning restores callbacks before it calls their
`on_fit_start`, which makes the groups; a step of holdfast is restored whole, after that.  Lightning does
not unfreeze parameters again either, so a step has the names of trained parameters.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from lightning.pytorch.callbacks import BaseFinetuning

from holdfast import errors

(_BatchNorm,) = errors.need("torch", "torch.nn.modules.batchnorm", "_BatchNorm")

TRAINED = "holdfast.trained"
"""The key of the names of trained parameters in a Lightning checkpoint."""


def callbacks_of(trainer: Any) -> list[Any]:
    """Return the callbacks that unfreeze parameters."""
    return [one for one in trainer.callbacks if isinstance(one, BaseFinetuning)]


def names_of_trained(module: Any) -> list[str]:
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def prepare(trainer: Any, saved: dict[str, Any]) -> None:
    """Give optimizers the groups of a Lightning checkpoint, and unfreeze the parameters that it names."""
    module, states = trainer.lightning_module, saved.get("callbacks", {})
    for callback in callbacks_of(trainer):
        if callback.state_key in states:
            callback.load_state_dict(deepcopy(states[callback.state_key]))
            callback.on_fit_start(trainer, module)
    trained = set(saved.get(TRAINED, ()))
    for prefix, part in module.named_modules():
        start = f"{prefix}." if prefix else ""
        for name, parameter in part.named_parameters(recurse=False):
            if start + name in trained and not parameter.requires_grad:
                parameter.requires_grad_(True)
                if isinstance(part, _BatchNorm):
                    part.track_running_stats = True  # the callback clears it when it freezes
