"""What `make test` runs of the files that take long; the rest of these files is run by `make soak`.

A file that is not named here is run whole.  `KEPT` gives for each that is named the tests that stay, as
regular expressions on their names (with parameters): at least one for each promise that the file proves.
A pattern that matches no test of its file ends the run, so the table cannot rot.

Some files prepare many cases in one launch of ranks.  `cases_of` gives the names of those that will be
asked for, so that what is left to the soak is not prepared in vain.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

KEPT: dict[str, tuple[str, ...]] = {
    "crash/test_converting.py": (
        r"test_killed_at_every_change\[(dcp|huggingface)\]",
        r"test_killed_at_random_it_goes_on\[huggingface\]",
        r"test_finished_files_are_not_written_again\[universal\]",
        r"test_interrupted_after_the_last_rename.*",
        r"test_(a|two|another).*",
    ),
    "crash/test_kill_at_random.py": (),
    "crash/test_mixed_overwrite.py": (),
    "delta/test_delta_lives.py": (
        r"test_all_processes_are_killed\[fsdp\]",
        r"test_fewer_ranks_with_each_optimizer\[adam\]",
        r"test_memory_and_records\[state\]",
        r"test_(other|an_optimizer|records|one_rank|ranks).*",
    ),
    "delta/test_exact.py": (
        r"test_bfloat16\[(masters-adamw|pure-sgd)\]",
        r"test_every_optimizer\[(adamw|adamw-foreach|momentum|sgd|rmsprop)\]",
        r"test_replayed_in_blocks\[(adamw|rmsprop)\]",
        r"test_accumulated_gradients\[(adam|sgd)\]",
        r"test_(?!bfloat16|every_optimizer|replayed_in_blocks|accumulated).*",
    ),
    "delta/test_killed_at_random.py": (r"test_at_a_random_moment\[(adamw-masters|sgd-float32)\]",),
    "delta/test_kills.py": (
        r"test_a_(node_dies|writer_dies).*",
        r"test_a_trainer_dies(_while_ranks.*)?",
    ),
    "delta/test_offline.py": (
        r"test_any_recorded_step_becomes_a_full_one\[(momentum|adamw-two-groups)\]",
        r"test_(?!any_recorded).*",
    ),
    "delta/test_random_trainings.py": (r"test_as_drawn\[[01]\]",),
    "delta/test_slow.py": (r"test_training_goes_on",),
    "distributed/test_deepspeed_engine.py": (
        r"test_saving\[(zero1-bf16-accumulate|zero2-fp32|zero3-fp32|a_damaged.*|what_modules.*)\]",
        r"test_on_two_ranks\[(resuming-zero3-fp32|resuming-zero1-bf16-accumulate)\]",
        r"test_on_two_ranks\[zero3-fp32-to-zero1-fp32\]",
    ),
    "distributed/test_matrix.py": (r"test_.*\[(plain|fsdp2|fsdp2_tp2|pp2_dp2)\]",),
    "distributed/test_megatron.py": (
        r"test_live\[save_bf16_(tp2_zero|tp2_pp2)\]",
        r"test_live\[resume_bf16_(tp2_zero_as_tp2_zero|tp2_pp2_as_tp2_pp2)\]",
        r"test_live\[(another_model_is_refused|what_modules_say_besides_is_refused)\]",
    ),
    "distributed/test_ucp.py": (),
    "distributed/test_universal.py": (r"test_an_engine_continues\[1-2\]",),
    "examples/test_deploy.py": (r"test_(?!the_slurm_script_keeps).*", r".*\[the third attempt.*\]"),
    "examples/test_examples.py": (r"test_(?!a_run_in_two_parts).*",),
    "frameworks/test_engines.py": (),
    "homes/test_records.py": (
        r"test_a_root_that_is_lost.*\[steps-are-held-up\]",
        r"test_(?!a_root_that_is_lost|close).*",
    ),
    "interop/test_deepspeed.py": (
        r"test_(?!experts|a_grid|pipeline_of_bf16|every_element\[z1-dp3).*",
    ),
    "launching/test_run.py": (
        r"test_(a_spare_takes|what_the_script_itself_does\[raise\]|what_cannot).*",
        r"test_a_spare_prints.*\[rank 0\]",
    ),
    "memory/test_agent_verb.py": (r"test_(?!a_silent_agent).*",),
    "memory/test_deaths.py": (r"test_an_agent_dies_while_a_restart.*",),
    "memory/test_ends.py": (
        r"test_a_forked_child_is_refused\[(step|save)\]",
        r"test_a_forked_child_leaves_its_parents_save_alone\[closes\]",
        r"test_the_agent_completes_the_save_of_a_run_that_raises\[KeyError\]",
        r"test_(?!a_forked|the_agent_completes|a_copy_on_a_volume).*",
    ),
    "memory/test_history.py": (r"test_each_killed_life_is_a_failure",),
    "memory/test_late.py": (r"test_(another|it_waits|a_late).*",),
    "memory/test_lives.py": (
        r"test_all_processes_are_killed\[fsdp\]",
        r"test_nodes_are_lost\[rs\(2\)-lost5-fsdp\]",
        r"test_replicas_protect_each_other_without_the_network\[hsdp-parity-lost1\]",
        r"test_snapshots_from_gradients\[ddp\]",
        r"test_another_number_of_nodes\[nodes1-fsdp\]",
        r"test_restarts_over_the_same_damage_converge\[the newest snapshot\]",
        r"test_what_memory_cannot_give_is_read_from_storage\[parity.*",
        r"test_a_bit_flips_in_a_segment\[three nodes\]",
        r"test_(durable_saves_are_made|a_crash_without|memory_is_full|more_is_lost).*",
        r"test_(states_of_a_lost_shard|a_replica_full_of_nan|an_agent_is_killed).*",
    ),
    "memory/test_planned.py": (r"test_groups_and_bytes_are_those_of_the_run\[fsdp.*",),
    "memory/test_silent.py": (r"test_(?!training_goes_on).*",),
    "memory/test_stopped.py": (),
    "nodes/test_chaos.py": (),
    "nodes/test_elastic_durable.py": (),
    "nodes/test_elastic_memory.py": (),
    "objects/test_converting.py": (r"test_(?!wherever_it_stops).*",),
    "objects/test_deaths.py": (r"test_a_claim",),
    "objects/test_faults.py": (
        r"test_an_upload_survives_a_fault\[(begin-cut|part-(refused|dropped)|end-(cut|dropped))\]",
        r"test_reads_lists_and_deletes_survive_a_fault\[(refused|cut)\]",
        r"test_a_conditional_put_is_done_once\[(cut|dropped|lost)\]",
        r"test_by_default_the_training_waits_once\[refuses\]",
        r"test_(who_comes_second|a_claim|two_runs).*",
    ),
    "objects/test_homes.py": (r"test_the_.*",),
    "objects/test_killed.py": (r"test_a_training_with_records\[2\]",),
    "objects/test_requests.py": (r"test_a_run\[one PUT\]",),
    "objects/test_verbs.py": (r"test_(?!a_copy_that_is_killed).*",),
}
"""By file, below this folder."""


FIRST = (
    "state/test_many_tensors.py",  # these two while there is little in memory: the collector, forks
    "memory/test_every_write.py",
    "launching/test_kills.py",  # these seven for the soak: up to half an hour each
    "objects/test_faults.py",
    "loops/test_loops.py",
    "docs/test_docs.py",
    "trainers/test_deepspeed.py",
    "trainers/test_accelerate.py",
    "trainers/test_transformers.py",
    "strangers/test_strangers.py",
    "crash/test_mixed_overwrite.py",
    "delta/test_kills.py",
    "optimizers/test_optimizers.py",
    "nodes/test_elastic_memory.py",
    "nodes/test_chaos.py",
    "nodes/test_elastic_durable.py",
    "distributed/test_matrix.py",
    "distributed/test_deepspeed_engine.py",
    "distributed/test_megatron.py",
    "memory/test_lives.py",
    "memory/test_deaths.py",
    "disks/test_exit.py",
    "delta/test_topk.py",
    "nodes/test_elastic_page.py",
    "partners/test_partners.py",
    "partners/test_meetings.py",
    "delta/test_delta_lives.py",
    "distributed/test_saving.py",
    "distributed/test_loading.py",
    "distributed/test_files.py",
    "distributed/test_converting.py",
)
"""Files of few tests that take long: begun first, so that none is left at the end for one worker alone."""


def in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """File by file: those named above, then the others, those of many tests before those of few."""
    sizes = Counter(item.path for item in items)

    def turn(item: pytest.Item) -> tuple[int, int]:
        file = item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""
        return FIRST.index(file) if file in FIRST else len(FIRST), -sizes[item.path]

    return sorted(items, key=turn)


def is_kept(file: str, name: str) -> bool:
    """Whether a test belongs to `make test`."""
    return file not in KEPT or any(re.fullmatch(pattern, name) for pattern in KEPT[file])


def leave_to_the_soak(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Mark what the table leaves out with `soak`.  UsageError if a pattern matches no test."""
    collected: dict[str, list[str]] = {}
    for item in items:
        if item.path.is_relative_to(TESTS):
            file = item.path.relative_to(TESTS).as_posix()
            collected.setdefault(file, []).append(item.name)
            if not is_kept(file, item.name):
                item.add_marker("soak")
    if any("::" in arg for arg in config.args):
        return  # only some tests of a file were collected
    unmatched = [
        f"{file}: {pattern}"
        for file, names in collected.items()
        for pattern in KEPT.get(file, ())
        if not any(re.fullmatch(pattern, name) for name in names)
    ]
    if unmatched:
        raise pytest.UsageError(
            "tests/gate.py keeps tests that are not there: " + ", ".join(unmatched)
        )


def cases_of(request: pytest.FixtureRequest, test: str, names: Sequence[str]) -> list[str]:
    """Of the cases that a test of this file is parametrized with, those that will be asked for."""
    if "not soak" not in request.config.option.markexpr:
        return list(names)
    file = request.path.relative_to(TESTS).as_posix()
    return [name for name in names if is_kept(file, f"{test}[{name}]")]
