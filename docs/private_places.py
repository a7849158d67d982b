"""The private places of Python, torch and other packages that holdfast uses, and why.

A place is a name that begins with an underscore, or lies in a module whose name does: its owner may rename
it in any version.  `PLACES` has all of them, one a line; `tests/house/test_private_places.py` compares it
with the code, and looks for each place in the versions that are installed.  `Class()` stands for an object
of a class, and `since` for the first version of torch that has a place, if that is newer than the oldest
one.  The page of the documentation is made from it (`make_private.py`).

Not in it are

    names that files contain    `formats` has those of classes in pickles and of keys of state_dicts;
                                another version reads old files just the same
    registries of an attempt    `launch/registries.py` has a table of its own, whose test asks for each
    methods of named tuples     Python documents `_fields` and `_replace`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

REFUSED = "refused"
"""The code that needs the place asks `holdfast.errors.need` for it, which refuses a version by its name."""


class Place(NamedTuple):
    """A private place: its path from the package on, and what holds for all places of its paragraph."""

    path: str
    package: str
    """The distribution that it is of, or "Python"."""
    where: tuple[str, ...]
    """Rooms, folders or modules of `src/holdfast` that use it, as beginnings of their paths."""
    why: str
    without: str
    since: str
    """The first version that has it, of those that holdfast works with; empty: all have it."""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def _places(text: str) -> Iterator[Place]:
    """Read paragraphs: what holds for all, in the lines that begin with a word and a colon, and paths."""
    for paragraph in text.strip().split("\n\n"):
        lines = [line.strip() for line in paragraph.splitlines()]
        said = dict(line.split(": ", 1) for line in lines if ": " in line)
        for line in lines:
            if ": " not in line:
                where, since = tuple(said["where"].split()), said.get("since", "")
                yield Place(line, said["of"], where, said["why"], said["without"], since)


# fmt: off
PLACES = tuple(_places("""
of: Python
where: base/errors base/storage_deadlines live/state/observer prove/inside/observer
why: a warning names the line of the script, and a step is known by the frame that makes it
without: nothing works; Python documents it, and CPython, which torch needs, has it
sys._getframe

of: Python
where: launch/liveness launch/recovery
why: only the stack of another thread tells whether a rank moves, or waits in a collective
without: a hanging rank is not found; Python documents it, and CPython, which torch needs, has it
sys._current_frames

of: Python
where: launch/command launch/forkserver launch/recovery tiers/memory/node/agent
why: a process has to end now, whatever its threads and exit handlers wait for
without: nothing ends; Python documents it for this
os._exit

of: Python
where: base/threads tiers/memory/tier
why: what is being saved has to end before Python waits for threads, and atexit calls come after that
without: refused
threading._register_atexit

of: Python
where: base/storage_deadlines
why: a child that was forked while a thread held the lock would wait for it for ever
without: refused
threading.Lock()._at_fork_reinit

of: Python
where: launch/command
why: an unknown option of `holdfast run` is answered with one that is like it, which argparse does not say
without: not used: the answer has no suggestion
argparse.ArgumentParser()._actions

of: Python
where: live/state/generators
why: the generator of the process, which every step has, is not told as one that is not saved
without: refused
random._inst

of: numpy
where: live/state/generators
why: the generator of the process, which every step has, is not told as one that is not saved
without: refused
numpy.random.mtrand._rand

of: torch
where: prove/inside
why: a proof sees the batches of every DataLoader, for which torch has no hook
without: a proof says that a step could not be observed
torch.utils.data.dataloader._BaseDataLoaderIter
torch.utils.data.dataloader._SingleProcessDataLoaderIter()._num_yielded

of: torch
where: live tiers/records/offline prove/inside
why: `named_parameters()` and its like leave out tied tensors, go into submodules and take thrice as long
without: refused
torch.nn.Module()._parameters
torch.nn.Module()._buffers
torch.nn.Module()._modules
torch.nn.Module()._non_persistent_buffers_set

of: torch
where: live/state/own_state_dicts live/state/unsaved_tensors
why: a module that saves as torch does need not be asked for a state_dict() at each save
without: refused
torch.nn.Module._save_to_state_dict
torch.nn.Module()._state_dict_hooks
torch.nn.Module()._state_dict_pre_hooks

of: torch
where: live/state/modules live/state/own_loading
why: a module that derives values while it loads is handed its own entries, without its submodules
without: refused
torch.nn.Module._load_from_state_dict
torch.nn.Module()._load_state_dict_pre_hooks
torch.nn.Module()._load_state_dict_post_hooks
torch.nn.Module()._version
torch.nn.modules.module._IncompatibleKeys

of: torch
where: live/state/own_loading live/state/own_state_dicts
why: `load_state_dict()` of a module reads the versions of its submodules from there
without: not used: modules that convert old entries take them for new ones, which those of a step are
torch.nn.Module().state_dict()._metadata

of: torch
where: live/restore/materialising
why: modules on the meta device get memory as `to_empty()` gives it, and tied tensors stay tied
without: refused
torch.nn.Module._apply

of: torch
where: live
why: `to_local()` takes part in autograd, and each save asks for hundreds of local tensors
without: refused
torch.distributed.tensor.DTensor._local_tensor

of: torch
where: live/state/writes
why: only torch's counter tells that a tensor was written while it was copied
without: refused
torch.Tensor._version

of: torch
where: live tiers
why: torch has no public call that copies many tensors at once
without: refused
torch._foreach_copy_

of: torch
where: live/restore/filling live/restore/materialising live/state/gradient_copies
why: tensors share a storage if its number is the same; addresses are 0 on the meta device
without: refused
torch.UntypedStorage()._cdata

of: torch
where: live/state/gradient_copies
why: a gradient may be lent to the copier only if nobody else holds its storage
without: not used: gradients are copied before the next step begins
torch._C._storage_Use_Count

of: torch
where: live/collecting live/state/in_hooks
why: torch does not say which parameters have hooks behind their gradients, which may step optimizers
without: refused
torch.Tensor._post_accumulate_grad_hooks

of: torch
where: live/collecting live/state/in_hooks
why: torch leaves optimizers that step in backward nowhere but there
without: not used: such an optimizer is known from its first step on, and until then not told
torch.distributed.optim._apply_optimizer_in_backward()._in_backward_optimizers

of: torch
where: live/state/in_hooks
why: DistributedDataParallel does not say which communication hooks it has, whose state is not saved
without: refused
torch.nn.parallel.DistributedDataParallel()._comm_hooks

of: torch
where: live/state/observer
why: torch's call registers hooks; those of this package have to come last, and a replay leaves out others
without: refused
torch.optim.Optimizer()._optimizer_step_pre_hooks
torch.optim.Optimizer()._optimizer_step_post_hooks
torch.optim.optimizer._global_optimizer_pre_hooks

of: torch
where: live/state/optimizer_wrappers
why: an optimizer whose state_dict() has hooks may say more than states and groups
without: not used: what such a hook adds is neither saved nor told
torch.optim.Optimizer()._optimizer_state_dict_pre_hooks
torch.optim.Optimizer()._optimizer_state_dict_post_hooks

of: torch
where: live/state/observer
why: an optimizer that steps in a backward pass is told from others
without: refused
torch._C._current_graph_task_id

of: torch
where: live/state/several tiers/memory/twin
why: torch's ZeroRedundancyOptimizer does not say which rank has the state of a parameter
without: refused
torch.distributed.optim.ZeroRedundancyOptimizer()._param_to_rank
torch.distributed.optim.ZeroRedundancyOptimizer()._overlap_with_ddp
torch.distributed.optim.ZeroRedundancyOptimizer()._optim_defaults

of: torch
where: live/restore/optimizer_states live/state/own_loading integrations/deepspeed
why: the trees of torch's own modules and optimizers are walked as torch walks them
without: refused
torch.utils._pytree.tree_leaves
torch.utils._pytree.tree_map
torch.utils._pytree.tree_map_only
torch.utils._pytree.tree_map_with_path

of: torch
where: live/restore/materialising
why: a parameter that FSDP2 keeps on the CPU must not be made on the device of its mesh
without: refused
torch.distributed.fsdp.FSDPModule._get_fsdp_state
torch.distributed.fsdp.FSDPModule()._get_fsdp_state()._fsdp_param_group

of: torch
where: live/restore/materialising
why: newer versions have several groups of parameters in one module
without: not used: an older version has one group, by another name
since: 2.12
torch.distributed.fsdp.FSDPModule()._get_fsdp_state()._fsdp_param_groups

of: torch
where: live/state/tensor_kinds
why: FSDP1's flat parameters have no names or shapes of their own, so they are refused
without: not used: flat parameters are saved as they are
torch.distributed.fsdp.FullyShardedDataParallel()._flat_param._is_flat_param
torch.distributed.fsdp.FullyShardedDataParallel()._flat_param._fsdp_flattened
torch.distributed.fsdp.FullyShardedDataParallel()._handle

of: torch
where: live/state/module_wrappers live/state/tensor_kinds live/restore/former_names prove/inside
why: what wraps a module is not to be in the names of its tensors, and torch does not say what it wraps
without: not used: the wrapper's own name is part of names, and older steps do not fit, which is told
torch._dynamo.eval_frame.OptimizedModule()._orig_mod
torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper()._checkpoint_wrapped_module
torch.distributed.fsdp.FullyShardedDataParallel()._fsdp_wrapped_module

of: torch
where: live/state/module_wrappers
why: a wrapper of somebody else's says in this method what is to be left out of names, as torch asks it, too
without: not used: the wrapper's own name is part of names
since: 2.7
torch.distributed.checkpoint.state_dict._get_fqns()._fqn_modifiers

of: torch
where: live/state/tensor_kinds
why: a tensor of zeros has no memory, and is refused by its kind
without: refused
torch.Tensor._is_zerotensor

of: torch
where: live/restore/one_memory
why: torch has no other call that makes a view with the negative bit
without: refused
torch._neg_view

of: torch
where: live/state/gradients live/state/composite_tensors
why: the public calls copy, or refuse a tensor that is not coalesced
without: refused
torch.Tensor._values
torch.Tensor._indices
torch.Tensor._coalesced_

of: torch
where: live/state/composite_tensors
why: torch does not say how the rows of a nested tensor lie
without: refused
torch.Tensor._nested_tensor_size
torch.Tensor._nested_tensor_strides
torch.Tensor._nested_tensor_storage_offsets
torch.nested.nested_tensor()._values
torch.nested.nested_tensor()._offsets
torch.nested.nested_tensor()._lengths
torch.nested.nested_tensor()._ragged_idx

of: torch
where: live/state/quantised
why: the public calls quantise values; these take quantised ones
without: refused
torch._make_per_channel_quantized_tensor
torch._make_per_tensor_quantized_tensor

of: torch
where: live/state/data_order integrations/accelerate_loaders integrations/torchtitan
why: generators have to be put back once a loader has made its iterator, which draws from them
without: refused
torch.utils.data.DataLoader._get_iterator

of: torch
where: integrations/accelerate_loaders integrations/torchtitan
why: a loader with persistent workers draws no seed for them in a later pass
without: refused
torch.utils.data.DataLoader()._iterator

of: torchdata
where: integrations/torchtitan
why: generators have to be put back before the first batch is fetched, and after the iterator is made
without: not used: they are put back before the first forward pass
torchdata.stateful_dataloader.StatefulDataLoader()._get_iterator()._next_data

of: torch
where: core/group/gloo launch/abort_connections
why: collectives on the CPU and aborts go to one backend of a group
without: refused
torch.distributed.ProcessGroup._get_backend
torch.distributed.ProcessGroup._device_types

of: torch
where: core/group/gloo
why: the public call takes a list of tensors, and copies them
without: refused
torch.distributed.ProcessGroupGloo._allgather_base

of: torch
where: core/group/meeting core/group/passed_values
why: ranks meet in the store that they have, and torch hands it out by no other call
without: refused
torch.distributed.distributed_c10d._get_default_store

of: torch
where: launch/abort_connections launch/registries
why: only torch knows all process groups
without: refused
torch.distributed.distributed_c10d._world

of: torch
where: integrations/dcp/names
why: DCP names the values of a state as this function does
without: refused
torch.distributed.checkpoint._nested_dict.flatten_state_dict

of: torch
where: integrations/dcp/values
why: values are read by torch's restricted unpickler, which has to allow classes of plain data besides
without: refused
torch._weights_only_unpickler._get_user_allowed_globals
torch.serialization._load
torch.serialization._open_zipfile_reader

of: torch
where: integrations/dcp/values
why: a stand-in for a tensor must not take part in torch's functions
without: refused
torch._C._disabled_torch_function_impl

of: torch
where: integrations/megatron
why: DCP's planners want it, and Megatron-Core's strategies make it
without: refused
torch.distributed.checkpoint.utils._DistWrapper

of: torch
where: integrations/lightning_finetuning
why: Lightning's callback clears a setting of layers of this class, and asks for it by this name
without: refused
torch.nn.modules.batchnorm._BatchNorm

of: torch
where: launch/leftovers
why: a `with` that an exception has broken off leaves its mode, which the next attempt must not have
without: refused
torch._GLOBAL_DEVICE_CONTEXT
torch.utils._device.CURRENT_DEVICE
torch.utils._python_dispatch._len_torch_dispatch_stack
torch.utils._python_dispatch._pop_mode
torch.overrides._get_current_function_mode_stack
torch.overrides._len_torch_function_stack
torch.overrides._pop_mode
torch.overrides._push_mode

of: torch
where: launch/leftovers
why: the same of hooks for saved tensors
without: not used: these hooks stay
since: 2.8
torch._C._autograd._top_saved_tensors_default_hooks

of: torch
where: launch/leftovers
why: the same
without: not used: these hooks stay
torch._C._autograd._pop_saved_tensors_default_hooks

of: torch
where: launch/leftovers
why: hooks for all modules and optimizers are put back as they were; torch has no list of the registries
without: not used: hooks that an attempt has registered stay
torch.nn.modules.module._global_forward_hooks
torch.optim.optimizer._global_optimizer_post_hooks

of: torch
where: launch/recovery
why: a thread in a collective by way of torch.ops has these files in its stack
without: not used: a rank that hangs there is told as one that hangs in its own code
torch._ops
torch._library

of: torch
where: launch/recovery
why: a look at devices must not make contexts on those that are not used
without: not used: contexts are made
torch._C._cuda_hasPrimaryContext

of: torch
where: launch/command
why: it is imported before ranks are forked, which would import it each
without: a warning of the launcher; ranks begin as they are
torch._dynamo

of: torch
where: launch/elastic_agent
why: workers leave and enter in their processes; torch's agent can only end and start them
without: refused
torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._assign_worker_ranks
torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._monitor_workers
torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._rendezvous
torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._restart_workers
torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._shutdown
torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._start_workers
torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._stop_workers
torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent()._exit_barrier_timeout
torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent()._pcontext
torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent()._rdzv_handler
torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent()._remaining_restarts
torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent()._worker_group

of: torch
where: launch/elastic_agent
why: a newer agent ends a run whose process the kernel does not let go; here its rank is named
without: refused
since: 2.13
torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent()._uninterruptible_state_first_seen
torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent()._uninterruptible_state_timeout

of: torch
where: launch/workers
why: the same; torch's agent asks its processes by these calls
without: refused
torch.distributed.elastic.multiprocessing.api.PContext._close
torch.distributed.elastic.multiprocessing.api.PContext._poll
torch.distributed.elastic.multiprocessing.api.PContext._start

of: torch
where: launch/torch_rendezvous launch/elastic_agent
why: a node keeps its place over a lost connection, and each round has a store of its own; torch has neither
without: refused
torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler()._bootstrap_store_info
torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler()._shared_tcp_store_server

of: torch
where: launch/torch_rendezvous
why: the same
without: refused
torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler()._create_tcp_store_server
torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler()._get_store
torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler()._heartbeat_lock
torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler()._keep_alive
torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler()._keep_alive_timer
torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler()._op_executor
torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler()._op_executor._add_to_participants
torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler()._op_executor._mark_rendezvous_complete
torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler()._start_heartbeats
torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler()._state_holder
torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler()._state_holder._backend
torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler()._state_holder._cache_duration
torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler()._store
torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler()._this_node
torch.distributed.elastic.rendezvous.dynamic_rendezvous.RendezvousTimeout()._last_call
torch.distributed.elastic.rendezvous.dynamic_rendezvous._Action
torch.distributed.elastic.rendezvous.utils._PeriodicTimer()._ctx
torch.distributed.elastic.rendezvous.utils._PeriodicTimer()._finalizer
torch.distributed.elastic.rendezvous.utils._PeriodicTimer()._thread

of: torch
where: launch/rendezvous
why: torch polls once a second, and a recovery waits for it
without: refused
torch.distributed.elastic.rendezvous.dynamic_rendezvous._delay

of: torch
where: launch/rendezvous_state
why: torch's state is a pickle, which a stranger could write; here it is JSON
without: refused
torch.distributed.elastic.rendezvous.dynamic_rendezvous._NodeDesc
torch.distributed.elastic.rendezvous.dynamic_rendezvous._RendezvousState

of: torch
where: launch/etcd_store
why: torch's store in etcd has to be asked again after each error of its client
without: refused
torch.distributed.elastic.rendezvous.etcd_store.EtcdStore._decode
torch.distributed.elastic.rendezvous.etcd_store.EtcdStore._encode

of: torchdata
where: live/state/data_order
why: the state of a loader says where its samplers are, and has no other form
without: not used: a place is taken for one amid an epoch, and an order for one that is not in the state
torchdata.stateful_dataloader.StatefulDataLoader().state_dict()._iterator_finished
torchdata.stateful_dataloader.StatefulDataLoader().state_dict()._num_yielded
torchdata.stateful_dataloader.StatefulDataLoader().state_dict()._sampler_iter_state
torchdata.stateful_dataloader.StatefulDataLoader(workers).state_dict()._snapshot
torchdata.stateful_dataloader.StatefulDataLoader(workers).state_dict()._snapshot._main_snapshot
torchdata.stateful_dataloader.StatefulDataLoader(workers).state_dict()._snapshot._snapshot_step
torchdata.stateful_dataloader.StatefulDataLoader(workers).state_dict()._steps_since_snapshot

of: torchdata
where: live/state/data_order
why: a loader that was restored at an end goes through the epoch once more, and its draws do not count
without: not used: a run that goes on from an end draws other numbers
torchdata.stateful_dataloader.StatefulDataLoader()._get_iterator()._finished

of: torchao
where: live/restore/composite_states
why: only the optimizer makes the empty state into which a saved one of low precision is read
without: not used: such a state is refused by its name
torchao.optim.adam._AdamBase._new_buffer

of: accelerate
where: live/restore/materialising
why: weights that accelerate has offloaded are refused, as it would put its own in place of what is loaded
without: not used: what is loaded into offloaded modules is lost
accelerate.hooks.add_hook_to_module()._hf_hook

of: accelerate
where: integrations/accelerate
why: an Accelerator has no call that gives the objects it has prepared and registered, or its hooks
without: refused
accelerate.Accelerator()._custom_objects
accelerate.Accelerator()._dataloaders
accelerate.Accelerator()._load_model_state_pre_hook
accelerate.Accelerator()._models
accelerate.Accelerator()._optimizers
accelerate.Accelerator()._save_model_state_pre_hook
accelerate.Accelerator()._schedulers

of: accelerate
where: integrations/accelerate
why: generators are put back where a loader's pass begins and fetches, which no callback tells
without: refused
accelerate.state.GradientState._add_dataloader
accelerate.state.GradientState._remove_dataloader
accelerate.data_loader.DataLoaderDispatcher._fetch_batches
accelerate.data_loader.DataLoaderShard._update_state_dict

of: transformers
where: integrations/transformers
why: callbacks come too late to restore, and too early to save
without: refused
transformers.Trainer._evaluate
transformers.Trainer._finalize_training
transformers.Trainer._init_training_state
transformers.Trainer._load_best_model
transformers.Trainer._load_from_checkpoint
transformers.Trainer._load_rng_state
transformers.Trainer._prepare_for_training
transformers.Trainer._run_epoch
transformers.Trainer._save_checkpoint
transformers.trainer._is_peft_model

of: transformers
where: integrations/transformers
why: the next log is to be that of an uninterrupted run
without: refused
transformers.Trainer()._globalstep_last_logged
transformers.Trainer()._total_loss_scalar
transformers.Trainer()._tr_loss

of: transformers
where: integrations/transformers
why: a class that overrides what writes or reads a folder is told that it is not called
without: not used: such an override is not told
transformers.Trainer._load_optimizer_and_scheduler
transformers.Trainer._load_scaler
transformers.Trainer._save
transformers.Trainer._save_optimizer_and_scheduler
transformers.Trainer._save_rng_state
transformers.Trainer._save_scaler

of: transformers
where: integrations/transformers
why: SIGTERM is handled once, by the Checkpointer
without: refused
transformers.trainer_jit_checkpoint.CheckpointManager()._original_sigterm_handler

of: transformers
where: integrations/transformers
why: callbacks that upload the folder of a checkpoint are refused, and do not say that they do
without: refused
transformers.integrations.WandbCallback()._log_model
transformers.integrations.DVCLiveCallback()._log_model
transformers.integrations.NeptuneCallback()._log_checkpoints
transformers.integrations.ClearMLCallback()._clearml

of: trl
where: integrations/trl_parts
why: a step between batches that were generated with earlier weights is told
without: not used: it is not told
trl.GRPOTrainer()._buffered_inputs
trl.GRPOTrainer()._step

of: lightning
where: integrations/lightning_loops integrations/lightning
why: a fit goes on amid an epoch, with its metrics; Lightning's own checkpoints begin the epoch again
without: refused
lightning.pytorch.Trainer()._logger_connector
lightning.pytorch.Trainer()._logger_connector._callback_metrics
lightning.pytorch.Trainer()._logger_connector._first_loop_iter
lightning.pytorch.Trainer().fit_loop._restart_stage
lightning.pytorch.Trainer().fit_loop._restarting
lightning.pytorch.Trainer().fit_loop.epoch_loop._restart_stage
lightning.pytorch.Trainer().fit_loop.epoch_loop._results
lightning.pytorch.Trainer().fit_loop.epoch_loop._skip_next_val
lightning.pytorch.Trainer().fit_loop.epoch_loop.val_loop._has_run
lightning.pytorch.loops.loop._Loop
lightning.pytorch.trainer.connectors.logger_connector.result._ResultMetric()._forward_cache

of: lightning
where: integrations/lightning_home integrations/lightning_loops
why: the parts of a checkpoint besides tensors come from Lightning's own connector
without: refused
lightning.pytorch.Trainer()._checkpoint_connector

of: lightning
where: integrations/lightning
why: loaders are put where the step had them, once Lightning has begun the epoch
without: refused
lightning.fabric.utilities.data._set_sampler_epoch
lightning.pytorch.Trainer().fit_loop._combined_loader
lightning.pytorch.Trainer().fit_loop._data_fetcher
lightning.pytorch.utilities.combined_loader.CombinedLoader._load_state_dicts

of: lightning
where: integrations/lightning
why: a save amid accumulated gradients is told
without: refused
lightning.pytorch.Trainer().fit_loop.epoch_loop._should_accumulate

of: lightning
where: integrations/lightning
why: with records the gradients are computed before the optimizer's step, unless weights are averaged
without: refused
lightning.pytorch.plugins.precision.Precision._wrap_closure
lightning.pytorch.strategies.DDPStrategy()._model_averager

of: lightning
where: integrations/lightning
why: ranks that are spawned from a script are refused
without: refused
lightning.pytorch.strategies.DDPStrategy()._start_method

of: lightning
where: integrations/lightning
why: a callback that unfreezes parameters takes the groups of a restored fit for its next one
without: refused
lightning.pytorch.callbacks.BaseFinetuning()._restarting

of: lightning
where: integrations/lightning
why: a checkpoint callback does not save a step again that it has a path of
without: not used: it saves the step once more
lightning.pytorch.callbacks.ModelCheckpoint()._last_global_step_saved

of: lightning
where: integrations/lightning
why: a logger that uploads the file at a path uploads no model, which is told
without: not used: it is not told
lightning.pytorch.loggers.WandbLogger()._log_model

of: lightning
where: live/state/module_wrappers live/restore/former_names
why: what wraps a module is not to be in the names of its tensors
without: not used: the wrapper's own name is part of names, and older steps do not fit, which is told
lightning.fabric.wrappers._FabricModule
lightning.fabric.wrappers._FabricModule()._forward_module
lightning.fabric.wrappers._FabricModule()._original_module

of: torchtitan
where: integrations/torchtitan
why: a manager is a subclass of torchtitan's, which goes on to read its own steps and to write exports
without: refused
torchtitan.components.checkpointer.dcp.CheckpointManager._close
torchtitan.components.checkpointer.dcp.CheckpointManager._create_checkpoint_id
torchtitan.components.checkpointer.dcp.CheckpointManager._find_load_step
torchtitan.components.checkpointer.dcp.CheckpointManager._load
torchtitan.components.checkpointer.dcp.CheckpointManager._save
torchtitan.components.checkpointer.dcp.CheckpointManager._save_last_step
torchtitan.components.checkpointer.dcp.CheckpointManager._wait_for_saving

of: deepspeed
where: live/state/deepspeed
why: after a restore the model's weights are made from the masters, as after a step
without: refused
deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._reassign_or_swap_out_partitioned_parameters
deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state
deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer()._hp_optimizer_states_linked

of: deepspeed
where: live/state/deepspeed
why: layouts that are not supported are refused
without: refused
deepspeed.DeepSpeedEngine()._config
deepspeed.pipe.PipelineModule()._grid

of: deepspeed
where: live/state/deepspeed
why: a module without its engine is refused: its weights are copies
without: not used: of ZeRO 1 and 2 such a module is saved, and not told
deepspeed.DeepSpeedEngine().module.weight._hp_mapping

of: megatron-core
where: live/state/megatron
why: which part of a parameter the distributed optimizer has is said nowhere else
without: refused
megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._get_model_param_range_map

of: megatron-core
where: live/state/megatron
why: after a restore the model's weights are made from the masters, as after a step
without: refused
megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._copy_main_params_to_model_params

of: megatron-core
where: integrations/megatron
why: a strategy of checkpoints turns sharded tensors into DCP's as Megatron-Core's own does
without: refused
megatron.core.dist_checkpointing.strategies.torch._replace_sharded_keys_with_state_dict_keys
megatron.core.dist_checkpointing.strategies.torch._replace_state_dict_keys_with_sharded_keys
megatron.core.dist_checkpointing.strategies.torch._restore_dict_types
megatron.core.dist_checkpointing.strategies.torch._unwrap_pyt_sharded_tensor
"""))
# fmt: on
