"""Gradient accumulation, with and without reductions, and discarded microbatches."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from _blocks import Transformer, next_token_loss, token_batch
from _engines import ENGINES, fully_shard, mesh_of
from _models import Stack, shard_blocks, shard_nested, vectors
from _parity import Case, check_parity, plain_step
from _pool import distributed, more, simulated
from _sides import assert_alike, backward, both, models_of, optimizers_of
from _stepping import engine_of
from composable_shard._torch.core import owns_memory
from composable_shard.errors import ShardConfigStateError


def sync_off_then_on(run):
    run.set_sync(False)
    run.backward(run.loss(0))
    run.backward(run.loss(1))
    run.set_sync(True)
    loss = run.loss(2)
    run.backward(loss)
    return loss


def sync_always(run):
    run.backward(run.loss(0))
    loss = run.loss(1)
    run.backward(loss)
    return loss


def sync_on_then_off_then_on(run):
    run.backward(run.loss(0))
    run.set_sync(False)
    run.backward(run.loss(1))
    run.set_sync(True)
    loss = run.loss(2)
    run.backward(loss)
    return loss


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("train", [sync_off_then_on, sync_always, sync_on_then_off_then_on])
@distributed(world=2)
def test_accumulation_is_exact_for_any_reducing_microbatch(rank, world, train, reshard):
    shard = functools.partial(shard_blocks, reshard_after_forward=reshard)
    check_parity(Case(model=Stack, shard=shard, train=train), rank, world)


@distributed(world=(1, 4))
def test_accumulation_is_exact_at_other_world_sizes(rank, world):
    check_parity(Case(model=Stack, train=sync_off_then_on, optimizer="adamw"), rank, world)


@distributed(world=2)
def test_accumulation_is_exact_in_nested_groups(rank, world):
    check_parity(Case(model=Stack, shard=shard_nested, train=sync_off_then_on), rank, world)


@distributed(world=2)
def test_parameters_kept_unsharded_between_microbatches_are_exact(rank, world):
    def train(run):
        if not run.reference:
            run.model.set_reshard_after_backward(False)
        run.backward(run.loss(0))
        if not run.reference:
            run.model.set_reshard_after_backward(True)
        loss = run.loss(1)
        run.backward(loss)
        return loss

    check_parity(Case(model=Stack, train=train), rank, world)


def accumulate(model, step):
    """Run three microbatches; the last one reduces and reshards. Returns how many gathers each has issued."""
    gathers = []
    for at in range(3):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(at == 2)
            model.set_reshard_after_backward(at == 2)
        with torch.profiler.profile(acc_events=True) as profile:
            train_on_tokens(model, 3 * step + at)
        names = [event.name for event in profile.events()]
        gathers.append(sum(name.startswith("gloo:") and "gather" in name for name in names))
    return gathers


def train_on_tokens(model, step):
    next_token_loss(model, *token_batch(0, step)).backward()


def shard_decoder(model, engine, compiled=False, **options):
    for block in model.blocks:
        engine(block, **options)
        if compiled:
            block.compile(backend="aot_eager")
    engine(model, **options)


@pytest.mark.parametrize("compiled", [False, more(True)])
@distributed(world=2)
def test_weights_kept_over_microbatches_are_gathered_once_per_step_as_in_fsdp2(rank, world, compiled):
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # Dynamo in FSDP2
    models = models_of(Transformer, shard_decoder, compiled=compiled, reshard_after_forward=False)
    optimizers = optimizers_of(models)
    for step in range(3):
        gathers = {name: accumulate(model, step) for name, model in models.items()}
        if step:  # in the first step the ranks also agree on a plan
            assert gathers["ours"] == gathers["fsdp2"] == [3, 0, 0]
        assert_alike(models)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(models)
    with torch.no_grad():
        losses = [next_token_loss(model, *token_batch(0, 9)) for model in models.values()]
    torch.testing.assert_close(losses, losses[:1] * 3)


@pytest.mark.parametrize("before", ["forward", "micro-batch", "kept micro-batch"])
@distributed(world=2)
def test_kept_weights_are_not_read_after_foreach_functions_swapped_the_shards(rank, world, before):
    """The weights were kept by a forward without a backward, or by a backward; then averages are evaluated."""
    models = models_of(Transformer, shard_decoder, fsdp2=False, reshard_after_forward=False)
    (tokens,) = token_batch(0, 0)
    outputs = {}
    for name, model in models.items():
        params = list(model.parameters())
        if before == "forward":
            model(tokens)
        elif name == "plain":
            train_on_tokens(model, 0)
        else:
            model.set_requires_gradient_sync(False)
            model.set_reshard_after_backward(False)
            train_on_tokens(model, 0)
            model.set_requires_gradient_sync(before == "micro-batch")
            model.set_reshard_after_backward(before == "micro-batch")
        with torch.no_grad():
            torch._foreach_mul_(params, 0.5)  # does not increase the version of a DTensor
            averaged = model(tokens)
            torch._foreach_mul_(params, 2)
        outputs[name] = averaged, model(tokens)
    for ours, plain in zip(outputs["ours"], outputs["plain"], strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("via", ["optimizer", "model"])
@distributed(world=(1, 2))
def test_zero_grad_clears_an_abandoned_microbatch_without_sync(rank, world, set_to_none, via):
    def train(run):
        if run.step in (1, 2):
            run.set_sync(False)
            run.backward(run.loss(5))
            run.zero_grad(set_to_none, via)
            run.set_sync(True)
        return plain_step(run)

    why = "FSDP2 adds the abandoned gradient to the next one"
    check_parity(Case(model=Stack, train=train, fsdp2=False, why=why), rank, world)


@pytest.mark.parametrize("set_to_none", [True, False])
@distributed(world=2)
def test_zero_grad_between_microbatches_without_sync_keeps_only_later_gradients(rank, world, set_to_none):
    def train(run):
        run.set_sync(False)
        run.backward(run.loss(5))
        run.zero_grad(set_to_none)
        run.backward(run.loss(6))
        run.backward(run.loss(7))
        run.set_sync(True)
        return plain_step(run)

    why = "FSDP2 adds the abandoned gradient to the next one"
    check_parity(Case(model=Stack, train=train, fsdp2=False, why=why), rank, world)


class Sides(torch.nn.Module):
    """Linear layers with these numbers of rows. The output is the sum of the squared outputs of the first `used`."""

    def __init__(self, rows):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, count, bias=False) for count in rows)

    def forward(self, x, used=None):
        return sum(layer(x).square().sum() for layer in self.layers[:used])


def inputs_of(micro, of):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * micro + of))


@pytest.mark.parametrize(("rows", "foreach"), [((2,), True), more((2, 6), True), ((2, 6), False)])
@distributed(world=3)
def test_clipping_between_microbatches_keeps_gradients_of_ranks_without_rows(rank, world, rows, foreach):
    torch.manual_seed(0)
    plain = Sides(rows)
    models = [shard(copy.deepcopy(plain)) for shard in ENGINES.values()]
    for micro in range(3):
        for of in range(world):
            (plain(inputs_of(micro, of)) / world).backward()
        for model in models:
            model.set_requires_gradient_sync(micro == 2)
            model(inputs_of(micro, rank)).backward()
            if micro < 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
    for expected, *sharded in zip(plain.parameters(), *(model.parameters() for model in models), strict=True):
        for param in sharded:
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


@pytest.mark.parametrize(
    ("rows", "cleared", "foreach"),
    [((2,), 1, False), more((2, 6), 1, False), more((2, 6), 2, False), ((2, 6), 2, True)],
)
@distributed(world=3)
def test_zero_grad_clears_gradients_of_ranks_without_rows(rank, world, rows, cleared, foreach):
    torch.manual_seed(0)
    plain = Sides(rows)
    model = fully_shard(copy.deepcopy(plain))
    for micro in range(2):
        for of in range(world):
            (plain(inputs_of(micro, of)) / world).backward()
        model.set_requires_gradient_sync(micro == 1)
        model(inputs_of(micro, rank)).backward()
        if micro == 0:
            for each in (plain, model):
                weights = list(each.parameters())[:cleared]
                torch.optim.SGD(weights, foreach=foreach).zero_grad(set_to_none=False)
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


UNSEEN = r"layers\.0\.weight: .* a rank without rows .* zero_grad\(set_to_none=True\)"


def clear_the_first(model):
    torch.optim.SGD([model.layers[0].weight], foreach=True).zero_grad(set_to_none=False)


def scale_the_first(model):
    model.layers[0].weight.grad.mul_(0.5)


@pytest.mark.parametrize("change", [clear_the_first, scale_the_first])
@pytest.mark.parametrize(("rows", "nodes"), [((2,), 1), more((2, 6), 1), more((4,), 3), ((4, 9), 3)])
@distributed(world=3)
def test_changes_that_ranks_without_rows_would_judge_wrongly_are_errors(rank, world, rows, nodes, change):
    options = {"mesh": mesh_of(3, 1), "outer_sharding": "optimizer"} if nodes > 1 else {}
    model = fully_shard(Sides(rows), **options)
    model.set_requires_gradient_sync(False)
    model(inputs_of(0, rank)).backward()
    assert (rank == 2) == (model.layers[0].weight.to_local().numel() == 0)
    change(model)
    if rank == 2:
        model(inputs_of(1, rank)).backward()
    else:
        with pytest.raises(ShardConfigStateError, match=UNSEEN):
            model(inputs_of(1, rank)).backward()


@distributed(world=3)
def test_a_rank_without_rows_that_uses_fewer_parameters_refuses_changes_it_cannot_see(rank, world):
    model = fully_shard(Sides((2, 6)))
    model.set_requires_gradient_sync(False)
    model(inputs_of(0, rank), used=1 if rank == 2 else 2).backward()
    torch.optim.SGD(model.parameters(), foreach=False).zero_grad(set_to_none=False)
    if rank == 2:
        with pytest.raises(ShardConfigStateError, match=UNSEEN):
            model(inputs_of(1, rank)).backward()
    else:
        model(inputs_of(1, rank)).backward()


@pytest.mark.parametrize("set_to_none", [True, False])
@distributed(world=2)
def test_zero_grad_clears_reduced_and_unreduced_gradients_together(rank, world, set_to_none):
    def train(run):
        run.backward(run.loss(4))
        run.set_sync(False)
        run.backward(run.loss(5))
        run.zero_grad(set_to_none)
        run.set_sync(True)
        return plain_step(run)

    why = "FSDP2 adds the abandoned gradient to the next one"
    check_parity(Case(model=Stack, train=train, fsdp2=False, why=why), rank, world)


@distributed(world=2)
def test_an_existing_gradient_tensor_is_kept_and_accumulated_into(rank, world):
    model = Stack()
    shard_blocks(model, fully_shard)
    x = vectors(rank, 0)
    model(*x).square().mean().backward()
    once = {n: p.grad.full_tensor().clone() for n, p in model.named_parameters()}
    held = {n: p.grad for n, p in model.named_parameters()}
    model(*x).square().mean().backward()
    for name, param in model.named_parameters():
        assert isinstance(param.grad, DTensor)
        assert torch.equal(param.grad.full_tensor(), once[name] + once[name]), name
        assert param.grad is held[name], f"the gradient of {name} was replaced, not added to"


@distributed(world=2)
def test_the_next_step_does_not_overwrite_a_gradient_that_the_user_holds(rank, world):
    model = Stack()
    shard_blocks(model, fully_shard)
    held = {}
    for step in range(3):
        model(*vectors(rank, step)).square().mean().backward()
        for name, (grad, before) in held.items():
            assert torch.equal(grad.to_local(), before), f"step {step} overwrote the held gradient of {name}"
        held = {n: (p.grad, p.grad.to_local().clone()) for n, p in model.named_parameters()}
        model.zero_grad()


@pytest.mark.parametrize("set_to_none", [True, False])
@distributed(world=2)
def test_zero_grad_between_forward_and_backward_clears_gradients_that_fsdp2_keeps(rank, world, set_to_none):
    """The root, and all groups that stay unsharded until backward, show other parameters then."""
    models = both(reshard_after_forward=False)
    for model in models.values():
        backward(model, rank, 0)
        first = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
        loss = model(*vectors(rank, 0)).square().mean()
        model.zero_grad(set_to_none)
        loss.backward()
        times = 1 if model is models["ours"] else 2
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad.to_local(), times * first[name], msg=lambda m, n=name: f"{n}: {m}")


@simulated(world=2)
def test_first_gradients_are_set_in_batches_and_later_ones_are_added_immediately_and_freed(rank, world):
    """The new gradient's memory is freed as well, even if the first parameter of a group is frozen."""
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(8)])
    for layer in model:
        layer.weight.requires_grad_(False)
        fully_shard(layer)
    fully_shard(model)
    seen = []
    for _ in range(3):
        inputs = torch.ones(2, 4, requires_grad=True)
        grads = [layer.bias for layer in model]
        inputs.register_hook(lambda _, of=grads: seen.append([b.grad if b.grad is None else b.grad + 0 for b in of]))
        model(inputs).sum().backward()
    there = [[gradient is not None for gradient in gradients] for gradients in seen]
    assert there[0] == [False] * 4 + [True] * 4  # of six reduced groups
    assert all(all(gradients) for gradients in there[1:])
    assert seen[1][7].to_local().tolist() == [4.0, 4.0]
    assert torch.equal(seen[2][2].to_local(), model[2].bias.grad.to_local())


class Keeping(torch.autograd.Function):
    """Returns its input. Backward keeps the gradient, or a view of it, in a list."""

    @staticmethod
    def forward(ctx, weight, kept, as_view):
        ctx.kept, ctx.as_view = kept, as_view
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        ctx.kept.append(grad.view(-1) if ctx.as_view else grad)
        return grad, None, None


class KeepsGradients(torch.nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 4))
        self.keep, self.kept = keep, []

    def forward(self, x):
        weight = self.weight if self.keep is None else Keeping.apply(self.weight, self.kept, self.keep == "view")
        return torch.nn.functional.linear(x, weight)


@pytest.mark.parametrize("keep", [None, "tensor", "view"])
@simulated(world=2)
def test_sums_are_added_in_place_but_never_to_gradients_that_other_code_keeps(rank, world, keep):
    torch.manual_seed(0)
    model = fully_shard(KeepsGradients(keep))
    model.set_requires_gradient_sync(False)
    inputs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * micro + rank)) for micro in range(3)]
    addresses, copies = [], []
    for x in inputs:
        model(x).sum().backward()
        (total,) = engine_of(model).groups[0].gradients.waiting()
        addresses.append(total.data_ptr())
        values = total.clone()
        del total  # or it would count as kept
        copies.extend(grad.clone() for grad in model.kept[len(copies) :])
        assert all(map(torch.equal, model.kept, copies))
    assert addresses == addresses[:1] * 3
    expected = sum(torch.ones(3, 6).T @ x for x in inputs)
    torch.testing.assert_close(values, expected)


class LinearWithBuffer(torch.autograd.Function):
    """A linear layer whose backward writes the gradient of the weight to the same memory each time."""

    @staticmethod
    def forward(ctx, x, weight, buffer):
        ctx.save_for_backward(x, weight)
        ctx.buffer = buffer
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        torch.mm(grad.T, x, out=ctx.buffer)
        return grad @ weight, ctx.buffer, None


class WritesGradientsToABuffer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(width, width) / width**0.5)
        self.buffer = torch.empty(width, width)

    def forward(self, x):
        return LinearWithBuffer.apply(x, self.weight, self.buffer)


@pytest.mark.parametrize("blocks", [True, False])
@distributed(world=2)
def test_gradients_that_a_function_writes_to_the_same_memory_are_accumulated(rank, world, blocks):
    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(WritesGradientsToABuffer(8), torch.nn.ReLU(), WritesGradientsToABuffer(8))

    reference, *models = (make() for _ in range(1 + len(ENGINES)))
    for shard, model in zip(ENGINES.values(), models, strict=True):
        for layer in (model[0], model[2]) if blocks else ():
            shard(layer)
        shard(model)
    for micro in range(4):
        inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * micro + of)) for of in range(world)]
        for x in inputs:
            (reference(x).square().sum() / world).backward()
        for model in models:
            model.set_requires_gradient_sync(micro == 3)
            model(inputs[rank]).square().sum().backward()
    for expected, *sharded in zip(reference.parameters(), *(model.parameters() for model in models), strict=True):
        for param in sharded:
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


@simulated(world=2)
def test_the_last_microbatch_is_added_in_place(rank, world):
    model = fully_shard(KeepsGradients(None))
    x = torch.ones(3, 4)
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()
    gradients = engine_of(model).groups[0].gradients
    address = gradients.waiting()[0].data_ptr()
    assert gradients.take([torch.ones(6, 4)])[0].data_ptr() == address


def test_memory_is_owned_if_no_view_graph_or_other_object_uses_it():
    one, two = torch.ones(3), torch.ones(3)
    view = two.view(3)
    assert owns_memory(one)
    assert not owns_memory(two)
    del view
    assert owns_memory(two)
    assert not owns_memory(torch.ones(3, requires_grad=True))
    assert not owns_memory(torch.ones(1).expand(3))
    part = torch.ones(2, 3).t()
    assert not owns_memory(part)  # not contiguous
    base = torch.ones(6)
    assert not owns_memory(base.view(2, 3))
    saved = torch.ones(3)
    graph = (torch.ones(3, requires_grad=True) * saved).sum()
    assert not owns_memory(saved)
    del graph
    assert owns_memory(saved)


@pytest.mark.parametrize("kept", ["unsharded", "pieces"])
@simulated(world=4)
def test_a_kept_gradient_survives_freezing_its_parameter(rank, world, kept):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    grads = {}
    engines = ENGINES if kept == "unsharded" else ["ours"]  # FSDP2 adds tensors of different sizes
    for name in ("plain", *engines):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        if name != "plain":
            for layer in (*model, model):
                ENGINES[name](layer, mesh=mesh)
            set_sync = model.set_requires_gradient_sync if kept == "unsharded" else model.set_requires_all_reduce
            set_sync(False)
        model(torch.ones(2, 4)).sum().backward()
        model[0].weight.requires_grad_(False)
        if name != "plain":
            set_sync(True)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        grads[name] = [param.grad for param in model.parameters()]
    for name in engines:
        assert all(map(torch.equal, [grad.full_tensor() for grad in grads[name]], grads["plain"])), name
