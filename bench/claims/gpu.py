"""The first minutes on a GPU: does each promise hold on this device?  One process, within ten minutes.

links      copies to the host: pageable, page-locked; what page-locking costs
memory     a snapshot in memory at each step, and a restore of it
records    a dense record of each step
replica    snapshots from gradients
carry      snapshots whose rest is carried on the device
durable    durable saves beside raw writes, `dcp.save` and `dcp.async_save`
order      restores behind queued kernels of a stream of the script's own; a graph captured beside a save
failure    a rank that is killed, or raises, under `holdfast run`: NCCL, and gloo on one device

A part that fails says why and the others go on.  `--device cpu --small` tries the script itself.
Please send the JSON (bench/results/gpu.json): it holds figures and the machine's kind, and no data.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import GB, folder_of, report, reporting, row

CLAIMS = (
    Claim("No part fails.", r"^parts that failed", at_most=0, unit=""),
    Claim(
        "Each kind of protection restores the newest step, bit for bit.",
        r"^(\w+): restores the newest step",
        at_least=1,
        unit="",
    ),
    Claim(
        "A snapshot in memory adds at most 0.5 % to a step.",
        r"^(memory|carry): what it adds to a step",
        at_most=0.5,
        unit="%",
    ),
    Claim(
        "A dense record adds at most 1.5 % to a step.",
        r"^records: what it adds to a step",
        at_most=1.5,
        unit="%",
    ),
    Claim(
        "A snapshot from gradients adds at most 2 % to a step.",
        r"^replica: what it adds to a step",
        at_most=2,
        unit="%",
    ),
    Claim(
        "A durable save has 0.8 of the raw device's speed.",
        r"^durable save: of the raw device's speed",
        at_least=0.8,
    ),
    Claim(
        "A durable save takes at most half as long as dcp.save.",
        r"^durable save: as fast as dcp.save",
        at_least=2,
    ),
    Claim(
        "A durable save holds the training for a tenth of what dcp.async_save does.",
        r"^training held: of what dcp.async_save holds",
        at_most=0.1,
    ),
    Claim(
        "Restores behind queued kernels, and saves beside a capture of a graph, are right.",
        r"^(restore_behind_queued_kernels|graph_beside_a_save) \|",
        at_least=1,
        unit="",
    ),
    Claim(
        "Under holdfast run, the next step comes within 15 s of a rank's death.",
        r"^(.+): until the next step",
        at_most=15,
        unit="s",
    ),
)

BEGINS_S, LIMIT_S = 360.0, 480.0
"""Seconds behind which no other part begins, and by which all are to be over."""


class Training:
    """A GPT that trains in bfloat16 under autocast, with a small buffer as most models have."""

    def __init__(self, device: str, small: bool) -> None:
        import torch
        from torch import nn

        torch.manual_seed(0)
        width, layers, words, batch, length = (
            (64, 2, 512, 2, 32) if small else (2048, 6, 32768, 32, 1024)
        )
        block = nn.TransformerEncoderLayer(
            width, max(width // 64, 1), 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.net = nn.Module()
        self.net.emb = nn.Embedding(words, width)
        self.net.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.net.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.net.to(device)
        self.optim = torch.optim.AdamW(
            self.net.parameters(), lr=1e-4, fused=device.startswith("cuda")
        )
        self.ids = torch.randint(0, words, (batch, length), device=device)
        self.device, self.done = device, 0
        self.state = {"model": self.net, "optim": self.optim}

    def step(self, ckpt: Any = None) -> None:
        import torch
        from torch import nn

        net = self.net
        self.done += 1
        self.optim.zero_grad(set_to_none=True)
        with torch.autocast(self.device.partition(":")[0], torch.bfloat16):
            net.count += 1
            out = net.blocks(net.emb(self.ids)) @ net.emb.weight.t()
            loss = nn.functional.cross_entropy(out.flatten(0, 1)[:-1], self.ids.flatten()[1:])
        loss.backward()
        self.optim.step()
        if ckpt is not None:
            ckpt.step(self.done)

    def seconds(self, steps: int, ckpt: Any = None) -> float:
        """Of a step, where the host may run ahead as it does in training."""
        sync(self.device)
        started = time.perf_counter()
        for _ in range(steps):
            self.step(ckpt)
        sync(self.device)
        return (time.perf_counter() - started) / steps

    def tensors(self) -> list[Any]:
        moments = (v for s in self.optim.state.values() for v in s.values())
        return [*self.net.state_dict().values(), *moments]

    def num_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())


def sync(device: str) -> None:
    import torch

    if device != "cpu":
        torch.accelerator.synchronize(device)


class Parts:
    """The parts, what they find, and its rows."""

    def __init__(self, device: str, small: bool, root: Path, out: Path) -> None:
        self.device, self.small, self.root, self.out = device, small, root, out
        self.began = time.time()
        self.found: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self._training: Training | None = None

    @property
    def left_s(self) -> float:
        return max(LIMIT_S - (time.time() - self.began), 5.0)

    @property
    def training(self) -> Training:
        if self._training is None:
            self._training = Training(self.device, self.small)
            self._training.seconds(4)
            self.found["state_gb"] = self._training.num_bytes() / GB
            self.found["step_s"] = self._training.seconds(8)
        return self._training

    def fresh(self, name: str) -> Path:
        shutil.rmtree(self.root / name, ignore_errors=True)
        return self.root / name

    def forget_training(self) -> None:
        import torch

        self._training = None
        gc.collect()
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def all(self, wanted: list[str]) -> None:
        failed: list[str] = []
        for name in wanted:
            started, began = time.time(), self.began
            if started - began > BEGINS_S:
                self.found[name] = "left out: no time"
                continue
            print(f"[{started - began:4.0f} s] {name} ...", flush=True)
            try:
                self.found[name] = getattr(self, name)()
            except Exception:
                self.found[name] = traceback.format_exc()[-2000:]
                failed.append(name)
            (self.out / "gpu_so_far.json").write_text(json.dumps(self.found, default=str))
            print(f"         {json.dumps(self.found[name], default=str)[:300]}", flush=True)
        text = f"{', '.join(failed)}: see the JSON" if failed else ""
        self.rows.append(row("parts that failed", text, "", len(failed), ""))

    # -- parts -------------------------------------------------------------------------------------

    def links(self) -> dict[str, Any]:
        import mmap

        import numpy as np
        import torch

        from holdfast.live.state import devices

        size = 1 << (24 if self.small else 31)
        there = torch.ones(size, dtype=torch.uint8, device=self.device)
        memory = mmap.mmap(-1, size)
        here = torch.from_numpy(np.frombuffer(memory, np.uint8))

        def rate() -> float:
            sync(self.device)
            started = time.perf_counter()
            here.copy_(there, non_blocking=True)
            sync(self.device)
            return size / (time.perf_counter() - started) / GB

        rate()
        found = {"pageable_gb_s": rate()}
        started = time.perf_counter()
        locked = devices.lock_pages(memoryview(memory), [torch.device(self.device)])
        if locked is not None:
            locked.wait()
            found["page_locking_s_per_gb"] = (time.perf_counter() - started) / size * GB
            rate()
            found["page_locked_gb_s"] = rate()
            locked.undo()
        return found

    def each_step(self, name: str, *, steps: int = 12, **options: Any) -> dict[str, Any]:
        """What `ckpt.step()` adds to a step, beside steps before and after without it."""
        import holdfast

        training, rounds = self.training, 2 if self.small else 3
        alone, beside, root = [], [], self.fresh(name)
        alone += [training.seconds(steps) for _ in range(rounds)]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", holdfast.HoldfastWarning)
            with holdfast.Checkpointer(root, training.state, on_error="warn", **options) as ckpt:
                for _ in range(4):
                    training.step(ckpt)
                    ckpt.wait(60)
                for _ in range(rounds):
                    beside.append(training.seconds(steps, ckpt))
                    ckpt.wait(60)
                    if name == "records" and not self.small:
                        time.sleep(4)  # the queue is empty at the next round: no disk is measured
                restored = self._restored(ckpt, training)
        alone += [training.seconds(steps) for _ in range(rounds)]
        shutil.rmtree(root, ignore_errors=True)
        same = restored["restored_the_newest"]
        self.rows.append(row(f"{name}: restores the newest step, bit for bit", "", "", same, ""))
        self.rows.append(
            row(
                f"{name}: what it adds to a step",
                f"{median(beside) * 1e3:.1f} ms",
                f"{median(alone) * 1e3:.1f} ms without",
                100 * (median(beside) / median(alone) - 1),
                " %",
            )
        )
        words = sorted({str(w.message)[:200] for w in told})
        return {"alone_s": alone, "beside_s": beside, "told": words} | restored

    def _restored(self, ckpt: Any, training: Training) -> dict[str, Any]:
        """A restore of the newest step, beside what the training had."""
        before = [t.detach().clone() for t in training.tensors()]
        sync(self.device)
        started = time.perf_counter()
        restored = ckpt.restore()
        sync(self.device)
        seconds = time.perf_counter() - started
        same = restored == training.done and all(
            bool((a == b).all()) for a, b in zip(before, training.tensors())
        )
        training.done = int(restored)
        return {
            "restore_s": seconds,
            "restore_gb_s": training.num_bytes() / seconds / GB,
            "restored_the_newest": same,
        }

    def memory(self) -> dict[str, Any]:
        import holdfast

        every, none = holdfast.Every(memory=1), holdfast.Memory("none")
        return self.each_step("memory", every=every, memory=none, when_busy="queue")

    def records(self) -> dict[str, Any]:
        import holdfast

        every = holdfast.Every(durable=1000, delta=1)
        return self.each_step("records", steps=5, every=every, delta=holdfast.Delta(queue=8))

    def replica(self) -> dict[str, Any]:
        import holdfast

        memory = holdfast.Memory("none", feed="gradient")
        return self.each_step("replica", every=holdfast.Every(memory=1), memory=memory)

    def carry(self) -> dict[str, Any]:
        import holdfast

        memory = holdfast.Memory("none", carry="64MB" if self.small else "8GB")
        every = holdfast.Every(memory=1)
        return self.each_step("carry", every=every, memory=memory, when_busy="queue")

    def durable(self) -> dict[str, Any]:
        import torch.distributed.checkpoint as dcp

        import holdfast

        training = self.training
        base = training.seconds(8)

        def values() -> dict[str, Any]:
            return {"model": training.net.state_dict(), "optim": training.optim.state_dict()}

        def timed(call: Callable[[], Any]) -> float:
            training.step()
            sync(self.device)
            started = time.perf_counter()
            call()
            return time.perf_counter() - started

        def held(begin: Callable[[], Callable[[], Any]]) -> float:
            """Seconds that eight steps take longer when a save begins before them."""
            training.step()
            sync(self.device)
            started = time.perf_counter()
            end = begin()
            for _ in range(8):
                training.step()
            sync(self.device)
            seconds = time.perf_counter() - started - 8 * base
            end()
            return seconds

        times: dict[str, list[float]] = {
            "raw": [], "save": [], "dcp": [], "held": [], "dcp_async_held": []
        }  # fmt: skip
        with holdfast.Checkpointer(
            self.fresh("durable"), training.state, keep=holdfast.Keep(1)
        ) as ckpt:
            ckpt.restore()

            def saved() -> Callable[[], Any]:
                save = ckpt.save(training.done)
                return lambda: save.wait(self.left_s)

            timed(lambda: saved()())  # reserves memory
            for _ in range(3):
                began = time.perf_counter()
                times["raw"].append(self._raw_write(training.num_bytes()))
                times["save"].append(timed(lambda: saved()()))
                at = str(self.fresh("dcp"))
                times["dcp"].append(timed(lambda at=at: dcp.save(values(), checkpoint_id=at)))
                times["held"].append(held(saved))
                at = str(self.fresh("dcp"))
                times["dcp_async_held"].append(
                    held(lambda at=at: dcp.async_save(values(), checkpoint_id=at).result)
                )
                if time.perf_counter() - began > self.left_s / 3:
                    break  # a slow disk
        middle = {name: median(some) for name, some in times.items()}
        self._durable_rows(middle, base)
        return times

    def _durable_rows(self, middle: dict[str, float], step_s: float) -> None:
        def text(name: str) -> str:
            return f"{middle[name]:.3f} s"

        save, held = middle["save"], max(middle["held"], 1e-4)
        self.rows += [
            row("durable save: of the raw device's speed", text("save"), f"raw {text('raw')}",
                middle["raw"] / save),
            row("durable save: as fast as dcp.save", text("save"), f"dcp.save {text('dcp')}",
                middle["dcp"] / save),
            row("training held: of what dcp.async_save holds", text("held"),
                f"{text('dcp_async_held')}; a step {step_s:.3f} s",
                held / max(middle["dcp_async_held"], 1e-4)),
        ]  # fmt: skip

    def _raw_write(self, size: int) -> float:
        import mmap
        from concurrent.futures import ThreadPoolExecutor

        block = mmap.mmap(-1, 1 << 26)
        path, direct = self.root / "raw", getattr(os, "O_DIRECT", 0)
        how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        started = time.perf_counter()
        try:
            fd = os.open(path, how | direct)
        except OSError:
            self.found["raw"] = "without O_DIRECT"
            fd = os.open(path, how)
        os.posix_fallocate(fd, 0, size)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda at: os.pwrite(fd, block, at), range(0, size, len(block))))
        os.fsync(fd)
        os.close(fd)
        seconds = time.perf_counter() - started
        path.unlink()
        return seconds

    def order(self) -> dict[str, Any]:
        """What goes wrong silently if it goes wrong."""
        self.forget_training()
        found = {"restore_behind_queued_kernels": self._restore_on_a_side_stream()}
        if self.device.startswith("cuda"):
            found["graph_beside_a_save"] = self._capture_beside_a_save()
        for name, outcome in found.items():
            self.rows.append(row(name, outcome, "", float(outcome == "right"), ""))
        return found

    def _restore_on_a_side_stream(self) -> str:
        import torch
        from torch import nn

        import holdfast
        from holdfast.live.state.devices import on_stream

        if self.device == "cpu":
            return "right"
        width = 256 if self.small else 4096
        with on_stream(torch.Stream(torch.device(self.device))):
            net = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(self.device)
            expected = net[0].weight.detach().clone()
            with holdfast.Checkpointer(self.fresh("side"), {"model": net}) as ckpt:
                ckpt.save(1).wait(60)
                big = torch.ones(width, width, device=self.device)
                for _ in range(100):  # what comes before is still to be done
                    big = big @ big / width
                with torch.no_grad():
                    net[0].weight.copy_(big)
                ckpt.restore()
                sync(self.device)
        return "right" if torch.equal(net[0].weight, expected) else "WRONG: written over"

    def _capture_beside_a_save(self) -> str:
        """The first save reserves memory and page-locks it; later ones copy beside the capture."""
        import torch
        from torch import nn

        import holdfast

        net, x = nn.Linear(4096, 4096).cuda(), torch.ones(8, 4096, device="cuda")
        expected = net(net(x))  # also what a first call makes
        ballast = nn.ParameterList(torch.zeros(1 << 26, device="cuda") for _ in range(8))
        root, state = self.fresh("graph"), {"net": net, "ballast": ballast}
        memory = holdfast.Memory("none", carry="1GB")
        with holdfast.Checkpointer(
            root, state, memory=memory, every=holdfast.Every(memory=1)
        ) as ckpt:
            for number in range(1, 4):
                save = ckpt.save(number)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y = net(net(x))
                    time.sleep(0.5)
                save.wait(60)
                y.zero_()
                graph.replay()
                sync(self.device)
                if not torch.equal(y, expected):
                    return f"WRONG: the graph of step {number} gives other values"
        before = net.weight.detach().clone()
        with torch.no_grad():
            net.weight.zero_()
        holdfast.load(root, state, step=3)
        return "right" if torch.equal(net.weight, before) else "WRONG: the save has other values"

    def failure(self) -> dict[str, Any]:
        self.forget_training()
        cases = [("nccl", "kill"), ("nccl", "raise"), ("gloo", "kill"), ("gloo", "raise")]
        if not self.device.startswith("cuda"):
            cases = [("gloo", "kill")]
        return {f"{backend} {fault}": self._failure(backend, fault) for backend, fault in cases}

    def _failure(self, backend: str, fault: str) -> dict[str, Any]:
        """NCCL has one rank a device; with gloo two share one."""
        import torch

        ranks = 2 if backend == "gloo" else min(torch.cuda.device_count(), 2)
        at = self.fresh(f"failure-{backend}-{fault}")
        told = at.with_suffix(".told")
        command = [sys.executable, "-m", "holdfast", "run", "--spares=1", "--standalone"]
        command += [f"--nproc-per-node={ranks}", "-m", "bench.lib.gpu_train"]
        command += [str(at), backend, fault, self.device.partition(":")[0]]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            text, _ = process.communicate(timeout=min(60.0, self.left_s))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text = f"{process.communicate()[0]}\nno end within 60 s"
        lines = [json.loads(x) for x in told.read_text().splitlines()] if told.exists() else []
        broke = next((x["at"] for x in lines if x.get("fault")), None)
        later = [x for x in lines if broke and x["at"] > broke and x.get("step")]
        firsts = [
            min((x["at"] for x in later if x["rank"] == r), default=None) for r in range(ranks)
        ]
        seconds = None if None in firsts or broke is None else max(firsts) - broke  # type: ignore[type-var,operator]
        ended = process.returncode == 0 and seconds is not None
        what = f"{ranks} rank(s), {backend}, {fault}: until the next step"
        self.rows.append(
            row(what, "" if ended else "not recovered", "", seconds if ended else 1e9, " s")
        )
        return {"next_step_s": seconds, "status": process.returncode} | (
            {} if ended else {"text": text[-1500:]}
        )


NAMES = ("links", "memory", "records", "replica", "carry", "durable", "order", "failure")


def main() -> None:
    import torch

    p = reporting(__doc__)
    p.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    p.add_argument("--small", action="store_true", help="a tiny model, to try the script out")
    p.add_argument("--parts", default=",".join(NAMES))
    p.add_argument("--work", type=Path, help="a folder on the disk to be measured")
    args = p.parse_args()
    started = time.time()
    place = tempfile.mkdtemp(prefix="holdfast-gpu-", dir="/dev/shm")
    os.environ["HOLDFAST_MEMORY_DIR"] = place
    root = Path(tempfile.mkdtemp(prefix="holdfast-gpu-", dir=args.work))
    out = folder_of(args)
    parts = Parts(args.device, args.small, root, out)
    if args.device.startswith("cuda"):
        parts.found["device"] = torch.cuda.get_device_name(args.device)
        parts.found["cuda"] = torch.version.cuda
    try:
        threading.current_thread().name = "training"
        parts.all(args.parts.split(","))
    finally:
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(place, ignore_errors=True)
        (out / "gpu_so_far.json").unlink(missing_ok=True)
    args.name = "gpu" if args.device.startswith("cuda") else "gpu_tried"
    args.work = str(args.work)
    report(CLAIMS, __doc__, args, parts.found, parts.rows, started)


if __name__ == "__main__":
    main()
