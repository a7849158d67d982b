"""Registries and caches of torch and frameworks that hold objects of an attempt, and how each is emptied.

Process groups, meshes and ranks of the last attempt harm the next one: new groups have the same names, new
meshes compare equal, but ranks may have changed.  `REGISTRIES` has one line for each registry, with the
reason.  Only imported modules are touched.  A line names the library's own call where there is one.
Elsewhere it names a private attribute, which may be missing in another version and then needs no reset.
`CHECKED` says which versions the table was compared with; a test compares it with the installed versions.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

from holdfast.launch.abort_connections import abort_on_devices

_counts = count(1000, 1000)
"""First numbers for groups; the steps are larger than the number of groups in any function."""

Reset = Callable[[Any, str], object]
"""Resets an attribute, given its owner and its name."""


def call(owner: Any, name: str) -> None:
    """Call the registry, a function that empties something."""
    getattr(owner, name)()


def call_with_none(owner: Any, name: str) -> None:
    """Call the registry, a function that sets something, with None."""
    getattr(owner, name)(None)


def clear(owner: Any, name: str) -> None:
    """Empty the registry, a container."""
    getattr(owner, name).clear()


def clear_cache(owner: Any, name: str) -> None:
    """Clear the cached results of the registry, a function."""
    getattr(owner, name).cache_clear()


def rebuild_cache(owner: Any, name: str) -> None:
    """Make the registry anew: a function that caches its results for each thread."""
    setattr(owner, name, type(getattr(owner, name))(getattr(owner, f"{name}_non_cached")))


def restart_numbers(owner: Any, name: str) -> None:
    """Restart the registry, a function that counts in a list, its default argument."""
    for default in inspect.unwrap(getattr(owner, name)).__defaults__ or ():
        if isinstance(default, list):
            default[:] = [0]


def set_to(value: Any) -> Reset:
    """Return the reset of a variable to `value`, its value in a new process."""
    return lambda owner, name: setattr(owner, name, value)


class Registry(NamedTuple):
    """A registry or a cache, and why it is reset."""

    module: str
    path: str
    """Attribute names that lead from the module to the registry."""
    reset: Reset
    reason: str
    older: str = ""
    """A version that has the registry, if the version in `CHECKED` no longer has it."""


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
REGISTRIES = (
    # destroy_process_group() does the same, but not for a world whose making was broken off
    Registry(_C10D, "_update_default_pg", call_with_none, "the world"),
    Registry(_C10D, "_world.pg_map", clear, "backend and store of each group"),
    Registry(_C10D, "_world.pg_names", clear, "names that are taken"),
    Registry(_C10D, "_world.pg_group_ranks", clear, "ranks of each group"),
    Registry(_C10D, "_world.pg_backend_config", clear, "backends of each group by device"),
    Registry(_C10D, "_world.pg_to_tag", clear, "the tag of each group"),
    Registry(_C10D, "_world.tags_to_pg", clear, "groups by tag, which are taken for new ones"),
    Registry(_C10D, "_world.pg_coalesce_state", clear, "collectives that were to go together"),
    Registry(_C10D, "_unregister_all_process_groups", call, "groups by name, for compiled code"),
    Registry(_C10D, "_world.group_count", set_to(0), "a new process names its groups from 0 on"),

    Registry("torch", "clear_autocast_cache", call, "weights of the attempt before, in 16 bits"),
    Registry("torch._dynamo", "reset", call, "compiled code has rank and size of the world in it"),
    Registry("torch._subclasses.fake_tensor", "FakeTensorMode.cache_clear", call,
          "DTensor's answers about shapes, which would pile up"),
    Registry("torch._C", "_clear_DTensor_sharding_propagator_cache", call, "rules with a mesh"),
    Registry(f"{_TENSOR}._api", f"{_SHARDING}.propagate_op_sharding", rebuild_cache,
          "rules with a mesh, as they were applied in each thread"),
    Registry(f"{_TENSOR}._api", f"{_SHARDING}._propagate_tensor_meta_cached", clear_cache,
          "shapes with a mesh"),
    Registry(f"{_TENSOR}._redistribute", "_gen_transform_infos", clear_cache, "plans with a mesh"),
    Registry(f"{_TENSOR}._redistribute", "clear_redistribute_planner_cache", call,
          "planners with a mesh"),
    Registry(f"{_TENSOR}._collective_utils", "MeshTopoInfo.build_from_mesh", clear_cache,
          "the hosts of a mesh"),
    Registry(f"{_TENSOR}._random", "_rng_tracker", set_to(None), "random numbers by place in a mesh"),
    Registry(_MESH, "_mesh_resources.mesh_stack", clear, "a `with mesh:` that was broken off"),
    Registry(_MESH, "_mesh_resources.child_to_root_mapping", clear,
          "meshes, which compare equal to new ones", older="2.6"),
    Registry(_MESH, "_mesh_resources.root_to_flatten_mapping", clear,
          "flat meshes, with groups of before", older="2.6"),
    Registry(_MESH, "_mesh_resources.flatten_name_to_root_dims", clear,
          "names of flat meshes that are taken", older="2.6"),
    Registry(_SYMMETRIC, "_group_name_to_store", clear, "stores, by names that come again"),
    Registry(_SYMMETRIC, "_group_name_to_workspace_tensor", clear,
          "memory shared with ranks of before, by names that come again"),
    Registry("torch.nn.parallel.distributed", "DistributedDataParallel._active_ddp_module", set_to(None),
          "the module of a forward pass that was broken off"),

    # accelerate has no public call for it
    Registry("accelerate.state", "AcceleratorState._reset_state", call, "mixed precision, plugins"),
    Registry("accelerate.state", "GradientState._reset_state", call, "loaders, steps of a batch"),
    Registry("accelerate.state", "PartialState._reset_state", call, "rank, device and backend"),

    # deepspeed.comm.destroy_process_group() needs groups that still work
    Registry("deepspeed.utils.groups", "_release_process_group_references", call, "its own groups"),
    Registry(_COMM, "cdb", set_to(None), "the backend in use, with its groups"),
    Registry(_COMM, "nccl_backend", set_to(None), "a backend that is taken again"),
    Registry(_COMM, "mpi_backend", set_to(None), "a backend that is taken again"),
    Registry(_COMM, "ccl_backend", set_to(None), "a backend that is taken again"),
    Registry(_COMM, "hccl_backend", set_to(None), "a backend that is taken again"),
    Registry(_ZERO, "zero_init_context", set_to(0), "depth of `zero.Init`, which may be broken off"),
    Registry(_ZERO, "top_level_context", set_to(None), "the outermost `zero.Init`"),
    Registry(_ZERO, "Init.param_id", set_to(0), "numbers of parameters, which ranks compare"),
    Registry(_ZERO, "Init.num_persisted_parameters", set_to(0), "how many stay whole"),
    Registry(_ZERO, "Init.num_persisted_elements", set_to(0), "how much stays whole, up to a limit"),
    Registry(_ZERO, "Init.apply_param_persistence", set_to(False), "whether any may stay whole"),
    Registry(_OFFLOAD, "FWD_MODULE_STACK", clear, "modules of a forward pass that was broken off"),
    Registry(_OFFLOAD, "DeepSpeedZeRoOffload._register_deepspeed_module", restart_numbers,
          "numbers of modules, which ranks compare"),

    Registry(f"{_MEGATRON}.parallel_state", "destroy_model_parallel", call, "all of its groups"),
    Registry(f"{_MEGATRON}.num_microbatches_calculator", "unset_num_microbatches_calculator", call,
          "it has the number of ranks, and cannot be made twice"),
    Registry(f"{_MEGATRON}.rerun_state_machine", "destroy_rerun_state_machine", call,
          "steps of before that it would compare with"),
)
# fmt: on


def forget_groups() -> None:
    """Destroy all process groups, and empty the registries of groups, meshes and ranks."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        try:
            abort_on_devices()  # collectives under way may wait for a lost rank
            dist.destroy_process_group()
        except Exception as error:
            say_on_rank(f"{error} while the process group was ended")
    for registry in REGISTRIES:
        _reset(registry)


def owner_of(registry: Registry) -> Any:
    """Return the object whose attribute is the registry; None if there is no such registry."""
    owner: Any = sys.modules.get(registry.module)
    *outer, last = registry.path.split(".")
    for name in outer:
        owner = getattr(owner, name, None)
    return owner if hasattr(owner, last) else None


def _reset(registry: Registry) -> None:
    owner = owner_of(registry)
    if owner is None:
        return
    try:
        registry.reset(owner, registry.path.rpartition(".")[2])
    except Exception as error:
        say_on_rank(f"{registry.module}.{registry.path} could not be reset: {error!r}")


def name_groups_otherwise() -> None:
    """Give groups made from now on new names: the function has returned, and may be called again.

    torch numbers groups from 0 again after all were destroyed.  A new group of an old name would find the
    old group's keys in the attempt's store: its ranks would connect to old addresses, and some wait for
    ever.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if not dist.is_initialized() and not c10d._world.group_count:
        c10d._world.group_count = next(_counts)


def say_on_rank(text: str) -> None:
    """Print a message of holdfast on this rank's stderr."""
    print(f"holdfast: {text}", file=sys.stderr, flush=True)
