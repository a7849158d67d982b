"""`holdfast agent ACTION`: the process that keeps this node's snapshots in memory."""

from __future__ import annotations

import time
from contextlib import suppress

import msgspec

from holdfast.base.errors import AgentUnreachable, UsageError
from holdfast.base.host import process_state
from holdfast.base.sizes import parse_size
from holdfast.base.suggest import did_you_mean
from holdfast.cli.screen import Result, say, table
from holdfast.cli.verbs import ACTIONS
from holdfast.cli.words import dim, good, many, size
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.client import Client, check_can_serve
from holdfast.tiers.memory.node.remains import free_remains

OPTIONS_OF = {
    "start": ("--host", "--budget", "--tls"),
    "run": ("--host", "--budget", "--tls"),
    "stop": ("--free",),
    "clean": ("--job",),
}


def run(action: str, *, job: str, host: str, budget: str, free: bool, tls: bool) -> Result:
    """See `holdfast.cli.verbs`."""
    if action not in ACTIONS:
        hint = did_you_mean(action, ACTIONS) or ", ".join(ACTIONS)
        raise UsageError(f"there is no action {action!r}", hint=hint)
    _check_options(
        action, {"--job": job, "--host": host, "--budget": budget, "--free": free, "--tls": tls}
    )
    client = Client(deadline_s=60.0)
    limit = parse_size("--budget", budget) if budget else 0
    if budget and not limit:
        raise UsageError(f"--budget {budget!r}: must be more than 0")
    if action == "run":
        raise SystemExit(_be_the_agent(client, host, limit, tls))
    if action == "start":
        _start(client, host, limit, tls)
    if action == "clean":
        return _clean(client, job)
    if not _is_there(client):
        return _nobody(client)
    if action == "stop":
        return _stop(client, free)
    report: w.AgentReport = client.ask(w.Status(), w.AgentReport)
    return Result(
        lambda: {"running": True, **msgspec.structs.asdict(report)}, lambda: _show(report)
    )


def _check_options(action: str, given: dict[str, object]) -> None:
    """UsageError for an option that the action does not have."""
    for name, value in given.items():
        if value and name not in OPTIONS_OF.get(action, ()):
            hint = "`--help` says which action has it"
            raise UsageError(f"`holdfast agent {action}` has no {name}", hint=hint)


def _is_there(client: Client) -> bool:
    """Whether an agent answers.  AgentUnreachable if one is silent at two looks: busy nodes are slow."""
    found = client.look()
    if found == "silent" and (found := client.look()) == "silent":
        raise client.silence()
    return found == "there"


def _start(client: Client, host: str, budget: int, tls: bool) -> None:
    """Start the agent; an agent that a training has started stays from now on too."""
    client.start(host, budget, stay=True, tls=tls)
    found: w.AgentReport = client.ask(w.Status(), w.AgentReport)
    if host not in ("", found.address.rpartition(":")[0]) or (tls and not found.tls):
        how = "by TLS" if found.tls else "without TLS"
        raise UsageError(
            f"the agent of this node, process {found.pid}, serves at {found.address} already, {how}",
            hint="`holdfast agent stop`, then start again; its snapshots stay",
        )
    client.ask(w.Stay(budget))


def _be_the_agent(client: Client, host: str, budget: int, tls: bool) -> int:
    check_can_serve()
    from holdfast.tiers.memory.node.agent import main

    if client.look() != "nobody":
        raise UsageError(
            f"this node has an agent already, process {client.pid}",
            hint="`holdfast agent stop` ends it; its snapshots stay",
        )
    options = [f"--host={host}"] * bool(host) + ["--tls"] * tls
    return main(["--stay", f"--budget={budget}", *options])


def _stop(client: Client, free: bool) -> Result:
    agent, until = client.agent(), time.monotonic() + client.deadline_s
    report: w.AgentReport = client.ask(w.Status(), w.AgentReport)
    running = [job.job for job in report.jobs if job.trainers]
    client.ask(w.Stop(free))
    while free and process_state(*agent) == "runs":  # the agent deletes before it ends
        if time.monotonic() > until:
            raise AgentUnreachable(f"the agent, process {agent[0]}, has not ended: it may hang")
        time.sleep(0.05)
    return Result(
        lambda: {"stopped": True, "freed": free, "running": running},
        lambda: say("\n".join(["stopped", *_go_on(running, free)])),
    )


def _go_on(running: list[str], free: bool) -> list[str]:
    """Say what becomes of the jobs that are running."""
    if not running:
        return []
    return [
        f"still running: {', '.join(running)}; the next snapshot starts another agent, and what this one "
        f"held {'is freed' if free else 'stays for it'}"
    ]


def _nobody(client: Client) -> Result:
    left = _left(client)

    def show() -> None:
        say(f"no agent at {client.root}")
        if left:
            say(f"earlier agents left {size(left)} there; `holdfast agent clean` frees them")

    data = {"running": False, "directory": str(client.root), "bytes": left}
    return Result(lambda: data, show, 1)


def _left(client: Client) -> int:
    """Return the bytes of memory that earlier agents have left."""
    found = 0
    for path in client.root.glob("jobs/*/*"):
        with suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


def _clean(client: Client, job: str) -> Result:
    """Free the memory of dead jobs, by the agent if there is one."""
    freed: list[str] = []
    if _is_there(client):
        freed = client.ask(w.Clean(job), list[str])
    elif _left(client):
        freed = free_remains(client.root, job)
    elif job:
        raise UsageError(f"job {job} is not known here", hint="no agent runs, and none left memory")
    names = f": {', '.join(freed)}" if freed else ""
    return Result(lambda: {"freed": freed}, lambda: say(f"{many(len(freed), 'job')} freed{names}"))


def _show(report: w.AgentReport) -> None:
    say(f"agent {report.pid} at {report.address}", "bold")
    say(f"{size(report.used)} of {size(report.budget)} in use")
    if not report.jobs:
        say(dim("no snapshots"))
        return
    rows = [
        (
            j.job,
            size(j.bytes),
            j.images,
            ", ".join(map(str, j.steps)) or "none",
            good(many(len(j.trainers), "process", "processes"))
            if j.trainers
            else f"none, since {int(time.time() - j.since)} s",
            j.root,
        )
        for j in report.jobs
    ]
    table(("job", ">size", ">images", "steps", "running", "root"), rows, indent=0)


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("agent")
