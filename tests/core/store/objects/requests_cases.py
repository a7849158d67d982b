"""Worker: the phases of `distributed.requests_cases` in a bucket; as JSON, by rank, what it was asked.

Each rank reaches the server by a proxy of its own, which counts also what this rank's writer of records
asks for.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from core.store.objects.proxy import Fate, Proxy, Request
from core.store.objects.servers import BUCKET
from system.distributed.requests_cases import Run, with_records, without_records

KEPT = 100


def kind_of(request: Request) -> str:
    """What a request asks for, in the words of S3."""
    query = request.path.partition("?")[2]
    for word, kind in (
        ("list-type", "LIST"),
        ("partNumber", "PART"),
        ("uploadId", "COMPLETE"),
        ("uploads", "BEGIN"),
        ("delete", "DELETE"),
    ):
        if word in query:
            return kind
    return request.method


def main(out: Path, endpoint: str) -> None:
    made: list[tuple[str, str]] = []

    def count(request: Request) -> Fate:
        made.append((kind_of(request), request.path))
        return Fate.PASSED

    dist.init_process_group("gloo")
    with Proxy(endpoint) as proxy:
        proxy.choose = count
        place = f"s3://{BUCKET}/{out.name}-{dist.get_world_size()}"
        run = Run(lambda name: f"{place}/{name}?endpoint={proxy.endpoint}", made, KEPT)
        without_records(run)
        with_records(run)
        run.write(out)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
