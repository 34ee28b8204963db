"""What an iteration did. Records are all that the engine reports back to the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .codec import read, written
from .schedule import Action, Kind
from .simulation import Times

JSON_VERSION = 1


@dataclass(frozen=True, slots=True)
class Span:
    """A period, in seconds from the beginning of the iteration, in which the host worked on, or waited for, a group.

    Spans of `UNSHARD` and `REDUCE` are the issue of a collective, of `WAIT` and `REDUCED` the waiting for it. Those of
    `FORWARD` and `BACKWARD` are the compute, and contain the others.
    """

    kind: Kind
    fqn: str
    begin: float
    end: float


def own_seconds(spans: Sequence[Span]) -> dict[tuple[Kind, str], float]:
    """For each kind and group, the seconds of its spans, less those of the spans within them.

    Args:
        spans: in the order in which they began, as `Stopwatch.take` gives them.
    """
    seconds: dict[tuple[Kind, str], float] = {}
    open_: list[Span] = []
    for span in spans:
        while open_ and open_[-1].end <= span.begin:
            open_.pop()
        if open_:
            outer = open_[-1]
            seconds[outer.kind, outer.fqn] -= min(span.end, outer.end) - span.begin
        key = span.kind, span.fqn
        seconds[key] = seconds.get(key, 0.0) + span.end - span.begin
        open_.append(span)
    return seconds


@dataclass(frozen=True, slots=True)
class Record:
    """One iteration: from an outermost forward that begins while no earlier one waits for its backward, to the next.

    A backward ends the wait of its own forward and of all earlier ones. So do a failed backward and an optimizer step.

    Attributes:
        actions: what was done to the groups, in order of issue.
        live_bytes: bytes leased from the pool after each action (unsharded parameters and communication buffers); for
            `SHRINK`, which leases pieces before it gives the weights back, the most during it.
        order: FQNs of the groups in the order in which their forwards began, one entry a use.
        times: seconds that groups took, by FQN, where they were measured.
        spans: what the host did when, if that was asked for.
        around: FQNs of groups that ran in the forward of another group but the root's, each with that group.
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

    def to_json(self) -> str:
        """The record as JSON, for `from_json`."""
        return written(self, "record", JSON_VERSION)

    @classmethod
    def from_json(cls, text: str) -> Record:
        """The record that `to_json` wrote, equal to it.

        Raises:
            ShardConfigValueError: the text is no record, one of another version, or has other fields.
        """
        return read(cls, text, "record", JSON_VERSION)

    def __str__(self) -> str:
        return "\n".join(str(action) for action in self.actions)
