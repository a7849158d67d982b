"""Prints parameters, shapes and tensor-parallel attributes of small models of Megatron-Core, as JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist


def described(model: Any) -> dict[str, Any]:
    return {
        name: (
            list(p.shape),
            p.partition_dim if getattr(p, "tensor_model_parallel", False) else None,
            getattr(p, "partition_stride", 1),
        )
        for name, p in model.named_parameters()
    }


def gpt(*, gated: bool, experts: int | None, untied: bool) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2,
        ffn_hidden_size=48, gated_linear_unit=gated, num_moe_experts=experts,
        moe_router_topk=2, use_cpu_initialization=True, add_bias_linear=not experts,
    )  # fmt: skip
    return GPTModel(
        config, get_gpt_layer_local_spec(experts, False), vocab_size=256, max_sequence_length=16,
        share_embeddings_and_output_weights=not untied,
    )  # fmt: skip


def main() -> None:
    from megatron.core import parallel_state

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *a: None  # type: ignore[assignment]
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    found = {
        "dense": described(gpt(gated=False, experts=None, untied=False)),
        "gated": described(gpt(gated=True, experts=None, untied=True)),
        "moe": described(gpt(gated=True, experts=4, untied=True)),
    }
    print("JSON" + json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
