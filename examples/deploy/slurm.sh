#!/bin/bash
#SBATCH --job-name=gpt
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --no-kill
#SBATCH --signal=B:TERM@120
# Four nodes train and the fifth stands by: it takes the place of a lost one, and when two are lost three go on.
# A lost rank is replaced by the spare process of its node.  So nothing is started again here unless the
# launchers themselves end; then they are, up to four times.  (After the loss of a node srun reports a failure,
# though the others have done all: the next attempt finds nothing left to do.)
# --no-kill: a lost node is taken out of the job, which goes on.  The first one runs this script and the
# rendezvous, and Slurm ends the job with it (--requeue has it begin again).
#
# Slurm ends everything that a job step started when the step ends.  So the agents are a step of their own,
# which lasts as long as the job.  Two minutes before the time is over Slurm tells this script alone (B:),
# which tells the training, and not the agents: with Checkpointer(..., sigterm_s=90) it saves, and is not
# started again.
# `scancel` and the end of the time tell the steps (SIGTERM), not this script: the agents' frees the memory.

# shellcheck disable=SC2016  # what is in single quotes is expanded on each node
set -u
export HOLDFAST_MEMORY_DIR=/dev/shm/holdfast-$SLURM_JOB_ID
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
training="" stopping="" status=1 nodes=$SLURM_NNODES
trap 'stopping=yes; kill -TERM $training 2>/dev/null' TERM

srun --overlap --no-kill --ntasks-per-node=1 --cpus-per-task=2 --gpus-per-node=0 \
    bash -c 'trap "kill %1; wait; rm -rf \"$HOLDFAST_MEMORY_DIR\"; exit 143" TERM
        holdfast agent run --host "$(hostname -i | cut -d " " -f 1)" --budget 200GiB &
        wait' &
agents=$!

for attempt in 1 2 3 4 5; do
    if [[ $stopping ]]; then break; fi
    nodes=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%D)  # those that are left
    most=$((nodes > 1 ? nodes - 1 : 1)) least=$((nodes > 2 ? nodes - 2 : 1))
    srun --overlap --no-kill --kill-on-bad-exit=0 --nodes="$nodes" --ntasks-per-node=1 \
        holdfast run --nnodes="$least:$most" --nproc-per-node=8 --spares=1 --shutdown-timeout=100 \
        --rdzv-backend=c10d --rdzv-endpoint="$head:29400" --rdzv-id="$SLURM_JOB_ID-$attempt" \
        "$@" &
    training=$!
    until wait "$training"; status=$?; ! kill -0 "$training" 2>/dev/null; do :; done  # a signal ends a wait
    if [[ $status -eq 0 ]]; then break; fi
    echo "holdfast run ended with $status in attempt $attempt; what is in memory is still there" >&2
done

# The nodes go to others now.  What is in memory and not in storage goes with them.
srun --overlap --no-kill --nodes="$nodes" --ntasks-per-node=1 \
    bash -c 'holdfast agent stop --free; rm -rf "$HOLDFAST_MEMORY_DIR"'
kill "$agents" 2>/dev/null
wait "$agents"
exit "$status"
