"""Composable, per-module parameter sharding for PyTorch."""

import sys as _sys
from importlib import import_module as _import_module
from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from . import errors as errors
from ._api import fully_shard as fully_shard
from ._api import last_record as last_record
from ._compile.artifacts import load_cache_artifacts as load_cache_artifacts
from ._compile.artifacts import save_cache_artifacts as save_cache_artifacts
from ._compile.compiled import compile as compile  # noqa: A004 - named like torch.compile
from ._compile.compiled import keep_from_dynamo as _keep_from_dynamo
from ._faults.replicas import broadcast_state as broadcast_state
from ._faults.replicas import check_replicas as check_replicas
from ._graphed.step import GraphedStep as GraphedStep
from ._graphed.step import make_graphed_step as make_graphed_step
from ._integrations.install import install as install
from ._integrations.install import uninstall as uninstall
from ._module.forward_methods import register_fsdp_forward_method as register_fsdp_forward_method
from ._module.gradients import average_by_tokens as average_by_tokens
from ._module.gradients import clip_grad_norm_ as clip_grad_norm_
from ._module.gradients import total_tokens as total_tokens
from ._module.methods import GradientReductionHandle as GradientReductionHandle
from ._module.methods import share_comm_ctx as share_comm_ctx
from ._module.module import FSDPModule as FSDPModule
from ._module.module import UnshardHandle as UnshardHandle
from ._module.status import drift as drift
from ._module.status import empty_pool as empty_pool
from ._module.status import explain_out_of_memory as explain_out_of_memory
from ._module.status import make_plan as make_plan
from ._module.status import stats as stats
from ._module.status import watch as watch
from ._plan.costs import Costs as Costs
from ._plan.plan import ShardPlan as ShardPlan
from ._plan.record import Record as Record
from ._plan.schedule import Action as Action
from ._policies import AllGather as AllGather
from ._policies import CommPolicy as CommPolicy
from ._policies import CPUOffloadPolicy as CPUOffloadPolicy
from ._policies import DataParallelMeshDims as DataParallelMeshDims
from ._policies import DiskOffloadPolicy as DiskOffloadPolicy
from ._policies import FSDPMeshInfo as FSDPMeshInfo
from ._policies import HostOffloadPolicy as HostOffloadPolicy
from ._policies import HSDPMeshInfo as HSDPMeshInfo
from ._policies import MixedPrecisionPolicy as MixedPrecisionPolicy
from ._policies import OffloadPolicy as OffloadPolicy
from ._policies import PoolPolicy as PoolPolicy
from ._policies import PrefetchPolicy as PrefetchPolicy
from ._policies import ReduceScatter as ReduceScatter
from ._policies import ShardPlacementResult as ShardPlacementResult
from ._torch.debug import set_debug as set_debug
from ._torch.ragged import Ragged as Ragged
from ._wrap import shard_auto as shard_auto
from ._wrap import shard_by_class as shard_by_class
from ._wrap import shard_by_size as shard_by_size

try:
    __version__ = _version("composable-shard")
except _PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0.0.0"

if _TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import optim as optim
    from . import planner as planner
    from . import report as report
    from . import testing as testing
    from . import weights as weights

# These are imported when they are used first, so that `import composable_shard` takes less time.
_IMPORTED_WHEN_USED = {"checkpoint", "optim", "planner", "report", "testing", "weights"}

_keep_from_dynamo(_sys.modules, __name__)
__all__ = sorted(name for name in globals() if not name.startswith("_") and name != "errors")


def __getattr__(name: str) -> _Any:
    if name not in _IMPORTED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _import_module(f"{__name__}.{name}")
    _keep_from_dynamo(_sys.modules, __name__)  # also modules of other folders that it has imported
    return module


def __dir__() -> list[str]:
    return sorted({*globals(), *_IMPORTED_WHEN_USED})
