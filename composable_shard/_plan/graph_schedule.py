"""The part of a plan that compiled graphs follow, by module: prefetching, and reductions in flight."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Listed = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class GraphSchedule:
    """The part of a plan that compiled graphs follow. Modules are FQNs in the root. Other modules have the defaults.

    Attributes:
        forward, backward: by module, the modules to gather when its forward or backward begins.
        in_flight: by module, the limit of reductions in flight, including its own.
        reduces_first: modules whose backward waits for reductions before it gathers.
        budget: the limit in bytes for unsharded weights and gradient buckets; None for no limit. Weights count from the
            launch of their gather (kept weights: from forward) to their last use, buckets until their reduction ends.
        kept: by module, the bytes of weights that stay unsharded between forward and backward, if there is a budget.
        frees_queued: whether gradient buckets take memory only until their reduction is queued.
    """

    forward: Listed = field(default_factory=dict)
    backward: Listed = field(default_factory=dict)
    in_flight: Mapping[str, int] = field(default_factory=dict)
    reduces_first: Sequence[str] = ()
    budget: int | None = None
    kept: Mapping[str, int] = field(default_factory=dict)
    frees_queued: bool = False

    def to_text(self) -> str:
        """This schedule as text, for guards of compiled code. Empty for the default schedule."""
        return "" if self == NOTHING_SAID else json.dumps(vars(self), sort_keys=True)

    @classmethod
    def of_text(cls, text: str) -> GraphSchedule:
        """The inverse of `to_text`."""
        return cls(**json.loads(text)) if text else NOTHING_SAID

    @property
    def modules(self) -> set[str]:
        """All modules that occur in `forward` and `backward`."""
        lists = [*self.forward.items(), *self.backward.items()]
        return {module for at, listed in lists for module in (at, *listed)}

    def gathered_by(self, backward: bool) -> dict[str, list[str]]:
        """For each module, the modules that gather it when they begin. Empty if it is gathered on demand."""
        lists = self.backward if backward else self.forward
        return {module: [at for at, listed in lists.items() if module in listed] for module in self.modules}


NOTHING_SAID = GraphSchedule()
