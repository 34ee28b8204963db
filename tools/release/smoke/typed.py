"""A file for mypy: it must know the types of an installed composable_shard and reject only the last line."""

import torch

import composable_shard as cs

plan: cs.ShardPlan = cs.make_plan(cs.fully_shard(torch.nn.Linear(2, 2)))
cs.PoolPolicy(budget="much")
