"""The strangers: modules, optimizers, wrappers and tensors of torch and of packages that others wrote.

`SUBJECTS` has for each package its subjects by name.  Each builds itself from the seed that is set, and
imports what it needs itself: a package that is not installed leaves out its own subjects alone.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from capabilities import FLOAT4, FSDP2_ON_CPUS, MUON, SWALR_STATE
from system.strangers.trial import Subject

Build = Callable[[int], Subject]
SUBJECTS: dict[str, dict[str, Build]] = {}


def subject(package: str, name: str) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        SUBJECTS.setdefault(package, {})[name] = build
        return build

    return add


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def trained(
    model: nn.Module,
    optim: Any,
    inputs: Callable[[], Any] = lambda: torch.randn(4, 8),
    loss: Callable[[Any], torch.Tensor] = lambda out: out.square().mean(),
    create_graph: bool = False,
    **also: Any,
) -> Subject:
    """The usual loop: forward, backward, step; what is `also` in the state takes a step if it can."""

    def step(n: int) -> Any:
        optim.zero_grad()
        made = loss(model(inputs()))
        made.backward(create_graph=create_graph)
        optim.step()
        for value in also.values():
            if hasattr(value, "step"):
                value.step()
        return made.detach()

    return Subject({"model": model, "optim": optim, **also}, step)


def with_adamw(make: Callable[[], nn.Module], **options: Any) -> Build:
    def build(seed: int) -> Subject:
        model = make()
        params = [p for p in model.parameters() if p.requires_grad]
        return trained(model, torch.optim.AdamW(params, lr=1e-2), **options)

    return build


def with_optimizer(make: Callable[[Any], Any], **options: Any) -> Build:
    def build(seed: int) -> Subject:
        model = mlp()
        return trained(model, make(model.parameters()), **options)

    return build


def only_computing(make: Callable[[], nn.Module], inputs: Callable[[], Any]) -> Build:
    """A module that is not trained: its output is compared."""

    def build(seed: int) -> Subject:
        model = make()
        return Subject({"model": model}, lambda n: model(inputs()))

    return build


# --- torch: modules

NORMED = {
    "BatchNorm, Dropout": lambda: nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4)
    ),
    "weight_norm (parametrization)": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))
    ),
    "weight_norm (hook)": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 4))),
    "spectral_norm (parametrization)": lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4))
    ),
    "spectral_norm (hook)": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 4))),
    "orthogonal": lambda: nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(8, 4))),
    "LazyLinear, materialised": lambda: _called(nn.Sequential(nn.LazyLinear(4))),
    "torch.compile": lambda: torch.compile(mlp(), backend="eager"),
    "TorchScript": lambda: torch.jit.script(mlp()),
    "DataParallel": lambda: nn.DataParallel(mlp()),
    "quantisation-aware training": lambda: _prepared_qat(),
    "float64": lambda: nn.Sequential(_Cast(torch.float64), mlp().double()),
    "bfloat16": lambda: nn.Sequential(_Cast(torch.bfloat16), mlp().bfloat16()),
    "channels_last": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    ),
}
for name, make in NORMED.items():
    subject("torch", name)(with_adamw(make))


class _Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


def _called(module: nn.Module) -> nn.Module:
    module(torch.ones(1, 8))
    return module


def _prepared_qat() -> nn.Module:
    model = mlp().train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    torch.ao.quantization.prepare_qat(model, inplace=True)
    return model


@subject("torch", "pruned")
def pruned(seed: int) -> Subject:
    model = mlp()
    from torch.nn.utils import prune

    prune.random_unstructured(model[0], "weight", 0.5)
    return trained(model, torch.optim.AdamW(model.parameters()))


@subject("torch", "tied weights")
def tied(seed: int) -> Subject:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    return trained(model, torch.optim.AdamW(model.parameters()))


@subject("torch", "LSTM")
def lstm(seed: int) -> Subject:
    model = nn.LSTM(8, 6, num_layers=2, dropout=0.2)
    return trained(
        model,
        torch.optim.AdamW(model.parameters()),
        inputs=lambda: torch.randn(3, 2, 8),
        loss=lambda out: out[0].square().mean(),
    )


@subject("torch", "Transformer")
def transformer(seed: int) -> Subject:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return trained(
        model, torch.optim.AdamW(model.parameters()), inputs=lambda: torch.randn(2, 3, 8)
    )


@subject("torch", "checkpoint_wrapper")
def checkpointed(seed: int) -> Subject:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Linear(8, 8)), nn.Linear(8, 4))
    return trained(model, torch.optim.AdamW(model.parameters()))


@subject("torch", "sparse gradients")
def sparse_gradients(seed: int) -> Subject:
    model = nn.EmbeddingBag(16, 4, sparse=True)
    return trained(
        model,
        torch.optim.SparseAdam(model.parameters()),
        inputs=lambda: torch.randint(16, (3, 5)),
    )


@subject("torch", "AveragedModel")
def averaged(seed: int) -> Subject:
    model = mlp()
    mean = torch.optim.swa_utils.AveragedModel(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    subject = trained(model, optim)

    def step(n: int) -> Any:
        made = subject.step(n)
        mean.update_parameters(model)
        return made

    return Subject({**subject.state, "mean": mean}, step)


@subject("torch", "complex parameters")
def complex_parameters(seed: int) -> Subject:
    model = nn.Linear(8, 4, dtype=torch.complex64)
    return trained(
        model,
        torch.optim.AdamW(model.parameters()),
        inputs=lambda: torch.randn(2, 8, dtype=torch.complex64),
        loss=lambda out: out.abs().square().mean(),
    )


@subject("torch", "get_extra_state")
def extra_state(seed: int) -> Subject:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) * self.calls

        def get_extra_state(self) -> Any:
            return {"calls": self.calls}

        def set_extra_state(self, state: Any) -> None:
            self.calls = state["calls"]

    model = Counting(8, 4)
    return trained(model, torch.optim.AdamW(model.parameters()))


@subject("torch", "_save_to_state_dict of one's own")
def own_save(seed: int) -> Subject:
    class Book(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 4)
            self.codes = torch.randn(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.codes = self.codes * 0.5
            return super().forward(x) + self.codes

        def _save_to_state_dict(self, to: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(to, prefix, keep_vars)
            to[prefix + "codes"] = self.codes

        def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
            self.codes = state.pop(prefix + "codes").clone()
            super()._load_from_state_dict(state, prefix, *args)

    model = Book()
    return trained(model, torch.optim.AdamW(model.parameters()))


def _saying(module: nn.Module, **entries: Callable[[nn.Module], Any]) -> nn.Module:
    """A module whose state_dict() has these entries, too."""

    def after(part: nn.Module, state: Any, prefix: str, _: Any) -> None:
        state.update({prefix + name: make(part) for name, make in entries.items()})

    module.register_state_dict_post_hook(after)
    return module


@subject("torch", "state-dict hook with a time")
def hook_with_a_time(seed: int) -> Subject:
    model = _saying(mlp(), saved_at=lambda _: time.time_ns())
    return trained(model, torch.optim.AdamW(model.parameters()))


@subject("torch", "state-dict hook with a constant")
def hook_with_a_constant(seed: int) -> Subject:
    model = _saying(mlp(), version=lambda _: "2.1")
    return trained(model, torch.optim.AdamW(model.parameters()))


@subject("torch", "state-dict hook with another constant")
def hook_with_another_constant(seed: int) -> Subject:
    model = _saying(mlp(), built_with=lambda _: seed)
    return trained(model, torch.optim.AdamW(model.parameters()))


@subject("torch", "state-dict hook with copies of weights")
def hook_with_copies(seed: int) -> Subject:
    model = _saying(mlp(), first=lambda part: part[0].weight.detach().clone())
    return trained(model, torch.optim.AdamW(model.parameters()))


@subject("torch", "state-dict hooks of a compiled module and around it")
def hooks_around_hooks(seed: int) -> Subject:
    inner = _saying(mlp(), norm=lambda part: part[0].weight.detach().norm())
    outer = _saying(torch.compile(inner, backend="eager"), mode=lambda _: "fast")
    model = nn.Sequential(outer)
    return trained(model, torch.optim.AdamW(model.parameters()))


@subject("torch", "child called _orig_mod")
def child_called_orig_mod(seed: int) -> Subject:
    class Shadow(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 4)
            self._orig_mod = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self._orig_mod(x)

    scale, deeper = torch.randn(4), torch.randn(4)
    model = _saying(Shadow(), **{"scale": lambda _: scale, "_orig_mod.scale": lambda _: deeper})
    return trained(model, torch.optim.AdamW(model.parameters()))


@subject("torch", "shared module that is partly ignored")
def shared_and_ignored(seed: int) -> Subject:
    from holdfast import ignore

    shared = ignore(_saying(nn.Linear(8, 8), kind=lambda _: "a"), "kind")
    model = nn.Sequential(shared, nn.Tanh(), shared)
    return trained(model, torch.optim.AdamW(model.parameters()))


subject("torch", "quantize_dynamic")(
    only_computing(
        lambda: torch.ao.quantization.quantize_dynamic(mlp(), {nn.Linear}, dtype=torch.qint8),
        lambda: torch.randn(4, 8),
    )
)
subject("torch", "lazy module, not yet called")(
    only_computing(lambda: nn.LazyLinear(4), lambda: torch.randn(4, 8))
)


def _inference() -> nn.Module:
    with torch.inference_mode():
        return mlp()


def _frozen_output(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


subject("torch", "inference tensors")(
    only_computing(lambda: _frozen_output(_inference()), lambda: torch.randn(4, 8))
)


def tensor(name: str, make: Callable[[], torch.Tensor]) -> None:
    """A tensor as a value of the state."""

    def build(seed: int) -> Subject:
        value = make()
        return Subject({"value": value}, lambda n: value)

    subject("torch", f"tensor: {name}")(build)


def _nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=layout)


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "float8_e4m3fn": lambda: torch.randn(8).to(torch.float8_e4m3fn),
    "float4_e2m1fn_x2": lambda: torch.randint(0, 255, (8,), dtype=torch.uint8).view(
        torch.float4_e2m1fn_x2
    ),
    "uint16": lambda: torch.randint(0, 9, (8,)).to(torch.uint16),
    "sparse COO": lambda: torch.randn(4, 4).to_sparse(),
    "sparse CSR": lambda: torch.randn(4, 4).to_sparse_csr(),
    "nested, strided": lambda: _nested(torch.strided),
    "nested, jagged": lambda: _nested(torch.jagged),
    "qint8": lambda: torch.quantize_per_tensor(torch.randn(8), 0.1, 0, torch.qint8),
    "conjugate view": lambda: torch.randn(8, dtype=torch.complex64).conj(),
    "negative view": lambda: torch.randn(8, dtype=torch.complex64).conj().imag,
    "meta": lambda: torch.empty(8, device="meta"),
    "expanded": lambda: torch.randn(1, 3).expand(4, 3),
    "transposed": lambda: torch.randn(3, 4).t(),
}
for name, make in TENSORS.items():
    tensor(name, make)


# --- torch: optimizers and what goes with them

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.Adam,
    "Adam, foreach": partial(torch.optim.Adam, foreach=True),
    "Adam, fused": partial(torch.optim.Adam, fused=True),
    "AdamW, amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "AdamW, lr as a tensor": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2)),
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop, centered": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "Rprop": torch.optim.Rprop,
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD, momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
}
for name, opt in OPTIMIZERS.items():
    subject("torch", name)(with_optimizer(opt))


@subject("torch", "LBFGS")
def lbfgs(seed: int) -> Subject:
    model = mlp()
    optim = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def step(n: int) -> Any:
        x = torch.randn(4, 8)

        def closure() -> torch.Tensor:
            optim.zero_grad()
            made = model(x).square().mean()
            made.backward()
            return made

        return optim.step(closure).detach()

    return Subject({"model": model, "optim": optim}, step)


@subject("torch", "Muon and AdamW in a list")
def muon_and_adamw(seed: int) -> Subject:
    model = mlp()
    pair = [
        torch.optim.Muon([p for p in model.parameters() if p.ndim == 2]),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2]),
    ]
    return _several(model, pair, pair)


@subject("torch", "optimizers in a dict")
def optimizers_in_a_dict(seed: int) -> Subject:
    model = mlp()
    by_name = {
        "first": torch.optim.AdamW(model[0].parameters()),
        "last": torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9),
    }
    return _several(model, list(by_name.values()), by_name)


def _several(model: nn.Module, optims: list[Any], value: Any) -> Subject:
    def step(n: int) -> Any:
        model.zero_grad()
        made = model(torch.randn(4, 8)).square().mean()
        made.backward()
        for optim in optims:
            optim.step()
        return made.detach(), [optim.state_dict() for optim in optims]

    return Subject({"model": model, "optims": value}, step)


@subject("torch", "an optimizer of optimizers")
def an_optimizer_of_optimizers(seed: int) -> Subject:
    class Both(torch.optim.Optimizer):
        def __init__(self, *parts: torch.optim.Optimizer) -> None:
            self.parts = list(parts)
            super().__init__([p for o in parts for g in o.param_groups for p in g["params"]], {})

        def step(self, closure: Any = None) -> None:
            for part in self.parts:
                part.step()

        def state_dict(self) -> Any:
            return {str(i): part.state_dict() for i, part in enumerate(self.parts)}

        def load_state_dict(self, state: Any) -> None:
            for i, part in enumerate(self.parts):
                part.load_state_dict(state[str(i)])

    model = mlp()
    both = Both(
        torch.optim.AdamW(model[0].parameters()), torch.optim.Adagrad(model[2].parameters())
    )
    return trained(model, both)


@subject("torch", "optimizer in backward")
def optimizer_in_backward(seed: int) -> Subject:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = mlp()
    _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 1e-2})

    def step(n: int) -> Any:
        made = model(torch.randn(4, 8)).square().mean()
        made.backward()
        return made.detach(), [
            p._in_backward_optimizers[0].state_dict() for p in model.parameters()
        ]

    return Subject({"model": model}, step)


@subject("torch", "ZeroRedundancyOptimizer")
def zero_redundancy(seed: int) -> Subject:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = mlp()
    optim = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    subject = trained(model, optim)
    return Subject(subject.state, lambda n: (subject.step(n), optim.optim.state_dict()["state"]))


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
        o, 3
    ),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [2],
    ),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
}


def scheduled(make: Callable[[Any], Any]) -> Build:
    def build(seed: int) -> Subject:
        model = mlp()
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return trained(model, optim, sched=make(optim))

    return build


for name, make_schedule in SCHEDULERS.items():
    subject("torch", name)(scheduled(make_schedule))


@subject("torch", "ReduceLROnPlateau")
def plateau(seed: int) -> Subject:
    model = mlp()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(optim, patience=0)
    subject = trained(model, optim)

    def step(n: int) -> Any:
        made = subject.step(n)
        sched.step(made)
        return made

    return Subject({**subject.state, "sched": sched}, step)


@subject("torch", "GradScaler")
def scaled(seed: int) -> Subject:
    model = mlp()
    optim = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)

    def step(n: int) -> Any:
        optim.zero_grad()
        made = model(torch.randn(4, 8)).square().mean()
        scaler.scale(made).backward()
        scaler.step(optim)
        scaler.update()
        return made.detach()

    return Subject({"model": model, "optim": optim, "scaler": scaler}, step)


@subject("torch", "DistributedDataParallel")
def ddp(seed: int) -> Subject:
    model = nn.parallel.DistributedDataParallel(NORMED["BatchNorm, Dropout"]())
    return trained(model, torch.optim.AdamW(model.parameters()))


@subject("torch", "FSDP2")
def fsdp2(seed: int) -> Subject:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = mlp()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=_mesh(), mp_policy=policy)
    fully_shard(model, mesh=_mesh(), mp_policy=policy)
    return trained(model, torch.optim.AdamW(model.parameters()))


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (1,))


@subject("torch", "tensor parallelism")
def tensor_parallel(seed: int) -> Subject:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = mlp()
    parallelize_module(model, _mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return trained(model, torch.optim.AdamW(model.parameters()))


@subject("torch", "FSDP1")
def fsdp1(seed: int) -> Subject:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"), use_orig_params=True)
    return trained(model, torch.optim.AdamW(model.parameters()))


# --- torchao


def torchao_optimizer(name: str, **options: Any) -> None:
    def build(seed: int) -> Subject:
        import torchao.optim

        model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 4))
        optim = getattr(torchao.optim, name)(model.parameters(), **options)
        return trained(model, optim, inputs=lambda: torch.randn(4, 128))

    subject("torchao", name)(build)


for name in ("Adam8bit", "AdamW8bit", "AdamW4bit", "AdamWFp8", "_AdamW"):
    torchao_optimizer(name)


def torchao_quantised(name: str, **options: Any) -> None:
    def make() -> nn.Module:
        import torchao.quantization as q

        model = nn.Sequential(nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 64))
        q.quantize_(model, getattr(q, name)(**options))
        return model

    subject("torchao", name.removesuffix("Config"))(
        only_computing(make, lambda: torch.randn(4, 128))
    )


for name in ("Int8WeightOnlyConfig", "IntxWeightOnlyConfig", "Float8WeightOnlyConfig"):
    torchao_quantised(name)


@subject("torchao", "quantisation-aware training")
def torchao_qat(seed: int) -> Subject:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_
    from torchao.quantization.qat import QATConfig

    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    base = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(32)
    )
    quantize_(model, QATConfig(base, step="prepare"))
    return trained(model, torch.optim.AdamW(model.parameters()), inputs=lambda: torch.randn(4, 64))


@subject("torchao", "NF4 weights")
def nf4(seed: int) -> Subject:
    from torchao.quantization import to_nf4

    model = nn.Linear(256, 128, bias=False)
    model.weight = nn.Parameter(to_nf4(model.weight.detach()), requires_grad=False)
    return Subject({"model": model}, lambda n: model.weight.get_original_weight())


def of_blocks(name: str, quantise: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def build(seed: int) -> Subject:
        model = nn.Linear(128, 64, dtype=torch.bfloat16)
        model.weight = nn.Parameter(quantise(model.weight.detach()), requires_grad=False)
        return Subject({"model": model}, lambda n: model.weight.dequantize(torch.float32))

    subject("torchao", f"{name} weights")(build)


def _mx(of: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    def quantise(values: torch.Tensor) -> torch.Tensor:
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        return MXTensor.to_mx(values, of)

    return quantise


def _nv(values: torch.Tensor) -> torch.Tensor:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    return NVFP4Tensor.to_nvfp4(values, per_tensor_scale=values.abs().max().float() / 448)


of_blocks("MXFP8", _mx(torch.float8_e4m3fn))
if FLOAT4.is_there:
    of_blocks("MXFP4", _mx(torch.float4_e2m1fn_x2))
of_blocks("NVFP4", _nv)


# --- bitsandbytes


def bnb_layer(name: str, **options: Any) -> None:
    def make() -> nn.Module:
        import bitsandbytes as bnb

        layer = getattr(bnb.nn, name)(128, 64, **options)
        return nn.Sequential(layer).to("cpu").requires_grad_(False)

    subject("bitsandbytes", name + (", nf4" if options else ""))(
        only_computing(make, lambda: torch.randn(4, 128))
    )


bnb_layer("Linear4bit", quant_type="nf4", compute_dtype=torch.float32)
bnb_layer("Linear8bitLt", has_fp16_weights=False)


@subject("bitsandbytes", "Embedding4bit")
def embedding_4bit(seed: int) -> Subject:
    import bitsandbytes as bnb

    model = bnb.nn.Embedding4bit(64, 128).to("cpu").requires_grad_(False)
    return Subject({"model": model}, lambda n: model(torch.randint(64, (4,))))


def bnb_optimizer(name: str, **options: Any) -> None:
    def build(seed: int) -> Subject:
        import bitsandbytes as bnb

        model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 4))
        optim = getattr(bnb.optim, name)(model.parameters(), **options)
        return trained(model, optim, inputs=lambda: torch.randn(4, 128))

    subject("bitsandbytes", name)(build)


for name, options in {
    "AdamW8bit": {},
    "Lion8bit": {},
    "SGD8bit": {"lr": 0.1, "momentum": 0.9},
    "AdEMAMix8bit": {},
    "Adam32bit": {},
}.items():
    bnb_optimizer(name, **options)


# --- transformers


def hugging(name: str, config: str, model: str, **options: Any) -> None:
    def build(seed: int) -> Subject:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(**options))
        optim = torch.optim.AdamW(made.parameters(), lr=1e-3)

        def step(n: int) -> Any:
            optim.zero_grad()
            tokens = torch.randint(0, 60, (2, 5))
            if "ViT" in model:
                loss = made(pixel_values=torch.randn(2, 3, 16, 16)).logits.square().mean()
            else:
                loss = made(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optim.step()
            return loss.detach()

        return Subject({"model": made, "optim": optim}, step)

    subject("transformers", name)(build)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 1}
hugging("GPT-2", "GPT2Config", "GPT2LMHeadModel", vocab_size=64, n_embd=16, n_layer=2, n_head=2)
hugging("Llama", "LlamaConfig", "LlamaForCausalLM", **GROUPED)
hugging("Qwen3", "Qwen3Config", "Qwen3ForCausalLM", **GROUPED, head_dim=8)
hugging(
    "Qwen3-MoE",
    "Qwen3MoeConfig",
    "Qwen3MoeForCausalLM",
    **GROUPED,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)
hugging(
    "Mixtral",
    "MixtralConfig",
    "MixtralForCausalLM",
    **GROUPED,
    num_local_experts=4,
    num_experts_per_tok=2,
)
hugging("BERT", "BertConfig", "BertForMaskedLM", **SMALL)
hugging("GPT-NeoX", "GPTNeoXConfig", "GPTNeoXForCausalLM", **SMALL)
hugging(
    "T5",
    "T5Config",
    "T5ForConditionalGeneration",
    vocab_size=64,
    d_model=16,
    d_kv=8,
    d_ff=32,
    num_layers=2,
    num_heads=2,
    decoder_start_token_id=0,
)
hugging(
    "ViT",
    "ViTConfig",
    "ViTForImageClassification",
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=16,
    patch_size=8,
)


@subject("transformers", "Adafactor")
def hugging_adafactor(seed: int) -> Subject:
    from transformers.optimization import Adafactor

    model = mlp()
    return trained(model, Adafactor(model.parameters()))


@subject("transformers", "cosine schedule")
def hugging_schedule(seed: int) -> Subject:
    from transformers import get_cosine_schedule_with_warmup

    return scheduled(lambda o: get_cosine_schedule_with_warmup(o, 2, 20))(seed)


# --- peft


def adapted(name: str, make_config: Callable[[], Any], quantised: bool = False) -> None:
    def build(seed: int) -> Subject:
        import peft
        import transformers

        config = transformers.LlamaConfig(**{**GROUPED, "hidden_size": 64})
        base = transformers.LlamaForCausalLM(config)
        if quantised:
            _quantise(base)
        model = peft.get_peft_model(base, make_config())
        optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

        def step(n: int) -> Any:
            optim.zero_grad()
            tokens = torch.randint(0, 60, (2, 5))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optim.step()
            return loss.detach()

        return Subject({"model": model, "optim": optim}, step)

    subject("peft", name)(build)


def _quantise(model: nn.Module) -> None:
    """Put 4-bit layers in the place of the projections, as transformers does for QLoRA."""
    import bitsandbytes as bnb

    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and path != "lm_head":
            owner, _, leaf = path.rpartition(".")
            small = bnb.nn.Linear4bit(
                layer.in_features,
                layer.out_features,
                bias=False,
                quant_type="nf4",
                compute_dtype=torch.float32,
            )
            small.load_state_dict({"weight": layer.weight.detach().clone()})
            setattr(model.get_submodule(owner), leaf, small.to("cpu"))


def _lora(**options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import peft

        targets = ["q_proj", "v_proj"]
        return peft.LoraConfig(
            r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False, **options
        )

    return make


def _peft(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import peft

        return getattr(peft, name)(task_type="CAUSAL_LM", **options)

    return make


adapted("LoRA", _lora(lora_dropout=0.1))
adapted("DoRA", _lora(use_dora=True))
adapted("QLoRA (bitsandbytes, nf4)", _lora(), quantised=True)
adapted(
    "IA3",
    _peft("IA3Config", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
)
adapted("prompt tuning", _peft("PromptTuningConfig", num_virtual_tokens=3))
adapted("LoRA with modules_to_save", _lora(modules_to_save=["lm_head"]))


# --- torchtitan


def _titan(several: bool) -> tuple[nn.Module, Any]:
    from torchtitan.components.optimizer.optimizer import OptimizersContainer, ParamGroupConfig

    def group(pattern: str, kind: str) -> Any:
        options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        return ParamGroupConfig(pattern=pattern, optimizer_name=kind, optimizer_kwargs=options)

    groups = (
        [group(r".*weight", "Adam"), group(r".*", "AdamW")] if several else [group(".*", "AdamW")]
    )
    config = OptimizersContainer.Config(param_groups=groups, implementation="foreach")
    model = mlp()
    return model, OptimizersContainer(config, model_parts=[model])


def titan(name: str, several: bool, scheduled: bool = False) -> None:
    def build(seed: int) -> Subject:
        from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

        model, optim = _titan(several)
        also = {"sched": LRSchedulersContainer(optim, lambda n: 1 / (n + 1))} if scheduled else {}
        return trained(model, optim, **also)

    subject("torchtitan", name)(build)


titan("OptimizersContainer", several=False)
titan("OptimizersContainer of two kinds", several=True)
titan("LRSchedulersContainer", several=True, scheduled=True)


# --- accelerate


@subject("accelerate", "prepared model, optimizer, scheduler")
def accelerated(seed: int) -> Subject:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = NORMED["BatchNorm, Dropout"]()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.LambdaLR(optim, lambda n: 1 / (n + 1))
    model, optim, sched = accelerator.prepare(model, optim, sched)

    def step(n: int) -> Any:
        optim.zero_grad()
        made = model(torch.randn(4, 8)).square().mean()
        accelerator.backward(made)
        optim.step()
        sched.step()
        return made.detach()

    return Subject({"model": model, "optim": optim, "sched": sched}, step)


# --- lightning


@subject("lightning", "Fabric: model and optimizer")
def fabric(seed: int) -> Subject:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model = mlp()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optim = fabric.setup(model, optim)

    def step(n: int) -> Any:
        optim.zero_grad()
        made = model(torch.randn(4, 8)).square().mean()
        fabric.backward(made)
        optim.step()
        return made.detach()

    return Subject({"model": model, "optim": optim}, step)


@subject("lightning", "LightningModule")
def lightning_module(seed: int) -> Subject:
    from lightning import LightningModule

    class Small(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"width": 8})
            self.net = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    model = Small()
    return trained(model, torch.optim.AdamW(model.parameters()))


# --- pytorch-optimizer


def pytorch_optimizers() -> dict[str, Build]:
    """Every optimizer of that package that trains a plain model by `step()`."""
    try:
        import pytorch_optimizer as po
    except ImportError:
        return {}
    return {
        name: _pytorch_optimizer(po.load_optimizer(name), **SPECIAL.get(name, {}))
        for name in po.get_supported_optimizers()
        if name not in LEFT_OUT
    }


SPECIAL: dict[str, dict[str, Any]] = {
    "adahessian": {"create_graph": True},
    "sophiah": {"create_graph": True},
    "ranger21": {"num_iterations": 100},
}
LEFT_OUT = {
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "lbfgs", "nadam",
    "radam", "rmsprop", "sgd",  # torch's own
    "adago", "adamuon", "distributedmuon", "muon", "muonclip", "normuon",  # groups of their own
    "adalomo", "adammini", "lomo", "spectralsphere",  # take a model, or matrices alone
    "alig", "bsam", "adashift", "demo",  # a closure; gradients of several steps; a network
}  # fmt: skip


def _pytorch_optimizer(kind: Any, create_graph: bool = False, **options: Any) -> Build:
    def build(seed: int) -> Subject:
        model = mlp()
        optim = kind(model.parameters(), lr=1e-3, **options)
        return trained(model, optim, create_graph=create_graph)

    return build


SUBJECTS["pytorch-optimizer"] = pytorch_optimizers()


@subject("pytorch-optimizer", "Lookahead around AdamW")
def lookahead(seed: int) -> Subject:
    from pytorch_optimizer import Lookahead

    model = mlp()
    inner = torch.optim.AdamW(model.parameters())
    return trained(model, Lookahead(inner, k=2))


@subject("pytorch-optimizer", "Muon")
def po_muon(seed: int) -> Subject:
    from pytorch_optimizer import Muon

    model = mlp()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    optim = Muon([{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}])
    return trained(model, optim)


# --- DeepSpeed


def engine(
    name: str, own_adam: bool = False, make: Callable[[], nn.Module] = mlp, **config: Any
) -> None:
    def build(seed: int) -> Subject:
        import deepspeed

        import deepspeed_on_cpu  # noqa: F401

        model = make()
        optim = None if own_adam else torch.optim.AdamW(model.parameters(), lr=1e-2)
        chosen = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_allow_untested_optimizer": True,
            **config,
        }
        if own_adam:
            chosen["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": False}}
        made, optim, _, _ = deepspeed.initialize(
            model=model, optimizer=optim, model_parameters=model.parameters(), config=chosen
        )

        def step(n: int) -> Any:
            dtype = next(made.parameters()).dtype
            loss = made(torch.randn(4, 8, dtype=dtype)).square().mean()
            made.backward(loss)
            made.step()
            return loss.detach()

        return Subject({"model": made, "optim": optim}, step)

    subject("DeepSpeed", name)(build)


engine("engine, ZeRO-1", zero_optimization={"stage": 1})
engine("engine, ZeRO-2, bfloat16", zero_optimization={"stage": 2}, bf16={"enabled": True})
engine("engine, ZeRO-3", zero_optimization={"stage": 3})
engine("engine with its own Adam, ZeRO-1", own_adam=True, zero_optimization={"stage": 1})
engine(
    "engine around a module with a state-dict hook",
    make=lambda: _saying(mlp(), kind=lambda _: "nf4"),
    zero_optimization={"stage": 1},
)

LACKING = {
    "FSDP2": FSDP2_ON_CPUS, "Muon and AdamW in a list": MUON, "tensor: float4_e2m1fn_x2": FLOAT4,
    "SWALR": SWALR_STATE,
}  # fmt: skip
"""What not every torch has; its subjects are left out there."""
for _name, _capability in LACKING.items():
    if not _capability.is_there:
        del SUBJECTS["torch"][_name]
