"""Plans and groups for tests of planning, created without a model, a process group or memory."""

from __future__ import annotations

import torch

from composable_shard._plan.arena import Lifetime
from composable_shard._plan.costs import Costs, Sizes, Times
from composable_shard._plan.group_plan import GroupPlan, ParamPlan
from composable_shard._plan.layout import Route
from composable_shard._plan.plan import ShardPlan
from composable_shard._plan.schedule import Step


def param_plan(fqn, shape, dtype=torch.float32, **kwargs):
    return ParamPlan(fqn, shape, dtype, dtype, dtype, **{"trains": True, **kwargs})


def group_plan(fqn, rows, **kwargs):
    prefix = f"{fqn}." if fqn else ""
    params = (param_plan(f"{prefix}weight", (rows, 256)), param_plan(f"{prefix}bias", (rows,)))
    settings = {"is_root": not fqn, "reshard_after_forward": bool(fqn), "route": Route("packed"), **kwargs}
    return GroupPlan(fqn, params, 2, "shard over 2", **settings)


def block_plan(rows=(256, 512, 768), **kwargs):
    groups = (group_plan("", 64), *(group_plan(f"blocks.{i}", n, **kwargs) for i, n in enumerate(rows)))
    return ShardPlan(groups, tuple(group.fqn for group in groups))


def costs_of(plan, forward=2e-4, backward=4e-4, latency=1e-5, bandwidth=2e9, **kwargs):
    fqns = [group.fqn for group in plan.groups]
    return Costs.of(
        latency=latency,
        bandwidth=bandwidth,
        forward=dict.fromkeys(fqns, forward),
        backward=dict.fromkeys(fqns, backward),
        **kwargs,
    )


def random_model(rng, blocks):
    """Steps, sizes and times of a root with `blocks` blocks of different sizes.

    A few blocks are frozen, stay unsharded, or reduce first. If the number of blocks is odd, reductions use memory only
    until they are queued, and nothing waits for them.
    """
    queued = bool(blocks % 2)
    first = rng.random() < 0.3 and not queued
    steps = [Step("", True, False, True)]
    steps += [Step(f"b{i}", False, rng.random() < 0.9, rng.random() < 0.95, False, first) for i in range(blocks)]
    speed = 2 ** rng.uniform(-2, 2)
    sizes, times = {}, {}
    for step in steps:
        weights = 512 * rng.randint(1, 40)
        landing, reduction = rng.choice([weights, weights, 0]), weights * rng.choice([1, 1, 2])
        sizes[step.fqn] = Sizes(weights, landing, reduction, frees_queued=queued)
        forward, moved = weights * speed * 2 ** rng.uniform(-1, 1) * 1e-6, 1e-4 + weights * 1e-6
        times[step.fqn] = Times(forward, 2 * forward, moved, moved)
    return steps, sizes, times


def random_lives(rng, groups, depth, kept=0.0, uneven=8.0):
    """Lifetimes of a step of a root with a chain of groups, whose sizes differ by a factor of up to 2**uneven."""
    ticks, turn = 4, 4 * groups
    lives, end = [], 2 * turn + 16
    around = int(2 ** rng.uniform(10, 18))
    lives += [Lifetime("weights root", around, 0, end - 4), Lifetime("reduction root", around, end - 4, end)]
    for i in range(groups):
        nbytes = int(2 ** rng.uniform(10, 10 + uneven))
        landing = nbytes if rng.random() < 0.7 else nbytes // 3
        runs, again = ticks * i, 2 * turn - ticks * (i + 1)
        first, second = max(0, runs - ticks * depth) + 1, max(turn, again - ticks * depth) + 1
        gathers = [(first, again + 3)] if rng.random() < kept else [(first, runs + 3), (second, again + 3)]
        for opened, closed in gathers:
            arrives = max(opened + 1, runs if opened == first else again)
            lives.append(Lifetime(f"weights {i}", nbytes, opened, closed))
            lives.append(Lifetime(f"landing {i}", landing, opened, arrives))
        lives.append(Lifetime(f"reduction {i}", nbytes * rng.choice([1, 1, 2]), again + 3, again + 3 + 2 * ticks))
    return lives


def all_issues(bare, place=0, least=0):
    """Generate all choices of events for the gathers of a step, in order."""
    if place == len(bare.gathers):
        yield []
        return
    gather = bare.gathers[place]
    for event in range(max(least, bare.first_event(gather)), gather.event + 1):
        for rest in all_issues(bare, place + 1, event):
            yield [event, *rest]
