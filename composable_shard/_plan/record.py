"""Records of iterations: the feedback from the engine to the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .codec import read, written
from .costs import Times
from .schedule import Action, Kind

JSON_VERSION = 1


@dataclass(frozen=True, slots=True)
class Span:
    """A time span in which the host worked on a group or waited for it, in seconds since the iteration began.

    Spans of `UNSHARD` and `REDUCE` issue a collective. Spans of `WAIT` and `REDUCED` wait for it. Spans of `FORWARD`
    and `BACKWARD` are compute, and contain the other spans.
    """

    kind: Kind
    fqn: str
    begin: float
    end: float


def own_seconds(spans: Sequence[Span]) -> dict[tuple[Kind, str], float]:
    """Seconds of the spans of each kind and group, excluding nested spans.

    Args:
        spans: spans ordered by their beginning, as in `Stopwatch.spans`.
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
    """One iteration.

    An iteration begins with an outermost forward while no earlier forward waits for its backward. It ends when the next
    iteration begins. A forward stops waiting when a backward runs (its own or that of a later forward), when a backward
    fails, or at an optimizer step.

    Attributes:
        actions: the actions on groups, in order of issue.
        live_bytes: bytes leased from the pool after each action (unsharded parameters and communication buffers). For
            `SHRINK`, which leases pieces before it releases the weights, the peak during the action.
        order: FQNs of the groups in the order in which their forwards began, one entry per use.
        times: measured seconds of groups, by FQN.
        spans: what the host did at which time, if this was requested.
        around: FQNs of groups that ran in the forward of another group (except the root), each with that group.
    """

    actions: tuple[Action, ...]
    live_bytes: tuple[int, ...]
    order: tuple[str, ...]
    times: tuple[tuple[str, Times], ...] = ()
    spans: tuple[Span, ...] = ()
    around: tuple[tuple[str, str], ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Peak of leased bytes."""
        return max(self.live_bytes, default=0)

    def to_json(self) -> str:
        """The record as JSON, for `from_json`."""
        return written(self, "record", JSON_VERSION)

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Read a record that `to_json` wrote. It is equal to the original.

        Raises:
            ShardConfigValueError: the text is not a record, has another version, or has missing or unknown fields.
        """
        return read(cls, text, "record", JSON_VERSION)

    def __str__(self) -> str:
        return "\n".join(str(action) for action in self.actions)
