"""Small manifests that would cost much: run with hard limits on time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

LIMITED = """
import json, os, resource, sys
here, tests, memory, attacks = json.loads(sys.argv[1])
sys.path[:0] = [here, tests]
import numpy as np
from system.hostile.test_manifests import raw, sealed, tensor, held, sharding, cut, file
from system.hostile.test_manifests import SOUND, FILE, TENSOR
from system.hostile.everything import read_everything
from holdfast.core.checkpoint.names import manifest_key
from holdfast.errors import HoldfastError
from holdfast.store import MemoryStore

def suffer(attack):
    resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
    limit = int(open("/proc/self/statm").read().split()[0]) * 4096 + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    store = MemoryStore("x")
    store.put("steps/0000000001/0001-000001/r00000.safetensors", bytes(4112))
    store.put(manifest_key(1), eval(attack))
    try:
        read_everything(store)
    except HoldfastError as error:
        return f"refused {type(error).__name__} {str(error)[:200]}"
    return "read"

for name, attack in attacks.items():
    if os.fork() == 0:
        print(json.dumps([name, suffer(attack)]), flush=True)
        os._exit(0)
    os.wait()
"""
MIB = 1 << 20
ATTACKS = {
    "ten million brackets": (
        r"""sealed(b'{"holdfast":1,"step":1,"run":1,"extras":' + b"[" * 10_000_000)"""
    ),
    "a million nested objects": (
        r"""sealed(b'{"holdfast":1,"step":1,"run":1,"extras":' + b'{"a":' * 1_000_000)"""
    ),
    "an unknown field of a million brackets": (
        r"""sealed(b'{"holdfast":1,"step":1,"run":1,"zzz":' + b"[" * 1_000_000 + b"]" * 1_000_000)"""
    ),
    "twenty thousand parallel fragments, ten thousand tensors": (
        """raw({
            **held(*[([0, i], [8, i + 1]) for i in range(20_000)]),
            "tensors": [{**TENSOR, "name": f"t{i}", "shape": [8, 20_000]} for i in range(10_000)],
        })"""
    ),
    "a mesh of a million ranks under fifty restrictions": (
        """raw({
            "mesh": [["dp", 1 << 20]],
            "shardings": [{"on": {"dp": [0, i + 1]}} for i in range(50)] + [{}],
            "tensors": [{**TENSOR, "name": f"t{i}", "sharding": i, "shape": []} for i in range(51)],
            **file(extras=4096 + 51, table=4096 + 51, bytes=4096 + 51 + 8),
        })"""
    ),
    "a tensor in a million parts": (
        """raw({
            "mesh": [["a", 1024], ["b", 1024]],
            **sharding(cuts=[cut(0, "a"), cut(0, "b")]),
            **tensor(shape=[1 << 24]),
            **file(extras=4096 + (1 << 24), table=4096 + (1 << 24), bytes=4096 + (1 << 24) + 65 * 8),
        })"""
    ),
    "a tensor of 2**57 bytes": (
        """raw({
            **tensor(shape=[1 << 57]),
            **file(extras=4096 + (1 << 57), table=4096 + (1 << 57),
                   bytes=4096 + (1 << 57) + 8 * ((1 << 39) + 1)),
        })"""
    ),
    "a tensor of 2**36 bytes in a short file": (
        """raw({
            **tensor(shape=[1 << 36]),
            **file(extras=4096 + (1 << 36), table=4096 + (1 << 36),
                   bytes=4096 + (1 << 36) + 8 * ((1 << 18) + 1)),
        })"""
    ),
}


@pytest.fixture(scope="module")
def outcomes(request) -> dict[str, str]:
    """By attack, what came of it in a process of its own; all are forked from one that has imported all."""
    here = request.path.parent
    attacks = {name: textwrap.dedent(attack).strip() for name, attack in ATTACKS.items()}
    asked = json.dumps([str(here), str(here.parents[1]), 1024 * MIB, attacks])
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, asked], capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return {"errors": run.stderr[-2000:]} | dict(map(json.loads, run.stdout.splitlines()))


@pytest.mark.parametrize("name", ATTACKS)
def test_cost_is_bounded(name, outcomes) -> None:
    assert outcomes.get(name, "died").startswith("refused"), outcomes
