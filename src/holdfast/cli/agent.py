"""`holdfast agent ACTION`: the process that keeps this node's snapshots in memory."""

from __future__ import annotations

from typing import Annotated

from holdfast.cli.options import Argument, Option
from holdfast.cli.screen import Result

EXAMPLES = (
    "holdfast agent status",
    "holdfast agent start --budget 64GiB",
    "holdfast agent stop --free",
)
ACTIONS = ("status", "start", "run", "stop", "clean")
MEANING = """status: show what the agent holds. start: run an agent in the background. run: be the agent, \
in the foreground. stop: end it; its snapshots stay for the next one. clean: free the memory of dead \
jobs."""


def run(
    action: Annotated[str, Argument("ACTION", MEANING)],
    job: Annotated[str, Option("For clean: this job alone.", "JOB")] = "",
    host: Annotated[str, Option("This node's address for other nodes.", "HOST")] = "",
    budget: Annotated[str, Option("Memory for snapshots, such as 64GiB.", "SIZE")] = "",
    free: Annotated[bool, Option("For stop: free everything that is held.")] = False,
    tls: Annotated[bool, Option("For start and run: serve other nodes by TLS.")] = False,
) -> Result:
    """Manage the agent of this node and user."""
    from holdfast.cli.work import agent

    return agent.run(action, job=job, host=host, budget=budget, free=free, tls=tls)


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("agent")
