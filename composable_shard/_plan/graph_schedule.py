"""The part of a graph's communication that users or a plan prescribe, ahead of any policy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from .schedule import ROOT_NAME

Listed = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class GraphSchedule:
    """What users or a plan prescribe of a graph's communication, ahead of any policy. Modules are FQNs in the root.

    Attributes:
        forward, backward: by module, the modules to gather when its forward, or backward, begins.
        kept: by module, the bytes of weights that stay between forward and backward.
        in_flight: by module, how many reductions may be in flight, its own included; empty if no plan is followed.
        reduces_first: modules whose backward waits for reductions before it gathers.
    """

    forward: Listed = field(default_factory=dict)
    backward: Listed = field(default_factory=dict)
    kept: Mapping[str, int] = field(default_factory=dict)
    in_flight: Mapping[str, int] = field(default_factory=dict)
    reduces_first: Sequence[str] = ()

    def to_text(self) -> str:
        """This schedule as text, on which compiled code can be guarded; empty if nothing is prescribed."""
        return "" if self == NOTHING_SAID else json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of_text(cls, text: str) -> GraphSchedule:
        """The inverse of `to_text`."""
        return cls(**json.loads(text)) if text else NOTHING_SAID

    @property
    def modules(self) -> set[str]:
        """All modules that are named, but for the root."""
        lists = [*self.forward.items(), *self.backward.items()]
        return {*self.kept, *self.in_flight, *(name for at, those in lists for name in (at, *those))} - {ROOT_NAME}


NOTHING_SAID = GraphSchedule()
