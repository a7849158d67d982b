"""The manifest, which rank 0 makes from the parts of all ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from holdfast.base.version import __version__
from holdfast.base.wire import WireError
from holdfast.core.checkpoint.lineage import Lineage
from holdfast.core.codec.digest import ALGORITHM, CHUNK_BYTES
from holdfast.core.format.manifest import FORMAT_VERSION, FileEntry, Manifest, readable
from holdfast.live.saving.messages import Written
from holdfast.live.saving.operation import Draft, SaveOperation

if TYPE_CHECKING:
    from holdfast.live.saving.attaching import Attached


def written(op: SaveOperation, draft: Draft, file: FileEntry | None) -> bytes:
    """Encode this rank's `Written`: its file and the extras that it has to send, or its error."""
    rank, send = op.saver.group.rank, draft.agreed.verdict.send
    sent = {key: draft.live.extras[key] for key, ranks in send.items() if rank in ranks}
    error = None if op.error is None else WireError.of(op.error)
    return msgspec.msgpack.encode(Written(error, file, sent))


def build_manifest(
    draft: Draft,
    answers: list[Written],
    *,
    step: int,
    run: int,
    attempt: str,
    notes: dict[str, str] | None = None,
    attached: Attached | None = None,
    line: Lineage = (),
) -> Manifest:
    """On rank 0: make the manifest from the answers of all ranks.  `notes`: further entries of `software`;
    `line`: the lineage of the run."""
    plan, verdict = draft.plan.agreement, draft.agreed.verdict
    extras: dict[str, Any] = {
        k: v for k, v in draft.live.extras.items() if k not in verdict.per_rank
    }
    if verdict.send:
        from holdfast.live.saving.merging import merge_extras
    for key, ranks in verdict.send.items():
        versions = [extras[key]] if key in extras else []
        versions += [answers[r].extras[key] for r in ranks if r != 0]
        extras[key] = merge_extras(key, versions)
    manifest = Manifest(
        holdfast=FORMAT_VERSION,
        step=step,
        run=run,
        attempt=attempt,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        software={"holdfast": __version__, "torch": str(torch.__version__), **(notes or {})},
        mesh=plan.mesh,
        chunk_bytes=CHUNK_BYTES,
        algorithm=ALGORITHM,
        shardings=plan.shardings,
        tensors=plan.tensors,
        aliases=plan.aliases,
        files=tuple(w.file for w in answers if w.file is not None),
        extras=extras,
        per_rank=verdict.per_rank,  # type: ignore[arg-type]
        line=line,
        **({} if attached is None else attached.in_manifest(attempt)),
    )
    return readable(manifest)
