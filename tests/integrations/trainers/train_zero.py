"""Training by transformers' Trainer or with an Accelerator, over an engine of DeepSpeed's."""

from deepspeed_on_cpu import deepspeed

# isort: split

import os
from typing import Any

from integrations.trainers import train_accelerate, train_transformers

__all__ = ["deepspeed", "main"]


def main(options: dict[str, Any]) -> None:
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    trained = train_accelerate if options.get("accelerate") else train_transformers
    trained.main(options)
