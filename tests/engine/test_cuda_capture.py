"""An eager step in a CUDA graph is an error, and the next step is exact."""

from __future__ import annotations

import pytest

import composable_shard as cs
from _decoders import Training
from _pool import distributed
from composable_shard._engine import engine


@distributed(world=2)
def test_a_forward_during_cuda_graph_capture_is_an_error_and_the_next_step_is_exact(rank, world):
    run = Training(rank, world)
    run.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "captures", lambda device: True)
        with pytest.raises(cs.errors.ShardConfigError, match=r"while a CUDA graph is being captured.*reduce-overhead"):
            run.forward()
    run.goes_on_exactly()
