"""A model of transformers comes back from a converted step by `from_pretrained`, with its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.soak


def test_from_pretrained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, tie_word_embeddings=False
    )
    model = transformers.GPT2LMHeadModel(config)
    tokenizer_config = b'{"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8}'
    tokenizer = (
        b'{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,'
        b'"pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,"model":'
        b'{"type":"WordLevel","vocab":{"[UNK]":0,"best":1,"step":2},"unk_token":"[UNK]"}}'
    )
    files = {
        "config.json": lambda: model.config.to_json_string().encode(),
        "tokenizer_config.json": tokenizer_config,
        "tokenizer.json": tokenizer,
    }
    with holdfast.Checkpointer(tmp_path / "run", {"model": model}, files=files) as ckpt:
        ckpt.save(1)
    holdfast.convert(tmp_path / "run", tmp_path / "hf", to="huggingface")
    again = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "hf"))
    assert type(again) is type(model)
    theirs = again.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())
    read = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "hf"))
    assert read("best step")["input_ids"] == [1, 2]
