"""Files whose names are not the live model's: the ways that docs/how-to/hugging-face.md tells."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import StateMismatch

transformers = pytest.importorskip("transformers", minversion="5")

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "hugging-face.md"
SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
EXPERTS = {"num_key_value_heads": 1, "head_dim": 8, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any], str | None]] = {
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**SMALL, **EXPERTS, "moe_intermediate_size": 12, "num_experts": 4},
        None,
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**SMALL, **EXPERTS, "num_local_experts": 4},
        "mixtral-names.rules",
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL, "gpt-neox-names.rules"),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**SMALL, "image_size": 8, "patch_size": 4},
        "vit-names.rules",
    ),
}


def build(name: str, seed: int, **more: Any) -> Any:
    kind, config, options, _ = MODELS[name]
    torch.manual_seed(seed)
    return getattr(transformers, kind)(getattr(transformers, config)(**options, **more))


def same(a: Any, b: Any) -> bool:
    mine, other = a.state_dict(), b.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(mine[k], other[k]) for k in mine)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page's section defines; its rules are in the working directory."""
    monkeypatch.chdir(tmp_path)
    section = PAGE.read_text().split("## Names of transformers 5\n")[1].split("\n## ")[0]
    found: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
        exec(block, found)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_what_the_page_tells_loads_what_transformers_has_saved(
    page: dict[str, Any], name: str
) -> None:
    build(name, 1).save_pretrained(name)
    expected = getattr(transformers, MODELS[name][0]).from_pretrained(name)
    model = build(name, 2)
    with pytest.raises(StateMismatch, match=r"Names of transformers 5"):
        holdfast.load(name, {"model": model})
    assert not same(model, expected)
    load: Callable[..., None] = page["load_pretrained"]
    load(name, model, MODELS[name][3])
    assert same(model, expected)


@pytest.mark.parametrize("name", MODELS)
def test_live_names_go_both_ways(tmp_path: Path, name: str) -> None:
    """`save_original_format=False` loads as it is; what is converted, `from_pretrained` takes."""
    saved, model = build(name, 1), build(name, 2)
    saved.save_pretrained(tmp_path / "live", save_original_format=False)
    holdfast.load(tmp_path / "live", {"model": model})
    assert same(model, saved)
    holdfast.save(tmp_path / "run", {"model": model}, step=1)
    holdfast.convert(tmp_path / "run", tmp_path / "made", to="huggingface")
    model.config.save_pretrained(tmp_path / "made")
    kind = getattr(transformers, MODELS[name][0])
    again, told = kind.from_pretrained(tmp_path / "made", output_loading_info=True)
    assert same(again, saved)
    assert not any(told.values())


def test_a_file_with_live_names(page: dict[str, Any], tmp_path: Path) -> None:
    """The command that the page ends with."""
    from cli.calling import call

    saved, model = build("vit", 1), build("vit", 2)
    saved.save_pretrained("vit")
    (line,) = re.findall(r"`(holdfast convert huggingface:vit [^`]*)`", PAGE.read_text())
    assert call(*line.split()[1:])[0] == 0
    holdfast.load("huggingface:vit-live", {"model": model})
    assert same(model, saved)


def test_other_mismatches_say_nothing_of_transformers(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": torch.nn.Linear(2, 2)}, step=1)
    with pytest.raises(StateMismatch) as error:
        holdfast.load(tmp_path, {"model": torch.nn.Sequential(torch.nn.Linear(2, 2))})
    assert "transformers" not in str(error.value)
