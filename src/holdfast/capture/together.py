"""The manifest, which all ranks make of their images together."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import torch

from holdfast.capture.job import SaveJob
from holdfast.codec.digest import ALGORITHM, CHUNK_BYTES
from holdfast.format.manifest import VERSION, FileEntry, Manifest
from holdfast.state.protocol import Written, merge_extras
from holdfast.version import __version__
from holdfast.wire import WireError


def written(job: SaveJob, file: FileEntry | None, rank: int) -> bytes:
    """Encode what this rank hands in: its file, and extras that it alone knows, or its error."""
    assert job.verdict is not None
    sent = {k: job.live.extras[k] for k, ranks in job.verdict.send.items() if rank in ranks}
    error = None if job.error is None else WireError.of(job.error)
    return msgspec.msgpack.encode(Written(error, file, sent))


def manifest_of(job: SaveJob, run: int, attempt: str, answers: list[Written]) -> Manifest:
    """On rank 0: the manifest of what all ranks have handed in."""
    assert job.plan is not None and job.verdict is not None
    plan = job.plan.agreement
    extras: dict[str, Any] = {
        k: v for k, v in job.live.extras.items() if k not in job.verdict.per_rank
    }
    for key, ranks in job.verdict.send.items():
        versions = [extras[key]] if key in extras else []
        versions += [answers[r].extras[key] for r in ranks if r != 0]
        extras[key] = merge_extras(key, versions)
    return Manifest(
        holdfast=VERSION,
        step=job.step,
        run=run,
        attempt=attempt,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        software={"holdfast": __version__, "torch": str(torch.__version__), **job.notes},
        mesh=plan.mesh,
        chunk_bytes=CHUNK_BYTES,
        algorithm=ALGORITHM,
        shardings=plan.shardings,
        tensors=plan.tensors,
        aliases=plan.aliases,
        files=tuple(w.file for w in answers if w.file is not None),
        extras=extras,
        per_rank=job.verdict.per_rank,  # type: ignore[arg-type]
    )
