"""Choose the classes of an engine and its parts, by the tools that are active.

Steps without tools must cost nothing. An engine and its parts therefore change their classes when a forward, a backward
or an `unshard()` of a user begins. While a profiler is active, or actions are logged, they use the classes of
`profiling.py`. A package above the engine can choose other classes (`engine.CHOOSERS`), as `_fsdp2` does for memory
trackers. Otherwise they use the plain classes.
"""

from __future__ import annotations

from .._torch.core import is_profiled
from .actions import Actions
from .engine import CHOOSERS, Engine
from .gradients import GradientFlow
from .profiling import LoggedRecorder, ProfiledActions, ProfiledEngine, ProfiledFlow, ProfiledRecorder
from .recorder import Recorder, is_logged
from .reductions import Reductions

# In the order of `Engine.parts`.
_PLAIN = Engine, Actions, Recorder, Reductions, GradientFlow
_PROFILED = ProfiledEngine, ProfiledActions, ProfiledRecorder, Reductions, ProfiledFlow
_LOGGED = ProfiledEngine, ProfiledActions, LoggedRecorder, Reductions, ProfiledFlow


def follow_tools(engine: Engine) -> None:
    """Give an engine and its parts the classes that the active tools need."""
    chosen = [classes for choose in tuple(CHOOSERS) if (classes := choose(engine)) is not None]
    classes = chosen[0] if chosen else _LOGGED if is_logged() else _PROFILED if is_profiled() else _PLAIN
    if tuple(map(type, engine.parts())) != classes:
        for part, kind in zip(engine.parts(), classes, strict=True):
            change_class(part, kind)


def change_class(part: object, kind: type) -> None:
    """Change the class of an object to a subclass that a tool needs, or back."""
    part.__class__ = kind
