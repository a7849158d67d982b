"""The commands of docs/how-to/elastic.md, as they are printed, on nodes that have the page's addresses."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.commands import ELSEWHERE, commands_of
from docs.test_docs import ROOT, blocks

from .cluster import Cluster, Node
from .spaces import Process

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.usefixtures("needs_nodes"),
]
PAGE = ROOT / "docs" / "how-to" / "elastic.md"
HEAD, ADDRESS = "10.0.0.1", "10.0.0.2"
RANKS = 8
SCRIPT = """
from datetime import timedelta
import holdfast, torch
import torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(minutes=2))
with holdfast.Checkpointer("runs", {"model": torch.nn.Linear(2, 2)}, sigterm_s=20) as ckpt:
    ckpt.save(ckpt.restore() + 1)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} has saved")
dist.destroy_process_group()
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(1, tmp_path, head=True) as found:
        yield found


def printed() -> list[str]:
    """The page's commands, with a node's address where the page says ADDRESS."""
    found = [c for b in blocks(PAGE, "console") for c in commands_of(b.text, b.options, PAGE.name)]
    here = f"system/nodes/{Path(__file__).name}"
    assert [c.text for c in found if ELSEWHERE.get(c.start or "") != here] == []
    return [command.text.replace("ADDRESS", ADDRESS) for command in found]


@pytest.mark.soak
def test_what_the_page_prints_starts_a_training(cluster: Cluster) -> None:
    serve, export, torchrun, sysctl = printed()
    head, (node,) = cluster.head, cluster.nodes
    assert head is not None
    for one, address in ((head, HEAD), (node, ADDRESS)):
        one.call(["ip", "address", "add", f"{address}/24", "dev", "eth0"])
    machines = retries()
    assert node.call(["bash", "-c", sysctl]) == "net.ipv4.tcp_retries2 = 6\n"
    assert int(node.call(["cat", "/proc/sys/net/ipv4/tcp_retries2"])) == 6
    assert retries() == machines
    (cluster.folder / "train.py").write_text(SCRIPT)
    server = run(head, serve)
    training = run(node, f"{export} && {torchrun}")
    assert training.wait(240) == 0, training.text()
    for rank in range(RANKS):
        assert f"rank {rank} of {RANKS} has saved" in training.text()
    assert server.poll() is None, server.text()


def run(node: Node, command: str) -> Process:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return node.run(["bash", "-c", command], {"PATH": path, "OMP_NUM_THREADS": "1"})


def retries() -> str:
    return Path("/proc/sys/net/ipv4/tcp_retries2").read_text()
