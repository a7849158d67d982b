"""The causes, and reports 1 to 35: what `prove` has to say of each script.

Each script takes `--right`, which mends it: then the answer is "exact".
"""

from prove.cases import Case

AT_8 = ("--kill-at", "8")
AT_9 = ("--kill-at", "9")
IN_THE_SECOND_EPOCH = ("--kill-at", "11")


def _cause(name: str, why: str, ranks: int = 1, options: tuple[str, ...] = ()) -> Case:
    """The case of the script that shows a cause."""
    return Case(f"causes/{name.replace('-', '_')}.py", name, why, ranks, options)


CASES = (
    _cause("accumulation", "a save comes between the two batches of a step"),
    _cause("asked-for-input", "the script asks what to call the run"),
    _cause("batches-left-out", "a resume begins the next epoch"),
    _cause("batches-repeated", "a resume begins its epoch from the start"),
    _cause("begun-anew", "an average of the weights is saved, and never loaded"),
    _cause("ended-early", "the script ends by itself after five steps of twelve"),
    _cause("fresh-optimizer", "DCP loads nothing into the state_dict of a fresh optimizer"),
    _cause("generator", "dropout draws from a generator that is seeded when the script starts"),
    _cause("groups-reset", "a weight decay that falls is not restored"),
    _cause("low-precision", "float32 masters are made anew from bfloat16 weights"),
    _cause("no-resume", "the script looks for a file of another name"),
    _cause("no-steps", "the script steps the weights by hand"),
    _cause("not-deterministic", "noise comes from a generator that is seeded by chance"),
    _cause("not-in-checkpoint", "a temperature is a plain number of a module"),
    _cause("nothing-saved", "the script never saves"),
    _cause("older-step", "files are sorted as text", options=AT_8),
    _cause("one-place", "the script writes to the home directory"),
    _cause("overwritten", "weights are initialised after they were restored"),
    _cause("ranks-disagree", "ranks save in turn, and each restores its own newest file", ranks=2),
    _cause("replicas-differ", "rank 0 alone restores the weights", ranks=2),
    _cause(
        "sampler-order", "epochs are numbered from 0 after a resume", options=IN_THE_SECOND_EPOCH
    ),
    _cause("scaler", "a scale that grows is not restored"),
    _cause("scheduler", "a warm-up begins anew"),
    _cause("swapped-moments", "groups are in another order after a resume"),
    _cause("untrained-object", "a model is restored, of which the trainer has a copy"),
    _cause("weights", "names in the file have a prefix, so that strict=False loads none"),
    Case(
        "scenarios/01_cached_references.py",
        "batches-left-out",
        "weights of step 3, in the file of step 6, go on with the batch of step 7",
        options=AT_8,
    ),
    Case(
        "scenarios/02_torn_step.py",
        "not-in-checkpoint",
        "the optimizer's counters in the file are of a later step than the weights",
        options=AT_9,
    ),
    Case(
        "scenarios/03_live_average.py",
        "not-in-checkpoint",
        "the average in the file is of a later step than the weights",
        options=AT_9,
    ),
    Case(
        "scenarios/04_saved_while_evaluating.py",
        "not-in-checkpoint",
        "the file has averaged weights in the place of those that are trained",
    ),
    Case("scenarios/06_shared_moments.py", "exact", "one file keeps what shares memory together"),
    Case(
        "scenarios/07_assigned_weights.py",
        "untrained-object",
        "the optimizer steps parameters that are no longer in the model",
    ),
    Case("scenarios/08_dead_groups.py", "scheduler", "it steers groups that a load has replaced"),
    Case("scenarios/09_kept_buffer.py", "exact", "what holdfast gives away stays as it is"),
    Case(
        "scenarios/10_states_made_to_be_loaded.py",
        "exact",
        "DCP's step of rate 0 is none of the training, and is overwritten",
    ),
    Case(
        "scenarios/11_states_made_by_a_step.py",
        "overwritten",
        "a step without gradients decays weights that were restored",
    ),
    Case(
        "scenarios/12_trusted_scaffold.py",
        "fresh-optimizer",
        "states that were made to be loaded are never loaded",
    ),
    Case(
        "scenarios/13_layers_in_another_order.py",
        "swapped-moments",
        "a resume builds the layers in another order",
    ),
    Case(
        "scenarios/14_dense_positions.py",
        "swapped-moments",
        "a parameter without states shifts those of the others",
    ),
    Case(
        "scenarios/15_count_in_a_group.py", "groups-reset", "an optimizer counts in its groups anew"
    ),
    Case(
        "scenarios/16_schedule_writes_when_loaded.py",
        "overwritten",
        "the schedule writes the settings of step 0 over those that were restored",
    ),
    Case(
        "scenarios/17_rate_in_a_tensor.py",
        "scheduler",
        "the schedule steers a tensor that the optimizer no longer has",
    ),
    Case(
        "scenarios/18_settings_of_an_older_torch.py",
        "groups-reset",
        "a setting that is not in the file takes its default",
    ),
    Case(
        "scenarios/19_masters_write_back.py",
        "weights",
        "float32 masters are in the file, and not restored",
    ),
    Case(
        "scenarios/20_masters_in_a_list.py",
        "low-precision",
        "float32 masters are made anew from bfloat16 weights",
    ),
    Case("scenarios/21_moments_in_bfloat16.py", "low-precision", "moments are saved in bfloat16"),
    Case(
        "scenarios/22_scaler_moved_by_a_load.py",
        "scaler",
        "it counts a step that was made for the optimizer to have states",
    ),
    Case(
        "scenarios/23_engine_without_states.py",
        "fresh-optimizer",
        "the engine gives no states to save",
    ),
    Case(
        "scenarios/24_experts_of_each_rank.py",
        "not-in-checkpoint",
        "the expert of rank 1 is in no file",
        ranks=2,
    ),
    Case(
        "scenarios/25_disjoint_meshes.py",
        "weights",
        "DCP is given the DTensors of both ranks, and loads that of one",
        ranks=2,
    ),
    Case(
        "scenarios/26_replicas_that_part.py",
        "not-in-checkpoint",
        "the weights of rank 1 between two averages are in no file",
        ranks=2,
    ),
    Case(
        "scenarios/27_slice_of_rank_0.py",
        "not-in-checkpoint",
        "the slice of rank 1 is in no file",
        ranks=2,
    ),
    Case(
        "scenarios/28_buffers_on_rank_0.py",
        "replicas-differ",
        "rank 0 alone restores the buffer",
        ranks=2,
    ),
    Case(
        "scenarios/29_statistics_of_each_rank.py",
        "not-in-checkpoint",
        "the statistics of rank 1 are in no file",
        ranks=2,
    ),
    Case(
        "scenarios/31_groups_of_a_stage.py",
        "scheduler",
        "the scheduler of the second stage begins anew",
        ranks=2,
    ),
    Case(
        "scenarios/32_folder_of_each_start.py",
        "ranks-disagree",
        "rank 1 never finds its files",
        ranks=2,
    ),
    Case(
        "scenarios/33_save_that_failed.py",
        "ranks-disagree",
        "rank 1 has no file of the newest step",
        ranks=2,
        options=AT_8,
    ),
    Case(
        "scenarios/34_loader_of_rank_0.py",
        "batches-repeated",
        "rank 1 begins its data from the start",
        ranks=2,
    ),
    Case(
        "scenarios/35_average_made_later.py",
        "begun-anew",
        "the average is made after the restore",
    ),
)

LEFT_OUT = {
    5: "labels and callbacks of a later step: the state is right, and nothing resumes from a label",
    30: "shapes that differ between ranks: the save hangs or is refused, so nothing can resume",
}
"""Reports without a script."""
