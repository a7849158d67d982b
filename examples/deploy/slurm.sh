#!/bin/bash
#SBATCH --job-name=gpt
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --signal=B:TERM@120
# Slurm ends everything that a job step started when the step ends.  So the agents are a step of their own,
# which lasts as long as the job, and torchrun is started again beside it as often as it fails.  Two minutes
# before the time is over Slurm tells this script alone (B:), which tells the training, and not the agents:
# with Checkpointer(..., sigterm_s=90) it saves, and is not started again.
# `scancel` and the end of the time tell the steps (SIGTERM), not this script: the agents' frees the memory.

set -u
export HOLDFAST_MEMORY_DIR=/dev/shm/holdfast-$SLURM_JOB_ID
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
training="" stopping="" status=1
trap 'stopping=yes; kill -TERM $training 2>/dev/null' TERM

srun --overlap --ntasks-per-node=1 --cpus-per-task=2 --gpus-per-node=0 \
    bash -c 'trap "kill %1; wait; rm -rf \"$HOLDFAST_MEMORY_DIR\"; exit 143" TERM
        holdfast agent run --host "$(hostname -i | cut -d " " -f 1)" --budget 200GiB &
        wait' &
agents=$!

for attempt in 1 2 3 4 5; do
    if [[ $stopping ]]; then break; fi
    srun --overlap --ntasks-per-node=1 --kill-on-bad-exit=1 \
        torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=8 --max-restarts=3 --shutdown-timeout=100 \
        --rdzv-backend=c10d --rdzv-endpoint="$head:29400" --rdzv-id="$SLURM_JOB_ID-$attempt" \
        "$@" &
    training=$!
    until wait "$training"; status=$?; ! kill -0 "$training" 2>/dev/null; do :; done  # a signal ends a wait
    if [[ $status -eq 0 ]]; then break; fi
    echo "torchrun ended with $status in attempt $attempt; what is in memory is still there" >&2
done

# The nodes go to others now.  What is in memory and not in storage goes with them.
srun --overlap --ntasks-per-node=1 \
    bash -c 'holdfast agent stop --free; rm -rf "$HOLDFAST_MEMORY_DIR"'
kill "$agents" 2>/dev/null
wait "$agents"
exit "$status"
