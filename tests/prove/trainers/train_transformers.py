"""GPT-2 by transformers' Trainer, which resumes as in its examples: from the last checkpoint, if any."""

from __future__ import annotations

from typing import Any

import torch
from small import ACCUMULATE, BATCH, EVERY, LENGTH, STEPS, WIDTH, WORDS, Texts, arguments
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from holdfast.integrations.transformers import with_holdfast


def collate(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    batch = torch.stack(texts)
    return {"input_ids": batch, "labels": batch}


def main() -> None:
    args = arguments()
    set_seed(0)
    given: dict[str, Any] = {
        "model": GPT2LMHeadModel(
            GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=2)
        ),
        "args": TrainingArguments(
            args.root,
            max_steps=STEPS,
            save_steps=EVERY,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATE,
            learning_rate=1e-3,
            seed=0,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        "train_dataset": Texts(),
        "data_collator": collate,
    }
    if args.by == "holdfast":
        trainer = with_holdfast(Trainer)(**given, holdfast={"root": args.root})
        trainer.train(resume_from_checkpoint=True)
    else:
        Trainer(**given).train(resume_from_checkpoint=get_last_checkpoint(args.root))


if __name__ == "__main__":
    main()
