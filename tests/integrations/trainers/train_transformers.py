"""Training by transformers' Trainer, its own or holdfast's; its `main` is run by `launching`."""

import os
import signal
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

import holdfast
from holdfast.integrations.transformers import with_holdfast
from integrations.trainers.tiny import Data, Journal, Net, Stream, Texts, die_at, digest


class Tell(TrainerCallback):  # type: ignore[misc]
    """Writes every loss down, and kills the process at the moment it is told: one of three per step."""

    def __init__(self, journal: Journal, options: dict[str, Any]) -> None:
        self.journal, self.die, self.count = journal, options.get("die", 0), 0
        self.by, self.stop = options.get("by", signal.SIGKILL), options.get("stop", 0)
        self.full = options.get("full", -1)

    def moment(self) -> None:
        self.count += 1
        die_at(self.die, self.count, self.by)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.moment()
        if state.global_step == self.full:
            self.full = -1
            raise RuntimeError("CUDA out of memory.")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.moment()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        kept = {k: v for k, v in logs.items() if k in ("loss", "eval_loss", "grad_norm")}
        if kept:
            self.journal.add(step=state.global_step, **kept)

    def on_save(self, *_: Any, **__: Any) -> None:
        self.moment()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        die_at(self.stop, state.global_step, signal.SIGTERM)


class Judged(Trainer):  # type: ignore[misc]
    """Its evaluations tell the losses that it is given, by step."""

    losses: dict[str, float]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        output = super().evaluation_loop(*args, **kwargs)
        output.metrics["eval_loss"] = self.losses[str(self.state.global_step)]
        return output


def args_of(options: dict[str, Any]) -> TrainingArguments:
    given: dict[str, Any] = {
        "output_dir": options["folder"],
        "max_steps": 26,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 7,
    }
    if options.get("fsdp"):
        wrap = {"version": 2, "transformer_layer_cls_to_wrap": ["Block"]}
        given |= {"fsdp": "full_shard auto_wrap", "fsdp_config": wrap}
    if "zero" in options:
        config = zero_config(options["zero"]) | options.get("config", {})
        given |= {"deepspeed": config, "bf16": options.get("bf16", False)}
    return TrainingArguments(**given | options.get("args", {}))


def zero_config(stage: int) -> dict[str, Any]:
    """A configuration of DeepSpeed's that leaves to the Trainer what it may."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {
        **dict.fromkeys((*names, "gradient_clipping"), "auto"),
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def with_lora() -> Any:
    """A language model of which only an adapter is trained."""
    import peft
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    return peft.get_peft_model(GPT2LMHeadModel(config), lora)


def main(options: dict[str, Any]) -> None:
    if options.get("fsdp") or "zero" in options:  # which accelerate offers on accelerators alone
        PartialState(cpu=True)
        kind = DistributedType.MULTI_GPU if options.get("fsdp") else DistributedType.DEEPSPEED
        PartialState._shared_state["distributed_type"] = kind
    torch.manual_seed(3)
    if options.get("apart"):  # output_dir is a folder of each node
        os.makedirs(own := options["folder"] + "-" + os.environ["RANK"], exist_ok=True)
        os.chdir(own)
        options["args"] = {**options.get("args", {}), "output_dir": "out"}
        options["holdfast"] = {"root": repr(options["folder"])}
    args = args_of(options)
    journal = Journal(options["journal"], writes=args.process_index == 0)
    callbacks: list[Any] = [Tell(journal, options)]
    if options.get("early"):
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=50))
    noisy = options.get("noisy", False)
    kwargs: dict[str, Any] = {
        "model": Net(options.get("drop", 0.2), options.get("hidden", 32)),
        "args": args,
        "train_dataset": Data(options.get("size", 50), noisy=noisy),
        "eval_dataset": Data(8),
        "callbacks": callbacks,
    }
    if options.get("streams"):
        kwargs["train_dataset"] = Stream(kwargs["train_dataset"])
    if options.get("are_stateful"):
        kwargs["train_dataset"].state_dict = dict
    if options.get("lora"):
        kwargs |= {"model": with_lora(), "train_dataset": Texts(50), "eval_dataset": Texts(8)}
    trainer_class = Judged if "losses" in options else Trainer
    if options.get("own"):
        trainer = trainer_class(**kwargs)
        trainer.losses = options.get("losses")
        result = trainer.train()
    else:
        extra = {k: eval(v, {"holdfast": holdfast}) for k, v in options.get("holdfast", {}).items()}
        trainer = with_holdfast(trainer_class)(**kwargs, holdfast=extra)
        trainer.losses = options.get("losses")
        result = trainer.train(resume_from_checkpoint=options.get("resume", True))
    if options.get("judge"):
        trainer.evaluate(trainer.train_dataset)
    whole = digest(trainer.model)
    journal.add(end=whole, best=trainer.state.best_metric, step=result.global_step)
