"""A bucket: saves, loads and resharded loads against raw requests and DCP's writers for S3.

Servers on loopback that the script starts: SeaweedFS (files on the disk) and moto (in memory; it copies a
whole object for each range that it gives, so that loads from it say nothing and are left out).  The
state lies as FSDP2 leaves it, cut along dim 0; for the resharded load, 2 ranks have saved it and 4 load it
cut along dim 1.  Values are compared after each first round.
holdfast     Checkpointer.save(step).wait() as in save_durable.py; holdfast.load
raw          the same bytes by obstore: a put of one object a rank, with the part size and concurrency that
             were fastest in a round before; ranged gets of 8 MiB by 8 threads into the same tensors
dcp s3torch  torch.distributed.checkpoint with s3torchconnector's writer and reader
dcp fsspec   the same with torch's own fsspec writer and reader (s3fs)
`pip install s3torchconnector tenacity s3fs`: what is not installed is left out, and named.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import (
    MIB,
    Job,
    main,
    over_ranks,
    ranks_of,
    ratio,
    row,
    seconds,
    settle,
    slowest,
    take_turns,
    with_compute,
)
from bench.lib.watching import status

RECORDS = (
    "object",
    "object_2_ranks",
    "object_4_ranks",
    "object_moto",
    "object_resharded",
    "object_held",
)
CLAIMS = (
    Claim(
        "A save into a bucket takes at most 1.15 of raw puts' time.",
        r"^save, (.+?) \|.*\| raw",
        at_most=1.15,
        records=RECORDS,
    ),
    Claim(
        "A load from a bucket takes at most 1.2 of raw gets' time.",
        r"^load, (.+?) \|.*\| raw",
        at_most=1.2,
        records=RECORDS,
    ),
    Claim(
        "A save into a bucket takes at most half as long as by DCP's writers for S3.",
        r"^save, (.+?) \|.*\| (dcp \w+)",
        at_least=2,
        records=RECORDS,
    ),
    Claim(
        "A load from a bucket takes at most half as long as by DCP's readers for S3.",
        r"^load, (.+?) \|.*\| (dcp \w+)",
        at_least=2,
        records=RECORDS,
    ),
    Claim(
        "A load on another layout reads each byte of a bucket once.",
        r"^bytes read for each wanted, (.+?) \|",
        at_most=1.05,
        records=RECORDS,
    ),
    Claim(
        "A save into a bucket takes 96 MiB of memory beside the image.",
        r"^memory beside the image, (.+?) \|",
        at_most=96,
        unit="MiB",
        records=RECORDS,
    ),
    Claim(
        "A save into a bucket holds the training at most 1.1 times as long as one to the disk.",
        r"^training held by a save, (.+?) \|",
        at_most=1.1,
        records=RECORDS,
    ),
)
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing123"}
REGION = "us-east-1"
BUCKET = "bench"
WEED = (
    '{"identities":[{"name":"t","actions":["Admin"],'
    '"credentials":[{"accessKey":"%s","secretKey":"%s"}]}]}'
)
PARTS = ((8, 4), (16, 8), (32, 4))
"""Part sizes in MiB, and parts at a time, of which raw takes the best."""
READ = 8 * MIB
READERS = 8


# -- servers --------------------------------------------------------------------------------------


def free_port() -> int:
    """A port that is free, and the one 10,000 above it, on which SeaweedFS's parts speak gRPC."""
    while True:
        port = random.randrange(12_000, 22_000)
        with socket.socket() as one, socket.socket() as other:
            if one.connect_ex(("127.0.0.1", port)) and other.connect_ex(
                ("127.0.0.1", port + 10_000)
            ):
                return port


def started(command: list[str], port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    atexit.register(process.kill)
    os.environ["BENCH_PIDS"] = f"{os.environ.get('BENCH_PIDS', '')} {process.pid}"
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.2)
    sys.exit(f"{command[0]} has not begun to listen on {port}")


def seaweedfs(folder: str) -> str:
    s3, config = free_port(), Path(folder) / "s3.json"
    config.write_text(WEED % tuple(KEYS.values()))
    ports = [f"-{what}.port={free_port()}" for what in ("master", "volume", "filer")]
    weed = str(Path(sys.executable).parent / "weed")
    command = [weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3"]
    command += [f"-s3.port={s3}", f"-s3.config={config}", *ports, "-volume.max=60"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    started([*command, "-master.volumeSizeLimitMB=1024"], s3)
    return f"http://127.0.0.1:{s3}"


def moto(_: str) -> str:
    port = free_port()
    server = str(Path(sys.executable).parent / "moto_server")
    started([server, "-H", "127.0.0.1", "-p", str(port)], port)
    return f"http://127.0.0.1:{port}"


def make_bucket(endpoint: str) -> None:
    """In a process of its own: boto3 and s3fs want different botocores."""
    make = (
        "import sys, time, boto3\n"
        "c = boto3.client('s3', endpoint_url=sys.argv[1], region_name=sys.argv[2])\n"
        "for _ in range(60):\n"
        "    try:\n"
        "        c.create_bucket(Bucket=sys.argv[3])\n"
        "        c.put_object(Bucket=sys.argv[3], Key='ready', Body=b'x')\n"
        "        break\n"
        "    except Exception as error:\n"
        "        last = error; time.sleep(1)\n"
        "else: raise last\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", make, endpoint, REGION, BUCKET], check=True, env=env)


def serve(numbers: list[int], servers: list[str], parts: list[str]) -> list[tuple[int, str]]:
    """Start the servers; the phases that use them."""
    os.environ.update(KEYS, AWS_REGION=REGION)
    found = []
    for name in servers:
        folder = tempfile.TemporaryDirectory(prefix=f"holdfast-{name}-")
        atexit.register(folder.cleanup)
        endpoint = {"seaweedfs": seaweedfs, "moto": moto}[name](folder.name)
        make_bucket(endpoint)
        os.environ[f"BENCH_{name.upper()}"] = endpoint
        if "same" in parts:
            found += [(n, f" {name}") for n in numbers]
        if "resharded" in parts and {2, 4} <= set(numbers) and name != "moto":
            found += [(2, f" {name} leaves"), (4, f" {name} reshards")]
    return [*found, *((1, f" {name} holds") for name in servers if "held" in parts)]


# -- contestants ----------------------------------------------------------------------------------


class Bucket:
    """One server, as each contestant speaks to it."""

    def __init__(self, job: Job, state: Any) -> None:
        from obstore.store import S3Store

        name, kind = job.phase.split()[0], job.phase.split()[-1]
        self.endpoint = os.environ[f"BENCH_{name.upper()}"]
        self.state, self.rank = state, job.rank
        options = {"allow_http": True}
        config = {"endpoint": self.endpoint, "region": REGION}
        self.inner = S3Store(BUCKET, config=config, client_options=options)
        run = "resharded" if kind in ("leaves", "reshards") else job.size  # each has its own root
        self.root = f"s3://{BUCKET}/holdfast-{run}?endpoint={self.endpoint}"

    def writers(self) -> dict[str, Any]:
        import torch.distributed.checkpoint as dcp

        tree = self.state.for_dcp()
        return {
            name: lambda make=make: dcp.save(tree, storage_writer=make())
            for name, (make, _) in self.of_dcp().items()
        }

    def readers(self) -> dict[str, Any]:
        import torch.distributed.checkpoint as dcp

        return {
            name: lambda make=make: dcp.load(self.state.for_dcp(), storage_reader=make())
            for name, (_, make) in self.of_dcp().items()
        }

    def of_dcp(self) -> dict[str, tuple[Any, Any]]:
        found: dict[str, tuple[Any, Any]] = {}
        if importlib.util.find_spec("s3torchconnector") is not None:
            found["dcp s3torch"] = self._s3torch()
        if importlib.util.find_spec("s3fs") is not None:
            found["dcp fsspec"] = self._fsspec()
        missing = {"dcp s3torch", "dcp fsspec"} - found.keys()
        if missing and self.rank == 0:
            print(f"not installed, left out: {', '.join(sorted(missing))}", flush=True)
        return found

    def _s3torch(self) -> tuple[Any, Any]:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

        config = S3ClientConfig(force_path_style=True)
        client = S3Client(REGION, endpoint=self.endpoint, s3client_config=config)

        def made(kind: Any, **options: Any) -> Any:
            made = kind(
                region=REGION, path=f"s3://{BUCKET}/s3torch", s3client_config=config, **options
            )
            made.fs._client = client  # it takes no endpoint
            return made

        return lambda: made(S3StorageWriter, thread_count=4), lambda: made(S3StorageReader)

    def _fsspec(self) -> tuple[Any, Any]:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

        options = {
            "key": KEYS["AWS_ACCESS_KEY_ID"],
            "secret": KEYS["AWS_SECRET_ACCESS_KEY"],
            "client_kwargs": {"endpoint_url": self.endpoint, "region_name": REGION},
        }
        path = f"s3://{BUCKET}/fsspec"
        return (
            lambda: FsspecWriter(path, thread_count=4, **options),
            lambda: FsspecReader(path, **options),
        )

    def put_raw(self, data: memoryview, part: int, at_once: int) -> None:
        import obstore

        obstore.put(
            self.inner,
            f"raw/{self.rank}",
            data,
            use_multipart=True,
            chunk_size=part * MIB,
            max_concurrency=at_once,
        )

    def read_raw(self, views: list[tuple[int, memoryview]]) -> None:
        import obstore

        def one(piece: tuple[int, memoryview]) -> None:
            at, view = piece
            view[:] = memoryview(
                obstore.get_range(self.inner, f"raw/{self.rank}", start=at, length=len(view))
            )

        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(one, views))


def image_of(state: Any) -> memoryview:
    """This rank's bytes, one tensor after the other."""
    import torch

    return memoryview(
        torch.cat([t.detach().reshape(-1).view(torch.uint8) for t in state.locals()]).numpy()
    )


def views_of(state: Any) -> list[tuple[int, memoryview]]:
    """Ranges of the raw object, and the memory of the tensors they go to."""
    import torch

    found, at = [], 0
    for t in state.locals():
        view = memoryview(t.detach().reshape(-1).view(torch.uint8).numpy())
        found += [(at + i, view[i : i + READ]) for i in range(0, len(view), READ)]
        at += len(view)
    return found


# -- phases ---------------------------------------------------------------------------------------


def work(job: Job) -> dict[str, Any]:
    import holdfast
    from bench.lib.state import State

    kind = job.phase.split()[-1]
    if kind == "holds":
        return {"bytes": 0.0, "held": held(job)}
    dim = 1 if kind == "reshards" else 0
    state = State(job.size, small=job.args.small, dim=dim)
    bucket = Bucket(job, state)
    found: dict[str, Any] = {"bytes": over_ranks(state.local_bytes, "SUM")}
    if kind == "reshards":
        found["load"] = loaded(job, bucket, None)
        found["read_bytes"] = over_ranks(holdfast.events.counters["read.bytes"], "SUM")
        return found
    data = image_of(state)
    expected = state.checksums()
    found["save"], found["beside_image"] = saved(job, bucket, data)
    if kind != "leaves" and "moto" not in job.phase:
        found["load"] = loaded(job, bucket, expected)
    return found


def saved(job: Job, bucket: Bucket, data: memoryview) -> tuple[Any, float]:
    import holdfast

    best = min(PARTS, key=lambda p: slowest(lambda: bucket.put_raw(data, *p)))
    ckpt = holdfast.Checkpointer(
        bucket.root, bucket.state.for_holdfast(), keep=holdfast.Keep(last=1), on_error="raise"
    )
    step = count(1)

    def ours() -> None:
        ckpt.save(next(step)).wait()

    ours()  # plans, and touches its buffer for the first time
    beside = peak_of(ours)
    acts = {"holdfast": ours, "raw": lambda: bucket.put_raw(data, *best), **bucket.writers()}

    def timed(act: Any) -> Any:
        def run(_: int) -> float:
            took = slowest(act)
            settle(job)
            return took

        return run

    rounds = 1 if job.phase.endswith("leaves") else job.args.rounds
    samples = take_turns({name: timed(act) for name, act in acts.items()}, rounds)
    ckpt.close()
    return samples, over_ranks(beside)


def held(job: Job) -> dict[str, list[float]]:
    """How long a save holds the training thread, on the disk and in the bucket: as stall.py does.

    A bucket's servers are elsewhere; here they take turns on the cores that the training has.  So they are
    given the lowest priority, and the training one thread.  An update of the state that follows is slower
    or quicker than the one before by a tenth of a second with nothing beside it: it is told apart.
    """
    import torch

    import holdfast
    from bench.lib.trainer import Trainer

    out_of_the_way()
    torch.set_num_threads(1)
    trainer = Trainer(job)
    bucket = Bucket(job, trainer.state)
    roots = {
        "disk": str(job.root / "held"),
        "bucket": f"{bucket.root}".replace("holdfast", "held", 1),
    }
    ckpts = {
        name: holdfast.Checkpointer(
            root, trainer.state.for_holdfast(), keep=holdfast.Keep(last=1), on_error="raise"
        )
        for name, root in roots.items()
    }
    step = iter(range(1, 1000))

    def one(name: str) -> float:
        trainer.compute()
        base = trainer.update()
        started = time.perf_counter()
        save = ckpts[name].save(next(step))
        called = time.perf_counter() - started
        trainer.compute()
        updated = trainer.update()
        save.wait()
        settle(job)
        slower[name].append(updated - base)
        return over_ranks(called)

    slower: dict[str, list[float]] = {name: [] for name in ckpts}
    for name in ckpts:
        one(name)  # which plans
        slower[name].clear()
    samples = take_turns({n: lambda _, n=n: one(n) for n in ckpts}, 2 * job.args.rounds)
    samples |= {f"{name}, the update after it": slower[name] for name in ckpts}
    for ckpt in ckpts.values():
        ckpt.close()
    return samples


def out_of_the_way() -> None:
    """Give the servers the lowest priority, within their sessions and among them."""
    for pid in os.environ["BENCH_PIDS"].split():
        Path(f"/proc/{pid}/autogroup").write_text("19")
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), 19)


def peak_of(act: Any) -> float:
    """MiB by which the memory of this process is larger, at most, while it does so."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    act()
    return (status("VmHWM") - before) / MIB


def loaded(job: Job, bucket: Bucket, expected: Any) -> Any:
    import holdfast

    state = bucket.state
    views = views_of(state)
    acts = {
        "holdfast": lambda: holdfast.load(bucket.root, state.for_holdfast()),
        **bucket.readers(),
    }
    if expected is not None:
        acts["raw"] = lambda: bucket.read_raw(views)
    sums: list[Any] = [] if expected is None else [expected]

    def timed(name: str) -> Any:
        def run(number: int) -> float:
            if number == 0:
                state.wipe()
            took = slowest(acts[name])
            if number == 0:
                sums.append(state.checksums())
                assert sums[-1] == sums[0], f"{name} loaded something else"
            return took

        return run

    return take_turns({name: timed(name) for name in acts}, job.args.rounds)


# -- report ---------------------------------------------------------------------------------------


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for key, f in found.items():
        ranks, server, *kind = key.split()
        if "held" in f:
            held_by = ("bucket", "disk")
            ours, disk = (seconds(f["held"], where) for where in held_by)
            times = ratio(f["held"], "bucket", "disk")
            told = f"training held by a save, {server}, {ranks} rank"
            out.append(row(told, ours, f"local disk: {disk}", times))
            later = {where: median(f["held"][f"{where}, the update after it"]) for where in held_by}
            texts = [f"{1e3 * later[where]:.0f} ms" for where in held_by]
            told = f"an update of the state is slower while a save is written, {server}"
            apart = 1e3 * (later["bucket"] - later["disk"])
            out.append(row(told, texts[0], f"local disk: {texts[1]}", apart, unit=" ms"))
            continue
        who = f"{server}, {ranks_of(ranks)}"
        for what in ("save", "load"):
            if what not in f or kind == ["leaves"]:
                continue
            s = f[what]
            told = f"{'load, 2 -> 4 ranks on the other dim' if kind else what}, {who}"
            ours = seconds(s, "holdfast", f["bytes"])
            if "raw" in s:
                raw = f"raw: {seconds(s, 'raw', f['bytes'])}"
                out.append(row(told, ours, raw, ratio(s, "holdfast", "raw")))
            for name in s.keys() - {"holdfast", "raw"}:
                other = f"{name}: {seconds(s, name, f['bytes'])}"
                out.append(row(told, ours, other, ratio(s, name, "holdfast")))
        if "read_bytes" in f:
            times = f["read_bytes"] / f["bytes"] / len(f["load"]["holdfast"])
            out.append(row(f"bytes read for each wanted, {who}", "", "", times))
        if "beside_image" in f and not kind:
            beside = f["beside_image"]
            out.append(row(f"memory beside the image, {who}", "", "", beside, " MiB"))
    return out


def extend(p: argparse.ArgumentParser) -> None:
    p.add_argument("--servers", default="seaweedfs,moto", help="default: seaweedfs,moto")
    p.add_argument("--parts", default="same,resharded,held", help="default: same,resharded,held")
    with_compute(p)


def phases(numbers: list[int]) -> list[tuple[int, str]]:
    p = argparse.ArgumentParser(add_help=False)
    extend(p)
    given = p.parse_known_args()[0]
    return serve(numbers, given.servers.split(","), given.parts.split(","))


if __name__ == "__main__":
    main(CLAIMS, __doc__, work, rows, rounds=4, extend=extend, phases=phases)
