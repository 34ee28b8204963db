"""Steps that are captured in a CUDA graph.

`torch.cuda.graph` around forward, loss and backward records the work that streams get, without running it. A replay
runs the recorded work again, and no Python. So in a capture:

- Work inside and outside must not depend on each other through the state of the engine. Whenever a capture begins or
  ends, all groups are resharded, and the pool is drained (`Capturing.follow`): a group that was gathered outside would
  put no gather into the graph, and each replay would use old weights. Events are dropped. The device is idle when a
  capture begins, and its work runs only in replays.
- Memory comes from the graph's private pool, and is freed at the end of backward. So nothing outside refers to it,
  except `.grad`, accumulated gradients and results, which the next replay writes again.
- Nothing may need the host: no vote, measurement or check of replicas, and no value that the host reads. Decisions that
  depend on values are taken from the last eager step. The graph then contains an assertion that they still hold.

A replay increases no version and runs no hook. So once an engine was captured by other code than `make_graphed_step`,
weights that were kept unsharded count as stale in each root forward (`Actions.may_be_replayed`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import torch
from torch.optim import Optimizer

from .._group.group import ParamGroup
from .._group.phases import SHARDED
from .._memory.offload import OffloadedOptimizer
from .._memory.pool import BufferPool
from .._torch import debug
from .._torch.capturing import capture_number
from ..errors import ShardConfigStateError
from .actions import Actions
from .stopwatch import Stopwatch

_CAPTURED = "while a CUDA graph is being captured"
_WHERE = f"a sharded model runs {_CAPTURED}"
_NOT_FINISHED = (
    "a backward was captured in a CUDA graph, but its finalize_backward() was not, so replays would set no .grad; call "
    "finalize_backward() in the captured step"
)


class Capturing:
    """Keeps the work of one engine in a capture apart from its work outside.

    Args:
        actions: the actions of the engine.
        pool: its memory.

    Attributes:
        number: number of the capture in which the engine has worked last; 0 if that was outside of captures.
        stepped: the groups that an optimizer has stepped in the last capture.
        optimizers: the optimizers that have stepped some in it, by id.
        changed_at: an event of a user after the last parameter change; see `Engine.changed_at`.
        counts: for `stats`: steps of `make_graphed_step` by kind.
    """

    def __init__(self, actions: Actions, pool: BufferPool) -> None:
        self.number = 0
        self.stepped: set[ParamGroup] = set()
        self.optimizers: dict[int, Optimizer] = {}
        self._is_known = False  # whether the next capture is one of `make_graphed_step`, which reports its replays
        self.changed_at: torch.Event | None = None
        self._changed_in = 0  # number of the capture in which it was set
        self.counts = Counter(captures=0, replays=0, eager_steps=0)
        self._actions, self._pool = actions, pool
        self._watch: Stopwatch | None = None  # the stopwatch outside of captures

    def follow(self) -> None:
        """Notice that a capture has begun or ended. Called before the engine begins any work.

        Raises:
            ShardConfigStateError: the model has a feature that cannot be captured.
        """
        now = capture_number(self._pool.memory.device)
        if now != self.number:
            self._cross(now)

    def _cross(self, now: int) -> None:
        actions = self._actions
        if now:
            _check_features(actions.groups)
            if not self._is_known:
                actions.note_capture()
        self._leave_reductions(now)
        self._switch_stopwatch(now)
        self.number = now
        self.stepped.clear()
        self.optimizers.clear()
        for group in actions.groups:
            group.forget_events()
        self._pool.cross(now)
        for group in actions.groups:
            if group.phase is not SHARDED and not group.running:
                actions.reshard(group)
        self._leave_reserved()
        self.drain()
        actions.parameters_changed()  # the first gather begins after the work that is queued now, and so in the capture

    def _leave_reductions(self, now: int) -> None:
        """Leave no reduction in flight when a capture begins or ends. Those of a failed capture are discarded.

        Raises:
            ShardConfigStateError: the program has not finished a backward before a capture (`finalize_backward`).
        """
        reductions = self._actions.reductions
        if not reductions.in_flight:
            return
        if now and not self.number:
            raise ShardConfigStateError(
                f"{_WHERE}, but reductions of an earlier backward are in flight; call finalize_backward() before the "
                "capture"
            )
        reductions.forget_events()
        self._actions.discard_reductions()

    def follow_end_by_hand(self) -> None:
        """Do the same as `follow`, before the program finishes a backward itself.

        Raises:
            ShardConfigStateError: that backward was captured, and its end is not.
        """
        number = self.number
        was_in_flight = bool(self._actions.reductions.in_flight)
        self.follow()
        if number and number != self.number and was_in_flight:
            raise ShardConfigStateError(_NOT_FINISHED)

    def _switch_stopwatch(self, now: int) -> None:
        """Time nothing in a capture, because the host reads the times of events."""
        recorder = self._actions.recorder
        if now and not self.number:
            self._watch = recorder.watch
            recorder.time_by(None)
        elif not now and recorder.watch is None:  # otherwise a user has turned it on since
            recorder.time_by(self._watch)

    def _leave_reserved(self) -> None:
        """Release memory that is reserved for the next gather: a graph must not gather into memory from outside.

        Raises:
            ShardConfigStateError: in a capture: code keeps views of such memory.
        """
        sharded = [group for group in self._actions.groups if group.phase is SHARDED]
        kept = _names(group for group in sharded if not group.leave_reserved())
        if self.number and kept:
            raise ShardConfigStateError(
                f"{_WHERE}, but code keeps views of unsharded parameters from outside of the graph ({kept}), for "
                "example in the graph of an earlier loss; delete them before the capture"
            )

    def note_change(self, event: torch.Event | None) -> None:
        """Set `changed_at`. The event counts only in the capture in which it was set: others cannot wait for it."""
        self.changed_at, self._changed_in = event, capture_number(self._pool.memory.device)

    def take_change(self) -> torch.Event | None:
        """Return the event of `note_change` for a forward that begins, and forget it."""
        event, self.changed_at = self.changed_at, None
        return event if self._changed_in == self.number else None

    def check_forward(self, replaced: bool, has_plan: bool) -> None:
        """Check a captured forward that begins.

        Args:
            replaced: whether parameters were replaced or converted since the last one.
            has_plan: whether an eager step has made the plan that it follows.

        Raises:
            ShardConfigStateError: an eager step must run first.
        """
        if replaced or not has_plan:
            why = "parameters were replaced or converted since its last step"
            raise ShardConfigStateError(
                f"{_WHERE}, but {why if replaced else 'its plan is made in the first step that trains'}; run one step "
                "eagerly before the capture, with the same code"
            )

    def count(self, kind: str) -> None:
        """Count a step of `make_graphed_step`."""
        self.counts[kind] += 1

    def expect(self, is_next: bool) -> None:
        """Set whether the next capture is one of `make_graphed_step`. It may not use this engine."""
        self._is_known = is_next
        if is_next:
            self.stepped.clear()
            self.optimizers.clear()

    def drain(self) -> None:
        """Free all memory of the pool that is not in use."""
        for group in self._actions.groups:
            if group.phase is SHARDED:
                group.leave_slots()
        self._pool.drain()

    def end(self) -> None:
        """At the end of a backward, or of a forward without one: in a capture, leave no memory of the graph behind."""
        if self.number:
            self.drain()

    def end_step(self) -> None:
        """At the end of a captured step.

        Raises:
            ShardConfigStateError: its backward is not finished.
        """
        if self.number:
            self.end()  # compiled graphs do not tell when a backward ends
            if self._actions.reductions.in_flight:
                self._actions.discard_reductions()
                raise ShardConfigStateError(_NOT_FINISHED)

    def before_step(self, optimizer: Optimizer | None, groups: Iterable[ParamGroup]) -> None:
        """In a capture: note that an optimizer steps these groups or others, and check that it can be captured.

        Raises:
            ShardConfigStateError: a learning rate is a number, or the optimizer keeps its step count on the host.
        """
        now = capture_number(self._pool.memory.device)
        if now and self._is_known:
            self.follow()  # the step may begin with the optimizer
        if not now or now != self.number:
            return
        if optimizer is None:
            raise ShardConfigStateError(
                f"a compiled optimizer step runs {_CAPTURED}, and its settings cannot be checked; step outside of the "
                "graph, or do not compile the step"
            )
        _check_step(optimizer, self._pool.memory.device)
        self.stepped.update(groups)
        self.optimizers[id(optimizer)] = optimizer


def _check_step(optimizer: Optimizer, device: torch.device) -> None:
    if isinstance(optimizer, OffloadedOptimizer):
        fix = "keep it on the device (offload_optimizer)"
        raise ShardConfigStateError(_about_step(optimizer, "the host copies its offloaded state", fix))
    for group in optimizer.param_groups:
        if "lr" in group:
            _check_rate(optimizer, group["lr"], device)
        if group.get("capturable") is False:
            fix = "pass capturable=True"
            raise ShardConfigStateError(_about_step(optimizer, "it counts its steps on the host", fix))


def _check_rate(optimizer: Optimizer, rate: object, device: torch.device) -> None:
    if not isinstance(rate, torch.Tensor) or rate.device.type != device.type:
        kind = "a tensor on the CPU" if isinstance(rate, torch.Tensor) else "a Python number"
        fix = f"pass lr=torch.tensor(..., device={device.type!r}), and change it with fill_()"
        raise ShardConfigStateError(_about_step(optimizer, f"its learning rate is {kind}", fix))


def _about_step(optimizer: Optimizer, problem: str, fix: str) -> str:
    return (
        f"{type(optimizer).__name__}.step() runs {_CAPTURED}, but {problem}, so all replays "
        f"would use the value of the capture; {fix}, or step after the replay, outside of the graph"
    )


# By property of a group: why it cannot be captured, and what to do.
_REFUSED: Sequence[tuple[Callable[[ParamGroup], bool], str, str]] = (
    (attrgetter("offloads"), "the host waits for copies of its offloaded parameters", "remove offload_policy"),
    (
        attrgetter("options.keep_storage"),
        "set_keep_unsharded_storage(True) keeps unsharded parameters in memory from outside of the graph",
        "set it to False",
    ),
    (
        attrgetter("rounds_gradients"),
        "its gradients are rounded with random numbers that the host seeds for each step",
        "remove the reduction from comm_policy",
    ),
)


def _check_features(groups: Sequence[ParamGroup]) -> None:
    if debug.debugging:
        raise ShardConfigStateError(f"{_WHERE}, but debug mode reads values on the host; call set_debug(False)")
    for has, why, fix in _REFUSED:
        if named := _names(filter(has, groups)):
            raise ShardConfigStateError(f"{_WHERE}, but {why} ({named}); {fix}, or do not capture")


def _names(groups: Iterable[ParamGroup]) -> str:
    return ", ".join([group.name for group in groups][:3])
