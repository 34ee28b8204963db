"""The methods of a sharded module that say how its plan is made."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from .._errors import ShardConfigTypeError
from .._plan.plan import ShardPlan
from .._policies import PoolPolicy, PrefetchPolicy
from .state import STATE


class Planning(TorchFSDPModule):
    """Policies of the plan. They are the root's, the outermost sharded module's; set them on all ranks alike.

    Set between two forwards, they hold for the next one, at the end of which a rank that finds that others have set
    something else raises `RankMismatchError`: all ranks do where all have set something; where only some have, these
    do, and the others cannot go on without them.
    """

    def set_prefetch_policy(self, policy: PrefetchPolicy) -> None:
        """How far ahead groups are gathered; lists of modules (`set_modules_to_forward_prefetch`) go before it.

        With `PrefetchPolicy.auto` the second and third training step are measured, every collective waited for where it
        is issued; from then on what can be hidden is. Two steps are measured again when groups have joined, and more
        and more rarely (after 64 steps, 128, 256...), to see whether times have changed; then the plan is made anew.

        Raises:
            ShardConfigTypeError: `policy` is no PrefetchPolicy.
            ShardConfigStateError: this is not the root.
        """
        _ask(self, "policy", PrefetchPolicy, policy, prefetch=policy)

    def set_pool_policy(self, policy: PoolPolicy) -> None:
        """How much memory unsharded parameters and communication may take.

        Raises:
            ShardConfigTypeError: `policy` is no PoolPolicy.
            ShardConfigStateError: this is not the root.
            PoolBudgetError: a group does not fit into the budget; raised by the first forward, if there was none yet.
        """
        _ask(self, "policy", PoolPolicy, policy, pool=policy)

    def set_plan(self, plan: ShardPlan) -> None:
        """Follow a plan that was made before, or elsewhere: its order, its schedule and its policies.

        Where forwards then run in another order, or a setter changes what is resharded, the schedule is made anew by
        the plan's policies; a warning says so, once.

        Raises:
            ShardConfigTypeError: `plan` is no ShardPlan.
            ShardConfigStateError: this is not the root.
            ShardConfigValueError: the plan is of another model; raised by the first forward, if there was none yet.
        """
        _ask(self, "plan", ShardPlan, plan, plan=plan, prefetch=None, pool=None)


def _ask(module: Any, argument: str, kind: type, value: object, **wanted: Any) -> None:
    if not isinstance(value, kind):
        raise ShardConfigTypeError(f"{argument}: expected a {kind.__name__}, got {type(value).__name__}")
    module.__dict__[STATE].ask(**wanted)
