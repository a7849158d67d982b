"""Modules of bitsandbytes and peft: a twin built from another seed computes the same after a restore."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import StateMismatch, UsageError

pytestmark = pytest.mark.soak

bnb: Any = pytest.importorskip("bitsandbytes")

FOUR: dict[str, dict[str, Any]] = {
    "nf4": {"quant_type": "nf4"},
    "nf4, scales not quantised": {"quant_type": "nf4", "compress_statistics": False},
    "fp4": {"quant_type": "fp4"},
    "nf4 in bfloat16": {"quant_type": "nf4", "quant_storage": torch.bfloat16},
}
X = torch.linspace(-1, 1, 256).reshape(2, 128)


def four(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layer = bnb.nn.Linear4bit(128, 64, compute_dtype=torch.float32, **FOUR[kind])
    return nn.Sequential(layer).to("cpu")


def eight(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(bnb.nn.Linear8bitLt(128, 64, has_fp16_weights=False)).to("cpu")


def check(root: Path, build: Callable[[int], nn.Module], *, used: bool, like: Any = X) -> None:
    model, twin = build(0), build(7)
    if used:
        model(like), twin(like)
    assert not torch.equal(logits(model, like), logits(twin, like))
    holdfast.save(root, {"model": model}, step=1)
    expected = logits(model, like)
    holdfast.load(root, {"model": twin})
    assert torch.equal(logits(twin, like), expected)


def logits(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = model(x)
    return getattr(found, "logits", found)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("kind", FOUR)
def test_four_bits(kind: str, used: bool, tmp_path: Path) -> None:
    check(tmp_path, lambda seed: four(kind, seed), used=used)


@pytest.mark.parametrize("used", [False, True])
def test_four_bits_repacked_for_inference(used: bool, tmp_path: Path) -> None:
    """On CPUs with AVX512-BF16 a forward pass in eval mode packs the weights in another way."""
    check(tmp_path, lambda seed: four("nf4", seed).eval(), used=used)


@pytest.mark.parametrize("used", [False, True])
def test_eight_bits(used: bool, tmp_path: Path) -> None:
    check(tmp_path, eight, used=used)


def test_another_kind_of_four_bits_is_refused(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": four("nf4", 0)}, step=1)
    with pytest.raises(StateMismatch, match=r"model\.0\.weight\.quant_state\.bitsandbytes__fp4"):
        holdfast.load(tmp_path, {"model": four("fp4", 0)})


@pytest.mark.parametrize("kind", ["Embedding4bit", "Embedding8bit"])
def test_embeddings_that_cannot_be_saved_are_refused(kind: str, tmp_path: Path) -> None:
    model = nn.Sequential(getattr(bnb.nn, kind)(32, 64)).to("cpu")
    with pytest.raises(UsageError, match=rf"model\.0: .*{kind}.* cannot be known"):
        holdfast.save(tmp_path, {"model": model}, step=1)


def qlora(seed: int) -> nn.Module:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model = transformers.LlamaForCausalLM(config)
    linear = [
        (part, name, child)
        for part in model.modules()
        for name, child in part.named_children()
        if isinstance(child, nn.Linear) and name != "lm_head"
    ]
    for part, name, child in linear:
        sizes = child.in_features, child.out_features
        four = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        four.weight = bnb.nn.Params4bit(
            child.weight.data, requires_grad=False, quant_type="nf4", module=four
        )
        setattr(part, name, four)
    lora = peft.LoraConfig(
        target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], init_lora_weights=False
    )
    return peft.get_peft_model(model.to("cpu"), lora)


def test_qlora_goes_on_as_it_would_have(tmp_path: Path) -> None:
    tokens = torch.arange(6)[None]

    def build(seed: int) -> dict[str, Any]:
        model = qlora(seed)
        trained = [p for p in model.parameters() if p.requires_grad]
        return {"model": model, "optim": torch.optim.AdamW(trained, lr=0.01)}

    def step(state: dict[str, Any]) -> None:
        state["model"](tokens, labels=tokens).loss.backward()
        state["optim"].step()
        state["optim"].zero_grad()

    state, twin = build(0), build(7)
    step(state), step(twin)
    holdfast.save(tmp_path, state, step=1)
    holdfast.load(tmp_path, twin)
    step(state), step(twin)
    assert torch.equal(logits(twin["model"], tokens), logits(state["model"], tokens))
    assert all(map(torch.equal, twin["model"].parameters(), state["model"].parameters()))


def test_qlora_with_a_state_dict_of_the_adapter_alone(tmp_path: Path) -> None:
    """A script may have replaced state_dict() on the model, so that it shows the adapter only."""
    peft = pytest.importorskip("peft")

    def build(seed: int) -> nn.Module:
        model = qlora(seed)
        whole = model.state_dict
        model.state_dict = lambda *_, **__: peft.get_peft_model_state_dict(model, whole())
        return model

    check(tmp_path, build, used=False, like=torch.arange(6)[None])
