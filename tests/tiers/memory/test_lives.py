"""Trainings that die and go on from memory: on the same ranks, on others, without some of their nodes.

Each test's lives are real processes under gloo; a node is a directory with an agent of its own.
"""

import re
import shutil
import time
from pathlib import Path

import pytest

import holdfast
from holdfast.core.checkpoint.names import manifest_key
from holdfast.core.codec.digest import CHUNK_BYTES
from holdfast.core.format.manifest import decode_manifest
from holdfast.store import open_store
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.client import Client
from tiers.memory.agents import kill
from tiers.memory.zygote import KILLED, Lives, Told, check, lose, train

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

IMAGE_BYTES = 2 * 400 * 800 * 4 * 3 // 4
"""Of each of four ranks, about."""


@pytest.mark.soak_except("fsdp")
@pytest.mark.parametrize("layout", ["ddp", "zero1", "fsdp", "hsdp", "tp"])
def test_all_processes_are_killed(lives: Lives, layout: str) -> None:
    """They go on from the snapshot of their last step, as the uninterrupted training does."""
    nodes = [0, 1] if layout == "fsdp" else [0, 1, 2, 3]
    reference = lives.live(nodes=nodes, until=8, layout=layout, reference=True)[0].digests
    digests = train(lives, 5, nodes, layout=layout, options={"redundancy": "none"})
    told = lives.live(nodes=nodes, until=8, layout=layout, options={"redundancy": "none"})
    check(lives, told, 5, digests)
    assert told[0].digests == {s: reference[s] for s in (6, 7, 8)}
    assert not any(list(lives.node(n).glob("jobs/*")) for n in nodes)  # closed: freed


@pytest.mark.soak
def test_one_process_is_killed_between_snapshots(lives: Lives) -> None:
    script = {"layout": "fsdp", "memory": 2, "options": {"redundancy": "none"}}
    told = lives.live(nodes=[0, 0, 1, 1], until=9, kill=[2], kill_at=6, **script)
    assert told[2].status == KILLED
    again = lives.live(nodes=[0, 0, 1, 1], until=9, **script)
    check(lives, again, 4, told[0].digests)


@pytest.mark.soak
def test_survivors_of_a_killed_process_end_by_themselves(lives: Lives) -> None:
    """Their next collective fails; a snapshot that waits for the dead keeps no process alive."""
    script = {"settle": False, "grace_s": 8.0, "options": {"redundancy": "none"}}
    told = lives.live(nodes=[0, 1], until=9, kill=[1], kill_at=5, **script)
    assert [t.status for t in told] == [1, KILLED], lives.errors()


@pytest.mark.soak_except("rs(2)-lost5-fsdp")
@pytest.mark.parametrize(
    ("redundancy", "lost", "layout"),
    [
        ("copy", [2], "fsdp"),
        ("parity", [0], "hsdp"),
        ("parity", [3], "tp"),
        ("auto", [1], "ddp"),
        ("auto", [1], "zero1"),
        ("rs(2)", [0, 3], "fsdp"),
        ("copy(3)", [1, 2], "fsdp"),
    ],
)
def test_nodes_are_lost(lives: Lives, redundancy: str, lost: list[int], layout: str) -> None:
    """Their images are rebuilt from the others', and training goes on with nodes that know nothing."""
    options = {"redundancy": redundancy, "tls": redundancy == "copy"}
    digests = train(lives, 4, [0, 1, 2, 3], layout=layout, options=options)
    lose(lives, *lost)
    told = lives.live(nodes=[0, 1, 2, 3], until=5, layout=layout, options=options)
    check(lives, told, 4, digests)
    check_sources(told)
    assert {x["source"] for one in told for x in one.events("memory.read")} >= {"local", "rebuilt"}
    assert sum(one.moved.get("memory.rebuilt.bytes", 0) for one in told) > 0


@pytest.mark.soak
def test_a_node_with_more_ranks_than_the_others_is_lost(lives: Lives) -> None:
    """Two ranks on one of three nodes: each finds a partner on another."""
    nodes, options = [0, 0, 1, 2], {"redundancy": "parity"}
    digests = train(lives, 3, nodes, options=options)
    lose(lives, 0)
    told = lives.live(nodes=nodes, until=4, options=options)
    check(lives, told, 3, digests)
    (chosen,) = told[0].events("memory.redundancy")
    assert chosen["kept"] == "parity" and chosen["groups"] == "2"
    assert not told[0].events("memory.weaker")


@pytest.mark.soak_except("hsdp-parity-lost1")
@pytest.mark.parametrize(
    ("redundancy", "lost"), [("copy", [3]), ("parity", [1]), ("rs(2)", [0, 2])]
)
@pytest.mark.parametrize("layout", ["ddp", "hsdp"])
def test_replicas_protect_each_other_without_the_network(
    lives: Lives, layout: str, redundancy: str, lost: list[int]
) -> None:
    """From the second snapshot on, each rank makes what it keeps from its own tensors; it is as good."""
    if layout == "hsdp" and redundancy == "rs(2)":
        pytest.skip("two replicas cannot bear two losses")
    options = {"redundancy": redundancy}
    told = lives.live(nodes=[0, 1, 2, 3], until=5, die=True, layout=layout, options=options)
    for one in told:
        how = [x["source"] for x in one.events("snapshot.protect")]
        assert how == ["peers"] + ["replica"] * 4, (how, lives.errors())
    losses = {"copy": 1, "parity": 1, "rs(2)": 2}[redundancy]
    for n in range(4):  # all of it once; then of three others the last chunk, with their extras
        assert 0 < report(lives, n).fetched < 1.2 * losses * IMAGE_BYTES + 4 * 3 * 1.1 * CHUNK_BYTES
    lose(lives, *lost)
    again = lives.live(nodes=[0, 1, 2, 3], until=6, layout=layout, options=options)
    check(lives, again, 5, told[0].digests)
    assert sum(one.moved.get("memory.rebuilt.bytes", 0) for one in again) > 0


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_plans_are_made_once(lives: Lives, layout: str) -> None:
    """What ranks agree on, an image's layout, the list of copies for each of its two slots, and what a rank
    makes of its own replica, if it has one: the snapshots that follow plan nothing."""
    options = {"redundancy": "copy"}
    for one in lives.live(nodes=[0, 1], until=9, layout=layout, options=options):
        planned = {x["step"]: x["planned"] for x in one.lines if "planned" in x}
        assert planned[9] == {"make_plan": 1, "plan_image": 1, "plan": 2, "replica_guard": 1}
        assert planned[4] == planned[9]
        assert one.events("snapshot.protect")[-1]["source"] == {"ddp": "replica"}.get(
            layout, "peers"
        )


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "source", "carry", "lost"),
    [
        ("ddp", "replica", "20MB", 0),
        ("ddp", "replica", "3MB", 1),
        ("zero1", "recomputed", "3MB", 0),
    ],
    ids=["all fits", "part fits", "recompute"],
)
def test_a_snapshot_and_its_guard_spread_over_steps(
    lives: Lives, layout: str, source: str, carry: str, lost: int
) -> None:
    """Copying takes longer than two steps, which do not wait for it.  What each rank saves, and what it
    keeps for the other one, are of the moment of the call all the same."""
    redundancy = "copy" if source == "replica" else "recompute"
    options = {"redundancy": redundancy, "carry": carry}
    script = {"layout": layout, "memory": 4, "options": options}
    slow = {"hurry": [12, 99], "slow": [12, 0.15]}
    told = lives.live(nodes=[0, 1], until=15, die=True, **slow, **script)
    for one in told:
        assert one.status == KILLED, lives.errors()
        assert [x["source"] for x in one.events("snapshot.protect")][-1] == source, one.lines
        assert not one.events("replica.differs")
        assert one.events("window.wait")[-1]["carried"] == "True"
        lines = [x for x in one.lines if "digest" in x or x.get("event") == "snapshot.copy"]
        order = [x.get("step") for x in lines]  # of events as text
        assert order.index(14) < order.index("12"), order
    again = lives.live(nodes=[0, 1], until=12, die=True, **script)
    check(lives, again, 12, told[0].digests)
    lose(lives, lost)
    rebuilt = lives.live(nodes=[0, 1], until=13, **script)
    check(lives, rebuilt, 12, told[0].digests)
    assert sum(one.moved.get("memory.rebuilt.bytes", 0) for one in rebuilt) > 0


def test_states_of_a_lost_shard_are_redone_from_gradients(lives: Lives) -> None:
    """Under ZeRO-1 no rank has another's optimizer states.  After two exchanges each rank redoes those that
    it keeps from its own gradients; they are the other's bit for bit, and nothing crosses the network."""
    script = {"layout": "zero1", "options": {"redundancy": "recompute"}}
    told = lives.live(nodes=[0, 1, 2], until=6, die=True, **script)
    for one in told:
        how = [x["source"] for x in one.events("snapshot.protect")]
        assert how == ["peers"] * 2 + ["recomputed"] * 4, (how, lives.errors())
    all_bytes = 2 * 400 * 800 * 4 * 3  # of all ranks
    fetched = sum(report(lives, n).fetched for n in range(3))
    assert fetched < 2.2 * all_bytes + 3 * 4 * 1.1 * CHUNK_BYTES < 3 * all_bytes
    lose(lives, 1)
    again = lives.live(nodes=[0, 1, 2], until=7, **script)
    check(lives, again, 6, told[0].digests)
    assert sum(one.moved.get("memory.rebuilt.bytes", 0) for one in again) > 0


@pytest.mark.soak
def test_redone_states_that_differ_are_exchanged(lives: Lives) -> None:
    """Twins compute something else, rank 1's once, rank 2's always, as another device might: seen by the
    digests, and the copy fetched instead; the one that is never right gives up."""
    script = {"layout": "zero1", "options": {"redundancy": "recompute"}}
    errs = {"1": [4], "2": list(range(1, 20))}
    told = lives.live(nodes=[0, 1, 2], until=9, die=True, twin_errs=errs, **script)
    assert [len(t.events("replica.differs")) for t in told] == [0, 1, 3], lives.errors()
    assert [len(t.events("twins.ended")) for t in told] == [0, 0, 1]
    lose(lives, 0)
    again = lives.live(nodes=[0, 1, 2], until=10, **script)
    check(lives, again, 9, told[0].digests)


@pytest.mark.soak_except("ddp")
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp"])
def test_snapshots_from_gradients(lives: Lives, layout: str) -> None:
    """A replica on the host makes the optimizer's steps: what it has is the training's state, bit for bit,
    on three ranks and on two; durable saves find no difference."""
    options = {"redundancy": "parity", "feed": "gradient"}
    nodes = [0, 1, 2, 3] if layout == "tp" else [0, 1, 2]
    told = lives.live(nodes=nodes, until=7, die=True, layout=layout, durable=5, options=options)
    for one in told:
        followed = [x["step"] for x in one.events("feed.followed")]
        assert followed == ["4", "6", "7"], (followed, lives.errors())
        assert not one.events("feed.drift")
        assert not one.events("twins.lost")
    lose(lives, 1)
    again = lives.live(nodes=nodes[:-1], until=12, die=True, layout="fsdp", options=options)
    check(lives, again, 7, told[0].digests)
    last = lives.live(nodes=[0, 2], until=12, layout="fsdp", options=options)
    check(lives, last, 12, again[0].digests)


@pytest.mark.soak
def test_durable_saves_from_gradients(lives: Lives) -> None:
    """Every second is of the live state, on all ranks alike; what the manifests say holds for all ranks."""
    options = {"redundancy": "none", "feed": "gradient", "prove_every": 2}
    nodes = [0, 1, 2]
    told = lives.live(nodes=nodes, until=9, die=True, durable=2, options=options)
    for one in told:
        followed = [x["step"] for x in one.events("feed.followed")]
        assert followed == ["5", "6", "7", "9"], (followed, lives.errors())
        assert not one.events("feed.drift")
    store = open_store(str(lives.place / "root"))
    says = {
        s: decode_manifest(store.get(manifest_key(s)), "").software.get("replica") for s in (4, 6)
    }
    assert says == {4: None, 6: "bit-exact, compared last at step 4"}
    reference = lives.live(nodes=nodes, until=6, reference=True)[0].digests
    lose(lives, *nodes)
    shutil.rmtree(lives.place / "root" / "steps" / f"{8:010d}", ignore_errors=True)
    again = lives.live(nodes=nodes, until=6, options=options)
    assert {(a.restored, a.start) for a in again} == {(6, reference[6])}, lives.errors()


def report(lives: Lives, node: int) -> w.AgentReport:
    return Client(lives.node(node), deadline_s=120.0).ask(w.Status(), w.AgentReport)


@pytest.mark.soak
def test_replicas_that_differ_are_exchanged(lives: Lives) -> None:
    """The statistics of batch norm are each rank's own under DDP: no rank can speak for another."""
    options = {"redundancy": "copy"}
    told = lives.live(nodes=[0, 1, 2], until=4, die=True, layout="batchnorm", options=options)
    lose(lives, 1)
    again = lives.live(nodes=[0, 1, 2], until=5, layout="batchnorm", options=options)
    check(lives, again, 4, told[0].digests)


def test_a_replica_full_of_nan_is_not_a_copy_of_another(lives: Lives) -> None:
    """(nvidia-resiliency-ext#349.)  Rank 1's memory is ruined; what it keeps for rank 0 is rank 0's all the
    same, fetched where it lies.  When node 0 is lost, no more is NaN than what rank 1 has saved itself."""
    options = {"redundancy": "copy"}
    told = lives.live(
        nodes=[0, 1, 2], until=4, die=True, layout="ddp", options=options, poison_at=4, poison=[1],
        replicas="trust",
    )  # fmt: skip
    assert told[1].events("replica.differs")
    lose(lives, 0)
    again = lives.live(nodes=[0, 1, 2], until=4, layout="ddp", options=options)
    assert [t.restored for t in again] == [4] * 3
    nans = next(x["nans"] for x in again[0].lines if "restored" in x)
    assert 0.25 < nans < 0.42


@pytest.mark.soak
def test_a_copied_root_is_another_job(lives: Lives) -> None:
    """A root is copied, and its run goes on and dies: what that left in memory is not the copy's."""
    options = {"redundancy": "none"}
    train(lives, 3, [0, 1], options=options, durable=3)
    shutil.copytree(lives.place / "root", lives.place / "copy")
    train(lives, 6, [0, 1], options=options)
    told = lives.live(nodes=[0, 1], until=4, options=options, root=str(lives.place / "copy"))
    assert [t.restored for t in told] == [3, 3]


@pytest.mark.soak
def test_durable_saves_do_not_starve(lives: Lives) -> None:
    """With a snapshot every step, one is always in flight: a save that is due waits for it.  (It is left
    out where another durable save is in flight, on a busy machine.)"""
    told = lives.live(
        nodes=[0, 1], until=20, memory=1, durable=5, settle=False, pause=0.2,
        options={"redundancy": "copy"},
    )  # fmt: skip
    assert [t.status for t in told] == [0, 0], lives.errors()
    saved = holdfast.steps(str(lives.place / "root"))
    assert set(saved) <= {5, 10, 15, 20}
    assert len(saved) >= 2


@pytest.mark.soak
@pytest.mark.parametrize(
    ("nodes", "layout"),
    [([0, 2, 3], "fsdp"), ([0, 2], "fsdp"), ([0, 2, 3, 4, 5], "fsdp"), ([0, 3], "zero1")],
)
def test_another_number_of_nodes(lives: Lives, nodes: list[int], layout: str) -> None:
    """Node 1 is lost; the training goes on with three nodes, with two, and with five."""
    rs, copy = ({"layout": layout, "options": {"redundancy": r}} for r in ("rs(2)", "copy"))
    digests = train(lives, 4, [0, 1, 2, 3], **rs)
    lose(lives, 1)
    told = lives.live(nodes=nodes, until=6, die=True, **copy)
    check(lives, told, 4, digests)
    again = lives.live(nodes=nodes, until=7, **copy)
    check(lives, again, 6, told[0].digests)


@pytest.mark.soak
def test_nodes_that_are_no_longer_part_of_the_job_still_answer(lives: Lives) -> None:
    """Four nodes, then two of them, without redundancy: the images of the others are fetched there."""
    digests = train(lives, 4, [0, 1, 2, 3], options={"redundancy": "none"})
    told = lives.live(nodes=[0, 3], until=5, options={"redundancy": "none"})
    check(lives, told, 4, digests)


@pytest.mark.soak
def test_a_job_moves_on_before_it_makes_a_snapshot_of_its_own(lives: Lives) -> None:
    """From nodes 0 and 1 to 0 and 2, then to 2 and 3: what 2 has met at its restart, it finds again."""
    options = {"redundancy": "none"}
    digests = train(lives, 3, [0, 1], options=options, memory=3)
    for nodes in ([0, 2], [2, 3]):
        told = lives.live(nodes=nodes, until=5, die=True, options=options, memory=9)
        check(lives, told, 3, digests)


@pytest.mark.soak
def test_the_successor_of_an_agent_is_found_where_the_job_no_longer_runs(lives: Lives) -> None:
    """The snapshot is older than the agent which holds it now."""
    options = {"redundancy": "none"}
    digests = train(lives, 3, [0, 1], options=options, memory=3)
    kill(lives.node(1))
    for nodes in ([0, 1], [0]):
        told = lives.live(nodes=nodes, until=4, die=True, options=options, memory=9)
        check(lives, told, 3, digests)


@pytest.mark.soak
def test_nodes_are_lost_one_after_the_other(lives: Lives) -> None:
    """What was rebuilt is protected again at once, not with the next snapshot that is due."""
    options = {"redundancy": "parity"}
    digests = train(lives, 3, [0, 1, 2], options=options, memory=3)
    lose(lives, 2)
    train(lives, 4, [0, 1], options=options, memory=3)
    lose(lives, 1)
    told = lives.live(nodes=[0, 1], until=4, options=options, memory=3)
    check(lives, told, 3, digests)


@pytest.mark.soak
def test_more_is_lost_than_the_scheme_bears(lives: Lives) -> None:
    """Two nodes under parity: the newest durable step, and the reason why not the snapshot."""
    options = {"redundancy": "parity"}
    digests = train(lives, 5, [0, 1, 2, 3], options=options, durable=3)
    lose(lives, 0, 1)
    told = lives.live(nodes=[0, 1, 2, 3], until=6, options=options, durable=3)
    assert [t.restored for t in told] == [3] * 4
    assert {t.start for t in told} == {digests[3]}
    reasons = [x["error"] for x in told[0].events("restore.passed_over")]
    assert any("2 of 4 members are lost" in reason for reason in reasons), reasons


@pytest.mark.soak_except("none-nodes0-lost0")
@pytest.mark.parametrize(
    ("redundancy", "nodes", "lost"), [("none", [0, 1], [1]), ("parity", [0, 1, 2], [0, 2])]
)
def test_what_memory_cannot_give_is_read_from_storage(
    lives: Lives, redundancy: str, nodes: list[int], lost: list[int]
) -> None:
    """More is lost than the scheme bears, but the snapshot was saved durably, too: its lost images are read
    there, those that are left in memory, and the events say where every byte came from."""
    options = {"redundancy": redundancy}
    digests = train(lives, 3, nodes, options=options, durable=3)
    lose(lives, *lost)
    told = lives.live(nodes=nodes, until=4, options=options)
    assert [(one.restored, one.start) for one in told] == [(3, digests[3])] * len(nodes)
    assert not any(one.events("restore.passed_over") for one in told)
    reads = [read for one in told for read in one.events("memory.read")]
    for n in nodes:
        of_it = [x for x in reads if x["key"].endswith(f"r{n:05d}.safetensors")]
        assert {x["source"] for x in of_it} <= ({"storage"} if n in lost else {"local", "peer"})
        (file,) = (lives.place / "root").glob(f"steps/0000000003/*/r{n:05d}.safetensors")
        assert 0.9 * file.stat().st_size < sum(int(x["bytes"]) for x in of_it)
    check_sources(told)
    from_storage = {x["key"] for one in told for x in one.events("memory.from_storage")}
    assert {key[-17:-12] for key in from_storage} == {f"{n:05d}" for n in lost}


def check_sources(told: list[Told]) -> None:
    """Every byte that was read is told of by events, and counted."""
    for one in told:
        reads = one.events("memory.read")
        assert sum(int(x["bytes"]) for x in reads) == one.moved["read.bytes"] > 0
        stored = sum(int(x["bytes"]) for x in reads if x["source"] == "storage")
        assert stored == one.moved.get("memory.storage.bytes", 0)


def test_an_agent_is_killed_before_the_restart(lives: Lives) -> None:
    """The next one adopts what it held; nothing that was committed is lost."""
    options = {"redundancy": "parity"}
    digests = train(lives, 3, [0, 1, 2], options=options)
    kill(lives.node(1))
    told = lives.live(nodes=[0, 1, 2], until=4, die=True, options=options)
    check(lives, told, 3, digests)


def flip(lives: Lives, node: int, kind: str, step: int) -> None:
    """One bit of what a node holds of the snapshot of a step."""
    client = Client(lives.node(node), deadline_s=120.0)
    client.start("127.0.0.1")
    job = next((lives.node(node) / "jobs").iterdir()).name
    held = client.ask(w.Ask(job), w.Held)
    manifests = [decode_manifest(m, "snapshot") for m in held.manifests]
    (attempt,) = {m.attempt for m in manifests if m.step == step}
    image = next(i for i in held.images if (i.kind, i.attempt) == (kind, attempt))
    flip_bit(Path(held.directory) / image.name, image.bytes // 3)


@pytest.mark.soak_except("three nodes")
@pytest.mark.parametrize("nodes", [[0, 1, 2], [0, 0, 0]], ids=["three nodes", "one node"])
def test_a_bit_flips_in_a_segment(lives: Lives, nodes: list[int]) -> None:
    """Found by its digest, and mended from the group; ranks of a lone node are one, too."""
    options = {"redundancy": "parity"}
    digests = train(lives, 4, nodes, options=options)
    flip(lives, nodes[1], "share", 4)
    told = lives.live(nodes=nodes, until=5, options=options)
    check(lives, told, 4, digests)
    assert told[0].events("memory.lost")
    assert sum(one.moved.get("memory.rebuilt.bytes", 0) for one in told) > 0


@pytest.mark.soak
def test_a_bit_flips_in_a_segment_without_redundancy(lives: Lives) -> None:
    """The snapshot before is still there."""
    options = {"redundancy": "none"}
    digests = train(lives, 4, [0, 1, 2], options=options)
    flip(lives, 1, "share", 4)
    told = lives.live(nodes=[0, 1, 2], until=5, options=options)
    check(lives, told, 3, digests)


@pytest.mark.soak
def test_a_bit_flips_in_a_parity_block_and_a_node_is_lost(lives: Lives) -> None:
    """What was rebuilt from damage is noticed; the damaged block is found, and the other one serves."""
    options = {"redundancy": "rs(2)"}
    digests = train(lives, 4, [0, 1, 2, 3], options=options)
    flip(lives, 0, "guard", 4)
    lose(lives, 2)
    told = lives.live(nodes=[0, 1, 2, 3], until=5, options=options)
    check(lives, told, 4, digests)


@pytest.mark.soak_except("the newest snapshot")
@pytest.mark.parametrize(
    ("in_storage", "good"), [(False, 5), (True, 2)], ids=["the newest snapshot", "all but one step"]
)
def test_restarts_over_the_same_damage_converge(lives: Lives, in_storage: bool, good: int) -> None:
    """(Megatron-LM#5281: 44 restarts on a damaged replica.)  Each of several lives that do not get to a new
    snapshot restores the same step as the first; then each that makes one step is one step further."""
    options = {"redundancy": "none"}
    digests = train(lives, 6, [0, 1], options=options, durable=2)
    flip(lives, 1, "share", 6)
    flip_in_storage(lives, 6)
    if in_storage:
        flip(lives, 0, "share", 5)
        flip_in_storage(lives, 4)
    passed_over = []
    for _ in range(3):
        told = lives.live(nodes=[0, 1], until=good, die=True, options=options)
        assert [t.restored for t in told] == [good] * 2, lives.errors()
        assert {t.start for t in told} == {digests[good]}
        passed_over.append(len(told[0].events("restore.passed_over")))
    assert passed_over[0] >= 1
    assert passed_over == sorted(passed_over, reverse=True)
    for step in range(good + 1, good + 3):
        told = lives.live(nodes=[0, 1], until=step, die=True, options=options)
        assert [t.restored for t in told] == [step - 1] * 2, lives.errors()
        assert {t.start for t in told} == {digests.get(step - 1, told[0].start)}


def flip_in_storage(lives: Lives, step: int) -> None:
    """One bit of what rank 1 has saved durably of a step."""
    (path,) = lives.place.glob(f"root/steps/{step:010d}/*/r00001.safetensors")
    flip_bit(path, path.stat().st_size // 3)


def flip_bit(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


@pytest.mark.soak
def test_memory_is_full(lives: Lives) -> None:
    """Snapshots are refused with the numbers; durable saves do not need them."""
    options = {"redundancy": "none", "budget": "3MB"}
    told = lives.live(nodes=[0, 1], until=4, die=True, options=options, durable=2)
    failed = [x["error"] for x in told[0].events("snapshot.failed")]
    assert any("budget is 3000000 bytes" in text for text in failed)
    assert holdfast.steps(str(lives.place / "root")) == [2, 4]
    again = lives.live(nodes=[0, 1], until=5, options=options)
    assert [t.restored for t in again] == [4, 4]
    assert again[0].start == told[0].digests[4]


@pytest.mark.soak
def test_memory_for_what_is_kept_is_missed_before_the_first_snapshot(lives: Lives) -> None:
    """A budget that holds both images of a rank, but not what it keeps for its group."""
    options = {"redundancy": "copy", "budget": "5MB"}
    told = lives.live(nodes=[0, 1, 2, 3], until=4, die=True, options=options, memory=5, durable=2)
    for one in told:
        (failed,) = one.events("prepare.failed")
        assert "budget is 5000000 bytes" in failed["error"]
        assert "3.91 MB of images, 3.90 MB kept for others, copy(2)" in failed["error"]
        assert [x["step"] for x in one.lines if "step" in x and "digest" in x] == [1, 2, 3, 4]
        failures = [x["event"] for x in one.lines if "failed" in x.get("event", "")]
        assert (
            failures[0] == "prepare.failed"
        )  # the others are of durable saves, which need no memory
    assert holdfast.steps(str(lives.place / "root")) == [2, 4]


@pytest.mark.soak
@pytest.mark.parametrize("redundancy", ["none", "copy"])
def test_the_budget_that_is_told_to_be_needed_is_enough(lives: Lives, redundancy: str) -> None:
    """To the byte, also where an image ends within a page of memory."""
    script = {"nodes": [0, 1], "until": 7, "width": 41, "memory": 2}
    small = {"redundancy": redundancy, "budget": 100_000}
    told = lives.live(**script, options=small)
    (failed,) = told[0].events("prepare.failed")
    (most,) = {int(n) for n in re.findall(r"take (\d+) bytes", failed["error"])}
    for budget, enough in ((most - 1, False), (most, True)):
        options = {"redundancy": redundancy, "budget": budget}
        told = lives.live(**script, options=options, root=str(lives.place / str(budget)))
        for one in told:
            assert bool(one.events("prepare.failed")) is not enough, lives.errors()
            assert not (enough and one.events("snapshot.failed")), lives.errors()


@pytest.mark.soak
def test_all_memory_is_taken_before_the_first_snapshot(lives: Lives) -> None:
    """Two images and two guards of each rank; no snapshot needs other memory, and no later life."""
    for until in (7, 11):  # both lives have a step first that no snapshot is due at
        options = {"redundancy": "parity"}
        told = lives.live(nodes=[0, 1, 2], until=until, die=True, memory=2, options=options)
        for rank, one in enumerate(told):
            assert one.lines[-1]["done"] == until, lives.errors()
            found = [p.name for p in lives.node(rank).glob("jobs/*/*") if not p.suffix]
            found = [name for name in found if name.startswith(("share", "guard"))]
            kinds = ["share", "share", "guard", "guard"]
            assert sorted(found) == sorted(f"{k}-{rank:05d}-{n}" for n, k in enumerate(kinds))
    assert [t.restored for t in told] == [6, 6, 6]


@pytest.mark.soak
def test_auto_keeps_nothing_where_memory_does_not_hold_it(lives: Lives) -> None:
    """It says so, and snapshots are taken."""
    options = {"budget": "5MB"}
    told = lives.live(nodes=[0, 1, 2, 3], until=7, die=True, options=options, memory=3)
    for one in told:
        assert [x["kept"] for x in one.events("memory.redundancy")] == ["none"]
        (weaker,) = one.events("memory.weaker")
        assert weaker["wanted"] == "parity" and "budget is 5000000 bytes" in weaker["why"]
        assert not one.events("snapshot.failed") and not one.events("prepare.failed")
    again = lives.live(nodes=[0, 1, 2, 3], until=7, options=options, memory=3)
    check(lives, again, 6, told[0].digests)
    assert not again[0].events("prepare.failed")  # the snapshot that is there counts as one of two


@pytest.mark.soak
def test_durable_saves_are_made_from_memory(lives: Lives) -> None:
    """Equal, file by file, to what a digest says; and read by a run without a memory tier."""
    digests = train(lives, 6, [0, 1], options={"redundancy": "copy"}, durable=3)
    root = str(lives.place / "root")
    assert holdfast.steps(root) == [3, 6]
    lose(lives, 0, 1)
    told = lives.live(nodes=[0, 1, 2], until=7, options={"redundancy": "none"})
    assert [t.restored for t in told] == [6] * 3
    assert {t.start for t in told} == {digests[6]}


@pytest.mark.soak
def test_a_crash_without_a_restart_is_flushed(lives: Lives) -> None:
    """Everybody dies and nobody comes back: the agents send the newest snapshot to storage."""
    options = {"redundancy": "none", "flush_after_s": 1.0}
    digests = train(lives, 4, [0, 1], options=options)
    root, until = str(lives.place / "root"), time.monotonic() + 120
    while holdfast.steps(root) != [4]:
        assert time.monotonic() < until, (lives.node(0) / "agent.log").read_text()
        time.sleep(0.1)
    lose(lives, 0, 1)
    told = lives.live(nodes=[0, 1], until=5, options=options)
    assert [(t.restored, t.start) for t in told] == [(4, digests[4])] * 2


@pytest.mark.soak
def test_a_flush_without_a_node_commits_nothing(lives: Lives) -> None:
    """Its images are not there, and a flush rebuilds none.  A restart does, and saves the step."""
    options = {"redundancy": "copy", "flush_after_s": 3.0}
    digests = train(lives, 4, [0, 1], options=options)
    lose(lives, 1)
    root, until = lives.place / "root", time.monotonic() + 120
    while not list(root.glob("steps/*/*/r00000.safetensors")):
        assert time.monotonic() < until, (lives.node(0) / "agent.log").read_text()
        time.sleep(0.1)
    assert not list(root.glob("steps/*/*/r00001.safetensors"))
    assert holdfast.steps(str(root)) == []
    told = lives.live(nodes=[0, 1], until=5, durable=100, die=True, options=options)
    check(lives, told, 4, digests)
    assert holdfast.steps(str(root)) == [4]
    assert len(list(root.glob("steps/*/*"))) == 2  # the manifest, and what it names
    log = lives.node(0) / "agent.log"
    assert "is not committed" in log.read_text() and "was taken over by run 2" in log.read_text()


@pytest.mark.soak
def test_a_flush_brings_no_root_back(lives: Lives) -> None:
    """That was moved meanwhile.  What is in memory stays there, and the run goes on where it is now."""
    root, moved = lives.place / "root", lives.place / "moved"
    options = {"redundancy": "copy", "flush_after_s": 3.0}
    digests = train(lives, 4, [0, 1], options=options)
    root.rename(moved)
    until = time.monotonic() + 120
    while not all("to storage" in (lives.node(n) / "agent.log").read_text() for n in (0, 1)):
        assert time.monotonic() < until, (lives.node(0) / "agent.log").read_text()
        time.sleep(0.1)
    assert "has no claim" in (lives.node(0) / "agent.log").read_text()
    assert not root.exists()
    told = lives.live(nodes=[0, 1], until=5, options=options, root=str(moved))
    check(lives, told, 4, digests)


@pytest.mark.soak
def test_a_model_that_does_not_fit_is_told_on_every_rank(lives: Lives) -> None:
    """By what does not, also where rank 0 has raised that and ended before others have read it."""
    script = {"nodes": [0, 1, 2], "options": {"redundancy": "none"}}
    train(lives, 2, **script)
    told = lives.live(until=3, width=41, **script)
    assert [t.status for t in told] == [1] * 3
    for rank in range(3):
        (error,) = (lives.place / f"life{lives.number}").glob(f"r{rank}.err")
        assert "StateMismatch: step 2 does not fit the live state" in error.read_text()


@pytest.mark.soak
def test_a_root_that_was_made_anew_begins_anew(lives: Lives) -> None:
    """Snapshots of the run that lived there before are another job's."""
    train(lives, 3, [0, 1], options={"redundancy": "none"})
    shutil.rmtree(lives.place / "root")
    told = lives.live(nodes=[0, 1], until=1, options={"redundancy": "none"})
    assert [t.restored for t in told] == [0, 0]
