"""Save and load checkpoints: committed atomically, verified by checksums, loadable on any number of ranks.

from composable_shard import checkpoint

state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "random": checkpoint.RandomState(), "epoch": 0}
if checkpoint.latest("runs/1") is not None:
    checkpoint.load("runs/1", state)
...
checkpoint.save("runs/1", state, step=step, keep=3)  # or checkpoint.async_save, which writes in the background
"""

from ._async import async_save as async_save
from ._dcp import export_dcp as export_dcp
from ._dcp import import_dcp as import_dcp
from ._exchange import Imported as Imported
from ._full.optimizer import full_optimizer_state_dict as full_optimizer_state_dict
from ._full.optimizer import load_full_optimizer_state_dict as load_full_optimizer_state_dict
from ._full.parameters import full_parameters as full_parameters
from ._full.state import full_state_dict as full_state_dict
from ._full.state import iter_full_state as iter_full_state
from ._full.state import load_full_state_dict as load_full_state_dict
from ._huggingface import export_safetensors as export_safetensors
from ._huggingface import import_safetensors as import_safetensors
from ._load import Loaded as Loaded
from ._load import load as load
from ._pending import PendingSave as PendingSave
from ._pending import wait as wait
from ._pruning import Verified as Verified
from ._pruning import latest as latest
from ._pruning import prune as prune
from ._pruning import verify as verify
from ._random import RandomState as RandomState
from ._rounding import RoundingState as RoundingState
from ._save import save as save
from ._state import PerRank as PerRank

__all__ = [
    "Imported",
    "Loaded",
    "PendingSave",
    "PerRank",
    "RandomState",
    "RoundingState",
    "Verified",
    "async_save",
    "export_dcp",
    "export_safetensors",
    "full_optimizer_state_dict",
    "full_parameters",
    "full_state_dict",
    "import_dcp",
    "import_safetensors",
    "iter_full_state",
    "latest",
    "load",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "prune",
    "save",
    "verify",
    "wait",
]
