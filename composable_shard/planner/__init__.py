"""Predict memory and step time of sharding strategies before a run, also for machines that are not available.

    advice = cs.planner.advise("llama3-8b", devices=8, machine="h100")  # an `Advice`
    print(advice.reason)

`KNOWN` maps the names that ``machine=`` accepts to a `Machine`, and `NAMED` maps names of models to a `Shape`.
"""

from .._wrap import repeated_blocks as repeated_blocks
from .advise import Advice as Advice
from .advise import Estimate as Estimate
from .advise import advise as advise
from .checkpointing import checkpoint_modules as checkpoint_modules
from .machine import KNOWN as KNOWN
from .machine import Link as Link
from .machine import Machine as Machine
from .picture import draw as draw
from .shape import NAMED as NAMED
from .shape import Shape as Shape
from .strategies import Layout as Layout
from .strategies import Strategy as Strategy

__all__ = [
    "KNOWN",
    "NAMED",
    "Advice",
    "Estimate",
    "Layout",
    "Link",
    "Machine",
    "Shape",
    "Strategy",
    "advise",
    "checkpoint_modules",
    "draw",
    "repeated_blocks",
]
