"""Reports 36 to 70, and variants (v) that no report has: what `prove` has to say of each script.

Each script takes `--right`, which mends it: then the answer is "exact".
"""

from prove.cases import Case

IN_THE_SECOND_EPOCH = ("--kill-at", "10")
IN_THE_FIRST_EPOCH = ("--kill-at", "4")
AT_7 = ("--kill-at", "7")
TWICE_IN_AN_EPOCH = ("--seed", "18")
"""Killed at 6, then at 4 and 8: with saves at 3 and 6."""

CASES = (
    Case(
        "36_ema_updates.py", "not-in-checkpoint", "the average's number of updates is in no state"
    ),
    Case("37_tie_made_at_first_start.py", "weights", "a resumed head is not tied to the embedding"),
    Case(
        "38_assigned_after_optimizer.py",
        "untrained-object",
        "the optimizer trains parameters that the model no longer has",
    ),
    Case(
        "40_frozen_later_not_saved.py",
        "not-in-checkpoint",
        "a layer that was trained, then frozen, is in no file",
        options=AT_7,
    ),
    Case("41_vocabulary_grew.py", "weights", "the embedding has another shape and is left out"),
    Case("42_names_of_the_wrapper.py", "weights", "no saved name fits the model"),
    Case(
        "43_adapter_of_another_name.py",
        "weights",
        "the adapter has another name than the saved one",
    ),
    Case("44_odd_shapes_sharded.py", "exact", "holdfast saves such shapes under FSDP2", ranks=2),
    Case("45_newest_by_text.py", "older-step", "96 comes after 192 as text", options=AT_7),
    Case(
        "46_every_start_saves_step_0.py",
        "no-resume",
        "the file of step 0 was written last, so that training begins there",
    ),
    Case(
        "47_progress_rebound.py",
        "batches-repeated",
        "the second resume has the weights of step 6 and the place of step 3",
        options=TWICE_IN_AN_EPOCH,
    ),
    Case(
        "48_retention_by_text.py",
        "older-step",
        "each new file is deleted, but for the first",
        options=AT_7,
    ),
    Case("49_old_one_deleted_first.py", "no-resume", "at the kill there is no file", options=AT_7),
    Case("51_saved_right_after_the_load.py", "exact", "holdfast saves what it has restored"),
    Case("52_scheduler_loaded_twice.py", "overwritten", "the second load adds to the first"),
    Case(
        "53_latest_lags.py", "older-step", "`latest` names the step before the newest", options=AT_7
    ),
    Case(
        "54_saved_at_the_end_of_an_epoch.py",
        "batches-left-out",
        "the second epoch is skipped",
        options=AT_7,
    ),
    Case(
        "55_second_resume_in_an_epoch.py",
        "batches-repeated",
        "the place is counted from the first resume",
        options=TWICE_IN_AN_EPOCH,
    ),
    Case(
        "56_epochs_counted_anew.py",
        "sampler-order",
        "the second epoch goes on in the order of the first",
        options=IN_THE_SECOND_EPOCH,
    ),
    Case(
        "57_persistent_worker_keeps_the_place.py",
        "batches-left-out",
        "the worker begins the second epoch amid it",
        options=IN_THE_FIRST_EPOCH,
    ),
    Case(
        "58_epoch_set_at_the_end.py",
        "sampler-order",
        "the second epoch goes on in the order of the first",
        ranks=2,
        options=IN_THE_SECOND_EPOCH,
    ),
    Case("59_amid_accumulation.py", "accumulation", "gradients of two batches are lost"),
    Case(
        "60_each_epoch_skips.py",
        "batches-left-out",
        "the second epoch begins amid it, too",
        options=IN_THE_FIRST_EPOCH,
    ),
    Case(
        "61_all_ranks_get_one_generator.py",
        "generator",
        "rank 1 draws the dropout of rank 0",
        ranks=2,
    ),
    Case(
        "62_plateau_forgets_its_patience.py",
        "scheduler",
        "the count of bad values is in no state",
    ),
    Case(
        "64_other_ranks_other_batch.py",
        "elsewhere",
        "as many batches of one rank are half as many samples",
        ranks=2,
        options=("--ranks", "1"),
    ),
    Case("65_another_split.py", "sampler-order", "the same place has samples of another split"),
    Case(
        "66_ranks_at_different_places.py",
        "batches-repeated",
        "rank 1 goes back to the place of rank 0",
        ranks=2,
        options=AT_7,
    ),
    Case(
        "67_mismatch_swallowed.py",
        "fresh-optimizer",
        "the saved groups do not fit, so nothing is loaded",
        options=AT_7,
    ),
    Case("68_buffer_lost_on_meta.py", "not-in-checkpoint", "the buffer is not persistent"),
    Case(
        "70_best_instead_of_last.py", "older-step", "the best step is not the newest", options=AT_7
    ),
    Case("v01_ema_decay_warmup.py", "not-in-checkpoint", "the average's count is in no state"),
    Case("v02_swa_count_not_saved.py", "not-in-checkpoint", "n_averaged is in no state"),
    Case("v03_swa_never_loaded.py", "begun-anew", "the average is in the file, and not loaded"),
    Case(
        "v04_one_cycle_made_anew.py", "scheduler", "it is not saved, and begins at its first step"
    ),
    Case("v05_plateau_not_restored.py", "scheduler", "it is in the file, and not loaded"),
    Case(
        "v06_warm_restarts_by_fraction.py", "scheduler", "it is told a wrong fraction of the epoch"
    ),
    Case(
        "v07_sampler_without_set_epoch.py",
        "sampler-order",
        "the sampler's epoch is 0 again",
        options=IN_THE_SECOND_EPOCH,
    ),
    Case(
        "v08_epoch_begins_again.py",
        "batches-repeated",
        "the place in the epoch is not restored",
        ranks=2,
        options=AT_7,
    ),
    Case(
        "v09_generator_of_the_sampler.py",
        "generator",
        "the sampler's generator begins anew",
        options=IN_THE_SECOND_EPOCH,
    ),
    Case(
        "v10_numpy_generator_in_a_data_set.py",
        "generator",
        "the data set's generator begins anew",
        options=IN_THE_SECOND_EPOCH,
    ),
    Case("v11_numpy_global_generator.py", "generator", "numpy's generator begins anew"),
    Case("v12_stream_begins_anew.py", "batches-repeated", "the stream is read from its beginning"),
    Case("v13_dropout.py", "generator", "torch's generator begins anew"),
    Case("v14_fresh_scaler.py", "scaler", "the scale is in no state"),
    Case(
        "v15_accumulation_under_ddp.py",
        "accumulation",
        "gradients of two batches are lost on each rank",
        ranks=2,
    ),
    Case("v16_momentum_in_bf16.py", "low-precision", "momentum was saved in bfloat16"),
    Case("v17_resumed_from_the_average.py", "weights", "the weights are those of the average"),
    Case("v18_head_left_out.py", "weights", "the head is left out of what is loaded"),
    Case("v19_weights_saved_in_half.py", "low-precision", "the weights were saved in bfloat16"),
    Case("v20_target_network.py", "not-in-checkpoint", "the target network is in no state"),
    Case(
        "v21_second_optimizer_of_a_gan.py", "fresh-optimizer", "the second optimizer has no states"
    ),
    Case("v22_bad_rounds.py", "not-in-checkpoint", "the count that lowers the rate is in no state"),
    Case(
        "v23_curriculum.py",
        "sampler-order",
        "the sampler is back at its first level",
        options=AT_7,
    ),
    Case(
        "v24_rank_1_reads_an_older_file.py",
        "ranks-disagree",
        "rank 0 goes on from step 9, rank 1 from step 6",
        ranks=2,
        options=IN_THE_SECOND_EPOCH,
    ),
    Case(
        "v25_only_parameters.py", "not-in-checkpoint", "the statistics of BatchNorm are in no state"
    ),
    Case(
        "v26_groups_of_the_script.py",
        "groups-reset",
        "the rate is that of the script",
        options=AT_7,
    ),
    Case("v27_parameters_in_another_order.py", "swapped-moments", "states are matched by position"),
    Case("v28_dcp_into_an_empty_optimizer.py", "fresh-optimizer", "there was nothing to load into"),
    Case("v29_holdfast_with_all.py", "exact", "holdfast saves all of this"),
    Case("v30_python_random.py", "generator", "Python's generator begins anew"),
    Case("v31_looks_for_another_name.py", "no-resume", "the file is never found"),
    Case(
        "v32_only_rank_0_loads.py",
        "replicas-differ",
        "rank 1 trains on from its first weights",
        ranks=2,
    ),
    Case("v33_seed_from_the_clock.py", "not-deterministic", "each run has another seed"),
    Case("v34_initialised_after_the_load.py", "overwritten", "the head is zero after the load"),
    Case(
        "v35_warmup_from_the_start_of_the_process.py",
        "overwritten",
        "the rate is warmed up again, over the restored one",
        options=AT_7,
    ),
    Case(
        "v36_draw_after_the_restore.py",
        "generator",
        "the restored generator is drawn from too often",
    ),
    Case(
        "v37_noise_of_workers.py",
        "generator",
        "the seed of the workers is drawn from a generator that began anew",
        options=IN_THE_SECOND_EPOCH,
    ),
    Case("v38_clipping_by_history.py", "not-in-checkpoint", "the running norm is in no state"),
    Case("v39_learnable_loss.py", "not-in-checkpoint", "the parameter of the loss is in no state"),
    Case("v40_center_of_a_loss.py", "not-in-checkpoint", "the center is in no state"),
    Case(
        "v41_rate_of_the_command_line.py",
        "overwritten",
        "the rate is written over the restored one",
        options=AT_7,
    ),
    Case("v42_loop_in_a_class.py", "not-in-checkpoint", "the loop's count is in no state"),
    Case("v43_batches_drawn_by_hand.py", "generator", "torch's generator begins anew"),
    Case("v44_error_of_the_load_swallowed.py", "no-resume", "the error of the load is swallowed"),
    Case("v45_left_in_eval.py", "not-in-checkpoint", "model.training is False, and in no state"),
    Case("v46_read_ahead.py", "batches-left-out", "two batches that were read are never used"),
    Case(
        "v47_sampler_of_the_script.py",
        "sampler-order",
        "the sampler's epoch is 0 again",
        options=IN_THE_SECOND_EPOCH,
    ),
    Case(
        "v48_numbers_in_a_pickle.py", "begun-anew", "the best loss is in the pickle, and not loaded"
    ),
    Case(
        "v49_warmup_of_a_count.py",
        "not-in-checkpoint",
        "the count that the rate is made from is in no state",
    ),
    Case("v50_decay_written_anew.py", "overwritten", "the decay is written over the restored one"),
    Case(
        "v51_group_added_after_the_load.py",
        "fresh-optimizer",
        "the second group has no states",
        options=IN_THE_SECOND_EPOCH,
    ),
    Case("v52_average_in_half.py", "low-precision", "the average was saved in bfloat16"),
    Case("v53_memory_in_attributes.py", "not-in-checkpoint", "the buffer is in no state"),
    Case(
        "v54_evaluation_behind_a_save.py",
        "generator",
        "an evaluation draws from the restored generator",
    ),
    Case("v55_one_of_two_loaders.py", "batches-repeated", "the second loader begins anew"),
    Case("v56_closure_called_again.py", "fresh-optimizer", "the states are not loaded"),
    Case("v57_optimizer_of_each_parameter.py", "scheduler", "one of four schedules is loaded"),
    Case(
        "v58_meter_of_the_time.py",
        "fresh-optimizer",
        "the states are not loaded, and a clock is none of the training",
    ),
    Case("v59_patience_in_a_dict.py", "not-in-checkpoint", "the best loss is in no state"),
    Case(
        "v60_saved_before_the_step.py",
        "batches-left-out",
        "the batch of the step that is named is never trained on",
    ),
    Case("v61_steps_of_a_critic.py", "fresh-optimizer", "the first optimizer has no states"),
)

LEFT_OUT = {
    39: "an export: the training goes on exactly",
    50: "a hand in the folder: a script cannot show it",
    63: "the memory that a load takes: the training goes on exactly",
    69: "an export: the training goes on exactly",
}
"""Numbers of reports that have no script here, and why."""
