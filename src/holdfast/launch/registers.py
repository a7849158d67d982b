"""Registers and caches of torch and of frameworks that know an attempt, and how each is emptied.

Process groups, meshes and ranks of the attempt before are of no use to the next one, and do harm: its
groups have the same names, its meshes compare equal, but ranks may have changed.  `REGISTERS` has one line
for each, with the reason.  Only modules that have been imported are looked at.  Where a library has a call
for it, the line names that call.  Where it has none the name is of its inside, and may be missing in
another version: what is not there needs no reset.  `CHECKED` says which versions the table was compared
with; a test does so with those that are installed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple

from holdfast.launch.cutting import abort_on_devices

_counts = count(1000, 1000)
"""More than a function makes groups."""

Reset = Callable[[Any, str], object]
"""Resets an attribute, given its owner and its name."""


def called(owner: Any, name: str) -> None:
    """The register is a function that empties something."""
    getattr(owner, name)()


def called_with_none(owner: Any, name: str) -> None:
    """The register is a function that sets something, which is to be None."""
    getattr(owner, name)(None)


def emptied(owner: Any, name: str) -> None:
    """The register is a container."""
    getattr(owner, name).clear()


def uncached(owner: Any, name: str) -> None:
    """The register is a function that keeps its results."""
    getattr(owner, name).cache_clear()


def uncached_by_threads(owner: Any, name: str) -> None:
    """The register is a function that keeps its results for each thread, so that it is made anew."""
    setattr(owner, name, type(getattr(owner, name))(getattr(owner, f"{name}_non_cached")))


def numbered_anew(owner: Any, name: str) -> None:
    """The register is a function that counts in a list, its default argument."""
    for default in inspect.unwrap(getattr(owner, name)).__defaults__ or ():
        if isinstance(default, list):
            default[:] = [0]


def put(value: Any) -> Reset:
    """The register is a variable that has this value in a new process."""
    return lambda owner, name: setattr(owner, name, value)


class Register(NamedTuple):
    """A register or a cache, and why it is reset."""

    module: str
    path: str
    """Names that lead there from the module."""
    reset: Reset
    reason: str
    older: str = ""
    """A version that has it, if the one in `CHECKED` has it no more."""


CHECKED = {"torch": "2.13", "accelerate": "1.15", "deepspeed": "0.19", "megatron-core": "0.16"}
"""The versions that the table was compared with."""

_C10D = "torch.distributed.distributed_c10d"
_MESH = "torch.distributed.device_mesh"
_TENSOR = "torch.distributed.tensor"
_SHARDING = "DTensor._op_dispatcher.sharding_propagator"
_SYMMETRIC = "torch.distributed._symmetric_memory"
_COMM = "deepspeed.comm.comm"
_ZERO = "deepspeed.runtime.zero.partition_parameters"
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
_MEGATRON = "megatron.core"

# fmt: off
REGISTERS = (
    # destroy_process_group() does the same, but not for a world whose making was broken off
    Register(_C10D, "_update_default_pg", called_with_none, "the world"),
    Register(_C10D, "_world.pg_map", emptied, "backend and store of each group"),
    Register(_C10D, "_world.pg_names", emptied, "names that are taken"),
    Register(_C10D, "_world.pg_group_ranks", emptied, "ranks of each group"),
    Register(_C10D, "_world.pg_backend_config", emptied, "backends of each group by device"),
    Register(_C10D, "_world.pg_to_tag", emptied, "the tag of each group"),
    Register(_C10D, "_world.tags_to_pg", emptied, "groups by tag, which are taken for new ones"),
    Register(_C10D, "_world.pg_coalesce_state", emptied, "collectives that were to go together"),
    Register(_C10D, "_unregister_all_process_groups", called, "groups by name, for compiled code"),
    Register(_C10D, "_world.group_count", put(0), "a new process names its groups from 0 on"),

    Register("torch", "clear_autocast_cache", called, "weights of the attempt before, in 16 bits"),
    Register("torch._dynamo", "reset", called, "compiled code has rank and size of the world in it"),
    Register("torch._subclasses.fake_tensor", "FakeTensorMode.cache_clear", called,
          "DTensor's answers about shapes, which would pile up"),
    Register("torch._C", "_clear_DTensor_sharding_propagator_cache", called, "rules with a mesh"),
    Register(f"{_TENSOR}._api", f"{_SHARDING}.propagate_op_sharding", uncached_by_threads,
          "rules with a mesh, as they were applied in each thread"),
    Register(f"{_TENSOR}._api", f"{_SHARDING}._propagate_tensor_meta_cached", uncached,
          "shapes with a mesh"),
    Register(f"{_TENSOR}._redistribute", "_gen_transform_infos", uncached, "plans with a mesh"),
    Register(f"{_TENSOR}._redistribute", "clear_redistribute_planner_cache", called,
          "planners with a mesh"),
    Register(f"{_TENSOR}._collective_utils", "MeshTopoInfo.build_from_mesh", uncached,
          "the hosts of a mesh"),
    Register(f"{_TENSOR}._random", "_rng_tracker", put(None), "random numbers by place in a mesh"),
    Register(_MESH, "_mesh_resources.mesh_stack", emptied, "a `with mesh:` that was broken off"),
    Register(_MESH, "_mesh_resources.child_to_root_mapping", emptied,
          "meshes, which compare equal to new ones", older="2.6"),
    Register(_MESH, "_mesh_resources.root_to_flatten_mapping", emptied,
          "flat meshes, with groups of before", older="2.6"),
    Register(_MESH, "_mesh_resources.flatten_name_to_root_dims", emptied,
          "names of flat meshes that are taken", older="2.6"),
    Register(_SYMMETRIC, "_group_name_to_store", emptied, "stores, by names that come again"),
    Register(_SYMMETRIC, "_group_name_to_workspace_tensor", emptied,
          "memory shared with ranks of before, by names that come again"),
    Register("torch.nn.parallel.distributed", "DistributedDataParallel._active_ddp_module", put(None),
          "the module of a forward pass that was broken off"),

    # accelerate has no public call for it
    Register("accelerate.state", "AcceleratorState._reset_state", called, "mixed precision, plugins"),
    Register("accelerate.state", "GradientState._reset_state", called, "loaders, steps of a batch"),
    Register("accelerate.state", "PartialState._reset_state", called, "rank, device and backend"),

    # deepspeed.comm.destroy_process_group() needs groups that still work
    Register("deepspeed.utils.groups", "_release_process_group_references", called, "its own groups"),
    Register(_COMM, "cdb", put(None), "the backend in use, with its groups"),
    Register(_COMM, "nccl_backend", put(None), "a backend that is taken again"),
    Register(_COMM, "mpi_backend", put(None), "a backend that is taken again"),
    Register(_COMM, "ccl_backend", put(None), "a backend that is taken again"),
    Register(_COMM, "hccl_backend", put(None), "a backend that is taken again"),
    Register(_ZERO, "zero_init_context", put(0), "depth of `zero.Init`, which may be broken off"),
    Register(_ZERO, "top_level_context", put(None), "the outermost `zero.Init`"),
    Register(_ZERO, "Init.param_id", put(0), "numbers of parameters, which ranks compare"),
    Register(_ZERO, "Init.num_persisted_parameters", put(0), "how many stay whole"),
    Register(_ZERO, "Init.num_persisted_elements", put(0), "how much stays whole, up to a limit"),
    Register(_ZERO, "Init.apply_param_persistence", put(False), "whether any may stay whole"),
    Register(_OFFLOAD, "FWD_MODULE_STACK", emptied, "modules of a forward pass that was broken off"),
    Register(_OFFLOAD, "DeepSpeedZeRoOffload._register_deepspeed_module", numbered_anew,
          "numbers of modules, which ranks compare"),

    Register(f"{_MEGATRON}.parallel_state", "destroy_model_parallel", called, "all of its groups"),
    Register(f"{_MEGATRON}.num_microbatches_calculator", "unset_num_microbatches_calculator", called,
          "it has the number of ranks, and cannot be made twice"),
    Register(f"{_MEGATRON}.rerun_state_machine", "destroy_rerun_state_machine", called,
          "steps of before that it would compare with"),
)
# fmt: on


def forget_groups() -> None:
    """End all process groups, and empty what knows of them, of meshes and of ranks."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        try:
            abort_on_devices()  # what is under way there may wait for a rank that is gone
            dist.destroy_process_group()
        except Exception as error:
            say(f"{error} while the process group was ended")
    for register in REGISTERS:
        _reset(register)


def owner_of(register: Register) -> Any:
    """What has the register as an attribute, under the last name of the path; None if it is not there."""
    owner: Any = sys.modules.get(register.module)
    *outer, last = register.path.split(".")
    for name in outer:
        owner = getattr(owner, name, None)
    return owner if hasattr(owner, last) else None


def _reset(register: Register) -> None:
    owner = owner_of(register)
    if owner is None:
        return
    try:
        register.reset(owner, register.path.rpartition(".")[2])
    except Exception as error:
        say(f"{register.module}.{register.path} could not be reset: {error!r}")


def name_groups_otherwise() -> None:
    """Give groups that are made from now on names that none has had: the function has returned, and may be
    called again.

    torch counts them from 0 once the ones before are destroyed.  A group of the same name finds the keys of
    the one before in the attempt's store: its ranks connect to where the others are no more, and some wait
    for ever.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    with suppress(AttributeError):
        if not dist.is_initialized() and not c10d._world.group_count:
            c10d._world.group_count = next(_counts)


def say(text: str) -> None:
    """Tell the user, beside what the ranks print."""
    print(f"holdfast: {text}", file=sys.stderr, flush=True)
