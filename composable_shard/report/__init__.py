"""Explanations of plans, figures, traces of steps, and compiled graphs as text.

Figures need matplotlib (extra `plot`). Traces need no other package.
"""

from composable_shard._graph.graphs import Gather as Gather
from composable_shard._graph.graphs import GraphReport as GraphReport
from composable_shard._graph.guard import FailedGuard as FailedGuard
from composable_shard._graph.guard import WatchedGraphs as WatchedGraphs
from composable_shard._graph.guard import watch_graphs as watch_graphs
from composable_shard._integrations.loggers import TrainingLog as TrainingLog
from composable_shard._integrations.loggers import log_to as log_to
from composable_shard.report._compiled_step import CompiledStep as CompiledStep
from composable_shard.report._compiled_step import compiled_step as compiled_step
from composable_shard.report._explain import Explanation as Explanation
from composable_shard.report._explain import explain as explain
from composable_shard.report._plan_memory import memory as memory
from composable_shard.report._step_time import time as time
from composable_shard.report._timeline import timeline as timeline

__all__ = [
    "CompiledStep",
    "Explanation",
    "FailedGuard",
    "Gather",
    "GraphReport",
    "TrainingLog",
    "WatchedGraphs",
    "compiled_step",
    "explain",
    "log_to",
    "memory",
    "time",
    "timeline",
    "watch_graphs",
]
