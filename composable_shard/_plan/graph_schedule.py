"""What users and a plan say of a graph's communication, before any policy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from .schedule import ROOT_NAME

Listed = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class GraphSchedule:
    """What users and a plan say of a graph's communication, before any policy. Modules are FQNs below the root.

    Attributes:
        forward, backward: by module, those to gather when its forward, or backward, begins.
        kept: modules whose weights stay between forward and backward, and how many bytes these are.
        in_flight: by module, how many reductions may be in flight with its own; empty if no plan is followed.
        reduces_first: modules whose backward waits for reductions before it gathers.
    """

    forward: Listed = field(default_factory=dict)
    backward: Listed = field(default_factory=dict)
    kept: Mapping[str, int] = field(default_factory=dict)
    in_flight: Mapping[str, int] = field(default_factory=dict)
    reduces_first: Sequence[str] = ()

    def to_text(self) -> str:
        """As text, which compiled code can be guarded by; empty if nothing is said."""
        return "" if self == NOTHING_SAID else json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of_text(cls, text: str) -> GraphSchedule:
        """The inverse of `to_text`."""
        return cls(**json.loads(text)) if text else NOTHING_SAID

    @property
    def modules(self) -> set[str]:
        """All that it names, but for the root."""
        lists = [*self.forward.items(), *self.backward.items()]
        return {*self.kept, *self.in_flight, *(name for at, those in lists for name in (at, *those))} - {ROOT_NAME}


NOTHING_SAID = GraphSchedule()
