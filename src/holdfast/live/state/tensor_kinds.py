"""Kinds of tensors: those whose memory holds their values, whole, as shape and dtype say, and others.

A checkpoint is made of memory.  Three kinds of tensors look like the others and are not:

* *Subclasses that compute their values* (`__torch_dispatch__`: quantised, nested, fake, sharded ones).
  Their values are in other tensors, so what is read from their own memory is nothing, or a crash.
* *Tensors without memory, or with another layout*: meta, lazy, sparse, wrapped by a transform of functorch,
  with a storage that was freed.
* *Parts that look whole.*  FSDP1, ZeRO-3 and Megatron keep a rank's part of a parameter in a plain tensor.
  Parts of one shape on all ranks would be taken for replicas, and every rank would get some of each
  other's elements back.  Each of these frameworks marks its parameters by an attribute.

`check_kind` refuses them by name.  The common case is seven look-ups, less than a microsecond.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, suppress
from functools import cache, lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from holdfast.base.errors import HoldfastError, LayoutError, UsageError, need
from holdfast.core.format.dtypes import DTYPES

need("torch", torch.Tensor, "_is_zerotensor")

PLAIN_TENSORS = frozenset([torch.Tensor, torch.nn.Parameter])
"""Types of plain tensors."""
FSDP1_MARKS = ("_fsdp_flattened", "_is_flat_param")
"""Attributes of parameters that torch's FullyShardedDataParallel has flattened, and of the flat ones."""
FSDP1_CHILD = "_fsdp_wrapped_module"
"""Name of the one submodule of a FullyShardedDataParallel."""
ZERO3_MARK = "ds_id"
"""Attribute of parameters that DeepSpeed's ZeRO-3 has partitioned."""
MEGATRON_MARK = "tensor_model_parallel"
"""Attribute of Megatron's parameters; true of those that tensor parallelism may have cut."""
SHARDING_MARKS = frozenset([*FSDP1_MARKS, ZERO3_MARK, MEGATRON_MARK])

FSDP1_HINT = (
    "shard the model by torch.distributed.fsdp.fully_shard (FSDP2), or hand over whole tensors: "
    "get_model_state_dict and get_optimizer_state_dict of torch.distributed.checkpoint.state_dict, with "
    "StateDictOptions(full_state_dict=True)"
)

_HINTS = {
    "AsyncCollectiveTensor": "wait for it before: tensor.wait()",
    "FakeTensor": "build the model outside FakeTensorMode",
    "MaskedTensor": "keep its get_data() and get_mask()",
    "NestedTensor": "keep its values() and offsets(), or make it dense (to_padded_tensor())",
    "ShardedTensor": "make it a DTensor, which says which part of the whole tensor it is",
}
"""Hints on what to do with a tensor, by the name of its class or of the nearest of its bases."""
_HINT = "keep its values in plain tensors (what its dequantize() or full_tensor() gives, say)"


def check_kind(tensor: torch.Tensor, name: str) -> None:
    """UsageError or LayoutError, with its name, for a tensor whose memory cannot be read or written."""
    try:
        if (
            is_plain_type(type(tensor))  # type: ignore[arg-type]
            and tensor.dtype in _storable()
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and ((tensor.data_ptr() and tensor.untyped_storage().nbytes()) or not tensor.numel())
        ):
            attributes = tensor.__dict__
            if not attributes or SHARDING_MARKS.isdisjoint(attributes):
                return
            error = _marked(tensor, name)
            if error is None:
                return
        else:
            error = _refusal(tensor, name)
    except RuntimeError as failed:  # of torch, for a kind that is not known here
        error = _unreadable(tensor, name, failed)
    raise error


def writing(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """A context in which torch lets values be written to a tensor: one of inference mode needs it again."""
    return torch.inference_mode() if tensor.is_inference() else torch.no_grad()


def fill_with_nan(tensor: torch.Tensor) -> None:
    """Fill a float or complex tensor with NaN; others stay."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        with writing(tensor), suppress(RuntimeError):  # float4 has no NaN
            tensor.fill_(float("nan"))


@lru_cache(1024)
def is_plain_type(kind: Any) -> bool:
    """True if tensors of a class have their values in their own memory."""
    own_dispatch = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return not (
        own_dispatch
        or hasattr(kind, "__tensor_flatten__")
        or issubclass(kind, UninitializedTensorMixin)
    )


@cache
def _storable() -> frozenset[torch.dtype]:
    return frozenset(getattr(torch, name) for name in DTYPES if hasattr(torch, name))


def _refusal(tensor: torch.Tensor, name: str) -> HoldfastError:
    """The error for a tensor whose memory does not say its values."""
    kind = type(tensor)
    if issubclass(kind, UninitializedTensorMixin):
        return UsageError(
            f"{name!r}: a lazy tensor (torch.nn.{kind.__name__}), which has no shape yet",
            hint="run a batch through the module first",
        )
    if not is_plain_type(kind):  # type: ignore[arg-type]
        known = [_HINTS[base.__name__] for base in kind.__mro__ if base.__name__ in _HINTS]
        return UsageError(
            f"{name!r}: a {kind.__module__}.{kind.__qualname__}, whose values are not in memory of its "
            "own, cannot be saved or loaded",
            hint=known[0] if known else _HINT,
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else tensor.layout
        return LayoutError(f"{name!r}: a {layout} tensor cannot be saved or loaded; make it dense")
    if tensor.dtype not in _storable():
        return UsageError(
            f"{name!r}: a tensor of {tensor.dtype} cannot be saved or loaded",
            hint="view it as uint8, or dequantize() it; storable: " + ", ".join(sorted(DTYPES)),
        )
    if tensor.is_meta:
        return UsageError(
            f"{name!r}: a tensor on the meta device, which has no values",
            hint="make it on a real device (modules are materialised by a load, others are not)",
        )
    if tensor._is_zerotensor():
        return UsageError(
            f"{name!r}: a tensor of zeros without memory (torch._efficientzerotensor)",
            hint="clone it",
        )
    return UsageError(
        f"{name!r}: the memory of this tensor was freed (its storage has "
        f"{tensor.untyped_storage().nbytes()} bytes for {tensor.numel()} elements)",
        hint="save when whoever freed it (a sharding or offloading framework) has filled it again, or "
        "hand over what that framework keeps instead",
    )


def _unreadable(tensor: torch.Tensor, name: str, failed: RuntimeError) -> HoldfastError:
    return UsageError(
        f"{name!r}: the memory of this {type(tensor).__qualname__} cannot be reached: {failed}",
        hint="inside torch.func transforms and the like there is none: save outside of them",
    )


def _marked(tensor: torch.Tensor, name: str) -> HoldfastError | None:
    """The error for a part that looks whole; None if its mark means nothing here."""
    if any(getattr(tensor, mark, False) for mark in FSDP1_MARKS):
        return _fsdp1(repr(name))
    if getattr(tensor, ZERO3_MARK, None) is not None:
        return LayoutError(
            f"{name!r}: a parameter that DeepSpeed's ZeRO-3 has partitioned; which part this is only the "
            "engine knows",
            hint="hand over the engine: {'model': engine, 'optim': engine.optimizer}",
        )
    if getattr(tensor, MEGATRON_MARK, False) and _may_be_cut():
        return LayoutError(
            f"{name!r}: a parameter that Megatron's tensor parallelism has cut "
            f"({MEGATRON_MARK}=True) outside of a Megatron-Core model: which part this is cannot be known",
            hint="hand over the model whose sharded_state_dict() tells, or make the parameter a DTensor",
        )
    return None


def check_unit(part: nn.Module, root: nn.Module) -> None:
    """LayoutError if a submodule of `root` is FSDP1's and has parameters, gathered now or not."""
    if FSDP1_CHILD in part._modules and getattr(part, "_handle", None) is not None:
        name = next(name for name, module in root.named_modules() if module is part)
        own = ".".join(each for each in name.split(".") if each != FSDP1_CHILD)
        raise _fsdp1(repr(own) if own else "the module")


def _fsdp1(what: str) -> LayoutError:
    return LayoutError(
        f"{what}: FullyShardedDataParallel (FSDP1) flattens parameters and cuts the flat ones, so what a "
        "rank has are no parts of parameters that other layouts could use; it is not supported",
        hint=FSDP1_HINT,
    )


def _may_be_cut() -> bool:
    """True if tensor parallelism is of more than one rank, as far as is known."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None and state.model_parallel_is_initialized():
        return int(state.get_tensor_model_parallel_world_size()) > 1
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
