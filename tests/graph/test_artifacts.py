"""Compiled code saved by another process: which models and ranks it fits, and that they start warm with it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import composable_shard as cs
from _cached_process import cache_counts, model_of, step
from _compiling import same_gradients, under_inductor
from _pool import POOL, simulated
from composable_shard import testing
from composable_shard._compile.artifacts import _about, _differences
from composable_shard._plan.layout import first_alike
from composable_shard.report import watch_graphs

with warnings.catch_warnings():  # Inductor's own imports warn
    warnings.simplefilter("ignore")
    import torch._inductor.compile_fx
    from torch._inductor.utils import fresh_cache

SCRIPT = Path(__file__).parents[1] / "_cached_process.py"
LIMIT_S = 500


@contextlib.contextmanager
def empty_caches():
    """Give this process its own compile caches, and set counters to zero."""
    with fresh_cache():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        yield
        torch._dynamo.reset()


def two_ahead():
    model = model_of()
    model.set_prefetch_policy(cs.PrefetchPolicy.depth(2))
    return model


def in_double():
    return model_of(mp_policy=cs.MixedPrecisionPolicy(param_dtype=torch.float64))


def with_other_modules():
    model = model_of()
    model.append(torch.nn.Tanh())
    return model


OTHERS = {
    "plan, from the file to this model: group (root): shape of 1.weight": lambda: model_of((8, 8), (8, 4)),
    "plan, from the file to this model: group 1: added": lambda: model_of((8, 8), (8, 8), (8, 6)),
    "plan, from the file to this model: group 0: reshard after forward": lambda: model_of(gathers_again=False),
    "schedule: policies": two_ahead,
    "modules: (2): Tanh() here, ) in the file": with_other_modules,
    "plan, from the file to this model: group (root): dtype float32 -> float32 as float64": in_double,
}


def steps_warm(rank, world, path):
    """Train on gloo with code that was compiled by another process, the only rank of a simulated world."""
    eager, model = model_of(), model_of()
    with empty_caches():
        cs.load_cache_artifacts(model, path)
        run = cs.compile(model)
        losses = step(eager, rank), step(run, rank)
        counts = cache_counts()
        torch._dynamo.reset()
        with watch_graphs() as found:
            step(cs.compile(model_of()), rank)
        assert [report.direction for report in found] == ["forward", "backward"], "not from the cache"
    torch.testing.assert_close(*losses)
    with under_inductor(1e-5):
        same_gradients(eager, model)
    refusals = []
    for make in OTHERS.values():
        with pytest.raises(cs.errors.ArtifactMismatchError) as caught:
            cs.load_cache_artifacts(make(), path)
        refusals.append(caught.value.differences)
    return counts, refusals


@pytest.mark.matrix
def test_all_ranks_start_warm_with_code_compiled_by_one_process(tmp_path):
    path = tmp_path / "compiled"
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "caches"), "OMP_NUM_THREADS": "1"}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # each compile thread is a process that imports torch
    done = subprocess.run(
        [sys.executable, SCRIPT, path], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("bytes") == found.pop("size") == path.stat().st_size
    assert found == {"hits": 0, "misses": 3, "bypassed": 0}  # an AOTAutograd entry, and a graph in each direction
    for counts, refusals in POOL.run("test_artifacts:steps_warm", 2, {"path": str(path)}, LIMIT_S):
        assert counts == {"hits": 1, "misses": 0, "bypassed": 0}
        for expected, differences in zip(OTHERS, refusals, strict=True):
            assert len(differences) == 1, differences
            assert differences[0].startswith(expected), (expected, differences)


def test_ranks_with_uneven_shards_need_separate_files():
    about = []
    for rank in (0, 1, 0):
        with testing.fake(2, rank):
            about.append(_about(model_of((8, 8), (8, 7))))
    assert list(_differences(about[0], about[2])) == []
    (difference,) = _differences(about[1], about[0])
    assert difference.startswith("pieces of 1.weight, 1.bias: on rank 1 (this rank) they have other shapes")
    another = {"composable_shard": "another", "plan": "{}"}  # its keys differ, and its plans may
    (difference,) = _differences(about[1], about[0] | another)
    assert difference.startswith("composable_shard: ")


@simulated(world=2)
def test_an_invalid_or_incomplete_file_is_refused(rank, world):
    model = model_of()
    with pytest.raises(cs.errors.ShardConfigValueError, match=r"was not written by save_cache_artifacts"):
        cs.load_cache_artifacts(model, SCRIPT)
    with pytest.raises(cs.errors.ShardConfigValueError, match="contains no sharded module"):
        _about(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("sizes", "world", "expected"),
    [([8, 4], 2, [0, 0]), ([7], 2, [0, 1]), ([9], 4, [0, 0, 0, 3]), ([9, 4], 4, [0, 0, 0, 3]), ([1], 3, [0, 1, 1])],
)
def test_ranks_with_equal_shard_shapes_share_compiled_code(sizes, world, expected):
    assert [first_alike(sizes, world, rank) for rank in range(world)] == expected
