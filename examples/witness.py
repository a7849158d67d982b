"""What a training state is, told by torch alone: one SHA-256 per tensor, gathered whole from all ranks.

A check of a checkpoint must not lean on the library that wrote it. `digests` uses only DTensor's
own gathering, so two runs on different layouts hold the same state if and only if their digests are
equal.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def digest(array: np.ndarray) -> str:
    """SHA-256 over dtype, shape and bytes."""
    head = f"{array.dtype.name}{list(array.shape)}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()


def tensors(model: nn.Module, optim: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the training state as a rank holds it, under the name that holdfast gives it."""
    for name, value in model.state_dict().items():
        yield f"model.{name}", value
    for name, parameter in model.named_parameters():
        for key, value in optim.state[parameter].items():
            yield f"optim.{name}.{key}", value


def whole(tensor: Tensor) -> np.ndarray:
    """The logical tensor; collective over the ranks that hold its parts."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().cpu().numpy()


def digests(model: nn.Module, optim: Optimizer) -> dict[str, str]:
    """Digest of every tensor by name; every rank must call it, and every rank gets the answer."""
    return {name: digest(whole(tensor)) for name, tensor in tensors(model, optim)}
