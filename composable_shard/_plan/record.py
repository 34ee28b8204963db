"""What an iteration did. The engine writes a record and hands it back; nothing else flows upward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .schedule import Action, Kind
from .simulation import Times


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds, from the beginning of the iteration, in which the host did, or waited for, something of a group.

    `UNSHARD` and `REDUCE` are the issue, `WAIT` and `REDUCED` the waiting, `FORWARD` and `BACKWARD` the compute, in
    which the others lie.
    """

    kind: Kind
    fqn: str
    begin: float
    end: float


def own_seconds(spans: Sequence[Span]) -> dict[tuple[Kind, str], float]:
    """For each kind and group, the seconds of its spans without those of others that lie within them.

    Args:
        spans: in the order in which they began, as `Stopwatch.take` gives them.
    """
    found: dict[tuple[Kind, str], float] = {}
    open_: list[Span] = []
    for span in spans:
        while open_ and open_[-1].end <= span.begin:
            open_.pop()
        if open_:
            outer = open_[-1]
            found[outer.kind, outer.fqn] -= min(span.end, outer.end) - span.begin
        key = span.kind, span.fqn
        found[key] = found.get(key, 0.0) + span.end - span.begin
        open_.append(span)
    return found


@dataclass(frozen=True, slots=True)
class Record:
    """One iteration: from a forward, while no earlier one waits for its backward, to the next such forward.

    A backward ends the wait of its own forward and of all before it, as do a failed backward and an optimizer's step.

    Attributes:
        actions: what was done to the groups, in order of issue.
        live_bytes: bytes leased from the pool after each action (unsharded parameters and communication buffers); of a
            `SHRINK`, which takes some before it gives others back, at the most.
        order: FQNs of the groups in the order in which their forwards began, one entry a use.
        around: of groups that ran in the forward of another one than the root's, their FQN and that one's.
        times: seconds that groups took, by FQN, where they were measured.
        spans: when what was done, while the engine is watched.
    """

    actions: tuple[Action, ...]
    live_bytes: tuple[int, ...]
    order: tuple[str, ...]
    times: tuple[tuple[str, Times], ...] = ()
    spans: tuple[Span, ...] = ()
    around: tuple[tuple[str, str], ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were leased at once."""
        return max(self.live_bytes, default=0)

    def __str__(self) -> str:
        return "\n".join(str(action) for action in self.actions)
