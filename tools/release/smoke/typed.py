"""What mypy must know of an installed composable_shard: the kinds of its names, and that the last line is wrong."""

import torch

import composable_shard as cs

plan: cs.ShardPlan = cs.make_plan(cs.fully_shard(torch.nn.Linear(2, 2)))
cs.PoolPolicy(budget="much")
