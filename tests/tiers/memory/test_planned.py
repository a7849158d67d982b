"""What `holdfast plan` says of groups and bytes, against what agents of real trainings hold."""

from typing import Any

import pytest

import holdfast
from holdfast.cli.plan import found_for
from holdfast.core.checkpoint.reshaping import Reshape
from holdfast.layout import Mesh
from holdfast.policy.redundancy import Protection
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.client import Client
from tiers.memory.zygote import Lives, train

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def planned(root: str, num_nodes: int, scheme: str) -> Protection:
    """For the mesh that was saved."""
    with holdfast.open(root) as checkpoint:
        manifest = checkpoint.manifest
        reshape = Reshape.onto(manifest, Mesh(manifest.mesh))
        shares = [manifest.file_of[r].bytes for r in range(reshape.mesh.world)]
        (found,) = found_for(
            num_nodes, scheme, shares, reshape.holdings(), mtbf_hours=1.0, repair_minutes=1.0
        )
    return found


def guards(lives: Lives, nodes: list[int]) -> list[w.Slot]:
    """Of the newest snapshot, by rank: what agents hold for others."""
    found: list[w.Slot] = []
    for n in sorted(set(nodes)):
        client = Client(lives.node(n))
        (job,) = client.ask(w.Status(), w.AgentReport).jobs
        held: Any = client.ask(w.Ask(job.job), w.Held)
        found += [image for image in held.images if image.kind == "guard"]
    newest = max(image.attempt for image in found)
    return sorted((g for g in found if g.attempt == newest), key=lambda g: g.rank)


@pytest.mark.soak_except("fsdp-nodes0-parity")
@pytest.mark.parametrize(
    ("layout", "nodes", "scheme"),
    [
        ("fsdp", [0, 1, 2, 3], "parity"),
        ("hsdp", [0, 1, 2, 3], "parity"),
        ("ddp", [0, 1, 2, 3], "rs(2)"),
        ("tp", [0, 0, 1, 1], "copy"),
        ("tp", [0, 1, 2, 3], "parity"),
    ],
)
def test_groups_and_bytes_are_those_of_the_run(
    lives: Lives, layout: str, nodes: list[int], scheme: str
) -> None:
    train(lives, 2, nodes, layout=layout, durable=2, options={"redundancy": scheme})
    plan = planned(str(lives.place / "root"), len(set(nodes)), scheme)
    kept = guards(lives, nodes)
    assert [g.rank for g in kept] == [0, 1, 2, 3], lives.errors()
    assert {g.members for g in kept} == set(plan.groups)
    assert plan.kept_bytes == pytest.approx(max(g.bytes for g in kept), rel=0.05)
