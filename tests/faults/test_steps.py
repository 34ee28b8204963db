"""Errors and unusual code within a step, the same on all ranks: a clear error, or the exact result.

Each test ends with gradients, two more steps and evaluations that equal those of an unsharded decoder.
"""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import composable_shard as cs
from _blocks import next_token_loss, token_batch
from _decoders import Training
from _pool import distributed
from _stepping import engine_of

LIMIT_S = 60.0


def everywhere(world, what):
    each = [None] * world
    dist.all_gather_object(each, what)
    return each


def trained(rank, world, steps=2):
    run = Training(rank, world)
    for _ in range(steps):
        run.step()
    return run


def hooked(module, hook):
    """Register a forward hook on a module that runs once."""

    def once(*arguments):
        handle.remove()
        return hook(*arguments)

    handle = module.register_forward_hook(once)


def assert_at_rest(run):
    assert all(isinstance(param, DTensor) for param in run.model.parameters())
    assert run.model.state_dict().keys() == run.plain.state_dict().keys()


# ---- the same errors on all ranks


def fail(*_):
    raise ZeroDivisionError("a fault of the model")


def interrupt(*_):
    raise KeyboardInterrupt


def fail_in_forward(run):
    hooked(run.model.blocks[1], fail)
    run.backward()


def fail_in_backward(run):
    hooked(run.model.blocks[1], lambda module, args, out: out.register_hook(fail) and None)
    run.backward()


def fail_in_an_evaluation(run):
    hooked(run.model.blocks[1], fail)
    with torch.no_grad():
        run.forward()


def be_interrupted_in_forward(run):
    hooked(run.model.blocks[1], interrupt)
    run.backward()


def be_interrupted_in_backward(run):
    hooked(run.model.blocks[1], lambda module, args, out: out.register_hook(interrupt) and None)
    run.backward()


def take_a_wrong_batch(run):
    run.model(torch.full((2, 8), 99))


def step_without_sync(run):
    run.model.set_requires_gradient_sync(False)
    run.backward()
    try:
        run.optimizer.step()
    finally:
        run.model.set_requires_gradient_sync(True)


def edit_a_saved_weight(run):
    def edit(module, args, out):
        with torch.no_grad():
            module.weight.mul_(2)

    hooked(run.model.blocks[1].attention.q, edit)
    run.backward()


def enter_from_two_threads(run):
    errors = []

    def forward():
        try:
            run.forward()
        except BaseException as error:
            errors.append(error)

    def run_another(*_):
        thread = threading.Thread(target=forward, name="another")
        thread.start()
        thread.join(LIMIT_S)

    hooked(run.model.blocks[1], run_another)
    run.backward()
    raise errors[0]


ERRORS = {
    fail_in_forward: (ZeroDivisionError, "a fault of the model"),
    fail_in_backward: (ZeroDivisionError, "a fault of the model"),
    fail_in_an_evaluation: (ZeroDivisionError, "a fault of the model"),
    be_interrupted_in_forward: (KeyboardInterrupt, None),
    be_interrupted_in_backward: (KeyboardInterrupt, None),
    take_a_wrong_batch: (IndexError, "out of range"),
    step_without_sync: (
        cs.errors.ShardConfigStateError,
        "still wait for their reduction; first run the last microbatch",
    ),
    edit_a_saved_weight: (
        cs.errors.StaleStateError,
        r"blocks\.1\.attention\.q\.weight: edited in place while unsharded",
    ),
    enter_from_two_threads: (cs.errors.ShardConfigStateError, "run a model in one thread at a time"),
}


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case.__name__)
@distributed(world=2, limit_s=LIMIT_S)
def test_weights_are_sharded_after_an_error_on_all_ranks_and_further_training_is_exact(rank, world, case):
    run = trained(rank, world)
    kind, words = ERRORS[case]
    shards = [param.to_local() for param in run.model.parameters()]
    before = [shard.clone() for shard in shards]
    with pytest.raises(kind, match=words) as caught:
        case(run)
    assert len({*everywhere(world, str(caught.value))}) == 1
    assert_at_rest(run)
    assert all(map(torch.equal, shards, before))
    run.optimizer.zero_grad()
    run.goes_on_exactly()


# ---- weights that change within a step


def step_in_forward(run):
    run.optimizer.step()


def write_shards_in_forward(run):
    with torch.no_grad():
        for param in run.params:
            param.mul_(1.0)


@pytest.mark.parametrize("change", [step_in_forward, write_shards_in_forward])
@distributed(world=2, limit_s=LIMIT_S)
def test_weights_that_change_between_their_use_and_backward_are_an_error(rank, world, change):
    run = trained(rank, world)
    run.params = [*run.model.parameters()]
    run.backward()
    run.backward_of_plain()
    hooked(run.model.blocks[1], lambda *_: change(run))
    with pytest.raises(
        cs.errors.StaleStateError, match="changed them between forward and backward; run backward first"
    ) as caught:
        run.backward()
    assert len({*everywhere(world, str(caught.value))}) == 1
    assert_at_rest(run)
    if change is step_in_forward:
        run.sides[1][1].step()
    for _, optimizer in run.sides:
        optimizer.zero_grad()
    run.goes_on_exactly()


# ---- unusual, but exact


def abandon_a_micro_batch_without_sync(run):
    run.model.set_requires_gradient_sync(False)
    run.backward()
    run.optimizer.zero_grad()
    run.model.set_requires_gradient_sync(True)


def evaluate_before_the_step(run):
    run.backward()
    run.backward_of_plain()
    with torch.no_grad():
        run.forward()
    run.update()


def gather_in_vain_before_the_step(run):
    run.backward()
    run.backward_of_plain()
    for module in (run.model.blocks[0], run.model):
        module.unshard()
    run.update()


def run_forward_and_drop_it(run):
    for _ in range(3):
        run.forward()


def freeze_for_a_step(run):
    for model in (run.model, run.plain):
        model.blocks[1].attention.requires_grad_(False)
    run.step()
    for model in (run.model, run.plain):
        model.blocks[1].attention.requires_grad_(True)


def take_gradients_of_parameters(run):
    names = ["blocks.1.attention.q.weight", "norm.weight"]
    of = [dict(model.named_parameters()) for model in (run.model, run.plain)]
    ours = torch.autograd.grad(next_token_loss(run.model, *token_batch(run.rank, 0)), [of[0][name] for name in names])
    loss = sum(next_token_loss(run.plain, *token_batch(rank, 0)) for rank in range(run.world)) / run.world
    for mine, other in zip(ours, torch.autograd.grad(loss, [of[1][name] for name in names]), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other)
    assert all(param.grad is None for param in run.model.parameters())


def edit_an_output_that_is_a_view(run):
    for model in (run.model, run.plain):
        for module in (model.blocks[1], model):
            module.register_forward_hook(edit)


def edit(module, args, out):
    out = out.view(-1)
    out += 0.5
    return out.view(*args[0].shape[:2], -1)


class Output:
    """An output type that neither torch nor this library inspects."""

    def __init__(self, x):
        self.x = x


def pass_objects_of_a_class_of_ones_own(run):
    for model in (run.model, run.plain):
        model.blocks[0].register_forward_hook(lambda module, args, out: Output(out))
        model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0].x, *args[1:]))


def convert(run):
    run.sides = [(model.double(), torch.optim.AdamW(model.parameters())) for model, _ in run.sides]
    run.optimizer = run.sides[0][1]


def use_a_parameter_on_one_rank_alone(run):
    """The norm belongs to the root's group; all ranks use the other parameters of that group."""

    def skip(module, args, out):
        return args[0]

    for model, ranks in ((run.model, [run.rank]), (run.plain, range(run.world))):
        for rank in ranks:
            handle = model.norm.register_forward_hook(skip) if rank else None
            (next_token_loss(model, *token_batch(rank, run.at)) / len(ranks)).backward()
            if handle:
                handle.remove()
    assert run.model.norm.weight.grad is not None
    run.check_gradients()
    run.update()


UNUSUAL = [
    abandon_a_micro_batch_without_sync,
    evaluate_before_the_step,
    gather_in_vain_before_the_step,
    run_forward_and_drop_it,
    freeze_for_a_step,
    take_gradients_of_parameters,
    edit_an_output_that_is_a_view,
    pass_objects_of_a_class_of_ones_own,
    convert,
    use_a_parameter_on_one_rank_alone,
]


@pytest.mark.parametrize("case", UNUSUAL, ids=lambda case: case.__name__)
@distributed(world=2, limit_s=LIMIT_S)
def test_unusual_steps_of_all_ranks_are_exact(rank, world, case):
    run = trained(rank, world)
    case(run)
    run.goes_on_exactly()


@pytest.mark.parametrize("phase", ["forward", "backward"])
@distributed(world=2, limit_s=LIMIT_S)
def test_a_model_deleted_after_an_error_on_all_ranks_leaves_no_memory(rank, world, phase):
    run = trained(rank, world)
    engine = weakref.ref(engine_of(run.model))

    def fail(*_):
        raise ZeroDivisionError

    def fail_later(_module, _args, out):
        out.register_hook(fail)

    run.model.blocks[1].register_forward_hook(fail_later if phase == "backward" else fail)
    with pytest.raises(ZeroDivisionError):
        run.backward()
    del run
    gc.collect()
    assert engine() is None
