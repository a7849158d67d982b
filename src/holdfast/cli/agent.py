"""`holdfast agent ACTION`: the process that keeps this node's snapshots in memory."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Annotated

import typer

from holdfast.cli.screen import AsJson, dim, good, many, print_json, say, size, table
from holdfast.errors import AgentUnreachable, UsageError
from holdfast.here import fate
from holdfast.memory.node import words as w
from holdfast.memory.node.client import Client, check_can_serve
from holdfast.near import near
from holdfast.sizes import parse_size

ACTIONS = ("status", "start", "run", "stop", "clean")

Action = Annotated[
    str,
    typer.Argument(
        metavar="ACTION",
        help="status: what is held. start: have an agent in the background. run: be the agent, in the "
        "foreground. stop: end it; what it holds stays for the next one. clean: free what dead jobs left.",
    ),
]
Job = Annotated[str, typer.Option("--job", help="For clean: this job alone.")]
Host = Annotated[str, typer.Option("--host", help="This node's address for other nodes.")]
Budget = Annotated[
    str, typer.Option("--budget", metavar="SIZE", help="Memory for snapshots, such as 64GiB.")
]
Tls = Annotated[bool, typer.Option("--tls", help="For start and run: serve other nodes by TLS.")]
Free = Annotated[bool, typer.Option("--free", help="For stop: free everything that is held.")]


def run(
    action: Action,
    job: Job = "",
    host: Host = "",
    budget: Budget = "",
    free: Free = False,
    tls: Tls = False,
    as_json: AsJson = False,
) -> None:
    """Look after the agent of this node and user."""
    if action not in ACTIONS:
        hint = near(action, ACTIONS) or ", ".join(ACTIONS)
        raise UsageError(f"there is no action {action!r}", hint=hint)
    _check_options(
        action, {"--job": job, "--host": host, "--budget": budget, "--free": free, "--tls": tls}
    )
    client = Client(deadline_s=60.0)
    limit = parse_size("--budget", budget) if budget else 0
    if budget and not limit:
        raise UsageError(f"--budget {budget!r}: an agent without memory holds nothing")
    if action == "run":
        raise typer.Exit(_be_the_agent(client, host, limit, tls))
    if action == "start":
        _start(client, host, limit, tls)
        action = "status"
    if action == "clean":
        _clean(client, job, as_json)
    elif (found := client.look()) != "there":
        if found == "silent":
            raise client.silence()
        _nobody(client, as_json)
    elif action == "stop":
        agent, until = client.agent(), time.monotonic() + client.deadline_s
        client.ask(w.Stop(free))
        while free and fate(*agent) == "runs":  # it deletes
            if time.monotonic() > until:
                raise AgentUnreachable(f"process {agent[0]} has not ended: it may hang")
            time.sleep(0.05)
        print_json({"stopped": True, "freed": free}) if as_json else say("stopped")
    else:
        _show(client.ask(w.Status(), w.AgentReport), as_json)


def _check_options(action: str, given: dict[str, object]) -> None:
    """UsageError for an option that does not count here: nobody shall believe that it does."""
    serving = ("--host", "--budget", "--tls")
    known = {"start": serving, "run": serving, "stop": ("--free",), "clean": ("--job",)}
    for name, value in given.items():
        if value and name not in known.get(action, ()):
            raise UsageError(
                f"`holdfast agent {action}` has no {name}", hint="`--help` says whose it is"
            )


def _start(client: Client, host: str, budget: int, tls: bool) -> None:
    """Start the agent; also one that a training has started stays from now on."""
    client.start(host, budget, stay=True, tls=tls)
    found: w.AgentReport = client.ask(w.Status(), w.AgentReport)
    if host not in ("", found.address.rpartition(":")[0]) or (tls and not found.tls):
        how = "by TLS" if found.tls else "without TLS"
        raise UsageError(
            f"the agent of this node, process {found.pid}, serves at {found.address} already, {how}",
            hint="`holdfast agent stop`, then start again; what it holds stays",
        )
    client.ask(w.Stay(budget))


def _be_the_agent(client: Client, host: str, budget: int, tls: bool) -> int:
    check_can_serve()
    from holdfast.memory.node.agent import main

    if client.look() != "nobody":
        raise UsageError(
            f"this node has an agent already, process {client.pid}",
            hint="`holdfast agent stop` ends it; what it holds stays",
        )
    options = [f"--host={host}"] * bool(host) + ["--tls"] * tls
    return main(["--stay", f"--budget={budget}", *options])


def _nobody(client: Client, as_json: bool) -> None:
    left = _left(client)
    if as_json:
        print_json({"running": False, "directory": str(client.root), "bytes": left})
    else:
        say(f"no agent at {client.root}")
        if left:
            say(f"{size(left)} lie there; `holdfast agent clean` frees them")
    raise typer.Exit(1)


def _left(client: Client) -> int:
    """Bytes of memory that agents before have left."""
    found = 0
    for path in client.root.glob("jobs/*/*"):
        with suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


def _clean(client: Client, job: str, as_json: bool) -> None:
    """Free what lies there, also without an agent: one is started for it and leaves by itself."""
    client.start()
    freed = client.ask(w.Clean(job), list[str])
    if as_json:
        print_json({"freed": freed})
    else:
        say(f"{many(len(freed), 'job')} freed" + (f": {', '.join(freed)}" if freed else ""))


def _show(report: w.AgentReport, as_json: bool) -> None:
    if as_json:
        print_json({"running": True, **_plain(report)})
        return
    say(f"agent {report.pid} at {report.address}", style="bold")
    say(f"{size(report.used)} of {size(report.budget)} in use")
    if not report.jobs:
        say(dim("it holds nothing"))
        return
    rows = [
        (
            j.job,
            size(j.bytes),
            str(j.images),
            ", ".join(map(str, j.steps)) or "none",
            good(many(len(j.trainers), "process", "processes"))
            if j.trainers
            else f"none, since {int(time.time() - j.since)} s",
            j.root,
        )
        for j in report.jobs
    ]
    table(("job", ">size", ">images", "steps", "running", "root"), rows, indent=0)


def _plain(report: w.AgentReport) -> dict[str, object]:
    import msgspec

    found: dict[str, object] = msgspec.to_builtins(report)
    return found


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("agent")
