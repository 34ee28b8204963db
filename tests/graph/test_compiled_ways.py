"""Ways to compile a sharded model: Inductor, block by block, with graph breaks. Unsharded models are not affected."""

from __future__ import annotations

import copy
import sys
import warnings
from types import FunctionType

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import composable_shard as cs
from _compiling import LIMIT_S, even, graphs_of, local, make_twins, same_gradients, text_of
from _engines import fully_shard
from _models import Stack, shard_blocks, vectors
from _pool import distributed
from composable_shard._compile.compiled import aot_eager
from composable_shard._torch.core import GRAPHS_GIVE_NONE
from composable_shard.report import watch_graphs

with warnings.catch_warnings():  # Inductor's own imports warn
    warnings.simplefilter("ignore")
    import torch._dynamo.testing
    import torch._inductor.compile_fx


def loss_of(model, rank, step):
    return model(*vectors(rank, step)).square().mean()


def check_steps(eager, model, rank, steps=3, run=None):
    torch._dynamo.reset()
    for step in range(steps):
        for each in (eager, model if run is None else run):
            loss_of(each, rank, step).backward()
        same_gradients(eager, model, f"in step {step}")
        with torch.no_grad():
            for each in (eager, model):
                for param in each.parameters():
                    param.add_(param.grad, alpha=-0.1)
                    param.grad = None


# ---- block by block


@distributed(world=2, limit_s=LIMIT_S)
def test_blocks_compiled_by_their_method_after_sharding_share_code(rank, world):
    eager, model = make_twins(even(3), shard_blocks)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    check_steps(eager, model, rank)
    assert counter.frame_count == 1


@distributed(world=2, limit_s=LIMIT_S)
def test_blocks_compiled_by_their_method_before_sharding_share_code(rank, world):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    eager, model = make_twins(even(3), lambda m, fs: None)
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    for each in (eager, model):
        shard_blocks(each, fully_shard)
    check_steps(eager, model, rank)
    assert counter.frame_count == 1


@distributed(world=2, limit_s=LIMIT_S)
def test_blocks_wrapped_by_torch_compile_after_sharding_gather_in_their_own_graphs(rank, world):
    eager, model = make_twins(even(3), shard_blocks)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    blocks = list(model.blocks)
    for place, block in enumerate(blocks):
        model.blocks[place] = torch.compile(block, backend=counter, fullgraph=True)

    with warnings.catch_warnings():  # Dynamo reads `.grad` of activations
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        for step in range(2):
            for each in (eager, model):
                loss_of(each, rank, step).backward()
    wrapped, model.blocks = model.blocks, nn.ModuleList(blocks)
    same_gradients(eager, model)
    assert counter.frame_count == 1
    assert len(wrapped) == 3


@distributed(world=2, limit_s=LIMIT_S)
def test_a_root_compiled_by_its_method_is_one_graph_within_the_engines_gather(rank, world):
    eager, model = make_twins(even(), shard_blocks)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model.compile(backend=counter, fullgraph=True)
    check_steps(eager, model, rank)
    assert counter.frame_count == 1


@distributed(world=2, limit_s=LIMIT_S)
def test_a_part_of_a_sharded_block_may_be_compiled(rank, world):
    eager, model = make_twins(even(), shard_blocks)
    for block in model.blocks:
        block.up.forward = torch.compile(block.up.forward, backend="aot_eager")
    with warnings.catch_warnings():  # Dynamo reads `.grad` of weights that are not leaves
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        check_steps(eager, model, rank)


# ---- graphs that break


class Breaking(Stack):
    def forward(self, x):
        x = self.inp(x)
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.head(self.blocks[1](x))


@distributed(world=2, limit_s=LIMIT_S)
def test_a_graph_break_inside_a_sharded_module_is_an_error_that_names_the_frame(rank, world):
    _, model = make_twins(Breaking(2, dim=8, hidden=16), shard_blocks)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"test_compiled_ways\.py.*in forward"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(*vectors(rank, 0))


@distributed(world=2, limit_s=LIMIT_S)
def test_a_graph_break_without_fullgraph_is_bitwise_identical_and_warns(rank, world):
    eager, model = make_twins(Breaking(2, dim=8, hidden=16), shard_blocks)
    run = torch.compile(model, backend="aot_eager")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", cs.errors.CompiledGraphWarning)
        check_steps(eager, model, rank, run=run)
    assert any("test_compiled_ways.py" in str(each.message) for each in said), [str(s.message) for s in said]
    assert all(isinstance(param, DTensor) for param in model.parameters())


def functions_of(package):
    """All functions of a package's modules and classes, and the functions that decorators wrap."""
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == package:
            owners = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == name]
            for each in [*vars(module).values(), *(member for owner in owners for member in vars(owner).values())]:
                while isinstance(each, FunctionType):
                    if each.__module__ == name:
                        yield each
                    each = getattr(each, "__wrapped__", None)


@distributed(world=2, limit_s=LIMIT_S)
def test_no_runtime_code_is_compiled_when_a_trace_is_abandoned(rank, world):
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = Stack(2, dim=8, hidden=16)
    shard_blocks(model, fully_shard, mesh=replicas)
    model.set_requires_all_reduce(False)  # makes the trace fail, so torch runs the engine instead
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        for step in range(2):
            run(*vectors(rank, step)).sum().backward()
    runtime = functions_of("composable_shard")
    found = {each.__qualname__ for each in runtime if _debug_get_cache_entry_list(each.__code__)}
    assert found <= {"FSDPModule.__call__", "FSDPModule._call_impl"}


@pytest.mark.parametrize("root", [True, False])
@distributed(world=2, limit_s=LIMIT_S)
def test_blocks_wrapped_by_torch_compile_before_sharding_are_exact(rank, world, root):
    def shard(model, fully_shard):
        for place, block in enumerate(model.blocks):
            if model.compiles:
                model.blocks[place] = block = torch.compile(block, backend="aot_eager", fullgraph=True)
            fully_shard(block)
        if root:
            fully_shard(model)

    eager, model = even(2), even(2)
    model.load_state_dict(eager.state_dict())
    eager.compiles, model.compiles = False, True
    for each in (eager, model):
        shard(each, fully_shard)
    torch._dynamo.reset()
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # Dynamo reads that of weights
    for step in range(3):
        for each in (eager, model):
            loss_of(each, rank, step).backward()
        for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(local(mine.grad), local(other.grad)), f"in step {step}"
    for param in model.blocks.parameters():
        assert isinstance(param, DTensor)


# ---- other methods than forward


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.dec(self.encode(x))

    def encode(self, x):
        return torch.tanh(self.enc(x))


def methods(rank, world):
    eager, model = make_twins(Coder(), lambda model, fully_shard: fully_shard(model, reshard_after_forward=True))
    for each in (eager, model):
        cs.register_fsdp_forward_method(each, "encode")
    run = torch.compile(model.encode, fullgraph=True, backend=aot_eager())
    with watch_graphs() as found:
        for step in range(3):
            for encode in (eager.encode, run):
                encode(*vectors(rank, step)).square().mean().backward()
            same_gradients(eager, model, f"in step {step}")
    assert not GRAPHS_GIVE_NONE or model.dec.weight.grad is None
    return text_of(found)


def test_a_registered_forward_method_is_one_graph():
    assert_expected_inline(
        graphs_of(methods),
        """\
forward Gwm, saves 160 bytes
backward GmwRw
""",
    )


# ---- the guard


def test_the_guard_reports_weights_that_a_forward_keeps():
    from composable_shard._graph.graphs import Gather, GraphReport, faults, repeated_gathers

    forward = GraphReport("forward", "GwGw", (Gather("blocks.0", True, 512), Gather("blocks.1", True, 0)), 512)
    assert faults(forward) == [
        "blocks.0: its weights should be gathered again in backward, but the compiled forward keeps 512 bytes of them"
    ]
    backward = GraphReport("backward", "GwGw", (Gather("blocks.1", False, 0), Gather("blocks.1", False, 0)), 0)
    assert repeated_gathers(forward, backward) == [
        "blocks.1: the compiled backward gathers its weights 2 times, expected 1"
    ]


def test_unsharded_models_compile_as_usual():
    from torch._inductor import config

    before = config.post_grad_custom_post_pass
    torch._dynamo.reset()
    with watch_graphs() as found:
        torch.compile(nn.Linear(4, 4), backend="aot_eager", fullgraph=True)(torch.randn(2, 4)).sum().backward()
    assert found == []
    assert config.post_grad_custom_post_pass is before
    assert not torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint


@distributed(world=2)
def test_a_copy_of_a_module_compiled_in_place_uses_its_own_weights(rank, world):
    model = Stack()
    shard_blocks(model, fully_shard)
    model.blocks[0].compile(backend="aot_eager")
    (x,) = vectors(rank, 0)
    before = model(x).detach()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    torch.testing.assert_close(copied(x).detach(), before, rtol=0, atol=0)
