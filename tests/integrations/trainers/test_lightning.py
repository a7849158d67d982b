"""Lightning's Trainer and Fabric over holdfast, in real processes."""

# ruff: noqa: N812
from __future__ import annotations

import json
import random
import re
import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning as L
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.checkpoint import notes
from holdfast.core.checkpoint.notes import read_notes
from holdfast.errors import FormatError, NotRecoverable, UsageError
from holdfast.integrations import lightning as integration
from holdfast.integrations.lightning_loops import misfit_of_sums
from holdfast.integrations.lightning_pointers import beside, label_start, read_pointer
from holdfast.store import open_store
from integrations.trainers import lit
from integrations.trainers.forked import Ranks, losses, value

pytestmark = [pytest.mark.soak, pytest.mark.distributed]

KINDS = {"single": 1, "ddp": 2, "fsdp2": 2}


def settings(tmp_path: Path, kind: str = "single", **more: Any) -> lit.Settings:
    root, paths = str(tmp_path / "root"), str(tmp_path / "paths")
    return lit.Settings(kind=kind, **{"root": root, "paths": paths, **more})


@pytest.fixture(scope="module", autouse=True)
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    log = tmp_path_factory.mktemp("ranks") / "log"
    with Ranks("integrations.trainers.lit", log) as found:
        yield found


@pytest.fixture(autouse=True)
def _quiet_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "1")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="lightning")


def fitted(s: lit.Settings, *callbacks: Any, module: Any = None, **more: Any) -> L.Trainer:
    """A fit in this process."""
    L.seed_everything(4, verbose=False)
    train, valid = lit.loaders()
    trainer = lit.trainer_of(s, *callbacks, **more)
    trainer.fit(module or lit.Net(s.width), train, valid, ckpt_path=s.ckpt_path)
    return trainer


class Begun(L.Callback):
    """Notes the step at which a training begins."""

    step: int | None = None

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.step = trainer.global_step


# -- killed, and resumed


@pytest.mark.parametrize("kind", KINDS)
def test_killed_ten_times_it_is_the_uninterrupted_run(
    kind: str, tmp_path: Path, ranks: Ranks
) -> None:
    """Every loss and the final weights are those of Lightning's own, uninterrupted run."""
    num, draw = KINDS[kind], random.Random(kind)
    own = ranks.printed(settings(tmp_path, kind, root="", paths=f"{tmp_path}/own").text(), num)
    kills, place, seen = ranks.num_kills, tmp_path / "0", list[str]()
    for attempt in range(30):
        path = ("newest", "last")[attempt % 2]
        every = {"memory": 1, "durable": 1_000_000} if attempt % 2 == 0 and kind == "single" else {}
        run = settings(place, kind, ckpt_path=path, every=every)
        has_all = ranks.num_kills == kills + 10
        seen += ranks.printed(run.text(), num, 0 if has_all else draw.randint(4, 9), seed=attempt)
        if any(line.startswith("END ") for line in seen):  # and another run from the beginning
            assert losses(seen) == losses(own)
            assert value(seen, "END") == value(own, "END")
            if has_all:
                return
            place, seen = tmp_path / str(attempt + 1), []
    raise AssertionError(f"{ranks.num_kills - kills} of 10 kills")


@pytest.mark.parametrize("stream", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize("every", [{}, {"durable": 1}], ids=["paths", "steps"])
def test_each_rank_has_its_own_sums_and_data(
    every: dict[str, int], stream: bool, tmp_path: Path, ranks: Ranks
) -> None:
    """After a kill in mid-epoch, the mean over the epoch and all ranks is that of the uninterrupted run."""
    more: dict[str, Any] = {"sums": True, "stream": stream, "epochs": 2, "save_every": 1}
    own = ranks.printed(
        settings(tmp_path, "ddp", root="", paths=f"{tmp_path}/own", **more).text(), 2
    )
    run = settings(tmp_path, "ddp", ckpt_path="newest", every=every, **more)
    if every:
        run.save_every = 1000
    seen = ranks.printed(run.text(), 2, 7)
    kept = max(holdfast.steps(run.root))
    assert 0 < kept < 12 and not any(line.startswith("END ") for line in seen)
    seen += ranks.printed(run.text(), 2)
    assert [line.split()[1] for line in seen if line.startswith("BEGIN")] == ["0", str(kept)]
    assert losses(seen) == losses(own)
    assert {"mean 0", "mean 1"} <= losses(own).keys()
    assert value(seen, "END") == value(own, "END")


class Endless(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from torch.randn(8, 1, 8, generator=lit.seeded(0))


def test_data_without_a_length_is_told_of(tmp_path: Path) -> None:
    trainer = lit.trainer_of(settings(tmp_path), limit_val_batches=0)
    with pytest.warns(holdfast.HoldfastWarning, match="one batch too far") as told:
        trainer.fit(lit.Net(), StatefulDataLoader(Endless(), batch_size=4))
    assert sum("too far" in str(one.message) for one in told) == 1


def test_a_place_in_other_data_is_told(tmp_path: Path) -> None:
    """Of four batches of ten; the data have grown since."""
    s = settings(tmp_path, save_every=4)

    def fit(num: int, steps: int) -> None:
        data = StatefulDataLoader(torch.randn(num, 8), batch_size=2, shuffle=True)
        trainer = lit.trainer_of(s, limit_val_batches=0, max_steps=steps)
        trainer.fit(lit.Net(), data, ckpt_path="newest")

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the place of", holdfast.HoldfastWarning)
        fit(20, 4)
        fit(20, 8)
    with pytest.warns(holdfast.HoldfastWarning, match="over 20 samples, and here it is over 24"):
        fit(24, 9)


def test_a_file_of_lightnings_own_that_is_newer_is_told(tmp_path: Path) -> None:
    run = settings(tmp_path, save_every=4)

    def fit(steps: int, **more: Any) -> None:
        saves = ModelCheckpoint(run.paths, "{step}", save_top_k=-1, every_n_train_steps=4)
        trainer = lit.trainer_of(run, saves, limit_val_batches=0, max_steps=steps)
        trainer.fit(lit.Net(), lit.loaders()[0], **more)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*newer-native", holdfast.HoldfastWarning)
        fit(4)
        fit(8, ckpt_path="newest")
    root, run.root = run.root, ""
    fit(12)  # without holdfast, from the beginning
    run.root = root
    with pytest.warns(holdfast.HoldfastWarning, match=r"step=12.ckpt, .*newer-native") as told:
        fit(13, ckpt_path="newest")
    assert sum("newer-native" in str(one.message) for one in told) == 1


def test_a_step_without_parts_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of earlier versions have none: they load."""

    def without(self: Any, rest: Any, *, weights_only: bool) -> dict[str, Any]:
        state = whole(self, rest, weights_only=weights_only)
        state.pop("lightning_rank", None)
        return state

    whole = integration._Saving._state
    with monkeypatch.context() as patch:
        patch.setattr(integration._Saving, "_state", without)
        fitted(settings(tmp_path, epochs=2))
    begun = Begun()
    run = settings(tmp_path, epochs=3, ckpt_path="newest")
    fitted(run, lit.checkpoints(run), begun)
    assert begun.step == 24


def test_sums_of_metrics_that_a_rank_has_not() -> None:
    """A step of as many ranks may have them of rank 0 alone."""
    assert misfit_of_sums({"ranks": 2}, 2) == ""
    assert misfit_of_sums({"ranks": 1, "of_first": True}, 1) == ""
    assert "(4 ranks then, 2 now)" in misfit_of_sums({"ranks": 4, "of_first": True}, 2)
    text = misfit_of_sums({"ranks": 2, "of_first": True}, 2)
    assert "only those of rank 0" in text and "ranks then" not in text


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sign", [1, -1], ids=["before", "after"])
def test_killed_at_each_write_of_a_path(sign: int, tmp_path: Path, ranks: Ranks) -> None:
    """The run goes on from `last.ckpt`.  At the end each path has its step, but for one that was being
    removed, and no other step is pinned."""
    own = ranks.printed(settings(tmp_path, root="", paths=f"{tmp_path}/own", epochs=1).text())
    number, has_ended = 0, False
    while not has_ended:
        number += 1
        assert number < 50
        place = tmp_path / str(number)
        place.mkdir()
        run = settings(place, epochs=1, ckpt_path="last", dies=sign * number)
        seen = ranks.printed(run.text(), dies=True)
        has_ended = any(line.startswith("END ") for line in seen)
        run.dies = 0
        seen += [] if has_ended else ranks.printed(run.text())
        assert losses(seen) == losses(own), number
        assert value(seen, "END") == value(own, "END"), number
        pointers = {str(p): json.loads(p.read_text()) for p in Path(run.paths).glob("*.ckpt")}
        assert not any("is_coming" in pointer for pointer in pointers.values())
        named = {f"{label_start(p)}{pointers[p]['step']}" for p in pointers}
        labels = set(read_notes(open_store(run.root)).live_labels)
        assert labels <= named and len(named - labels) <= (not has_ended), (number, named, labels)
        assert any(label.startswith("last ") for label in labels)
    assert number > 10


class Noted(lit.Net):
    """Keeps the losses of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[int, list[float]] = {}

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = super().training_step(batch, number)
        self.losses.setdefault(self.current_epoch, []).append(loss.item())
        return loss


@pytest.mark.parametrize("stateful", [True, False])
def test_an_epoch_after_a_save_at_its_end_is_the_uninterrupted_one(
    stateful: bool, tmp_path: Path
) -> None:
    """That is where ModelCheckpoint saves without options."""

    def fit(name: str, epochs: int, ckpt_path: str | None = None) -> dict[int, list[float]]:
        run, module = settings(tmp_path / name, epochs=epochs), Noted()
        train, valid = lit.loaders()
        train = train if stateful else DataLoader(train.dataset, batch_size=4, shuffle=True)
        trainer = lit.trainer_of(run, ModelCheckpoint(run.paths))
        trainer.fit(module, train, valid, ckpt_path=ckpt_path)
        return module.losses

    L.seed_everything(4, verbose=False)
    whole = fit("whole", 4)
    L.seed_everything(4, verbose=False)
    fit("in parts", 2)
    L.seed_everything(5, verbose=False)
    rest = fit("in parts", 4, "newest")
    assert rest == {epoch: whole[epoch] for epoch in (2, 3)}


class Watched(Noted):
    """What it learns depends on metrics: of a batch, of an epoch, of validations."""

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = super().training_step(batch, number)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def configure_optimizers(self) -> Any:
        (optimizer,), _ = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        watched = {"both_epoch": "epoch", "most": "epoch", "val": "epoch", "both_step": "step"}
        return [optimizer], [
            {
                "scheduler": plateau(optimizer, factor=0.9, patience=0, threshold=0.5),
                "monitor": monitor,
                "interval": interval,
            }
            for monitor, interval in watched.items()
        ]


class Failed(Exception):
    pass


class Fails(L.Callback):
    """Fails in a hook, before callbacks that save there."""

    def __init__(self, hook: str, step: int) -> None:
        self.step = step
        setattr(self, hook, self.fail)

    def fail(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise Failed


SAVED: dict[str, dict[str, Any]] = {
    "batch": {"every_n_train_steps": 1},
    "validation": {"save_on_train_epoch_end": False},
    "epoch": {},
}


@pytest.mark.parametrize("by", ["epochs", "steps"])
@pytest.mark.parametrize(
    ("saved", "hook", "step"),
    [
        ("batch", "on_train_batch_start", 5),
        ("batch", "on_validation_start", 6),
        ("batch", "on_validation_end", 6),
        ("batch", "on_validation_start", 24),
        ("batch", "on_train_epoch_end", 24),
        ("validation", "on_train_batch_start", 6),
        ("validation", "on_train_batch_end", 13),
        ("validation", "on_train_epoch_end", 24),
        ("epoch", "on_train_epoch_start", 24),
        ("epoch", "on_train_batch_end", 26),
    ],
)
def test_what_comes_after_a_save_is_done(
    saved: str, hook: str, step: int, by: str, tmp_path: Path
) -> None:
    """Validations, schedulers and callbacks that look at metrics, and the sums of these over an epoch."""

    def fit(name: str, *fails: Any, ckpt_path: str | None = None) -> dict[str, Any]:
        run, module = settings(tmp_path / name, epochs=3 if by == "epochs" else -1), Watched()
        stops = [
            EarlyStopping(metric, patience=100, check_on_train_epoch_end=metric != "val")
            for metric in ("both_epoch", "most", "val")
        ]
        train, valid = lit.loaders()
        saves = ModelCheckpoint(run.paths, save_top_k=-1, **SAVED[saved])
        more = {"val_check_interval": 0.25} if saved != "epoch" else {}
        steps = {"max_steps": 36} if by == "steps" else {}
        trainer = lit.trainer_of(run, *fails, *stops, saves, **more, **steps)
        try:
            trainer.fit(module, train, valid, ckpt_path=ckpt_path)
        except Failed:
            assert fails
        schedulers = [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs]
        return {
            "digest": lit.digest(module),
            "losses": module.losses,
            "schedulers": schedulers,
            "stops": [stop.state_dict() for stop in stops],
            "epoch": trainer.current_epoch,
            "batches": trainer.fit_loop.epoch_loop._batches_that_stepped,
        }

    L.seed_everything(4, verbose=False)
    whole = fit("whole")
    L.seed_everything(4, verbose=False)
    first = fit("in parts", Fails(hook, step))
    L.seed_everything(5, verbose=False)
    rest = fit("in parts", ckpt_path="newest")
    losses = whole.pop("losses")
    assert sum(map(len, losses.values())) == 36
    for part in (first, rest):
        for epoch, found in part.pop("losses").items():
            expected = losses[epoch]
            assert found in (expected[: len(found)], expected[-len(found) :])
    assert rest == whole


def test_the_end_of_an_epoch_of_which_nothing_was_seen_may_fail(tmp_path: Path) -> None:
    """As it asks for what training_step has kept."""

    class Keeps(lit.Net):
        def on_train_epoch_start(self) -> None:
            self.outputs: list[torch.Tensor] = []

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            self.outputs.append(super().training_step(batch, number))
            return self.outputs[-1]

        def on_train_epoch_end(self) -> None:
            torch.stack(self.outputs)

    def fit(*fails: Any, **more: Any) -> L.Trainer:
        run = settings(tmp_path, epochs=3, **more)
        return fitted(
            run, *fails, ModelCheckpoint(run.paths, every_n_train_steps=1), module=Keeps()
        )

    with pytest.raises(Failed):
        fit(Fails("on_train_epoch_end", 24))
    with pytest.warns(
        holdfast.HoldfastWarning, match="end of epoch 1 failed in a run that has seen no batch"
    ):
        trainer = fit(ckpt_path="newest")
    assert (trainer.global_step, trainer.current_epoch) == (36, 3)
    assert not vars(trainer.fit_loop).keys() & {"on_advance_end"}
    assert "advance" not in vars(trainer.fit_loop.epoch_loop)


def test_what_a_save_has_not_got_is_told(tmp_path: Path) -> None:
    class Hooked(lit.Net):
        def on_train_batch_end(self, *_: Any) -> None:
            pass

    def told(*, expected: str, module: Any = None, **more: Any) -> int:
        run = settings(tmp_path / expected[:5], epochs=1, accumulate=more.pop("accumulate", 1))
        saves = ModelCheckpoint(run.paths, save_top_k=-1, **more.pop("saves"))
        with pytest.warns(holdfast.HoldfastWarning, match=expected) as found:
            fitted(run, saves, module=module, **more)
        parts = (" lacks ", "gradients are accumulated")
        return len([one for one in found if any(part in str(one.message) for part in parts)])

    amid = {"accumulate": 4, "val_check_interval": 6, "saves": {"save_on_train_epoch_end": False}}
    assert told(expected="while gradients are accumulated", **amid) == 1
    each = {"every_n_train_steps": 1}
    assert told(expected=r"what on_train_batch_end\(\)", module=Hooked(), saves=each) == 1


def test_a_restored_step_that_is_named_once_more_is_not_told_of(tmp_path: Path) -> None:
    """After a restart, a ModelCheckpoint saves the step again at the first batch of the next one."""
    run = settings(tmp_path, epochs=1, accumulate=2)
    saves = {"dirpath": run.paths, "save_top_k": -1, "every_n_train_steps": 2}
    fitted(run, ModelCheckpoint(**saves), max_steps=4)
    run.ckpt_path = "newest"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", holdfast.HoldfastWarning)
        trainer = fitted(run, ModelCheckpoint(**saves))
    assert trainer.global_step == 6 and holdfast.steps(run.root) == [2, 4, 6]
    assert [str(one.message) for one in found if "accumulated" in str(one.message)] == []


class Layered(Noted):
    """Has a backbone, which is frozen at first, and an optimizer for its head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
        self.net = torch.nn.Sequential(self.backbone, self.net)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net[1].parameters(), lr=1e-2, foreach=False)


@pytest.mark.parametrize("step", [8, 30], ids=["frozen", "unfrozen"])
@pytest.mark.parametrize("from_", ["own root", "another root", "file of Lightning's"])
def test_what_a_callback_has_unfrozen_goes_on(from_: str, step: int, tmp_path: Path) -> None:
    """The groups that it has added to the optimizer have their states, and the backbone is trained; not so
    from a file of Lightning's, which does not tell of that."""
    is_own, is_lightnings = from_ == "own root", from_.startswith("file")

    def fit(name: str, *fails: Any, ckpt_path: str | None = None) -> dict[str, Any]:
        run, module = settings(tmp_path / name, epochs=4), Layered()
        if is_lightnings and fails:
            run.root = ""
        unfreezes = BackboneFinetuning(1, lambda epoch: 1.5, initial_denom_lr=5.0)
        saves = ModelCheckpoint(run.paths, "{step}", save_top_k=-1, every_n_train_steps=1)
        train, valid = lit.loaders()
        trainer = lit.trainer_of(run, *fails, unfreezes, saves)
        try:
            trainer.fit(module, train, valid, ckpt_path=ckpt_path)
        except Failed:
            assert fails
        assert not unfreezes._restarting
        (optimizer,) = trainer.optimizers
        return {
            "digest": lit.digest(module),
            "losses": module.losses,
            "rates": [group["lr"] for group in optimizer.param_groups],
            "trained": [name for name, p in module.named_parameters() if p.requires_grad],
        }

    L.seed_everything(4, verbose=False)
    whole = fit("whole")
    L.seed_everything(4, verbose=False)
    fit("in parts", Fails("on_train_batch_start", step))
    L.seed_everything(5, verbose=False)
    path = f"{settings(tmp_path / 'in parts').paths}/step={step}.ckpt"
    rest = fit("in parts" if is_own else "next", ckpt_path="newest" if is_own else path)
    assert rest["rates"] == whole["rates"] and len(rest["rates"]) == 2
    is_trained = "net.0.0.weight" in rest["trained"]
    assert is_trained == (not is_lightnings or step == 8)
    if is_own:  # else it draws other masks and orders
        losses = whole.pop("losses")
        for epoch, found in rest.pop("losses").items():
            assert found == losses[epoch][-len(found) :]
        assert rest == whole


def test_a_logger_that_uploads_paths_is_told_once(tmp_path: Path) -> None:
    """It would upload a pointer for a model."""

    class Uploads(CSVLogger):
        def __init__(self, *, log_model: bool | str) -> None:
            super().__init__(str(tmp_path / "logs"))
            self._log_model = log_model

    def texts(*, log_model: bool | str) -> list[str]:
        run = settings(tmp_path, epochs=1)
        trainer = lit.trainer_of(run)
        trainer.loggers = [Uploads(log_model=log_model)]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer.fit(lit.Net(), *lit.loaders())
        return [str(one.message) for one in told if "uploads the small file" in str(one.message)]

    (text,) = texts(log_model="all")
    assert "Uploads(log_model='all')" in text
    assert not texts(log_model=False)


def test_the_loggers_that_upload_are_known() -> None:
    """By the attribute that the warning above goes by."""
    pytest.importorskip("wandb")
    from lightning.pytorch.loggers import WandbLogger

    assert WandbLogger(log_model="all")._log_model == "all"


def test_paths_that_a_killed_run_left_are_settled_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be written never again.  Each says so before its step is pinned."""
    run, own = settings(tmp_path, epochs=1), holdfast.Checkpointer.pin

    def pin(ckpt: holdfast.Checkpointer, step: int, label: str) -> None:
        assert Path(run.paths, f"{label.split(' ')[0]}.ckpt").exists()
        own(ckpt, step, label)

    with monkeypatch.context() as patched:
        patched.setattr(holdfast.Checkpointer, "pin", pin)
        fitted(run)
    last, store = json.loads(Path(run.paths, "last.ckpt").read_text()), open_store(run.root)
    for name, step in (("done", last["step"]), ("gone", 999)):
        path = f"{run.paths}/{name}.ckpt"
        Path(path).write_text(json.dumps({**last, "step": step, "is_coming": True}))
    early = f"{label_start(path)}999"  # as earlier versions left it
    notes.change(store, lambda n: notes.with_labels(n, {early: 999}))
    run.ckpt_path, run.epochs = "newest", 2
    fitted(run)
    assert json.loads(Path(run.paths, "done.ckpt").read_text()) == last
    assert not Path(run.paths, "gone.ckpt").exists()
    labels = read_notes(store).live_labels
    named = [(k.split(" ")[0], s) for k, s in labels.items() if k[:4] in ("done", "gone")]
    assert named == [("done", last["step"])]


def test_two_ranks_of_fsdp2_go_on_as_one(tmp_path: Path, ranks: Ranks) -> None:
    """Every bit of the weights is back; what follows is as on one rank, with other sums."""
    run = settings(tmp_path, "fsdp2")
    ranks.printed(run.text(), 2, 20)
    module = lit.Net()
    step = holdfast.load(run.root, {"model": module})
    saved = lit.digest(module)
    run.kind, run.ckpt_path = "single", "newest"
    found = ranks.printed(run.text())
    assert value(found, "BEGIN").split()[1] == str(step)
    assert value(found, "BEGIN").split()[2] == saved
    assert value(found, "END").split()[1] == "60"


# -- ModelCheckpoint


def test_top_k_last_and_best_name_whole_steps(tmp_path: Path) -> None:
    run = settings(tmp_path, epochs=3)
    callback = lit.checkpoints(run)
    trainer = fitted(run, callback)
    paths = sorted(p.name for p in Path(run.paths).iterdir())
    assert len(paths) == 3 and "last.ckpt" in paths  # two best, and the last
    for path in Path(run.paths).iterdir():
        pointer = json.loads(path.read_text())
        assert "is_coming" not in pointer
        with holdfast.open(run.root, step=pointer["step"]) as step:
            assert step.step == pointer["step"]
    best = lit.Net.load_from_checkpoint(callback.best_model_path)
    named = int(re.search(r"step=(\d+)", callback.best_model_path)[1])
    saved = lit.Net()
    holdfast.load(run.root, {"model": saved}, step=named)
    assert lit.digest(best) == lit.digest(saved)
    found = trainer.validate(dataloaders=lit.loaders()[1], ckpt_path="best", verbose=False)
    assert found[0]["val"] > 0
    assert lit.digest(trainer.lightning_module) == lit.digest(saved)
    # steps that no path names were deleted, but for what came after the last save
    pointed = {json.loads(p.read_text())["step"] for p in Path(run.paths).iterdir()}
    assert pointed <= set(holdfast.steps(run.root))
    assert len(holdfast.steps(run.root)) <= 2 * len(pointed)


def test_callbacks_know_after_a_resume_what_they_knew(tmp_path: Path) -> None:
    """The path `last.ckpt` and the best ones name one step, and each callback's state is the newest."""
    run = settings(tmp_path, epochs=2)
    first, second = (
        lit.checkpoints(run),
        ModelCheckpoint(dirpath=run.paths + "2", monitor="val", save_top_k=1, every_n_epochs=1),
    )
    fitted(run, first, second)
    run.ckpt_path, run.epochs = "last", 3
    third = lit.checkpoints(run)
    seen: dict[str, Any] = {}

    class Look(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            seen.update(deepcopy(third.state_dict()))

    fitted(run, Look(), third)
    assert seen["last_model_path"] == first.last_model_path
    assert seen["best_model_path"] == first.best_model_path
    assert seen["best_k_models"] == first.best_k_models


def test_weights_alone(tmp_path: Path) -> None:
    run = settings(tmp_path, epochs=2)
    callback = ModelCheckpoint(dirpath=run.paths, every_n_epochs=1, save_weights_only=True)
    trainer = fitted(run, callback)
    with holdfast.open(f"{run.root}-weights") as step:
        assert not [name for name in step.names() if name.startswith("optim")]
    model = lit.Net.load_from_checkpoint(callback.best_model_path)
    assert lit.digest(model) == lit.digest(trainer.lightning_module)
    run.ckpt_path, run.epochs = callback.best_model_path, 3
    with pytest.raises(KeyError, match="contains only the model"):
        fitted(run)


def test_weights_alone_have_an_upload_and_files(tmp_path: Path) -> None:
    """What is saved after training has the files; that it is not uploaded is told once."""
    note = tmp_path / "note.txt"
    note.write_bytes(b"n")
    files = {"note.txt": note, "more.txt": b"m"}
    run = settings(tmp_path, epochs=1, options={"upload": f"{tmp_path}/behind", "files": files})
    trainer = fitted(run, ModelCheckpoint(run.paths, save_weights_only=True, save_last=True))
    for root in (f"{run.root}-weights", f"{tmp_path}/behind-weights"):
        model = lit.Net()
        with holdfast.open(root) as step:
            assert dict(step.files) == {"note.txt": b"n", "more.txt": b"m"}
        holdfast.load(root, {"model": model})
        assert lit.digest(model) == lit.digest(trainer.lightning_module)
    note.unlink()

    def save_again() -> None:
        for name in ("one", "two"):
            trainer.save_checkpoint(f"{run.paths}/{name}.ckpt")

    with pytest.warns(holdfast.HoldfastWarning, match="is not uploaded") as told:
        save_again()
    (root,) = tmp_path.glob("root-two-*")
    with holdfast.open(root) as step:
        assert dict(step.files) == {"more.txt": b"m"}
    texts = [str(one.message) for one in told]
    assert sum("is not uploaded" in text for text in texts) == 1
    assert sum("'note.txt' cannot be read" in text for text in texts) == 2


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        ("/runs/a/", "/runs/a-weights"),
        ("s3://bucket/runs/a?region=x", "s3://bucket/runs/a-weights?region=x"),
        ("s3://bucket/?region=x", "s3://bucket/weights?region=x"),
    ],
)
def test_weights_beside_a_root_are_in_its_own_bucket(root: str, expected: str) -> None:
    assert beside(root, "weights") == expected


def test_a_link_is_a_last_path_too(tmp_path: Path) -> None:
    run = settings(tmp_path, epochs=2)
    fitted(run, ModelCheckpoint(run.paths, "{step}", save_top_k=-1, save_last="link"))
    last = Path(run.paths, "last.ckpt")
    assert last.is_symlink() and json.loads(last.read_text())["step"] == 24
    run.ckpt_path, run.epochs = "last", 3
    assert fitted(run).global_step == 36


def test_a_removed_path_leaves_neither_a_pin_nor_a_root(tmp_path: Path) -> None:
    """Also in a folder that is a link, and when the fit is over."""
    run = settings(tmp_path, epochs=1)
    Path(tmp_path, "deep/within").mkdir(parents=True)
    Path(run.paths).symlink_to("deep/within")
    plain, half, final = (f"{run.paths}/{name}.ckpt" for name in ("plain", "half", "final"))

    class Saves(L.Callback):
        def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            trainer.save_checkpoint(plain)
            with torch.no_grad():
                module.net[0].weight.mul_(0.5)
            trainer.save_checkpoint(half)
            assert len(list(tmp_path.glob("root-half*"))) == 1
            trainer.strategy.remove_checkpoint(half)

    trainer = fitted(run, Saves(), lit.checkpoints(run))
    trainer.save_checkpoint(final)
    assert lit.digest(lit.Net.load_from_checkpoint(final)) == lit.digest(trainer.lightning_module)
    lit.Net.load_from_checkpoint(plain)
    kept = set(read_notes(open_store(run.root)).live_labels)
    assert any(label.startswith("plain ") for label in kept)
    for path in (plain, final):
        trainer.strategy.remove_checkpoint(path)
        assert not Path(path).exists()
    left = set(read_notes(open_store(run.root)).live_labels)
    assert left == {label for label in kept if not label.startswith("plain ")}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "paths", "root"]


def test_a_save_of_changed_weights_leaves_the_step_that_others_name(tmp_path: Path) -> None:
    run = settings(tmp_path, epochs=1)

    class Average(L.Callback):
        def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            trainer.save_checkpoint(f"{run.paths}/plain.ckpt")
            with torch.no_grad():
                module.net[0].weight.mul_(0.5)
            trainer.save_checkpoint(f"{run.paths}/half.ckpt")

    trainer = fitted(run, Average(), lit.checkpoints(run))
    trainer.save_checkpoint(f"{run.paths}/final.ckpt")
    plain, half, final = (
        lit.Net.load_from_checkpoint(f"{run.paths}/{name}.ckpt").net[0].weight
        for name in ("plain", "half", "final")
    )
    assert torch.equal(plain * 0.5, half) and torch.equal(half, final)


def test_a_save_that_was_not_finished_is_not_the_last(tmp_path: Path) -> None:
    run = settings(tmp_path, epochs=1)
    fitted(run)
    last = Path(run.paths, "last.ckpt")
    last.write_text(json.dumps({**json.loads(last.read_text()), "step": 999}))
    run.ckpt_path, run.epochs = "last", 2
    with pytest.warns(holdfast.HoldfastWarning, match=r"names step 999, .* goes on from step 12"):
        assert fitted(run).global_step == 24


def test_a_checkpoint_for_slurms_requeue_is_waited_for(tmp_path: Path) -> None:
    """Lightning has the job queued again right after it.  Its path does not hold up a restart for ever."""
    run, begun = settings(tmp_path, epochs=1), Begun()
    path, seen = tmp_path / "hpc_ckpt_1.ckpt", []

    class Requeues(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(path)
                seen.append((json.loads(path.read_text()), holdfast.steps(run.root)))

    fitted(run, Requeues(), lit.checkpoints(run))
    ((pointer, steps),) = seen
    assert "is_coming" not in pointer and pointer["step"] == 4 and 4 in steps
    path.write_text(json.dumps({**pointer, "step": 999, "is_coming": True}))
    run.ckpt_path, run.epochs = str(path), 2
    with pytest.warns(holdfast.HoldfastWarning, match=r"names step 999, .* goes on from step 12"):
        fitted(run, begun, lit.checkpoints(run))
    assert begun.step == 12


def checkpoint_each_epoch(folder: str) -> ModelCheckpoint:
    """Each epoch's step stays, and a last path is there."""
    return ModelCheckpoint(folder, "{step}", save_top_k=-1, save_last=True)


def test_the_last_path_names_its_step_though_another_run_is_newer(tmp_path: Path) -> None:
    run, begun = settings(tmp_path, epochs=3), Begun()
    fitted(run, checkpoint_each_epoch(run.paths))
    back = replace(run, ckpt_path=f"{run.paths}/step=12.ckpt", epochs=-1)
    fitted(back, ModelCheckpoint(run.paths + "2", every_n_train_steps=6), max_steps=18)
    run.ckpt_path, run.epochs = f"{run.paths}/last.ckpt", 4
    fitted(run, begun, checkpoint_each_epoch(run.paths))
    assert begun.step == 36


def test_a_last_path_of_an_unfinished_save_is_no_step_of_another_run(tmp_path: Path) -> None:
    """That has the same number.  Nor is it settled to name that one."""
    run, begun = settings(tmp_path, epochs=3), Begun()
    fitted(run, checkpoint_each_epoch(run.paths))
    back = replace(run, ckpt_path=f"{run.paths}/step=12.ckpt", epochs=-1)
    fitted(back, ModelCheckpoint(run.paths + "2", every_n_train_steps=6), max_steps=18)
    pointer = json.loads(Path(run.paths, "last.ckpt").read_text())
    killed = holdfast.open(run.root).manifest.run
    assert pointer["step"] == 36 and pointer["run"] < killed
    coming = json.dumps({**pointer, "run": killed, "is_coming": True})
    for name in ("last", "other"):
        Path(run.paths + "2", f"{name}.ckpt").write_text(coming)
    run.ckpt_path, run.epochs = f"{run.paths}2/last.ckpt", 4
    with pytest.warns(
        holdfast.HoldfastWarning,
        match="names step 36 of run .*, whose save was not finished",
    ):
        fitted(run, begun, checkpoint_each_epoch(run.paths + "2"))
    assert begun.step == 18
    assert not Path(run.paths + "2", "other.ckpt").exists()


def test_a_path_whose_step_another_run_saved_anew_is_refused(tmp_path: Path) -> None:
    """But the last path stands for the newest step, and pointers without a run are taken."""
    run = settings(tmp_path, epochs=2)
    fitted(run, checkpoint_each_epoch(run.paths))
    back = replace(run, ckpt_path=f"{run.paths}/step=12.ckpt")
    with pytest.warns(holdfast.HoldfastWarning, match="saved anew by run"):
        fitted(back, checkpoint_each_epoch(run.paths + "2"))
    old, anew = (
        Path(run.paths, "step=24.ckpt"),
        r"names step 24 of run \d+, which was saved anew by run",
    )
    with pytest.raises(NotRecoverable, match=anew):
        lit.Net.load_from_checkpoint(old)
    run.ckpt_path, run.epochs = str(old), 3
    with pytest.raises(NotRecoverable, match=anew):
        fitted(run)
    run.ckpt_path, begun = f"{run.paths}/last.ckpt", Begun()
    with pytest.warns(holdfast.HoldfastWarning, match=anew):
        fitted(run, begun, checkpoint_each_epoch(run.paths))
    assert begun.step == 24
    pointer = json.loads(old.read_text())
    del pointer["run"]
    old.write_text(json.dumps(pointer))
    lit.Net.load_from_checkpoint(old)


class Averaged(lit.Net):
    """Is validated with other weights than it is trained with."""

    def on_validation_start(self) -> None:
        self.kept = [p.detach().clone() for p in self.parameters()]
        with torch.no_grad():
            for p in self.parameters():
                p.fill_(7)

    def on_validation_end(self) -> None:
        with torch.no_grad():
            for p, kept in zip(self.parameters(), self.kept):
                p.copy_(kept)


def test_a_save_in_validation_has_the_weights_that_are_there(tmp_path: Path) -> None:
    """They are put back as soon as callbacks have saved, outside of an optimizer's step."""
    run = settings(tmp_path, epochs=1)
    each = ModelCheckpoint(run.paths, "{step}", monitor="val", save_top_k=-1)
    fitted(run, each, module=Averaged(), val_check_interval=3)
    paths = sorted(Path(run.paths).iterdir())
    assert len(paths) == 4
    for path in paths:
        found = lit.Net.load_from_checkpoint(path)
        assert all(bool((p == 7).all()) for p in found.parameters()), path


class Counting(lit.Net):
    num_seen = 0

    def on_validation_end(self) -> None:
        self.num_seen += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["num_seen"] = self.num_seen


def test_a_second_path_of_a_step_says_what_it_has_not_got(tmp_path: Path) -> None:
    """A restart from it repeats the validation that came between."""
    run, module = settings(tmp_path, epochs=2), Counting()
    first = ModelCheckpoint(run.paths, every_n_train_steps=12, save_top_k=-1)
    second = ModelCheckpoint(run.paths + "2", every_n_epochs=1, save_top_k=-1)
    with pytest.warns(holdfast.HoldfastWarning, match="'num_seen', .* has changed since") as told:
        fitted(run, first, second, module=module)
    assert len([one for one in told if "num_seen" in str(one.message)]) == 1
    path = next(Path(run.paths + "2").glob("*step=24.ckpt"))
    assert integration._load_also_pointers(path)["num_seen"] == 1 and module.num_seen == 2


def test_lightnings_own_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    """Its weights, optimizer and loops are all there: the next losses are as Lightning's own."""
    own = settings(tmp_path, root="", epochs=1)
    fitted(own)
    one, two = (
        settings(tmp_path, epochs=2, ckpt_path=f"{own.paths}/last.ckpt", root=root)
        for root in ("", str(tmp_path / "root"))
    )
    one.paths += "1"
    two.paths += "2"
    digests = [lit.digest(fitted(s).lightning_module) for s in (one, two)]
    assert digests[0] == digests[1]


def test_nothing_found_is_a_fresh_start_and_a_used_root_is_told(tmp_path: Path) -> None:
    run = settings(tmp_path, epochs=1, ckpt_path="newest")
    assert fitted(run).global_step == 12
    run.ckpt_path = None
    with pytest.warns(holdfast.HoldfastWarning, match="has steps of another run, up to 12"):
        fitted(run)


@pytest.mark.parametrize("ckpt_path", [None, "newest"])
def test_a_fast_dev_run_leaves_the_root_as_it_is(ckpt_path: str | None, tmp_path: Path) -> None:
    """As Lightning's own callbacks do, it saves what it is told to, and no more."""
    run = settings(tmp_path, epochs=1, every={"durable": 1})

    def files() -> dict[Path, bytes]:
        return {p: p.read_bytes() for p in Path(run.root).rglob("*") if p.is_file()}

    class Saves(L.Callback):
        def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            trainer.save_checkpoint(f"{run.paths}/tried.ckpt")

    def tried() -> L.Trainer:
        given = replace(run, ckpt_path=ckpt_path)
        return fitted(given, Saves(), lit.checkpoints(run), fast_dev_run=2)

    trainer = tried()
    found = lit.Net.load_from_checkpoint(f"{run.paths}/tried.ckpt")
    assert lit.digest(found) == lit.digest(trainer.lightning_module)
    assert trainer.global_step == 2 and not Path(run.root).exists()
    trainer = fitted(run)
    before, digests = files(), [lit.digest(trainer.lightning_module)]
    assert before
    trainer = tried()
    digests.append(lit.digest(trainer.lightning_module))
    assert files() == before
    assert not list(Path(run.paths).glob("last-*")) and not list(tmp_path.glob("root-last-*"))
    assert (trainer.global_step, digests[0] == digests[1]) == (
        (2, False) if ckpt_path is None else (12, True)
    )


def test_what_tuner_tries_is_no_step_of_the_run(tmp_path: Path) -> None:
    """It saves and trains before the fit has loaded anything."""
    run = settings(tmp_path, epochs=1)
    fitted(run)
    run.epochs, begun = 2, Begun()
    trainer = lit.trainer_of(run, begun, lit.checkpoints(run), default_root_dir=tmp_path)
    module, (train, _) = lit.Net(), lit.loaders()
    Tuner(trainer).lr_find(module, train, num_training=5, update_attr=False)
    assert holdfast.steps(run.root)[-1] == 12
    trainer.fit(module, train, ckpt_path="newest")
    assert begun.step == 12 and holdfast.steps(run.root)[-1] == 24
    assert sorted(p.name for p in tmp_path.iterdir()) == ["paths", "root"]


def test_a_path_that_is_saved_again_with_changed_weights_names_these(tmp_path: Path) -> None:
    """Its first save is still under way then; it is no longer pinned."""
    run = settings(tmp_path, epochs=1)
    path, seen = f"{run.paths}/twice.ckpt", []

    class Twice(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(path)
                with torch.no_grad():
                    module.net[0].weight.mul_(0.5)
                trainer.save_checkpoint(path)
                seen.append(lit.digest(module))

    fitted(run, Twice(), lit.checkpoints(run))
    assert [lit.digest(lit.Net.load_from_checkpoint(path))] == seen
    labels = read_notes(open_store(run.root)).live_labels
    assert labels and not any(label.startswith("twice ") for label in labels)


def test_ranks_agree_on_where_a_path_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another rank's weights were changed, this rank's are saved beside, too."""
    run = settings(tmp_path, epochs=1)

    class Saves(L.Callback):
        def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            trainer.save_checkpoint(f"{run.paths}/same.ckpt")
            with monkeypatch.context() as patched:
                patched.setattr(trainer.strategy, "reduce_boolean_decision", lambda *_: False)
                trainer.save_checkpoint(f"{run.paths}/other.ckpt")

    fitted(run, Saves(), lit.checkpoints(run))
    assert len(list(tmp_path.glob("root-other-*"))) == 1 and not list(tmp_path.glob("root-same*"))


def test_a_path_of_the_restored_step_leaves_its_other_paths_as_they_are(tmp_path: Path) -> None:
    """A callback may save before the first batch, or because there is none."""
    run = settings(tmp_path, epochs=1)
    fitted(run, checkpoint_each_epoch(run.paths))

    class Saves(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            trainer.save_checkpoint(f"{run.paths}/begin.ckpt")

    run.ckpt_path, run.epochs = "newest", 2
    fitted(run, Saves(), checkpoint_each_epoch(run.paths))
    first, begin = (
        lit.Net.load_from_checkpoint(f"{run.paths}/{n}.ckpt") for n in ("step=12", "begin")
    )
    assert lit.digest(first) == lit.digest(begin)
    labels = read_notes(open_store(run.root)).live_labels
    named = {label.split(" ")[0] for label, step in labels.items() if step == 12}
    assert named == {"step=12", "last", "begin"}


# -- what cannot be done


class Opaque:
    pass


class WithOpaque(lit.Net):
    def __init__(self, opaque: Any) -> None:
        super().__init__()
        self.save_hyperparameters({"opaque": opaque})


class Drops(lit.Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["net.0.bias"]


def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"hyper_parameters\.opaque: a .*Opaque cannot be saved"):
        fitted(settings(tmp_path / "1"), module=WithOpaque(Opaque()))
    with pytest.raises(UsageError, match=r"changed 'net\.0\.bias' in the state_dict"):
        fitted(settings(tmp_path / "2"), module=Drops())
    for of in (FSDPStrategy(), "deepspeed", "ddp_spawn"):
        with pytest.raises(UsageError, match="cannot save with"):
            integration.strategy(of, tmp_path)
    with pytest.raises(UsageError, match="has no evry="):
        integration.strategy("ddp", tmp_path, evry=5)


# -- Fabric


def test_fabric_is_handed_over_as_it_is(tmp_path: Path, ranks: Ranks) -> None:
    """One device, DDP, FSDP2, then plain torch: names do not depend on Fabric, nor losses on the layout."""
    seen: list[str] = []
    for kind, num in KINDS.items():
        seen += ranks.printed(settings(tmp_path, kind, fabric=True).text(), num)
    loaded, own = lit.plain(), lit.plain()
    optimizer = torch.optim.AdamW(loaded.parameters())
    root = str(tmp_path / "root")
    assert holdfast.load(root, {"model": loaded, "optim": optimizer}) == 12
    printed = {int(step): float.fromhex(loss) for step, loss in losses(seen).items()}
    optim = torch.optim.AdamW(own.parameters(), lr=1e-2)
    for step in range(1, 13):
        loss = (own(torch.ones(4, 8)) - 1).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        assert printed[step] == pytest.approx(loss.item(), rel=1e-5)
    for p, q in zip(loaded.parameters(), own.parameters()):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize(
    "text", ['{"holdfast":1}', '{"holdfast":' + "[" * 100_000, '{"holdfast":x']
)
def test_a_path_that_should_name_a_step_and_does_not(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.ckpt").write_text(text)
    with pytest.raises(FormatError, match=r"a.ckpt' should name a step and does not"):
        read_pointer(tmp_path / "a.ckpt")


def test_paths_that_cannot_be_written_do_not_end_the_fit(tmp_path: Path, ranks: Ranks) -> None:
    """The steps are saved, and rank 0, which alone writes paths, leaves nobody waiting."""
    run = settings(tmp_path, "ddp", epochs=2)
    Path(run.paths, "last.ckpt").mkdir(parents=True)
    found = ranks.printed(run.text(), 2)
    assert value(found, "END").split()[1] == "24" and holdfast.steps(run.root)[-1] == 24
    alone = settings(tmp_path, epochs=1, root=f"{tmp_path}/own")
    with pytest.warns(holdfast.HoldfastWarning, match=r"last\.ckpt is not brought up to date"):
        assert fitted(alone).global_step == 12
    assert holdfast.steps(alone.root)[-1] == 12


def test_a_damaged_path_among_others_does_not_end_a_start(tmp_path: Path) -> None:
    run = settings(tmp_path, epochs=1)
    fitted(run)
    Path(run.paths, "old-step=7.ckpt").write_text('{"holdfast": 1, "ro')
    run.ckpt_path, run.epochs = "newest", 2
    with pytest.warns(holdfast.HoldfastWarning, match=r"old-step=7\.ckpt: the step that it names"):
        assert fitted(run).global_step == 24
