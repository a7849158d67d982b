"""The model, the data and the arguments that the trainings of this folder have in common."""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

STEPS = 24
"""Optimizer steps of a training."""
EVERY = 4
"""Optimizer steps from one save to the next; an epoch has three, or six without accumulation."""
BATCH, ACCUMULATE = 8, 2
WORDS, LENGTH, WIDTH = 64, 16, 32


class Texts(Dataset[torch.Tensor]):
    """48 texts of 16 words."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.words = torch.randint(WORDS, (48, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, number: int) -> torch.Tensor:
        return self.words[number]


class Language(nn.Module):
    """A small transformer. Its result is the loss of predicting each next word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.1, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        x = self.words(texts) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return cross_entropy(self.head(x)[:, :-1].flatten(0, 1), texts[:, 1:].flatten())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True, help="folder of the checkpoints")
    parser.add_argument("--with", dest="by", choices=("own", "holdfast"), default="own")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.makedirs(args.root, exist_ok=True)
    return args
