"""Facts that a program changes between calls of a graphed step: replays follow them, or the step is refused."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
import warnings
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import adam

import composable_shard as cs
from _pool import distributed, simulated
from _replaying import captures_on_cpu
from composable_shard._graphed.host import _places
from composable_shard.errors import ShardConfigStateError, ShardConfigTypeError, StaleStateError


class OwnError(RuntimeError):
    pass


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("table", torch.arange(16.0))


def net(**options):
    torch.manual_seed(0)
    model = Net()
    for module in (model[0], model[2], model):
        cs.fully_shard(module, **options)
    return model


def data(number, rank=0):
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(1000 * rank + number))


def trained(model, inputs):
    loss = model(inputs).square().mean()
    loss.backward()
    return loss.detach()


def stepping(model, optimizer):
    """A training step with its optimizer."""

    def step(inputs):
        loss = trained(model, inputs)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


@contextlib.contextmanager
def capturable():
    """Let Adam be captured on the CPU."""
    with captures_on_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])
        yield


class Twins:
    """Two equal programs, each with a model and further state, of which one runs its step with `make_graphed_step`."""

    def __init__(self, make, **options):
        self.sides = make(), make()
        self.call = cs.make_graphed_step(self.sides[0].step, **options)

    def run(self, *inputs, change=lambda side: None, after=lambda side: None):
        """Run a call of both, after `change`, and compare all results, parameters, gradients and buffers."""
        results = []
        for side, step in zip(self.sides, (self.call, self.sides[1].step), strict=True):
            change(side)
            results.append(step(*inputs))
            after(side)
        assert torch.equal(*results)
        ours, theirs = (side.tensors() for side in self.sides)
        assert [each is None for each in ours] == [each is None for each in theirs]
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True) if one is not None)


def local(tensor):
    return tensor if tensor is None or not hasattr(tensor, "to_local") else tensor.to_local()


class Side:
    """A model, the modules that train with it, and its step."""

    def __init__(self, *modules):
        self.model, *self.others = modules

    def step(self, inputs):
        return trained(self.model, inputs)

    def tensors(self):
        params = [param for module in (self.model, *self.others) for param in module.parameters()]
        return [local(each) for param in params for each in (param.detach(), param.grad)] + [*self.model.buffers()]

    def zero_grad(self):
        for module in (self.model, *self.others):
            module.zero_grad()


# ------------------------------------------------------------------ optimizers


class WithCritic(Side):
    """An unsharded critic trains with the model, and its own optimizer steps it in the step."""

    def __init__(self, rate):
        super().__init__(net(), nn.Linear(4, 1))
        self.optimizer = torch.optim.Adam(self.others[0].parameters(), rate, capturable=isinstance(rate, torch.Tensor))

    def step(self, inputs):
        loss = self.others[0](self.model(inputs)).mean()
        loss.backward()
        self.optimizer.step()
        self.zero_grad()
        return loss.detach()


@distributed(world=2)
def test_optimizers_of_unsharded_modules_are_checked_and_followed(rank, world):
    with capturable():
        twins = Twins(lambda: WithCritic(torch.tensor(0.1)))

        def decay(side):
            side.optimizer.param_groups[0]["weight_decay"] = 0.5

        for number in range(9):
            twins.run(data(number), change=decay if number == 5 else lambda side: None)
        assert (twins.call.captures, twins.call.replays) == (2, 6)
        refused = WithCritic(0.1)
        call = cs.make_graphed_step(refused.step)
        for number in range(2):
            call(data(number))
        with pytest.raises(ShardConfigStateError, match=r"Adam.step\(\) .* learning rate is a Python number"):
            call(data(2))


@distributed(world=2)
def test_an_optimizer_outside_of_the_capture_may_have_a_rate_that_is_a_number(rank, world):
    """Neither one that steps after the replays, nor one of a model that is not in the capture."""
    model, other = net(), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, other)]
    call = cs.make_graphed_step(lambda inputs: trained(model, inputs))
    with captures_on_cpu():
        for number in range(5):
            call(data(number))
            other(data(number)).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert call.replays == 3


@distributed(world=2)
def test_an_optimizer_that_steps_at_the_beginning_is_checked_too(rank, world):
    model, critic = net(), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(critic.parameters(), 0.1)

    def step(inputs):
        optimizer.step()
        optimizer.zero_grad()
        loss = critic(model(inputs)).mean()
        loss.backward()
        return loss.detach()

    call = cs.make_graphed_step(step)
    with captures_on_cpu():
        for number in range(2):
            call(data(number))
        with pytest.raises(ShardConfigStateError, match=r"SGD.step\(\) .* learning rate is a Python number"):
            call(data(3))


@distributed(world=2)
def test_attributes_that_a_program_sets_on_an_optimizer_cause_no_captures(rank, world):
    with capturable():
        twins = Twins(lambda: WithCritic(torch.tensor(0.1)))
        for number in range(6):
            twins.run(data(number), change=lambda side, number=number: setattr(side.optimizer, "logged", number))
        assert (twins.call.captures, twins.call.replays) == (1, 4)


class Counting(torch.optim.Optimizer):
    """An optimizer that counts its steps in an attribute or in a setting."""

    def __init__(self, params, where):
        super().__init__(params, {"lr": torch.tensor(0.1), "steps": 0})
        self.steps, self.where = 0, where

    @torch.no_grad()
    def step(self):
        self.steps += self.where == "attribute"
        for group in self.param_groups:
            group["steps"] += self.where == "setting"
            for param in group["params"]:
                local(param).sub_(local(param.grad) * group["lr"] / (1 + self.steps + group["steps"]))


@pytest.mark.parametrize("where", ["attribute", "setting"])
@distributed(world=2)
def test_optimizers_that_count_on_the_host_are_refused_and_their_settings_restored(rank, world, where):
    model = net()
    optimizer = Counting(model.parameters(), where)
    call = cs.make_graphed_step(stepping(model, optimizer))
    with captures_on_cpu():
        for number in range(2):
            call(data(number))
        weight = model[0].weight.to_local().clone()
        for _ in range(2):
            with pytest.raises(ShardConfigStateError, match="the step of Counting changes Python numbers"):
                call(data(2))
        assert optimizer.param_groups[0]["steps"] == (2 if where == "setting" else 0)
        assert torch.equal(model[0].weight.to_local(), weight)


class InBackward(Side):
    def __init__(self):
        super().__init__(net())
        rate = torch.tensor(0.1)
        self.optimizer = cs.optim.in_backward(
            self.model, lambda params: torch.optim.AdamW(params, rate, capturable=True, foreach=True)
        )


@distributed(world=2)
def test_in_backward_follows_accumulation_settings_and_removed_hooks(rank, world):
    with capturable():
        twins = Twins(InBackward)
        ends = lambda side: side.optimizer.step()  # noqa: E731
        for number in range(3):
            twins.run(data(number), after=ends)
        for number in range(9):  # the second and the third microbatch have equal gradients to add to
            with contextlib.ExitStack() as stack:
                for side in twins.sides if number % 3 < 2 else ():
                    stack.enter_context(side.optimizer.accumulating())
                twins.run(data(number), after=ends if number % 3 == 2 else lambda side: None)
        replays = twins.call.replays

        def decay(side):
            side.optimizer.param_groups[0]["weight_decay"] = 0.9

        for number in range(3):
            twins.run(data(number), change=decay, after=ends)
        assert twins.call.replays == replays + 2
        for number in range(3):
            twins.run(data(number), change=lambda side: side.optimizer.remove_hooks(), after=Side.zero_grad)
        assert twins.call.replays == replays + 4


@distributed(world=2)
def test_settings_that_change_in_each_call_are_not_captured_again_and_again(rank, world):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), torch.tensor(0.1), capturable=True)
    call = cs.make_graphed_step(stepping(model, optimizer))
    with capturable(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(24):
            optimizer.param_groups[0]["betas"] = (0.9, 0.99 - number / 100)
            call(data(number))
        assert call.captures == 3
        texts = [str(each.message) for each in caught if "make_graphed_step" in str(each.message)]
        assert len(texts) == 1
        assert "none of the last 16 calls could replay" in texts[0]
        assert "optimizer change often" in texts[0]


@distributed(world=2)
def test_a_replayed_optimizer_makes_earlier_forwards_stale(rank, world):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), torch.tensor(0.1), capturable=True)
    call = cs.make_graphed_step(stepping(model, optimizer))
    with capturable():
        for number in range(4):
            call(data(number))
        loss = model(data(4)).sum()
        shard = model[0].weight.to_local().detach()
        saved = (shard * torch.ones_like(shard).requires_grad_()).sum()
        call(data(5))
        assert call.replays == 3
        with pytest.raises(StaleStateError):
            loss.backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.backward()


# ------------------------------------------------------------------ buffers and arguments


class WithSlice(Side):
    """A buffer is a part of another one."""

    def __init__(self):
        super().__init__(net())
        self.model.register_buffer("part", self.model.table[:4])

    def step(self, inputs):
        loss = self.model(inputs).sum() * self.model.part.sum()
        loss.backward()
        return loss.detach()


@distributed(world=2)
def test_a_buffer_of_another_shape_at_the_same_address_is_captured_again(rank, world):
    twins = Twins(WithSlice)

    def change(side, most):
        side.model.part = side.model.table[:most]

    with captures_on_cpu():
        for number in range(8):
            twins.run(data(number), change=lambda side, most=4 if number < 4 else 8: change(side, most))
            for side in twins.sides:
                side.zero_grad()
        assert twins.call.captures == 2


def test_a_graph_depends_on_the_values_of_tensors_that_are_not_on_its_device():
    tensor, cpu, other = torch.zeros(2), torch.device("cpu"), torch.device("cuda")
    before = _places([tensor], cpu), _places([tensor], other)
    tensor.add_(1)
    assert _places([tensor], cpu) == before[0]
    assert _places([tensor], other) != before[1]
    assert _places([tensor[:1]], cpu) != before[0]
    assert _places([tensor.view(torch.int32)], cpu) != before[0]
    assert _places([torch.eye(2).to_sparse()], cpu)


@distributed(world=2)
def test_a_step_that_replaces_a_buffer_warns_and_one_that_does_so_in_a_capture_is_refused(rank, world):
    model, replaces = net(), [True]

    def step(inputs):
        loss = trained(model, inputs)
        if replaces[0]:
            model.total = model.total + loss
        return loss

    call = cs.make_graphed_step(step)
    with captures_on_cpu(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(18):
            call(data(number))
            model.zero_grad()
        assert (call.captures, call.eager_calls) == (0, 18)
        assert sum("write to buffers in place" in str(each.message) for each in caught) == 1
        replaces[0] = False
        call(data(0))
        model.zero_grad()
        replaces[0], total = True, model.total
        with pytest.raises(ShardConfigStateError, match="the step replaces a parameter or a buffer"):
            call(data(0))
        assert model.total is total


@distributed(world=2)
def test_a_step_may_not_write_to_a_buffer_that_is_its_argument(rank, world):
    model = net()

    def step(inputs, total):
        model.total.add_(1.0)
        return trained(model, inputs * total)

    call = cs.make_graphed_step(step)
    with captures_on_cpu():
        for number in range(2):
            call(data(number), model.total)
            model.zero_grad()
        with pytest.raises(ShardConfigStateError, match=r"writes to an argument of shape \[\]"):
            call(data(2), model.total)


# ------------------------------------------------------------------ what the step runs and trains


class WithHiddenCritic(Side):
    """The step trains an unsharded critic, which no optimizer has stepped before."""

    def __init__(self):
        super().__init__(net(), nn.Linear(4, 1))

    def step(self, inputs):
        loss = self.others[0](self.model(inputs)).mean()
        loss.backward()
        return loss.detach()


@distributed(world=2)
def test_parameters_that_no_optimizer_has_stepped_are_trained_if_their_module_is_passed(rank, world):
    with captures_on_cpu():
        sides = WithHiddenCritic(), WithHiddenCritic()
        twins = Twins(iter(sides).__next__, modules=sides[0].others)
        for number in range(6):
            twins.run(data(number))
            for side in twins.sides if number % 2 else ():
                side.zero_grad()
        assert twins.call.replays >= 3
        side = WithHiddenCritic()
        call = cs.make_graphed_step(side.step)
        for number in range(2):
            call(data(number))
            side.zero_grad()
        for _ in range(2):
            with pytest.raises(ShardConfigStateError, match=r"trains a parameter of shape .* modules="):
                call(data(2))
        assert all(param.grad is None for module in (side.model, *side.others) for param in module.parameters())


@distributed(world=2)
def test_parameters_whose_gradient_the_step_clears_are_followed(rank, world):
    """Their optimizer steps in the step, so `.grad` is None before and after it."""
    with capturable():
        twins = Twins(lambda: WithCritic(torch.tensor(0.1)))

        def change(side):
            side.others[0].bias.requires_grad_(False)

        for number in range(9):
            twins.run(data(number), change=change if number == 5 else lambda side: None)
        assert (twins.call.captures, twins.call.replays) == (2, 6)


@distributed(world=2)
def test_parameters_that_a_program_makes_for_each_call_are_not_held(rank, world):
    model, made = net(), []

    def step(inputs):
        return trained(model, inputs + made[-1])

    call = cs.make_graphed_step(step)
    with captures_on_cpu():
        for number in range(5):
            made.append(torch.zeros(4, requires_grad=True))
            optimizer = torch.optim.SGD([made[-1]], 0.1)
            optimizer.step()
            call(data(number))
            model.zero_grad()
        refs = [weakref.ref(each) for each in made]
        optimizer = None
        made.clear()
        gc.collect()
        assert [ref() for ref in refs] == [None] * 5
        assert call.captures == 0


@dataclass
class Late:
    """A step that uses another module from its third call on."""

    model: nn.Module
    other: nn.Module
    calls: int = 0

    def __call__(self, inputs):
        self.calls += 1
        loss = self.model(inputs).mean()
        if self.calls > 2:
            loss = loss + self.other(inputs).mean()
        loss.backward()
        return loss.detach()


@distributed(world=2)
def test_a_step_that_runs_a_new_model_in_its_capture_is_refused_and_then_follows(rank, world):
    steps = [Late(net(), net()) for _ in range(2)]
    for each in steps:
        each.other(data(0)).sum().backward()
        each.other.zero_grad()
    call = cs.make_graphed_step(steps[0])
    with captures_on_cpu():
        for number in range(8):
            if number == 2:
                with pytest.raises(ShardConfigStateError, match=r"for the first time in a capture.*pass it with key="):
                    call(data(number))
                params = [*steps[0].model.parameters(), *steps[0].other.parameters()]
                assert all(param.grad is None for param in params)
            assert torch.equal(call(data(number)), steps[1](data(number)))
            for name in ("model", "other"):
                for ours, theirs in zip(*(getattr(each, name).parameters() for each in steps), strict=True):
                    assert (ours.grad is None) == (theirs.grad is None)
                    assert ours.grad is None or torch.equal(local(ours.grad), local(theirs.grad))
                    ours.grad = theirs.grad = None
        assert call.replays >= 3


@distributed(world=2)
def test_a_model_that_first_runs_in_the_capture_needs_an_eager_call(rank, world):
    step = Late(net(), net())
    call = cs.make_graphed_step(step)
    with captures_on_cpu():
        for number in range(2):
            call(data(number))
        with pytest.raises(ShardConfigStateError, match="for the first time in a capture"):
            call(data(2))
        for number in range(3):
            call(data(number))
        assert call.replays >= 1


class Freezing(Side):
    def __init__(self):
        super().__init__(net())

    def step(self, inputs, freezes):
        self.model[0].requires_grad_(not freezes)
        return trained(self.model, inputs)


@distributed(world=2)
def test_a_step_may_freeze_and_thaw_parameters(rank, world):
    twins = Twins(Freezing)
    with captures_on_cpu():
        for number in range(10):
            twins.run(data(number), number % 2 == 0)
            ours, theirs = ([param.requires_grad for param in side.model.parameters()] for side in twins.sides)
            assert ours == theirs
            for side in twins.sides if number % 2 else ():
                side.zero_grad()
        assert twins.call.replays >= 5


# ------------------------------------------------------------------ the end of backward


class ByHand(Side):
    """The caller finishes backward, in the step or after it."""

    def __init__(self):
        super().__init__(net())
        self.model.set_manual_backward_finalization(True)

    def step(self, inputs):
        loss = trained(self.model, inputs)
        self.model.finalize_backward()
        return loss


@distributed(world=2)
def test_a_backward_that_is_finished_in_the_step_is_captured(rank, world):
    twins = Twins(ByHand)
    with captures_on_cpu():
        for number in range(6):
            twins.run(data(number), after=lambda side: side.model.finalize_backward())  # which has nothing to do
            for side in twins.sides:
                side.zero_grad()
        assert twins.call.replays >= 3
        for side in twins.sides:
            side.model.set_manual_backward_finalization(False)
        eager = twins.call.eager_calls
        twins.run(data(6))
        assert twins.call.eager_calls == eager + 1


@distributed(world=2)
def test_a_backward_that_is_finished_after_the_step_is_refused(rank, world):
    model = net()
    model.set_manual_backward_finalization(True)
    call = cs.make_graphed_step(lambda inputs: trained(model, inputs))
    match = r"its finalize_backward\(\) was not.*call finalize_backward\(\) in the captured step"
    with captures_on_cpu() as captures:
        for number in range(2):
            call(data(number))
            model.finalize_backward()
            model.zero_grad()
        with pytest.raises(ShardConfigStateError, match=match):
            call(data(2))
        model.zero_grad(set_to_none=False)
        inputs = data(2)
        captures.capture(lambda: trained(model, inputs), None)
        with pytest.raises(ShardConfigStateError, match=match):
            model.finalize_backward()
        model.zero_grad()
        trained(model, inputs)
        with pytest.raises(ShardConfigStateError, match=r"in flight; call finalize_backward\(\) before the capture"):
            captures.capture(lambda: trained(model, inputs), None)
        model.finalize_backward()
        model.set_manual_backward_finalization(False)
        gradient = model[0].weight.grad.to_local().clone()
        model.zero_grad()
        trained(model, inputs)
        assert torch.equal(model[0].weight.grad.to_local(), gradient)


@distributed(world=2)
def test_a_capture_that_fails_in_backward_leaves_nothing_in_flight(rank, world):
    model, errors = net(), []

    def fail(gradient):
        if errors:
            raise errors.pop()

    model[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    call = cs.make_graphed_step(lambda inputs: trained(model, inputs))
    with captures_on_cpu():
        for number in range(2):
            call(data(number))
            model.zero_grad()
        errors.append(OwnError("of the hook"))
        with pytest.raises(OwnError, match="of the hook"):
            call(data(2))
        model.zero_grad()
        for number in range(3):
            call(data(number))
            gradient = model[0].weight.grad.to_local().clone()
            model.zero_grad()
            trained(model, data(number))
            assert torch.equal(model[0].weight.grad.to_local(), gradient)
            model.zero_grad()
        assert call.replays == 3


# ------------------------------------------------------------------ ranks, threads and modes


@distributed(world=2)
def test_ranks_that_replay_different_steps_are_told_so(rank, world):
    model = net()

    @torch.no_grad()
    def evaluated(inputs):
        return model(inputs).sum()

    steps = [cs.make_graphed_step(each) for each in (lambda inputs: trained(model, inputs), evaluated)]
    with captures_on_cpu():
        for number in range(4):
            for step in steps:
                step(data(number))
                model.zero_grad()
        assert [step.replays for step in steps] == [2, 2]
        numbers = [next(iter(step._graphs.values())).numbers[0] for step in steps]
        match = rf"rank 0 is about to replay captured graph {numbers[0]} .* replay captured graph {numbers[1]} "
        with pytest.raises(cs.errors.RankMismatchError, match=match):
            steps[rank](data(9))


@distributed(world=2)
def test_graphs_of_other_models_of_one_rank_do_not_count(rank, world):
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ranks", "alone"))["alone"]
    torch.manual_seed(0)
    models = cs.fully_shard(nn.Linear(4, 4), mesh=alone), net()
    steps = [cs.make_graphed_step(lambda inputs, model=model: trained(model, inputs)) for model in models]
    with captures_on_cpu():
        for step in steps if rank == 0 else steps[1:]:
            for number in range(4):
                step(data(number))
        assert steps[1].replays == 2


@simulated(world=1)
def test_two_threads_cannot_replay_at_the_same_time(rank, world):
    model, errors = net(), []
    with torch.no_grad():
        call = cs.make_graphed_step(lambda inputs: model(inputs).sum())
        with captures_on_cpu():
            for number in range(4):
                call(data(number))
            (captured,) = call._graphs.values()
            replay = captured.graph.replay

            def elsewhere():
                with torch.no_grad():
                    try:
                        call(data(8))
                    except ShardConfigStateError as error:
                        errors.append(str(error))

            def during():
                thread = threading.Thread(target=elsewhere)
                thread.start()
                thread.join()
                replay()

            captured.graph.replay = during
            assert torch.equal(call(data(7)), model(data(7)).sum())
            assert len(errors) == 1
            assert "while another thread is in" in errors[0]
            captured.graph.replay = replay
            elsewhere()  # the claim has ended
            assert len(errors) == 1


@distributed(world=2)
def test_inference_mode_is_captured_apart_from_other_modes(rank, world):
    model = net()
    call = cs.make_graphed_step(lambda inputs: model(inputs).sum())
    with captures_on_cpu():
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                for number in range(4):
                    made = call(data(number))
                    assert torch.equal(made, model(data(number)).sum())
                    assert made.is_inference() == (mode is torch.inference_mode)
        assert call.captures == 2


@distributed(world=2)
def test_debug_mode_is_not_replayed(rank, world):
    model = net()
    call = cs.make_graphed_step(lambda inputs: trained(model, inputs))
    with captures_on_cpu():
        for number in range(4):
            call(data(number))
            model.zero_grad()
        cs.set_debug(True)
        try:
            call(data(4))
            model.zero_grad()
            with pytest.raises(ShardConfigStateError, match="debug mode reads values"):
                call(data(5))
        finally:
            cs.set_debug(False)
        call(data(4))
        assert (call.captures, call.replays) == (1, 3)


# ------------------------------------------------------------------ results and errors


@distributed(world=2)
def test_numbers_of_numpy_are_results(rank, world):
    model = net()
    call = cs.make_graphed_step(lambda inputs: (trained(model, inputs), np.float32(1.5)))
    with captures_on_cpu():
        for number in range(4):
            assert call(data(number))[1] == 1.5
        assert call.replays == 2


class Opaque:
    def __init__(self, loss):
        self.loss = loss


@distributed(world=2)
def test_results_are_copies_and_other_objects_are_refused(rank, world):
    model, total = net(), torch.zeros(())

    def counted(inputs):
        total.add_(1.0)
        trained(model, inputs)
        return total

    call, results = cs.make_graphed_step(counted), []
    with captures_on_cpu():
        for number in range(5):
            results.append(call(data(number)))
            model.zero_grad()
        assert [each.item() for each in results] == [1.0, 2.0, 3.0, 4.0, 5.0]
        with pytest.raises(ShardConfigTypeError, match="the step returned a Opaque, whose tensors"):
            cs.make_graphed_step(lambda inputs: Opaque(trained(model, inputs)))(data(0))
        call = cs.make_graphed_step(lambda inputs: trained(model, inputs), key=lambda: [1])
        call(data(0))
        with pytest.raises(ShardConfigTypeError, match=r"key: must return a value .* got a list"):
            call(data(0))


@pytest.mark.parametrize("kind", [OwnError, torch.OutOfMemoryError, ValueError])
@distributed(world=2)
def test_errors_of_the_program_and_lack_of_memory_are_not_replaced(rank, world, kind):
    model, errors = net(), []

    def step(inputs):
        loss = trained(model, inputs)
        for error in errors:
            raise error
        return loss

    call = cs.make_graphed_step(step)
    with captures_on_cpu():
        for number in range(2):
            call(data(number))
            model.zero_grad()
        errors.append(kind("of the step"))
        with pytest.raises(kind, match=f"^{re.escape('of the step')}$"):
            call(data(2))
        errors.clear()
        for number in range(3):
            call(data(number))
            model.zero_grad()
        assert (call.captures, call.replays) == (1, 3)
