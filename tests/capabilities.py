"""What the installed torch can do, which is asked of torch itself and never told from its number.

FSDP2_ON_CPUS.require()              # in a test, a fixture or a case of ranks: skips where torch cannot

dcp.save(state, checkpoint_id=path, **ALONE)    # DCP without ranks
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp2
from torch.distributed.run import get_args_parser
from torch.distributed.tensor._ops import _view_ops
from torch.optim.swa_utils import SWALR

from holdfast.core.group.listening import TAKES_LISTENER


@dataclass(frozen=True)
class Capability:
    """Something that torch cannot do in every version that holdfast works with."""

    what: str
    is_there: bool

    def require(self) -> None:
        """Skip the test that calls this, or in which a rank calls it, where torch cannot do it."""
        if not self.is_there:
            pytest.skip(f"this torch has no {self.what}")


FQN_MODIFIERS = Capability(
    "names of DCP's by _fqn_modifiers", "dsd_fqn_modifiers" in StateDictOptions.__dataclass_fields__
)
FSDP2_ON_CPUS = Capability("FSDP2 on CPUs", hasattr(torch.cpu.Stream, "record_event"))
UNEVEN_OVER_TP = Capability(
    "uneven shards of FSDP2 over tensor parallelism",
    "FSDP+TP sharding does not support uneven" not in inspect.getsource(fsdp2),
)
FLAT_STRIPES = Capability(
    "flat DTensors of what is cut by columns",
    "Attempted to flatten multiple dimensions" not in inspect.getsource(_view_ops),
)
GROUPS_OF_SOME = Capability(
    "saves of DCP's by a group without rank 0",
    "global_coordinator_rank" in inspect.getsource(dcp.utils._DistWrapper),
)
ASYNC_PROCESS = Capability(
    "asynchronous saves of DCP's in a process",
    hasattr(dcp.state_dict_saver, "AsyncCheckpointerType"),
)
SHUTDOWN_TIMEOUT = Capability(
    "--shutdown-timeout of torchrun",
    "--shutdown-timeout" in get_args_parser()._option_string_actions,
)
FLOAT4 = Capability("float4", hasattr(torch, "float4_e2m1fn_x2"))
LISTENERS = Capability("store that serves at a listening socket", TAKES_LISTENER)
FLOAT8_E8M0 = Capability("float8_e8m0fnu", hasattr(torch, "float8_e8m0fnu"))
MUON = Capability("Muon", hasattr(torch.optim, "Muon"))
SWALR_STATE = Capability(
    "SWALR without a function in its state",
    "anneal_func" not in SWALR(torch.optim.SGD([torch.zeros(1)], lr=1.0), swa_lr=1.0).state_dict(),
)

ALONE: dict[str, Any] = (
    {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}
)
"""Options of DCP's calls without ranks.  Where there is none for it, DCP looks whether there are ranks."""
