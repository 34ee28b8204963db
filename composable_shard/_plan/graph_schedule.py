"""The part of a plan that compiled graphs follow, by module: what is gathered ahead, and reductions in flight."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Listed = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class GraphSchedule:
    """The part of a plan that compiled graphs follow. Modules are FQNs in the root; those not named have defaults.

    Attributes:
        forward, backward: by module, the modules to gather when its forward, or backward, begins.
        in_flight: by module, how many reductions may be in flight, its own included.
        reduces_first: modules whose backward waits for reductions before it gathers.
        budget: the most bytes that weights may take from the launch of their gather, or from forward on, to their last
            use, and buckets of gradients until their reduction is over; None for no limit.
        kept: by module, the bytes of weights that stay between forward and backward, if there is a budget.
        frees_queued: whether buckets of gradients take memory only until their reduction is queued, as on a stream.
    """

    forward: Listed = field(default_factory=dict)
    backward: Listed = field(default_factory=dict)
    in_flight: Mapping[str, int] = field(default_factory=dict)
    reduces_first: Sequence[str] = ()
    budget: int | None = None
    kept: Mapping[str, int] = field(default_factory=dict)
    frees_queued: bool = False

    def to_text(self) -> str:
        """This schedule as text, on which compiled code can be guarded; empty if nothing is prescribed."""
        return "" if self == NOTHING_SAID else json.dumps(vars(self), sort_keys=True)

    @classmethod
    def of_text(cls, text: str) -> GraphSchedule:
        """The inverse of `to_text`."""
        return cls(**json.loads(text)) if text else NOTHING_SAID

    @property
    def modules(self) -> set[str]:
        """All modules that are named in lists."""
        lists = [*self.forward.items(), *self.backward.items()]
        return {module for at, listed in lists for module in (at, *listed)}

    def gathered_by(self, backward: bool) -> dict[str, list[str]]:
        """For each module, those at whose beginning it is gathered; none if it is gathered on demand."""
        lists = self.backward if backward else self.forward
        return {module: [at for at, listed in lists.items() if module in listed] for module in self.modules}


NOTHING_SAID = GraphSchedule()
