"""The parts that the saves of a run share: the thread that agrees and copies, the plan, the open window.

A save reuses the description of the state, and with it the plan, of the save before, if every tensor is the
same object or has the same placement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from holdfast.base.threads import Worker
from holdfast.core.group import Group
from holdfast.core.layout import Mesh
from holdfast.live.saving.handle import Save
from holdfast.live.saving.operation import Companion, Draft, Keeper, Request, SaveOperation
from holdfast.live.saving.planning import Planner
from holdfast.live.state.agreed import Sample, describe_tensors
from holdfast.live.state.copy_timing import CopyTiming
from holdfast.live.state.named import Collected, LiveTensor
from holdfast.live.state.snapshot import SetAside
from holdfast.live.state.window import Gate, resting

if TYPE_CHECKING:
    from holdfast.live.state.carrying import CarryBuffer
    from holdfast.live.state.replicas import Replicas


MUCH_BYTES = 1 << 30
"""Bytes copied at each call above which the user gets a notice."""


def _nothing(op: SaveOperation, error: BaseException | None) -> None:
    """Do nothing at the end of an operation."""


class Saver:
    """Runs save operations, one after the other.  All ranks call its methods in the same order."""

    def __init__(
        self,
        group: Group,
        *,
        mesh: Mesh | None = None,
        deadline_s: float = 600.0,
        replicas: Literal["once", "verify", "trust"] = "once",
    ) -> None:
        self.group = group
        self.deadline_s = deadline_s
        self.verifies = replicas == "verify"
        """True if each save compares all replicas."""
        self.replicas: Replicas | None = None
        """The replicas that ranks compare; None with one rank."""
        if group.size > 1:
            from holdfast.live.state.replicas import Replicas

            self.replicas = Replicas(replicas)
        self.room: CarryBuffer | None = None
        """Memory for tensors that are not copied when the window ends; None unless it was asked for."""
        self.planner = Planner(group, mesh, deadline_s)
        self.aside: SetAside = {}
        """Tensors that were set aside at the last call."""
        self.news: list[str] = []
        """Warnings for the user."""
        self.copy_timing = CopyTiming()
        self.is_last = False
        """True once training has ended, so no save has to hold it."""
        self._is_aside_told = False
        self._number = 0
        self.gate = Gate()
        self._described: tuple[list[Any], dict[str, str], bytes] = (
            [],
            {},
            describe_tensors(Collected()),
        )
        """`_lie_of` each tensor, the aliases, and the description that was made from both."""
        self._worker = Worker("holdfast-saving")

    def carry_up_to(self, carry_bytes: int) -> None:
        """Give tensors that are not copied when the window ends so much memory."""
        if carry_bytes:
            from holdfast.live.state.carrying import CarryBuffer

            self.room = CarryBuffer(carry_bytes)

    # -- training thread --------------------------------------------------------------------------

    def operation(
        self,
        keeper: Keeper,
        request: Request,
        *,
        companion: Companion | None = None,
        on_end: Callable[[SaveOperation, BaseException | None], None] = _nothing,
    ) -> SaveOperation:
        """Return a new operation.  Each must be given to `begin`, in the same order."""
        self._number += 1
        return SaveOperation(
            self, keeper, self._number, request, companion=companion, on_end=on_end
        )

    def begin(self, op: SaveOperation, describe_live: Callable[[], Collected]) -> Save:
        """Start an operation; return its handle.  Blocks as `SaveOperation.collect`, and until all is
        copied if the next step might not wait for the copy.  The rest runs in the background, where an
        operation also ends after an interrupt (Ctrl-C), so that no rank waits for it."""
        is_snapshot = not (op.request.busy or op.request.is_rehearsal)
        try:
            if is_snapshot:
                self.gate.look(op.step)
            op.collect(describe_live)
            live, is_held = op.live, op.must_hold and op.error is None and not self.is_last
            if not op.request.busy:  # else the copy under way still needs its window
                self.gate.window = op.window
        except BaseException as interrupt:
            op.interrupted_by(interrupt)
            raise
        finally:
            self._worker.submit(op.guarded, op.run)
        if is_snapshot and self.gate.is_bypassed:
            from holdfast.live.saving.blocking_saves import hold_bypassed

            is_held &= not hold_bypassed(self, op)
        if not self._is_aside_told and sum(t.nbytes for t in self.aside.values()) >= MUCH_BYTES:
            from holdfast.live.saving.blocking_saves import tell_set_aside

            self._is_aside_told = True
            tell_set_aside(self)
        if is_held:
            op.window.wait()
            self.copy_timing.watch(live)
            op.window.at_end = self.copy_timing.look
        return op.save

    def settle(self, limit_s: float | None) -> None:
        """Wait until no operation agrees or copies; TimeoutError if that takes longer than `limit_s`.

        Without a limit it ends, too, because every wait of an operation has a deadline.
        """
        with resting():
            self._worker.settle(limit_s)

    def close(self) -> None:
        """Let every later optimizer step pass."""
        self.gate.close()
        self._worker.shutdown()

    # -- saving thread ----------------------------------------------------------------------------

    def describe(self, live: Collected) -> bytes:
        """Describe the state; reuse the last description if no tensor or placement has changed."""
        tensors, aliases, description = self._described
        now = [_lie_of(t) for t in live.tensors.values()]
        is_same = len(now) == len(tensors) and all(map(_is_same, now, tensors))
        if not is_same or live.aliases != aliases:
            description = describe_tensors(live)
            self._described = now, live.aliases, description
        return description

    def sample(self, op: SaveOperation, description: bytes) -> Sample | None:
        """Take a sample of the replicas at the moment of a save, to be compared; None without a plan, which
        states what is replicated, or if this rank has no live state to sample."""
        plan = self.planner.plan
        if self.replicas is None or plan is None or plan.description != description:
            return None
        if op.request.busy or op.error is not None or op.replica is not None:
            return None
        return self.replicas.sample(op.moment, self.aside, plan.placement, self.group.rank)

    def make_room(self, draft: Draft) -> None:
        """Allocate the memory for carrying over, if it was asked for."""
        if self.room is not None and draft.layout is not None:
            _, copies = draft.layout
            self.room.make(source.device for source in copies.sources)


def _lie_of(tensor: LiveTensor) -> Any:
    """Return a value to compare a tensor's placement with: the tensor itself if it is steady; otherwise all
    of its description, because it must not be kept alive."""
    if tensor.steady:
        return tensor
    parts = tuple((part.shape, part.box, part.cuts) for part in tensor.parts)
    return tensor.name, tensor.state, tensor.placed.dtype, parts


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, tuple) and one == other)
