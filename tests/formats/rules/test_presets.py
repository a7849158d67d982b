"""Presets against the models that they are for: their names, shapes, and how frameworks cut them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zygote
from holdfast.core.layout.view import View
from holdfast.layout import Mesh
from holdfast.rules import RuleSet, presets

torch = pytest.importorskip("torch")
TP2 = Mesh((("tp", 2),))
ALL = Mesh((("dp", 2), ("fsdp", 2), ("ep", 2), ("tp", 2)))


def models() -> dict[str, tuple[str, Any]]:
    """By name: the preset, and a model of a small configuration without storage."""
    transformers = pytest.importorskip("transformers")
    common = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
              "intermediate_size": 48, "vocab_size": 101}  # fmt: skip
    grouped = {**common, "num_key_value_heads": 2}
    gpt2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 101, "n_positions": 16}
    wanted: dict[str, tuple[str, str, str, dict[str, Any]]] = {
        "gpt2": ("gpt2", "GPT2LMHeadModel", "GPT2Config", gpt2),
        "gpt2 alone": ("gpt2", "GPT2Model", "GPT2Config", gpt2),
        "gpt2 classifier": ("gpt2", "GPT2ForSequenceClassification", "GPT2Config", gpt2),
        "llama": ("llama", "LlamaForCausalLM", "LlamaConfig", grouped),
        "llama, biases": ("llama", "LlamaForCausalLM", "LlamaConfig",
                          {**grouped, "attention_bias": True, "mlp_bias": True}),
        "llama alone": ("llama", "LlamaModel", "LlamaConfig", grouped),
        "mistral": ("llama", "MistralForCausalLM", "MistralConfig", grouped),
        "qwen2": ("llama", "Qwen2ForCausalLM", "Qwen2Config", grouped),
        "qwen3": ("llama", "Qwen3ForCausalLM", "Qwen3Config", grouped),
        "mixtral": ("mixtral", "MixtralForCausalLM", "MixtralConfig",
                    {**grouped, "num_local_experts": 8}),
        "gpt-neox": ("gpt-neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", common),
    }  # fmt: skip
    found = {}
    with torch.device("meta"):
        for name, (preset, kind, config, options) in wanted.items():
            made = getattr(transformers, config)(**options, bos_token_id=0, eos_token_id=1)
            found[name] = (preset, getattr(transformers, kind)(made))
    return found


def load(preset: str) -> RuleSet:
    let = {"megatron-gpt": {"layers": 2, "groups": 2}, "mixtral": {"experts": 8},
           "gpt-neox": {"heads": 4}}  # fmt: skip
    return RuleSet.load(preset, let=let.get(preset))


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in model.state_dict().items()}


def tp_dim(rules: RuleSet, name: str, shape: tuple[int, ...]) -> int | None:
    """The dim that tp 2 halves; None if it halves none."""
    stored = rules.layout(name, shape, TP2).view(0).stored
    halved = [d for d in range(len(shape)) if stored[d] * 2 in (shape[d], shape[d] + 1)]
    assert len(halved) <= 1
    return halved[0] if halved else None


def test_all_presets_load() -> None:
    assert presets() == [
        "deepspeed-zero", "gpt-neox", "gpt2", "llama", "megatron-gpt", "mixtral",
    ]  # fmt: skip
    for preset in presets():
        assert load(preset).rules


def test_presets_fit_the_models_of_transformers() -> None:
    for name, (preset, model) in models().items():
        rules, shapes = load(preset), shapes_of(model)
        axes = tuple((a, n) for a, n in ALL.axes if a in rules.axes + rules.copies)
        rules.check(shapes, Mesh(axes))
        plan = getattr(model.config, "base_model_tp_plan", None) or {}
        checked = 0
        for tensor, shape in shapes.items():
            how = next((h for p, h in plan.items() if _is(tensor, p)), None)
            if how is None or "experts" in tensor or not re.fullmatch("(col|row)wise", how):
                continue
            expected = 0 if how == "colwise" else 1 if tensor.endswith("weight") else None
            assert tp_dim(rules, tensor, shape) == expected, (name, tensor)
            checked += 1
        assert checked or "gpt2" in name, name


def _is(tensor: str, pattern: str) -> bool:
    """Whether a tensor is of a module that a plan of transformers names."""
    regex = pattern.replace(".", r"\.").replace("*", r"\d+")
    return bool(re.fullmatch(rf"(?:\w+\.)?{regex}\.(?:weight|bias)", tensor))


def test_mixtral_files_have_a_tensor_per_expert() -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for e in range(8):
        prefix = f"model.layers.0.block_sparse_moe.experts.{e}"
        shapes |= {f"{prefix}.w1.weight": (48, 32), f"{prefix}.w2.weight": (32, 48),
                   f"{prefix}.w3.weight": (48, 32)}  # fmt: skip
    rules = load("mixtral")
    rules.check({**shapes, "model.layers.0.block_sparse_moe.gate.weight": (8, 32)}, ALL)
    layout = rules.layout("model.layers.0.block_sparse_moe.experts.6.w2.weight", (32, 48), ALL)
    assert str(layout.sharding()) == "dim 1 over tp, dim 0 over fsdp, on ep 1"


def stored_of(view: View, array: np.ndarray) -> np.ndarray:
    """What a rank stores of an array, by fragments."""
    stored = np.full(view.size, -1, array.dtype)
    origin = (0,) * array.ndim
    for f in view.fragments():
        strides = [s * stored.itemsize for s in f.strides]
        target = np.lib.stride_tricks.as_strided(stored[f.offset :], f.box.shape, strides)
        target[...] = array[f.box.within(origin)]
    return stored.reshape(view.stored)


def test_gpt2_ranks_hold_whole_heads_of_q_k_and_v() -> None:
    weight = np.arange(32 * 96).reshape(32, 96)
    layout = load("gpt2").layout("transformer.h.0.attn.c_attn.weight", weight.shape, TP2)
    q, k, v = np.split(weight, 3, axis=1)
    for rank in range(2):
        half = slice(16 * rank, 16 * rank + 16)
        expected = np.concatenate([q[:, half], k[:, half], v[:, half]], axis=1)
        assert np.array_equal(stored_of(layout.view(rank), weight), expected)


def test_gpt_neox_cuts_between_heads() -> None:
    rules = RuleSet.load("gpt-neox", let={"heads": 3})
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    rules.layout(name, (36, 32), Mesh((("tp", 3),))).check()
    with pytest.raises(ValueError, match="0:18 cuts a group of 12"):
        rules.layout(name, (36, 32), TP2).check()


@pytest.mark.slow
def test_megatron_presets_agree_with_megatron_core(tmp_path: Path) -> None:
    """Every parameter of its GPT models has a rule, which cuts the dim that Megatron says it cuts."""
    pytest.importorskip("megatron.core")
    script = Path(__file__).with_name("megatron_names.py")
    done = zygote.run([script, tmp_path / "init"], timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout[done.stdout.index("JSON") + 4 :])
    for kind, params in found.items():
        let = {"layers": 2, "groups": 2, "gated": int(kind != "dense"), "experts": 4,
               "tied": int(kind == "dense"), "vocab_multiple": 1}  # fmt: skip
        rules = RuleSet.load("megatron-gpt", let=let)
        shapes = {name: tuple(shape) for name, (shape, _, _) in params.items()}
        rules.check(shapes, Mesh((("pp", 2), ("dp", 2), ("ep", 2), ("tp", 2))))
        for name, (shape, dim, stride) in params.items():
            assert tp_dim(rules, name, tuple(shape)) == dim, (kind, name)
            if (
                dim is not None and "qkv" not in name
            ):  # stride: pieces that a rank's part consists of
                fragments = rules.layout(name, tuple(shape), TP2).fragments(0)
                assert len(fragments) == stride, (kind, name)


def test_zero_3_is_an_even_division_with_padding() -> None:
    rules = load("deepspeed-zero")
    layout = rules.layout("w", (1024,), Mesh((("dp", 3),)))
    layout.check()
    assert [layout.view(r).stored for r in range(3)] == [(342,)] * 3
    assert [sum(f.box.size for f in layout.fragments(r)) for r in range(3)] == [342, 342, 340]
