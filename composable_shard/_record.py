"""What an iteration did. The engine writes a record and hands it back; nothing else flows upward."""

from __future__ import annotations

from dataclasses import dataclass

from ._schedule import Action
from ._simulation import Times
from ._timing import Span


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
