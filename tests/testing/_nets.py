"""The simulated network of the fabric tests."""

from __future__ import annotations

from composable_shard.testing import fabric

LATENCY, BANDWIDTH = 10e-6, 1e9
EXACT = [{"clock": "virtual"}, {"clock": "streams"}]


def net(world=4, **given):
    return fabric(world, **{"latency_s": LATENCY, "bandwidth_Bps": BANDWIDTH} | given)
