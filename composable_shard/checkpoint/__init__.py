"""Checkpoints that survive anything: saved whole or not at all, checked when they are loaded, at any number of ranks.

from composable_shard import checkpoint

state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "random": checkpoint.RandomState(), "epoch": 0}
if checkpoint.latest("runs/1") is not None:
    checkpoint.load("runs/1", state)
...
checkpoint.save("runs/1", state, step=step, keep=3)  # or checkpoint.async_save, which goes on beside the training
"""

from ._async import async_save as async_save
from ._load import Loaded as Loaded
from ._load import load as load
from ._pending import PendingSave as PendingSave
from ._pending import wait as wait
from ._pruning import Verified as Verified
from ._pruning import latest as latest
from ._pruning import prune as prune
from ._pruning import verify as verify
from ._random import RandomState as RandomState
from ._save import save as save
from ._state import PerRank as PerRank
from ._state import Stateful as Stateful

__all__ = [
    "Loaded",
    "PendingSave",
    "PerRank",
    "RandomState",
    "Stateful",
    "Verified",
    "async_save",
    "latest",
    "load",
    "prune",
    "save",
    "verify",
    "wait",
]
