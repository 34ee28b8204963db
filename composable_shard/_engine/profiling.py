"""Ranges for torch's profiler, with the names that torch's FSDP2 uses, and a log of all actions.

While a profiler is active, or the logger ``composable_shard.engine`` has level DEBUG, the engine and its parts use the
classes below, which put ranges around their work. `tools.py` chooses the classes, so steps without a profiler or log
pay no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from .._comm.copies import Gradients
from .._group.group import ParamGroup
from .._group.phases import AWAY
from .._plan.schedule import Action, Kind
from .._torch.core import current_backward
from .actions import Actions
from .backward import BackwardPass, Token
from .engine import Engine
from .gradients import GradientFlow
from .node import Outputs, Use
from .recorder import LOG, NO_ARGUMENT, Recorder

T = TypeVar("T")
_ACTIONS = {
    Kind.UNSHARD: "all_gather",
    Kind.WAIT: "all_gather_copy_out",
    Kind.REDUCE: "post_backward_reduce",
    Kind.REDUCED: "post_backward_rs_wait",
}
record: Callable[[str], AbstractContextManager[Any]] = torch.profiler.record_function


def range_of(label: str, group: ParamGroup) -> AbstractContextManager[Any]:
    """A range named after a group and, if the module has several groups, the number of ranks that shard it."""
    fqn, _, on_other_mesh = group.fqn.partition(" on ")
    name = f"FSDP::{label} ({fqn})" if fqn else f"FSDP::{label}"
    return record(f"{name} [pg={group.shard_size}]" if on_other_mesh or group.companions else name)


class ProfiledRecorder(Recorder):
    """Runs actions in profiler ranges."""

    def act(self, kind: Kind, group: ParamGroup, work: Callable[..., T], argument: Any = NO_ARGUMENT) -> T:
        label = _ACTIONS.get(kind)
        if label is None:
            return super().act(kind, group, work, argument)
        with range_of(label, group):
            return super().act(kind, group, work, argument)


class LoggedRecorder(ProfiledRecorder):
    """Logs actions before they begin, in the notation of records: ``UNSHARD blocks.0``."""

    def act(self, kind: Kind, group: ParamGroup, work: Callable[..., T], argument: Any = NO_ARGUMENT) -> T:
        LOG.debug("%s", Action(kind, group.fqn))
        return super().act(kind, group, work, argument)


class ProfiledActions(Actions):
    """Actions in profiler ranges."""

    def prefetch(self, groups: Sequence[ParamGroup]) -> None:
        direction = "backward" if current_backward() >= 0 else "forward"
        for group in groups:
            if group.phase in AWAY:
                with record(f"FSDP::{direction}_prefetch for {group.fqn}"):
                    super().prefetch((group,))

    def begin_backward(
        self, use: Use, outputs: Outputs, missed: Sequence[ParamGroup], following: Sequence[ParamGroup]
    ) -> None:
        with range_of("pre_backward", use.group):
            super().begin_backward(use, outputs, missed, following)

    def end_use(self, group: ParamGroup, following: ParamGroup | None) -> None:
        with range_of("post_backward_reshard", group):
            super().end_use(group, following)


class ProfiledFlow(GradientFlow):
    """A gradient flow in profiler ranges."""

    def _reduce_or_accumulate(self, group: ParamGroup, gradients: Gradients) -> None:
        with range_of("post_backward_accumulate", group):
            super()._reduce_or_accumulate(group, gradients)


class ProfiledEngine(Engine):
    """An engine whose events run in profiler ranges."""

    profiled = True

    def _begin_forward(self) -> None:
        with record("FSDP::root_pre_forward"):
            super()._begin_forward()

    def before_forward(self, group: ParamGroup) -> tuple[Use, Outputs] | None:
        with range_of("pre_forward", group):
            return super().before_forward(group)

    def after_forward(self, group: ParamGroup, copied: Sequence[torch.Tensor] = (), failed: bool = False) -> None:
        with range_of("post_forward", group):
            super().after_forward(group, copied, failed)

    def _end_backward(self, now: BackwardPass, token: Token) -> None:
        with record("FSDP::root_post_backward_callback"):
            super()._end_backward(now, token)
