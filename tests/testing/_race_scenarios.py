"""Scenarios for `testing.races`: ways to shard and train a small decoder."""

from __future__ import annotations

import functools

from _race_settings import (
    copying_to_host,
    counting,
    debugging,
    extended,
    freeze,
    held,
    idle_memory_goes_back,
    in_two_dtypes,
    note,
    offloading,
    on_the_network,
    own_communication,
    parallelize,
    setting,
    shards_on_host,
    stepped_on_host,
    sums_of_ranks,
    three_quarters,
)
from _race_steps import (
    accumulate,
    accumulate_pieces,
    as_a_graph,
    blocks_in_turns,
    branches,
    checkpointed,
    drop_after_failure,
    evaluate_too,
    event_of_the_optimizer,
    fail_first,
    fail_to_gather,
    fail_to_reduce,
    fail_to_send,
    gather_elsewhere,
    hook_gradients,
    idle_memory_goes_back_on_another_stream,
    memory_goes_back_on_another_stream,
    optimizer_on_another_stream,
    read_a_kept_view,
    reduce_on_own_stream,
    reduce_on_two_streams,
    reshard_between,
    side_forward,
    side_in_turns,
    touch_gradients,
    two_backwards,
    unshard_by_hand,
)
from _race_training import HALF, MIXED, Scenario, decoder
from composable_shard import CommPolicy, PrefetchPolicy

REPLICAS = {"replicate": 2, "shard": 2}
OUTER = {"outer_sharding": "optimizer"}
UNEVEN = functools.partial(decoder, dim=18, heads=3, kv_heads=1)

SCENARIOS = {
    "default": Scenario(),
    "deep": Scenario(make=functools.partial(decoder, 3), steps=3),
    "packed": Scenario(transport="packed"),
    "deep-packed": Scenario(transport="packed", make=functools.partial(decoder, 3), steps=3),
    "plain": Scenario(transport="torch"),
    "half": Scenario({"mp_policy": HALF}),
    "mixed": Scenario({"mp_policy": MIXED}),
    "mixed-packed": Scenario({"mp_policy": MIXED}, transport="packed"),
    "low-bits": Scenario(prepare=setting("set_comm_policy", CommPolicy("fp8", "int8", block=8)), step=accumulate),
    "low-bits-packed": Scenario(
        {"mp_policy": MIXED},
        transport="packed",
        prepare=setting("set_comm_policy", CommPolicy("int8", "bf16", block=8)),
    ),
    "low-bits-between-replicas": Scenario(
        mesh=REPLICAS, prepare=setting("set_comm_policy", CommPolicy("bf16", "fp8", "int8", block=8))
    ),
    "keep-weights": Scenario({"reshard_after_forward": False}),
    "three-ahead": Scenario(
        make=functools.partial(decoder, 4), prepare=setting("set_prefetch_policy", PrefetchPolicy.depth(3))
    ),
    "accumulate": Scenario(step=accumulate),
    "evaluate": Scenario(step=evaluate_too),
    "gradient-hooks": Scenario(prepare=hook_gradients),
    "all-reduce-hook": Scenario(prepare=reduce_on_own_stream),
    "checkpoint": Scenario(prepare=checkpointed(use_reentrant=False)),
    "checkpoint-reentrant": Scenario(prepare=checkpointed(use_reentrant=True)),
    "gradients-touched": Scenario(step=touch_gradients),
    "two-backwards": Scenario(step=two_backwards),
    "budget": Scenario(make=functools.partial(decoder, 4), prepare=three_quarters),
    "held": Scenario(make=functools.partial(decoder, 4), prepare=held, steps=3),
    "held-packed": Scenario(
        {"mp_policy": MIXED}, transport="packed", make=functools.partial(decoder, 4), prepare=held, steps=3
    ),
    "few-ranks": Scenario({"reshard_after_forward": 2}),
    "few-ranks-by-hand": Scenario(
        {"reshard_after_forward": 2}, make=functools.partial(decoder, 6), prepare=reshard_between, steps=3
    ),
    "failing": Scenario(step=fail_first),
    "dropped-in-forward": Scenario(end=functools.partial(drop_after_failure, in_backward=False)),
    "dropped-in-backward": Scenario(end=functools.partial(drop_after_failure, in_backward=True)),
    "side-in-turns": Scenario(step=side_in_turns),
    "side-forward": Scenario(step=side_forward),
    "optimizer-event": Scenario(step=event_of_the_optimizer),
    "optimizer-on-another-stream": Scenario(step=optimizer_on_another_stream),
    "extensions-and-optimizer": Scenario(make=extended, step=optimizer_on_another_stream, steps=3),
    "another-stream": Scenario(step=memory_goes_back_on_another_stream, steps=1),
    "idle-memory": Scenario(prepare=idle_memory_goes_back),
    "kept-view": Scenario(prepare=read_a_kept_view),
    "own-memory": Scenario(prepare=setting("set_keep_unsharded_storage", True)),
    "idle-memory-on-another-stream": Scenario(
        prepare=idle_memory_goes_back, step=idle_memory_goes_back_on_another_stream
    ),
    "blocks-in-turns": Scenario(make=functools.partial(decoder, 4), prepare=blocks_in_turns),
    "blocks-in-turns-packed": Scenario(
        {"mp_policy": MIXED}, transport="packed", make=functools.partial(decoder, 4), prepare=blocks_in_turns
    ),
    "branches": Scenario(make=functools.partial(decoder, 4), prepare=branches),
    "branches-few-ranks": Scenario({"reshard_after_forward": 2}, make=functools.partial(decoder, 4), prepare=branches),
    "branches-counted": Scenario(make=functools.partial(decoder, 4), prepare=branches, around=counting),
    "by-hand": Scenario(step=unshard_by_hand),
    "replicas": Scenario(mesh=REPLICAS),
    "replicas-mixed": Scenario({"mp_policy": MIXED}, mesh=REPLICAS, step=accumulate_pieces),
    "outer-sharding": Scenario(OUTER, mesh=REPLICAS, steps=3),
    "outer-sharding-mixed": Scenario({**OUTER, "mp_policy": MIXED}, mesh=REPLICAS, step=accumulate_pieces),
    "outer-sharding-accumulate": Scenario(OUTER, mesh=REPLICAS, make=UNEVEN, step=accumulate),
    "outer-sharding-evaluate": Scenario(
        {**OUTER, "mp_policy": MIXED}, mesh=REPLICAS, transport="packed", step=evaluate_too
    ),
    "outer-sharding-low-bits": Scenario(
        OUTER,
        mesh=REPLICAS,
        prepare=setting("set_comm_policy", CommPolicy("bf16", "fp8", "int8", block=8, refresh="bf16")),
    ),
    "outer-sharding-few-ranks": Scenario({**OUTER, "reshard_after_forward": 2}, mesh={"replicate": 2, "shard": 4}),
    "outer-sharding-offload": Scenario(OUTER, mesh=REPLICAS, prepare=shards_on_host, around=offloading),
    "outer-sharding-two-streams": Scenario(OUTER, mesh=REPLICAS, step=reduce_on_two_streams),
    "outer-sharding-optimizer": Scenario(OUTER, mesh=REPLICAS, step=optimizer_on_another_stream),
    "outer-sharding-graph": Scenario(OUTER, mesh=REPLICAS, step=as_a_graph, steps=3),
    "outer-sharding-failing": Scenario(OUTER, mesh=REPLICAS, step=fail_first),
    "uneven": Scenario(make=UNEVEN),
    "uneven-packed": Scenario(make=UNEVEN, transport="packed"),
    "frozen": Scenario(make=lambda: freeze(decoder())),
    "tensor-parallel": Scenario(mesh={"dp": 2, "tp": 2}, axis="dp", parallelize=parallelize),
    "offload": Scenario(prepare=shards_on_host, around=offloading),
    "steps-on-host": Scenario(prepare=note, around=copying_to_host, optimizer=stepped_on_host),
    "extensions": Scenario(make=extended),
    "own-communication": Scenario(prepare=own_communication),
    "failing-communication": Scenario({"mp_policy": MIXED}, prepare=own_communication, step=fail_to_send, steps=1),
    "network-of-its-own": Scenario(around=on_the_network),
    "replicas-two-streams": Scenario(mesh=REPLICAS, step=reduce_on_two_streams),
    "two-dtypes": Scenario(make=in_two_dtypes, steps=3),
    "failing-reduction": Scenario(make=in_two_dtypes, step=fail_to_reduce),
    "failing-extension": Scenario(make=extended, step=fail_to_gather, steps=1),
    "two-streams": Scenario(step=reduce_on_two_streams),
    "two-streams-sums": Scenario(step=reduce_on_two_streams, around=sums_of_ranks),
    "two-streams-debugging": Scenario(step=reduce_on_two_streams, around=debugging),
    "graph": Scenario(step=as_a_graph),
    "few-ranks-elsewhere": Scenario({"reshard_after_forward": 2}, step=gather_elsewhere),
    "counted-memory": Scenario(around=counting),
    "sums-of-ranks": Scenario(around=sums_of_ranks),
    "debugging": Scenario(around=debugging),
}
