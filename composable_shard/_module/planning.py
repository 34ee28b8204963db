"""The methods of a sharded module that set how its plan is made."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from .._errors import ShardConfigTypeError
from .._plan.plan import ShardPlan
from .._policies import PoolPolicy, PrefetchPolicy
from .state import STATE


class Planning(TorchFSDPModule):
    """Policies of the plan. Set them on the root, the outermost sharded module, and on all ranks alike.

    A policy that is set between two forwards holds from the next one on. At the end of that forward, a rank whose
    policy differs from that of others raises `RankMismatchError`. If every rank has set a policy, all raise; if only
    some have, only these raise, and the others cannot go on without them.
    """

    def set_prefetch_policy(self, policy: PrefetchPolicy) -> None:
        """Set how far ahead groups are gathered. Explicit lists (`set_modules_to_forward_prefetch`) take precedence.

        With `PrefetchPolicy.auto` the second and third training step are measured, with every collective waited for
        where it is issued. From then on the schedule hides as much communication as it can. Two steps are measured
        again when groups have joined, and more and more rarely (after 64 steps, 128, 256...) to see whether times have
        changed; then the plan is made anew.

        Raises:
            ShardConfigTypeError: `policy` is no PrefetchPolicy.
            ShardConfigStateError: this is not the root.
        """
        _ask(self, "policy", PrefetchPolicy, policy, prefetch=policy)

    def set_pool_policy(self, policy: PoolPolicy) -> None:
        """Set how much memory unsharded parameters and communication buffers may take.

        Raises:
            ShardConfigTypeError: `policy` is no PoolPolicy.
            ShardConfigStateError: this is not the root.
            PoolBudgetError: a group does not fit into the budget; before the first forward, that forward raises it.
        """
        _ask(self, "policy", PoolPolicy, policy, pool=policy)

    def set_plan(self, plan: ShardPlan) -> None:
        """Follow a plan that was made before, or elsewhere: its order, its schedule and its policies.

        If forwards then run in another order, or a setter changes what is resharded, a new schedule is made under the
        plan's policies, and a warning says so, once.

        Raises:
            ShardConfigTypeError: `plan` is no ShardPlan.
            ShardConfigStateError: this is not the root.
            ShardConfigValueError: the plan is of another model; before the first forward, that forward raises it.
        """
        _ask(self, "plan", ShardPlan, plan, plan=plan, prefetch=None, pool=None)


def _ask(module: Any, argument: str, kind: type, value: object, **wanted: Any) -> None:
    if not isinstance(value, kind):
        raise ShardConfigTypeError(f"{argument}: expected a {kind.__name__}, got {type(value).__name__}")
    module.__dict__[STATE].ask(**wanted)
