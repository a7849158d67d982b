"""A real Megatron-Core GPT, its optimizer and its checkpoints, on the CPU by `megatron_cpu`."""

from __future__ import annotations

import io
import pickle
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SEQUENCE, BATCH = 8, 4


def _arrange(setup: Setup) -> None:
    """Make Megatron's process groups, unless they are there.  It forgets those of another arrangement,
    whose threads would add up: they are ended."""
    from megatron.core import parallel_state as mpu

    if mpu.model_parallel_is_initialized():
        sizes = (
            mpu.get_tensor_model_parallel_world_size(),
            mpu.get_pipeline_model_parallel_world_size(),
            mpu.get_expert_model_parallel_world_size(),
            mpu.get_virtual_pipeline_model_parallel_world_size() or 1,
        )
        if sizes == (setup.tp, setup.pp, setup.ep, setup.virtual):
            return
        mpu.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    mpu.initialize_model_parallel(
        setup.tp, setup.pp, setup.virtual if setup.virtual > 1 else None,
        expert_model_parallel_size=setup.ep,
    )  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """A model and how it is trained."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    virtual: int = 1
    """Model chunks of each pipeline stage."""
    sequence_parallel: bool = False
    bf16: bool = False
    fp16: bool = False
    distributed: bool = False
    sharding: str = "fully_reshardable"
    bucket: int | None = None
    """Elements after which the distributed optimizer begins another bucket."""
    fp8: bool = False
    """Whether modules have extra states, as Transformer Engine's have."""
    parallel_save: bool = False
    """Whether replicas share the writing, as Megatron-LM has it by default."""
    homogeneous: bool = True
    tied: bool = False
    gated: bool = True
    experts: int | None = None
    norm: str = "LayerNorm"
    positions: str = "learned_absolute"
    biased_qkv: bool = True
    hidden: int = 16
    inner: int = 24
    layers: int = 4
    heads: int = 4
    groups: int = 2
    vocab: int = 50
    divisible: int = 8
    lr: float = 0.01
    batch: int = BATCH
    micro: int = 1

    @property
    def padded_vocab(self) -> int:
        """As Megatron-LM pads it: to a multiple of `make_vocab_size_divisible_by` times the TP size."""
        unit = self.divisible * self.tp
        return -(-self.vocab // unit) * unit

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else torch.float32

    @property
    def metadata(self) -> dict[str, Any]:
        """What Megatron-LM hands to `sharded_state_dict`."""
        found: dict[str, Any] = {"non_homogeneous_layers": not self.homogeneous}
        if not self.homogeneous:
            found["singleton_local_shards"] = True
        found["chained_optim_avoid_prefix"] = True
        if self.distributed:
            found["distrib_optim_sharding_type"] = self.sharding
        return found


class Run:
    """A GPT of `setup` on this rank, in the parallel groups that it asks for."""

    def __init__(self, setup: Setup, seed: int = 1) -> None:
        _arrange(setup)
        self.setup = setup
        self.config = self._config()
        torch.manual_seed(seed)
        self.gpts = [self._gpt(i) for i in range(setup.virtual)]
        self.models = [self._wrapped(gpt, i) for i, gpt in enumerate(self.gpts)]
        self.optimizer = self._optimizer()
        self.iteration = 0

    @property
    def gpt(self) -> Any:
        """The only chunk."""
        (gpt,) = self.gpts
        return gpt

    @property
    def model(self) -> Any:
        """The only chunk, wrapped."""
        (model,) = self.models
        return model

    def _config(self) -> Any:
        from megatron.core.transformer.transformer_config import TransformerConfig

        s = self.setup
        return TransformerConfig(
            num_layers=s.layers, hidden_size=s.hidden, num_attention_heads=s.heads,
            num_query_groups=s.groups, ffn_hidden_size=s.inner, normalization=s.norm,
            use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0,
            tensor_model_parallel_size=s.tp, pipeline_model_parallel_size=s.pp,
            expert_model_parallel_size=s.ep, sequence_parallel=s.sequence_parallel,
            gated_linear_unit=s.gated, add_bias_linear=s.experts is None and not s.gated,
            activation_func=torch.nn.functional.silu if s.gated else torch.nn.functional.gelu,
            num_moe_experts=s.experts, moe_router_topk=2, moe_token_dispatcher_type="allgather",
            moe_router_load_balancing_type="none", gradient_accumulation_fusion=False,
            bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
            apply_rope_fusion=False, persist_layer_norm=False, add_qkv_bias=s.biased_qkv,
            params_dtype=s.dtype, bf16=s.bf16, fp16=s.fp16, pipeline_dtype=s.dtype,
            virtual_pipeline_model_parallel_size=s.virtual if s.virtual > 1 else None,
            variable_seq_lengths=False, batch_p2p_comm=False,
        )  # fmt: skip

    def _gpt(self, chunk: int) -> Any:
        from megatron.core import parallel_state as mpu
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        s = self.setup
        vp = {"vp_stage": chunk} if s.virtual > 1 else {}
        model = GPTModel(
            self.config,
            get_gpt_layer_local_spec(num_experts=s.experts, moe_grouped_gemm=False),
            s.padded_vocab,
            SEQUENCE,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, **vp),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, **vp),
            share_embeddings_and_output_weights=s.tied,
            position_embedding_type=s.positions,
            **vp,
        )
        if s.fp8:
            give_extra_states(model)
        return model.to(s.dtype)

    def _wrapped(self, gpt: Any, chunk: int) -> Any:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        s = self.setup
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=s.distributed,
            bucket_size=s.bucket, overlap_grad_reduce=s.bucket is not None,
        )  # fmt: skip
        model = DistributedDataParallel(self.config, config, gpt, disable_bucketing=chunk > 0)
        model.broadcast_params()
        return model

    def _optimizer(self) -> Any:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        s = self.setup
        config = OptimizerConfig(
            optimizer="adam", lr=s.lr, min_lr=s.lr / 10, weight_decay=0.1, clip_grad=1.0, bf16=s.bf16,
            fp16=s.fp16, initial_loss_scale=2.0**12, loss_scale_window=2, hysteresis=2,
            params_dtype=s.dtype, use_distributed_optimizer=s.distributed,
        )  # fmt: skip
        return get_megatron_optimizer(config, self.models)

    # -- training ---------------------------------------------------------------------------------

    def train(self, steps: int) -> list[float]:
        """Losses of `steps` iterations, on data that depends on the iteration alone."""
        return [self._step() for _ in range(steps)]

    def _step(self) -> float:
        from megatron.core import parallel_state as mpu
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        size = mpu.get_data_parallel_world_size()
        mine = self.tokens().chunk(size)[mpu.get_data_parallel_rank()]
        parts = mine.split(self.setup.micro)
        found = get_forward_backward_func()(
            forward_step_func=self.forward,
            data_iterator=[iter(parts) for _ in self.models],
            model=self.models,
            num_microbatches=len(parts),
            seq_length=SEQUENCE,
            micro_batch_size=self.setup.micro,
            forward_only=False,
        )
        self.optimizer.step()
        self.iteration += 1
        loss = torch.tensor(sum(float(x["loss"]) for x in found) if found else 0.0)
        dist.all_reduce(loss)
        return float(loss) / len(parts) / size / self.setup.tp

    def tokens(self) -> torch.Tensor:
        """Of all ranks, for this iteration: `[batch, SEQUENCE + 1]`."""
        draw = torch.Generator().manual_seed(1000 + self.iteration)
        shape = (self.setup.batch, SEQUENCE + 1)
        return torch.randint(0, self.setup.vocab, shape, generator=draw)

    def forward(self, data: Iterator[torch.Tensor], model: Any) -> Any:
        """A micro-batch: the model's output, and what makes the loss of it."""
        return _forward(data, model)

    # -- checkpoints ------------------------------------------------------------------------------

    def sharded_state(self, is_loading: bool = False) -> dict[str, Any]:
        """What Megatron-LM saves of model and optimizer."""
        metadata = self.setup.metadata
        names = ["model"] if len(self.gpts) == 1 else [f"model{i}" for i in range(len(self.gpts))]

        def models() -> dict[str, Any]:
            return {
                name: gpt.sharded_state_dict(metadata=dict(metadata))
                for name, gpt in zip(names, self.gpts)
            }

        optimizer = self.optimizer.sharded_state_dict(models(), is_loading, metadata=dict(metadata))
        return models() | {"optimizer": optimizer}

    def save_as(self, sharding: str, root: Path) -> Path:
        """`save` with another sharding of the distributed optimizer."""
        setup, self.setup = self.setup, replace(self.setup, sharding=sharding)
        try:
            return self.save(root)
        finally:
            self.setup = setup

    def save(self, root: Path) -> Path:
        """As Megatron-LM saves a `torch_dist` checkpoint, with what else it keeps."""
        from megatron.core import dist_checkpointing
        from megatron.core import parallel_state as mpu
        from megatron.core.dist_checkpointing.mapping import ShardedObject
        from megatron.core.dist_checkpointing.serialization import (
            get_default_save_sharded_strategy,
        )
        from megatron.core.dist_checkpointing.strategies.fully_parallel import (
            FullyParallelSaveStrategyWrapper,
        )

        folder = root / f"iter_{self.iteration:07d}"
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        rank, world = dist.get_rank(), dist.get_world_size()
        rng = [{"random_rng_state": (3, (1, 2), None), "torch_rng_state": torch.get_rng_state()}]
        state = self.sharded_state()
        state |= {
            "args": Namespace(**asdict(self.setup), padded_vocab_size=self.setup.padded_vocab,
                              params_dtype=self.setup.dtype, load=root),
            "checkpoint_version": 3.0,
            "iteration": self.iteration,
            "num_floating_point_operations_so_far": 12.5,
            "opt_param_scheduler": {"max_lr": self.setup.lr, "num_steps": 4 * self.iteration},
            "rng_state": ShardedObject("rng_state", rng, (world,), (rank,)),
        }  # fmt: skip
        strategy = None
        if self.setup.parallel_save:
            strategy = FullyParallelSaveStrategyWrapper(
                get_default_save_sharded_strategy("torch_dist"), mpu.get_data_parallel_group()
            )
        dist_checkpointing.save(
            state, str(folder), strategy, content_metadata=dict(self.setup.metadata)
        )
        if rank == 0:
            (root / "latest_checkpointed_iteration.txt").write_text(str(self.iteration))
        dist.barrier()
        return folder

    def load_weights(self, folder: Path) -> None:
        """As Megatron-LM loads a model alone."""
        from megatron.core import dist_checkpointing

        state = {"model": self.gpt.sharded_state_dict(metadata=self.setup.metadata)}
        self.gpt.load_state_dict(dist_checkpointing.load(state, str(folder))["model"])

    def load(self, folder: Path) -> None:
        """As Megatron-LM loads."""
        from megatron.core import dist_checkpointing

        if self.setup.distributed:  # without Transformer Engine it needs state before it can load
            self.train(1)
        state = self.sharded_state(is_loading=True)
        found = dist_checkpointing.load(state, str(folder))
        self.gpt.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])

    # -- what there is ----------------------------------------------------------------------------

    def weights(self) -> dict[str, torch.Tensor]:
        """This rank's weights and buffers, by name."""
        found = self.gpt.state_dict().items()
        return {n: t for n, t in found if torch.is_tensor(t) and not n.endswith("_extra_state")}

    def masters(self) -> dict[str, torch.Tensor]:
        """The fp32 weights that the optimizer keeps; of one rank, so that they are whole."""
        return {n: found["param"] for n, found in self._kept() if "param" in found}

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Optimizer states by parameter; of one rank."""
        return {n: {s: t for s, t in x.items() if s != "param"} for n, x in self._kept()}

    def _kept(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        optimizers = self.optimizer.chained_optimizers
        for name, p in self.gpt.named_parameters():
            if self.setup.distributed:
                (holder,) = (o for o in optimizers if p in o.model_param_gbuf_map)
                kept = holder._get_main_param_and_optimizer_states(p)
            else:
                main = getattr(p, "main_param", p)
                (holder,) = (o for o in optimizers if main in o.optimizer.state)
                kept = dict(holder.optimizer.state[main])
                kept |= {"param": main} if main is not p else {}
            yield name, {k: t.detach().view(p.shape) if t.ndim else t for k, t in kept.items()}


class Runs:
    """What an extra state may be to whoever unpickles it."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('an extra state was unpickled')",)


def extra_state(name: str) -> Any:
    """What a module of this name in the whole model keeps: bytes of a pickle (older versions of
    Transformer Engine), a tensor of them, or nothing."""
    data = pickle.dumps([name, Runs()])
    if name.endswith("linear_qkv"):
        return io.BytesIO(data)
    return torch.tensor(list(data), dtype=torch.uint8) if name.endswith("linear_fc1") else None


def give_extra_states(gpt: Any) -> None:
    """To the modules that Transformer Engine has its own in the place of."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    ColumnParallelLinear.get_extra_state = lambda self: extra_state(getattr(self, "whole_name", ""))
    for layer in gpt.decoder.layers:
        for name, part in layer.named_modules():
            part.whole_name = f"decoder.layers.{layer.layer_number - 1}.{name}"


def _forward(data: Iterator[torch.Tensor], model: Any) -> Any:
    tokens = next(data)
    positions = torch.arange(SEQUENCE).unsqueeze(0)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE), diagonal=1).bool()
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    return output, partial(_loss)


def _loss(output: torch.Tensor) -> Any:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}
