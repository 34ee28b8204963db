"""Each shim for a private name of torch does what its docstring specifies, with the installed version of torch."""

from __future__ import annotations

import contextlib
import functools
import sys

import pytest
import torch
import torch.nn as nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from composable_shard._torch import core
from composable_shard.testing import _torch as testing_torch

# ---- backward passes


class Note(torch.autograd.Function):
    """Calls a function in backward."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad, None


def noted(call, x=None):
    return Note.apply(torch.ones(2, requires_grad=True) if x is None else x, call)


def test_nested_backward_passes_have_larger_numbers():
    numbers = []

    def outer():
        numbers.append(core.current_backward())
        with torch.enable_grad():
            noted(lambda: numbers.append(core.current_backward())).sum().backward()
        numbers.append(core.current_backward())

    assert core.current_backward() == -1
    noted(outer).sum().backward()
    assert core.current_backward() == -1
    first, nested, again = numbers
    assert 0 <= first == again < nested


def test_a_callback_runs_at_the_end_of_its_pass():
    log = []
    x = torch.ones(2, requires_grad=True)
    end = noted(lambda: log.append("last node"), x)
    noted(lambda: core.queue_backward_callback(lambda: log.append("end")), end).sum().backward()
    assert log == ["last node", "end"]


def test_a_callback_of_a_nested_pass_runs_at_the_end_of_the_nested_pass():
    log = []

    def outer():
        with torch.enable_grad():
            noted(lambda: core.queue_backward_callback(lambda: log.append("nested"))).sum().backward()
        log.append("outer")

    noted(outer).sum().backward()
    assert log == ["nested", "outer"]


def test_a_callback_of_a_failed_pass_is_not_called():
    log = []

    class Token:
        def __call__(self):
            log.append("called")

        def __del__(self):
            log.append("dropped")

    def fail():
        raise OSError("boom")

    with pytest.raises(OSError, match="boom"):
        noted(lambda: core.queue_backward_callback(Token()), noted(fail)).sum().backward()
    assert log == ["dropped"]


def test_a_node_will_run_exactly_if_backward_needs_it():
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    node_x, node_y = (noted(lambda: None, each) for each in (x, y))
    seen = []

    def look():
        seen.append([core.node_will_run(n.grad_fn) for n in (node_x, node_y)])

    noted(look, node_x + node_y).sum().backward(inputs=[x])
    assert seen == [[True, False]]


ADDED, RETURNED, DROPPED = core.Fate.ADDED, core.Fate.RETURNED, core.Fate.DROPPED


@pytest.mark.parametrize(
    ("run", "fates"),
    [
        (lambda out, x, y: out.backward(), None),
        (lambda out, x, y: out.backward(inputs=[x, y]), None),
        (lambda out, x, y: out.backward(inputs=[y]), [DROPPED, ADDED]),
        (lambda out, x, y: torch.autograd.grad(out, [x]), [RETURNED, DROPPED]),
        (lambda out, x, y: torch.autograd.grad(out, [x, y]), [RETURNED, RETURNED]),
    ],
    ids=["backward", "backward with both inputs", "backward with one input", "grad of one", "grad of both"],
)
def test_the_fates_of_leaf_gradients_are_known_while_backward_runs(run, fates):
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    both = x * y
    nodes = [node for node, _ in both.grad_fn.next_functions]
    seen = []
    run(noted(lambda: seen.append(core.gradient_fates(nodes)), both).sum(), x, y)
    assert seen == [fates]


def test_gradient_fates_ignores_leaves_without_requires_grad():
    x = torch.ones(2, requires_grad=True)
    (node, _), *_ = (x * 2).grad_fn.next_functions
    seen = []
    noted(lambda: seen.append(core.gradient_fates([node, None])), x * 2 + x).sum().backward()
    assert seen == [None]


def test_plain_apply_equals_the_functions_own_apply():
    x, log = torch.ones(2, requires_grad=True), []
    out = core.plain_apply(Note)(x, lambda: log.append("backward"))
    out.sum().backward()
    assert log == ["backward"]
    assert torch.equal(x.grad, torch.ones(2))


def test_grad_mode_is_set():
    for enabled in (False, True):
        core.set_grad_enabled(enabled)
        assert torch.is_grad_enabled() is enabled


# ---- hooks


def test_the_innermost_saved_tensor_hooks_are_active():
    assert core.active_saved_tensors_hooks() is None

    def pack(tensor):
        return tensor

    def unpack(packed):
        return packed

    with save_on_cpu(), saved_tensors_hooks(pack, unpack):
        assert core.active_saved_tensors_hooks() == (pack, unpack)
    assert core.active_saved_tensors_hooks() is None


class KeepingHooks:
    """Saved-tensor hooks that are bound methods, like those of the runtime."""

    def pack(self, tensor):
        return tensor.detach()

    def unpack(self, packed):
        return packed


@pytest.mark.parametrize("outside", [False, True])
def test_a_selective_checkpoint_warns_about_user_hooks_only(outside):
    weight = torch.ones(2, 2, requires_grad=True)
    context = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    warns = outside and torch.__version__ >= "2.15"
    ours = KeepingHooks()
    with contextlib.ExitStack() as stack:
        if outside:
            stack.enter_context(save_on_cpu())
        pack = core.passed_by_checkpoints(ours.pack, core.active_saved_tensors_hooks())
        assert pack.__self__ is ours
        stack.enter_context(saved_tensors_hooks(pack, ours.unpack))
        if warns:
            stack.enter_context(pytest.warns(FutureWarning, match="selective activation checkpoint"))
        out = checkpoint(lambda w: (w @ w).sin(), weight, use_reentrant=False, context_fn=context)
    out.sum().backward()
    expected = torch.full((2, 2), 4 * torch.tensor(2.0).cos().item())
    torch.testing.assert_close(weight.grad, expected)


def test_a_policy_without_reduce_dtype_reduces_in_torchs_default_dtype():
    half, full = torch.bfloat16, torch.float32
    changed = "versionchanged:: 2.15" in MixedPrecisionPolicy.__doc__
    assert core.default_reduce_dtype(stored=full, compute=half) == (full if changed else half)
    assert core.default_reduce_dtype(stored=half, compute=half) == half


def test_taken_hooks_are_not_called_and_their_handles_stay_valid():
    leaf, log = nn.Parameter(torch.ones(2)), []
    handles = [
        leaf.register_hook(lambda grad: log.append("tensor")),
        leaf.register_post_accumulate_grad_hook(lambda param: log.append("post")),
    ]
    tensor_hooks, post_hooks = core.take_gradient_hooks(leaf)
    assert [len(tensor_hooks), len(post_hooks)] == [1, 1]
    leaf.sum().backward()
    assert log == []
    for handle in handles:
        handle.remove()
    assert [len(tensor_hooks), len(post_hooks)] == [0, 0]
    assert core.take_gradient_hooks(leaf) == (None, None)


def test_later_hooks_are_taken_the_next_time():
    leaf = nn.Parameter(torch.ones(2))
    leaf.register_hook(lambda grad: None)
    first, _ = core.take_gradient_hooks(leaf)
    leaf.register_hook(lambda grad: None)
    second, _ = core.take_gradient_hooks(leaf)
    assert len(first) == len(second) == 1
    assert first is not second


def test_returned_hooks_are_called_again_and_newer_ones_stay_on_the_leaf():
    leaf, log = nn.Parameter(torch.ones(2)), []
    handles = [
        leaf.register_hook(lambda grad: log.append("tensor")),
        leaf.register_post_accumulate_grad_hook(lambda param: log.append("post")),
    ]
    taken = tuple([found] for found in core.take_gradient_hooks(leaf))
    assert core.return_gradient_hooks(leaf, *taken) == ([], [])
    leaf.sum().backward()
    assert log == ["tensor", "post"]
    taken = tuple([found] for found in core.take_gradient_hooks(leaf))
    meanwhile = leaf.register_hook(lambda grad: log.append("meanwhile"))
    assert core.return_gradient_hooks(leaf, *taken) == (taken[0], [])
    leaf.sum().backward()
    assert log == ["tensor", "post", "meanwhile", "post"]
    for handle in (*handles, meanwhile):
        handle.remove()
    leaf.sum().backward()
    assert len(log) == 4


def test_any_gradient_hooks_detects_both_types_of_hooks():
    leaves = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    assert not core.any_gradient_hooks(leaves)
    handle = leaves[1].register_hook(lambda grad: None)
    assert core.any_gradient_hooks(leaves)
    handle.remove()
    leaves[2].register_post_accumulate_grad_hook(lambda param: None)
    assert core.any_gradient_hooks(leaves)


# ---- trees


def test_the_tensors_of_a_tree_are_found_and_replaced():
    a, b = torch.ones(1), torch.ones(2)
    tree = {"x": [a, 3, None], "y": (b, "text")}
    assert core.tree_tensors(a) == [a]
    assert [t.numel() for t in core.tree_tensors(tree)] == [1, 2]
    changed = core.map_tensors(lambda t: t.numel(), tree)
    assert changed == {"x": [1, 3, None], "y": (2, "text")}
    assert torch.equal(core.map_tensors(lambda t: t + 1, a), a + 1)


# ---- streams of the CPU


def test_the_streams_of_the_cpu_can_be_replaced_temporarily():
    was = torch.cpu.Stream, torch.cpu.Event, torch.cpu.current_stream()
    with testing_torch.cpu_streams(list, dict, "default"):
        assert (torch.cpu.Stream(), torch.cpu.Event(), torch.cpu.current_stream()) == ([], {}, "default")
        with torch.cpu.stream("another"):
            assert torch.cpu.current_stream() == "another"
        assert torch.cpu.current_stream() == "default"
    assert (torch.cpu.Stream, torch.cpu.Event, torch.cpu.current_stream()) == was


@pytest.mark.parametrize("has_graphs", [True, False])
def test_any_tensor_may_belong_to_a_cuda_graph_if_its_device_has_one(monkeypatch, has_graphs):
    asked = []

    class Trees:
        @staticmethod
        def get_manager(index, create_if_none_exists):
            assert not create_if_none_exists
            asked.append(index)
            return "a manager" if has_graphs else None

    with FakeTensorMode():
        of_host, of_device = torch.ones(2), torch.ones(2, device="cuda:0")
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    assert not core.is_of_cuda_graph(of_device)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", Trees)
    monkeypatch.setattr(torch._C, "_is_key_in_tls", lambda key: False)
    assert core.is_of_cuda_graph(of_device), "where a thread cannot see them"
    monkeypatch.setattr(torch._C, "_is_key_in_tls", lambda key: key == "tree_manager_containers")
    assert core.is_of_cuda_graph(of_device) == has_graphs
    assert not core.is_of_cuda_graph(of_host)
    assert asked == [0]


def test_an_output_of_a_cuda_graph_is_marked():
    tensor = torch.ones(2)
    assert not core.is_of_cuda_graph(tensor)
    torch._C._set_cached_tensors_enabled(True)
    try:
        torch._C._add_cached_tensor(tensor)  # like CUDA graphs of Inductor
        assert core.is_of_cuda_graph(tensor)
        torch._C._remove_cached_tensor(tensor)
    finally:
        torch._C._set_cached_tensors_enabled(False)
    assert not core.is_of_cuda_graph(tensor)
