"""How each verb of the command line is called: its arguments, its help and its examples.

What a verb does is the function `run` of the module of its name, imported when the verb is called: so
help waits for nothing, and no verb for the imports of another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from holdfast.base.sizes import parse_size
from holdfast.cli.options import Argument, Option
from holdfast.cli.screen import Result

TargetArgument = Annotated[str, Argument("URL[@STEP]", "A folder, or a step in it.")]
RootArgument = Annotated[str, Argument("URL", "The folder that holds the steps.")]
ShowAll = Annotated[bool, Option("Show everything.", name="--all")]


@dataclass(frozen=True, slots=True)
class Verb:
    """A function whose signature and docstring say how a verb is called, and its examples."""

    run: Callable[..., Result]
    examples: tuple[str, ...]


def _verb(*examples: str) -> Callable[[Callable[..., Result]], Verb]:
    return lambda run: Verb(run, examples)


@_verb(
    "holdfast ls runs/gpt",
    "holdfast ls runs/gpt --columns eval_accuracy,tensors",
    "holdfast ls s3://bucket/runs/gpt --json",
)
def ls(
    url: RootArgument,
    columns: Annotated[
        str | None, Option("More columns: metrics, tensors, files.", "NAME,...")
    ] = None,
) -> Result:
    """List steps: size, age, and whether each is complete.  Exit 1 if any is not, or if there are none.

    The metric that the run keeps its best steps by is a column; --json has all metrics. Snapshots that the
    agent of this node holds in memory are listed below. Of a folder that is no root, checkpoints in it are
    listed.
    """
    from holdfast.cli.ls import run

    return run(url, columns)


@_verb(
    "holdfast inspect runs/gpt",
    "holdfast inspect runs/gpt@1000 'model.h.*.weight' --stats",
    "holdfast inspect runs/gpt meta.wandb_id",
)
def inspect(
    target: TargetArgument,
    name: Annotated[
        str | None, Argument("[NAME]", "A tensor, a pattern such as '*.bias', or an extra.")
    ] = None,
    stats: Annotated[bool, Option("Read tensors: mean, deviation, least, most, NaN, Inf.")] = False,
    show_all: ShowAll = False,
) -> Result:
    """Show the contents of a step; with NAME, draw how that tensor is cut, and show where its bytes lie, or
    print the value of that extra.

    An extra is named by its path: progress.epoch, optim.param_groups[0].lr.
    """
    from holdfast.cli.inspect import run

    return run(target, name, stats, show_all)


QUICK = "Lengths, manifest, headers and digest tables; not the data."


@_verb(
    "holdfast verify runs/gpt",
    "holdfast verify runs/gpt@1000 --quick",
    "holdfast verify dcp:runs/old",
)
def verify(target: TargetArgument, quick: Annotated[bool, Option(QUICK)] = False) -> Result:
    """Check every digest of a step, and that every tensor is covered.  Exit 1 if anything is wrong.

    Foreign checkpoints have no digests: the output lists what was checked and what was not.
    """
    from holdfast.cli.verify import run

    return run(target, quick)


@_verb(
    "holdfast diff runs/gpt@1000 runs/gpt@2000",
    "holdfast diff runs/gpt dcp:runs/old --only 'model.*'",
)
def diff(
    a: Annotated[str, Argument("A[@STEP]", "One step.")],
    b: Annotated[str, Argument("B[@STEP]", "The other.")],
    only: Annotated[str | None, Option("Names to compare.", "PATTERN")] = None,
    show_all: ShowAll = False,
) -> Result:
    """Compare values, names, shapes and extras of two steps.  Exit 1 if anything differs.

    Weights come first. Relative L2 is the norm of the difference divided by the larger norm of the two: 0
    for equal tensors, about 1 for unrelated ones.
    """
    from holdfast.cli.diff import run

    return run(a, b, only, show_all)


SCHEMES = "For --nodes: none, copy, parity, rs(m), recompute."


@_verb(
    "holdfast plan runs/gpt --mesh dp=4,tp=2",
    "holdfast plan runs/gpt --mesh dp=8 --nodes 4 --redundancy parity",
    "holdfast plan runs/gpt --mesh dp=2,tp=4 --rules llama --rank 3",
)
def plan(
    target: TargetArgument,
    mesh: Annotated[str, Option("The new mesh, outermost first: dp=4,tp=2.", "AXES")],
    rules: Annotated[str | None, Option("A file of rules, or a preset.", "FILE")] = None,
    let: Annotated[list[str] | None, Option("A variable of the rules.", "NAME=N")] = None,
    rank: Annotated[int | None, Option("One rank in detail.", "R")] = None,
    nodes: Annotated[
        int | None, Option("Show what snapshots in memory cost and survive.", "N")
    ] = None,
    redundancy: Annotated[str, Option(SCHEMES, "SCHEME")] = "auto",
    node_mtbf_hours: Annotated[
        float, Option("Mean time between failures of a node.", "H")
    ] = 8760.0,
    repair_minutes: Annotated[float, Option("Time to replace a lost node.", "M")] = 10.0,
    show_all: ShowAll = False,
) -> Result:
    """Show what each rank of another mesh would read from a step, or store by rules."""
    from holdfast.cli.plan import run

    return run(
        target, mesh, rules=rules, let=let, rank=rank, nodes=nodes, redundancy=redundancy,
        node_mtbf_hours=node_mtbf_hours, repair_minutes=repair_minutes, show_all=show_all,
    )  # fmt: skip


FORMATS = "universal, deepspeed, dcp, huggingface, safetensors, torch"
"""`TARGET_FORMATS` of `formats.converting`, which the help does not import."""


@_verb(
    "holdfast convert runs/gpt@1000 out/weights --to huggingface --dtype bfloat16",
    "holdfast convert runs/gpt weights.safetensors --to safetensors",
    "holdfast convert deepspeed:runs/old runs/new",
)
def convert(
    source: TargetArgument,
    target: Annotated[str, Argument("DST", "A new folder, or a root that gets one more step.")],
    to: Annotated[str, Option(f"One of {FORMATS}.", "FORMAT")] = "universal",
    from_: Annotated[
        str | None, Option("Format of the source, if not recognised: dcp, ...", "FORMAT", "--from")
    ] = None,
    key: Annotated[str, Option("Of weights alone: the model's key.", "KEY")] = "model",
    dtype: Annotated[str | None, Option("Cast these weights: bfloat16, ...", "DTYPE")] = None,
    rules: Annotated[str | None, Option("Rules that rename the weights.", "FILE")] = None,
    max_file: Annotated[str, Option("Largest size of one file.", "SIZE")] = "5GB",
    memory: Annotated[str, Option("Most memory for buffers.", "SIZE")] = "2GiB",
    no_verify: Annotated[bool, Option("No CRC-32 of the source, no reading back.")] = False,
) -> Result:
    """Rewrite a checkpoint in another format.  After an interruption, run the same command again: it goes
    on where it was, or in a bucket with the files that are not written yet.

    universal: holdfast's own format with whole tensors, which Hugging Face's loaders read too.
    deepspeed: DeepSpeed's universal format.  dcp: torch.distributed.checkpoint.
    huggingface: weights alone, as safetensors in the folder DST; safetensors, torch: weights alone, in the
    one file DST.  Under torchrun the ranks share the work.
    """
    from holdfast.cli.convert import run

    return run(
        source, target, to=to, from_=from_, key=key, dtype=dtype, rules=rules, max_file=max_file,
        memory=memory, is_verified=not no_verify,
    )  # fmt: skip


@_verb(
    "holdfast copy runs/gpt s3://bucket/runs/gpt",
    "holdfast copy runs/gpt@1000 /archive/gpt --log",
    "holdfast copy runs/gpt /archive/gpt --all --dry-run",
)
def copy(
    source: TargetArgument,
    target: Annotated[str, Argument("DST", "Root to copy into; made if missing.")],
    every: Annotated[bool, Option("Copy every step, and the records.", name="--all")] = False,
    log: Annotated[bool, Option("Copy the records that lead on from the step, too.")] = False,
    dry_run: Annotated[bool, Option("Only say what would be copied.")] = False,
) -> Result:
    """Copy a step (the newest, or URL@STEP) into another root, byte for byte. After an interruption, run
    the same command again: it goes on with the next file. If a run has gone back, the newest step is the
    one that the run goes on from.

    URL and DST are paths or URLs. Each chunk is compared with its digest before it is written, and a step
    exists in DST once all of it is there. Files that DST has already are not copied again; another step of
    the same number stays. Exit 1 if a step is damaged or another step has its number.
    """
    from holdfast.cli.copy import run

    return run(source, target, every, log, dry_run)


@_verb(
    "holdfast prune runs/gpt --keep-last 3 --dry-run",
    "holdfast prune runs/gpt --keep-last 1 --keep-best eval_loss:2",
    "holdfast prune runs/gpt --keep-every 10000 --keep-newer 2d",
)
def prune(
    url: RootArgument,
    keep_last: Annotated[int | None, Option("Keep the newest N steps.", "N")] = None,
    keep_every: Annotated[int | None, Option("Keep every multiple of N.", "N")] = None,
    keep_best: Annotated[
        str | None, Option("Keep the best N by a metric.", "METRIC:N[:max]")
    ] = None,
    keep_newer: Annotated[str | None, Option("Keep newer steps (36h, 2d).", "TIME")] = None,
    dry_run: Annotated[bool, Option("Only show what would be deleted.")] = False,
) -> Result:
    """Delete steps that no option keeps.  Never deleted: the newest good step, the step from which records
    lead to the newest state, and pinned steps.
    """
    from holdfast.cli.prune import run

    return run(url, keep_last, keep_every, keep_best, keep_newer, dry_run=dry_run)


STEP_AND_LABEL = """The step, and a label for it; the label alone with --remove, and behind an address \
that names the step."""


@_verb(
    "holdfast pin runs/gpt 1000 best",
    "holdfast pin runs/gpt@newest good",
    "holdfast pin runs/gpt best --remove",
)
def pin(
    url: RootArgument,
    words: Annotated[list[str], Argument("STEP LABEL", STEP_AND_LABEL)],
    remove: Annotated[bool, Option("Take the label away.")] = False,
) -> Result:
    """Give a step a label. No training and no `prune` deletes a step with a label.

    A label names one step: if it named another, it moves. `holdfast ls` shows labels.
    """
    from holdfast.cli.pin import run

    return run(url, words, remove)


@_verb(
    "holdfast log runs/gpt",
    "holdfast log runs/gpt --json",
)
def log(url: RootArgument) -> Result:
    """List the records of a root.

    Exit 1 if files are damaged, if records that are newer than every full step cannot be replayed, or if
    there is no such root.
    """
    from holdfast.cli.log import run

    return run(url)


@_verb(
    "holdfast replay runs/gpt runs/gpt-at-1234 --to 1234",
    "holdfast log runs/gpt  # which steps are recorded",
)
def replay(
    url: RootArgument,
    into: Annotated[str, Argument("DST", "Root of the full step; made if missing.")],
    to: Annotated[int, Option("The recorded step.", "STEP")],
) -> Result:
    """Replay the recorded gradients from the nearest full step to STEP, and save the result.

    On the CPU, with the whole state in memory.  Optimizers of torch only.
    """
    from holdfast.cli.replay import run

    return run(url, into, to)


@_verb(
    "holdfast simulate 64 1024 16384 --days 30",
    "holdfast simulate 1024 --device-mtbf-hours 20000 --state 4GB --plot job.png",
)
def simulate(
    devices: Annotated[list[int], Argument("DEVICES...", "Sizes of the job: 10 1000 100000.")],
    days: Annotated[
        float | None, Option("Length of the job: 30, or as long as the trace.", "D")
    ] = None,
    device_mtbf_hours: Annotated[
        float, Option("Mean time between failures of a device.", "H")
    ] = 50_000.0,
    node_share: Annotated[float, Option("Share of failures that lose a node's memory.", "X")] = 0.5,
    shape: Annotated[float, Option("Weibull: below 1 failures come in bursts.", "K")] = 1.0,
    trace: Annotated[
        str | None, Option("Failures of the job: a CSV of hours,kind.", "FILE")
    ] = None,
    overhead: Annotated[float, Option("Share of time that saving may take.", "X")] = 0.03,
    estimate: Annotated[bool, Option("Let holdfast estimate the failure rates.")] = False,
    devices_per_node: Annotated[int, Option("", "N")] = 8,
    step_s: Annotated[float, Option("Time of a training step.", "S")] = 5.0,
    state: Annotated[str, Option("State per device.", "BYTES")] = "2GB",
    record: Annotated[str, Option("Record of a step per device.", "BYTES")] = "20MB",
    node_storage: Annotated[
        str, Option("Bandwidth to storage per node and second.", "BYTES")
    ] = "2GB",
    storage: Annotated[str, Option("Bandwidth to storage per second, in all.", "BYTES")] = "500GB",
    stall_s: Annotated[float, Option("Stall of a step by a snapshot.", "S")] = 0.05,
    record_stall: Annotated[float, Option("Stall of a step by a record, in steps.", "X")] = 0.01,
    restart_s: Annotated[
        float, Option("Time from a failure to a loaded state, by a restart.", "S")
    ] = 180.0,
    detect_s: Annotated[float, Option("Time to notice a failure, in place.", "S")] = 15.0,
    enter_s: Annotated[float, Option("Time until ranks can load again, in place.", "S")] = 30.0,
    standby: Annotated[int, Option("Standby nodes that replace lost ones.", "N")] = 1,
    repair_s: Annotated[float, Option("Time to replace a lost node.", "S")] = 600.0,
    seed: Annotated[int, Option("Seed of the failures.", "N")] = 0,
    plot: Annotated[str | None, Option("Draw a chart; needs matplotlib.", "FILE")] = None,
) -> Result:
    """Simulate a job with failures, protected by holdfast and in other ways, restarted and in place."""
    from holdfast.cli.simulate import check, run
    from holdfast.policy.cluster import Cluster

    check(days=days, shape=shape, seed=seed)
    clusters = [
        Cluster(
            devices=n, devices_per_node=devices_per_node, device_mtbf_hours=device_mtbf_hours,
            node_share=node_share, step_s=step_s, stall_s=stall_s, record_stall=record_stall,
            restart_s=restart_s, detect_s=detect_s, enter_s=enter_s, standby_nodes=standby,
            repair_s=repair_s, state_bytes=parse_size("--state", state),
            record_bytes=parse_size("--record", record),
            node_storage_bytes_per_s=parse_size("--node-storage", node_storage),
            storage_bytes_per_s=parse_size("--storage", storage),
        )
        for n in sorted(set(devices))
    ]  # fmt: skip
    asked = {"days": days, "shape": shape, "trace": trace, "seed": seed, "overhead": overhead,
             "estimate": estimate}  # fmt: skip
    return run(clusters, asked, plot)


ACTIONS = ("status", "start", "run", "stop", "clean")
MEANING = """status: show what the agent holds. start: run an agent in the background. run: be the agent, \
in the foreground. stop: end it; its snapshots stay for the next one. clean: free the memory of dead \
jobs."""


@_verb(
    "holdfast agent status",
    "holdfast agent start --budget 64GiB",
    "holdfast agent stop --free",
)
def agent(
    action: Annotated[str, Argument("ACTION", MEANING)],
    job: Annotated[str, Option("For clean: this job alone.", "JOB")] = "",
    host: Annotated[str, Option("This node's address for other nodes.", "HOST")] = "",
    budget: Annotated[str, Option("Memory for snapshots, such as 64GiB.", "SIZE")] = "",
    free: Annotated[bool, Option("For stop: free everything that is held.")] = False,
    tls: Annotated[bool, Option("For start and run: serve other nodes by TLS.")] = False,
) -> Result:
    """Manage the agent of this node and user."""
    from holdfast.cli.agent import run

    return run(action, job=job, host=host, budget=budget, free=free, tls=tls)


SHELL = "bash, zsh or fish: print its script. words: complete LINE, which the scripts call."


@_verb(
    'eval "$(holdfast completion bash)"                             # in ~/.bashrc',
    'eval "$(holdfast completion zsh)"               # in ~/.zshrc, after compinit',
    "holdfast completion fish > ~/.config/fish/completions/holdfast.fish",
)
def completion(
    what: Annotated[str, Argument("SHELL", SHELL)],
    line: Annotated[str | None, Argument("[LINE]", "For words: the line so far.")] = None,
) -> Result:
    """Print the script that completes verbs, options, and the steps and labels of a local root in a shell.

    In runs/gpt@ it completes steps and labels; elsewhere the shell completes the names of files.
    """
    from holdfast.cli.completion import run

    return run(what, line)


@_verb(
    "holdfast prove -- python train.py --root runs/gpt",
    "holdfast prove --ranks 1 -- torchrun --nproc-per-node 2 train.py --root r",
    'holdfast prove --state out --resume-with="--resume" -- python train.py',
)
def prove(
    command: Annotated[
        list[str],
        Argument("-- COMMAND...", "What starts the training; one word is a line for the shell."),
    ],
    steps: Annotated[int, Option("Train up to this step of the optimizer.", "N")] = 20,
    kill_at: Annotated[int | None, Option("Kill after this step; default: at random.", "N")] = None,
    kill: Annotated[str, Option("Kill all ranks, or one: all, one.", "WHICH")] = "all",
    resume_with: Annotated[str, Option("Arguments that a restart needs besides.", "ARGS")] = "",
    ranks: Annotated[int | None, Option("Go on with N ranks, too.", "N")] = None,
    then: Annotated[str, Option("Go on with this command, too.", "COMMAND")] = "",
    state: Annotated[
        list[str] | None, Option("A folder that the training writes; may be repeated.", "DIR")
    ] = None,
    seed: Annotated[int | None, Option("Of the steps at which runs are killed.", "S")] = None,
    tolerance: Annotated[
        float | None, Option("Share of its way that a tensor may be off, if not bit-exact.", "T")
    ] = None,
    patience: Annotated[float, Option("Longest time between two steps.", "SECONDS")] = 300.0,
    keep: Annotated[bool, Option("Keep what the runs have written.")] = False,
) -> Result:
    """Run a training whole, killed and resumed, and name the first thing that differs.

    The script is not changed, whatever it saves with. Each run has its own empty copy of the folder after
    --root, and of those that --state names. Compared are parameters, gradients, optimizer states and
    settings, batches, losses, generators, averages and counters, at each step on each rank, by digests.

    Exit 0 if everything is bit for bit the same, 1 if something is not, 2 if it could not be found out.
    """
    from holdfast.cli.prove import run

    return run(
        command=command, steps=steps, kill_at=kill_at, kill=kill, resume_with=resume_with, ranks=ranks,
        then=then, state=state or [], seed=seed, tolerance=tolerance, patience_s=patience, keep=keep,
    )  # fmt: skip


VERBS = {
    verb.run.__name__: verb
    for verb in (ls, inspect, verify, diff, plan, convert, copy, prune, pin, log, replay, simulate, agent,
                 completion, prove)
}  # fmt: skip
"""In the order in which the help lists them."""
