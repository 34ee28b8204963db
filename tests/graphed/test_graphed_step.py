"""`make_graphed_step`: eager calls, captures and replays equal eager steps of a twin bit for bit; errors and counts."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim import adam

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _engines import mesh_of
from _pool import distributed
from _replaying import captures_on_cpu
from composable_shard.errors import (
    ShardConfigStateError,
    ShardConfigTypeError,
    ShardConfigValueError,
)


def decoder(dropout=0.0, prepare=lambda model: None, **options):
    torch.manual_seed(0)
    model = Transformer(layers=2, dropout=dropout)
    prepare(model)
    for module in (*model.blocks, model):
        cs.fully_shard(module, **options)
    return model


class Pair:
    """A decoder that trains through `make_graphed_step`, and one that trains eagerly."""

    def __init__(self, rank, make=decoder, run=None, **options):
        self.rank = rank
        self.models = make(), make()
        self.graphed, self.eager = self.models
        self._run = run or (lambda model, tokens: next_token_loss(model, tokens))
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in self.models]
        self.call = cs.make_graphed_step(lambda tokens: self.run(self.graphed, tokens), **options)

    def run(self, model, tokens):
        loss = self._run(model, tokens)
        loss.backward()
        return loss.detach()

    def step(self, number, tokens=None):
        """Run a step of both, and compare losses and gradients."""
        tokens = token_batch(self.rank, number)[0] if tokens is None else tokens
        torch.manual_seed(1000 + number)
        loss = self.call(tokens)
        torch.manual_seed(1000 + number)
        assert torch.equal(loss, self.run(self.eager, tokens)), number
        self.compare(number)
        return loss

    def compare(self, number):
        for (name, ours), theirs in zip(self.graphed.named_parameters(), self.eager.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), (number, name)
            if ours.grad is not None:
                assert torch.equal(ours.grad.to_local(), theirs.grad.to_local()), (number, name)

    def update(self, **how):
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            cs.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(**how)

    def accumulate(self, count, microbatches):
        """Run `count` microbatches and yield the number of each. Only the last one of a step reduces gradients."""
        for number in range(count):
            is_last = number % microbatches == microbatches - 1
            for model in self.models:
                model.set_requires_gradient_sync(is_last)
            self.step(number)
            if is_last:
                self.update()
            yield number

    def ends(self, number):
        """Compare an eager step and an evaluation after the replays."""
        tokens = token_batch(self.rank, number)[0]
        losses = []
        for model in self.models:
            torch.manual_seed(1000 + number)
            losses.append(self.run(model, tokens))
        assert torch.equal(*losses)
        self.compare(number)
        self.update()
        with torch.no_grad():
            assert torch.equal(*(model.eval()(tokens) for model in self.models))


@distributed(world=2)
def test_steps_are_eager_then_captured_then_replayed_with_new_data_and_new_dropout(rank, world):
    pair = Pair(rank, lambda: decoder(dropout=0.2))
    with captures_on_cpu():
        for number in range(7):
            pair.step(number)
            pair.update()
            expected = (0, 0) if number < 2 else (1, number - 1)
            assert (pair.call.captures, pair.call.replays) == expected
        assert pair.call.eager_calls == 2
        text = repr(pair.call)
        assert "1 captures, 5 replays, 2 eager calls" in text
        assert "1 because the first call finds the models" in text
        figures = cs.stats(pair.graphed)
        assert [figures[f"graphs/{kind}"] for kind in ("captures", "replays", "eager_steps")] == [1.0, 5.0, 2.0]
        assert not any(name.startswith("graphs/") for name in cs.stats(pair.eager))
        pair.ends(7)


@distributed(world=2)
def test_a_step_that_clips_in_each_microbatch_keeps_the_gradients_of_earlier_ones(rank, world):
    """Clipping changes `.grad` while gradients are accumulated elsewhere."""

    def loss_after_clipping(model, tokens):
        loss = next_token_loss(model, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0, foreach=False)
        return loss.detach()

    pair = Pair(rank)
    pair.run = loss_after_clipping
    with captures_on_cpu():
        for _ in pair.accumulate(12, microbatches=2):
            pass
        assert pair.call.replays
        pair.ends(12)


@distributed(world=2)
def test_gradients_are_added_to_or_set_as_in_eager_steps(rank, world):
    pair = Pair(rank)
    with captures_on_cpu():
        for number in range(12):
            pair.step(number)
            if number % 3 == 2:
                pair.update(set_to_none=number % 2 == 0)
        assert pair.call.captures == 2  # without `.grad`, and with
        assert pair.call.replays >= 7
        for parameter in pair.graphed.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad.clone()  # other memory than the graph's
        pair.step(12)
        pair.ends(13)


@distributed(world=2)
def test_first_further_and_last_microbatches_have_graphs_of_their_own(rank, world):
    pair = Pair(rank)
    with captures_on_cpu():
        for _ in pair.accumulate(16, microbatches=4):
            pass
        assert pair.call.captures == 3
        assert pair.call.replays >= 6
        for model in pair.models:
            model.set_requires_gradient_sync(False)
        pair.step(16)
        for model in pair.models:
            model.set_requires_gradient_sync(True)
        pair.ends(17)  # the eager step reduces the gradients that a replay has accumulated


@distributed(world=2)
def test_what_the_host_decides_is_part_of_the_key(rank, world):
    pair = Pair(rank)
    with captures_on_cpu():

        def steps(expected, tokens=None):
            for number in range(2):
                pair.step(number, tokens)
                pair.update()
            assert pair.call.captures == expected

        steps(0)
        steps(1)
        steps(2, token_batch(rank, 0, length=6)[0])  # shapes
        for model in pair.models:
            model.eval()
        steps(3)
        for model in pair.models:
            model.train()
            model.blocks[0].attention.q.weight.requires_grad_(False)
        steps(4)
        for model in pair.models:
            model.set_gradient_divide_factor(4.0)
        steps(5)
        with torch.autocast("cpu"):
            steps(6)
        steps(6)
        pair.ends(9)


@distributed(world=2)
def test_the_training_mode_of_an_empty_container_is_part_of_the_key(rank, world):
    def run(model, tokens):
        return next_token_loss(model, tokens) * (2.0 if model.extra.training else 1.0)

    pair = Pair(rank, lambda: decoder(prepare=lambda model: model.add_module("extra", nn.Sequential())), run)
    with captures_on_cpu():
        for expected in (1, 2):
            for number in range(3):
                pair.step(number)
                pair.update()
            assert pair.call.captures == expected
            for model in pair.models:
                model.extra.eval()


@distributed(world=2)
def test_arguments_and_results_can_be_containers_and_constants(rank, world):
    model = decoder()

    def step(batch, *, scale):
        loss = scale * next_token_loss(model, batch["tokens"][0])
        loss.backward()
        return {"loss": loss.detach(), "scale": scale}

    call, seen = cs.make_graphed_step(step), []
    with captures_on_cpu():
        for number in range(5):
            result = call({"tokens": token_batch(rank, number)}, scale=2.0)
            seen.append(result["loss"])
            assert result["scale"] == 2.0
            model.zero_grad()
        assert len({loss.item() for loss in seen}) == 5  # results of earlier replays keep their values
        assert call.replays == 3
        call({"tokens": token_batch(rank, 0)}, scale=3.0)
        assert call.captures == 1
        with pytest.raises(ShardConfigTypeError, match="got a ndarray; pass tensors, numbers and text"):
            call(torch.ones(2).numpy(), scale=1.0)
        with pytest.raises(ShardConfigValueError, match=r"shape \[2\] that requires a gradient.*pass tensor.detach"):
            call(torch.ones(2, requires_grad=True), scale=1.0)
        with pytest.raises(ShardConfigValueError, match="on meta, and the model computes on cpu; move the batch"):
            call(torch.ones(2, device="meta"), scale=1.0)


@distributed(world=2)
def test_moved_parameters_are_captured_again(rank, world):
    pair = Pair(rank)
    with captures_on_cpu():
        for number in range(4):
            pair.step(number)
            pair.update()
        assert pair.call.captures == 1
        for model in pair.models:
            state = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
        pair.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in pair.models]
        for number in range(4, 9):
            pair.step(number)
            pair.update()
        assert pair.call.captures == 2
        pair.ends(9)


@distributed(world=2)
def test_replaced_parameters_run_eagerly_before_they_are_captured(rank, world):
    pair = Pair(rank)
    with captures_on_cpu():
        for number in range(4):
            pair.step(number)
            pair.update()
        for model in pair.models:
            model.head.weight = nn.Parameter(2 * model.head.weight.detach())
        pair.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in pair.models]
        for number in range(4, 8):
            pair.step(number)
            pair.update()
        assert pair.call.captures == 2
        pair.ends(8)


@distributed(world=2)
def test_an_evaluation_is_captured_without_any_training(rank, world):
    model, twin = decoder(), decoder()
    call = cs.make_graphed_step(torch.no_grad()(lambda tokens: model(tokens)))
    with captures_on_cpu():
        for number in range(5):
            tokens = token_batch(rank, number)[0]
            with torch.no_grad():
                assert torch.equal(call(tokens), twin(tokens)), number
        assert call.replays == 3


@distributed(world=2)
def test_gradients_and_clipping_are_right_when_unsharded_parameters_are_installed_before_each_call(rank, world):
    pair = Pair(rank)
    with captures_on_cpu():
        for number in range(6):
            for model in pair.models:
                model.unshard()
            tokens = token_batch(rank, number)[0]
            assert torch.equal(pair.call(tokens), pair.run(pair.eager, tokens)), number
            pair.compare(number)
            norms = [cs.clip_grad_norm_(model.parameters(), 0.1) for model in pair.models]
            assert torch.equal(*map(full, norms)), number
            for optimizer in pair.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert pair.call.replays == 4
        pair.ends(6)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@distributed(world=2)
def test_settings_that_the_step_changes_are_those_of_eager_steps_after_a_replay(rank, world):
    models = [decoder(), decoder()]

    def make(model):
        def step(tokens, last):
            model.set_requires_gradient_sync(last)
            model.train(not last)
            loss = next_token_loss(model, tokens)
            loss.backward()
            return loss.detach()

        return step

    graphed, eager = cs.make_graphed_step(make(models[0])), make(models[1])
    with captures_on_cpu():
        for number in range(10):
            tokens = token_batch(rank, number)[0]
            assert torch.equal(graphed(tokens, number % 2 == 1), eager(tokens, number % 2 == 1))
            assert models[0].training is models[1].training
            if number % 2:
                for model in models:
                    model.zero_grad()
        assert graphed.replays >= 4
        for model in models:
            next_token_loss(model, tokens).backward()  # with gradient sync, as after an eager last microbatch
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())


@pytest.mark.parametrize("set_to_none", [True, False])
@distributed(world=2)
def test_gradients_can_be_set_to_zero_between_microbatches_without_sync(rank, world, set_to_none):
    pair = Pair(rank)
    with captures_on_cpu():
        for number in range(16):
            for model in pair.models:
                model.set_requires_gradient_sync(number % 4 == 3)
            pair.step(number)
            if number % 4 == 0:
                for optimizer in pair.optimizers:
                    optimizer.zero_grad(set_to_none=set_to_none)
            if number % 4 == 3:
                pair.update(set_to_none=set_to_none)
        assert pair.call.replays >= 2
        pair.ends(16)


def capturable(model, rate):
    return torch.optim.AdamW(model.parameters(), lr=rate, capturable=True, foreach=True)


@distributed(world=2)
def test_each_graph_of_two_models_steps_only_its_own(rank, world):
    pairs = [(decoder(), decoder()) for _ in range(2)]  # the models of a GAN, graphed and eager
    rate = torch.tensor(0.01)
    optimizers = [[capturable(model, rate) for model in models] for models in pairs]

    def make(side):
        def step(tokens, which):
            loss = next_token_loss(pairs[which][side], tokens)
            loss.backward()
            optimizers[which][side].step()
            optimizers[which][side].zero_grad()
            return loss.detach()

        return step

    graphed, eager = cs.make_graphed_step(make(0)), make(1)
    with captures_on_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])
        for number in range(12):
            tokens, which = token_batch(rank, number)[0], number % 2
            assert torch.equal(graphed(tokens, which), eager(tokens, which)), number
        assert graphed.captures == 2
        (first,), (second,) = ([e for e, groups in each.stepped if groups] for each in graphed._graphs.values())
        assert first is not second


@distributed(world=2)
def test_a_changed_optimizer_is_captured_again(rank, world):
    models = [decoder(), decoder()]
    rate = torch.tensor(0.01)
    optimizers = [capturable(model, rate) for model in models]

    def make(which):
        def step(tokens):
            loss = next_token_loss(models[which], tokens)
            loss.backward()
            optimizers[which].step()
            optimizers[which].zero_grad()
            return loss.detach()

        return step

    graphed, eager = cs.make_graphed_step(make(0)), make(1)
    with captures_on_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])

        def steps(begin, captures):
            for number in range(begin, begin + 4):
                tokens = token_batch(rank, number)[0]
                assert torch.equal(graphed(tokens), eager(tokens)), number
            assert graphed.captures == captures

        steps(0, 1)
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
        steps(4, 1)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
        assert len(rates) == 2
        steps(8, 2)
        for optimizer in optimizers:
            optimizer.param_groups[0]["betas"] = (0.5, 0.9)
        steps(12, 3)


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))


@distributed(world=2)
def test_steps_with_effects_that_a_replay_cannot_repeat_are_refused(rank, world):
    model, mean, total = decoder(), Mean(), torch.zeros(())

    def adds(tokens, total):
        loss = next_token_loss(model, tokens)
        loss.backward()
        total += loss.detach()

    def replaces(tokens, _total):
        mean.mean = 0.9 * mean.mean + next_token_loss(model, tokens).detach()

    def trained(step, count):
        call = cs.make_graphed_step(step, modules=[mean])
        for number in range(count):
            call(token_batch(rank, number)[0], total)
            model.zero_grad()
        return call

    with captures_on_cpu():
        trained(adds, 2)
        with pytest.raises(ShardConfigStateError, match=r"writes to an argument of shape \[\]"):
            trained(adds, 3)
        call = trained(replaces, 5)
        assert call.eager_calls == 5
        assert "because the first call after parameters, buffers or the plan have changed" in repr(call)


@distributed(world=2)
def test_a_teacher_that_never_trains_does_not_prevent_captures(rank, world):
    teacher = decoder()

    def run(model, tokens):
        with torch.no_grad():
            target = teacher(tokens).softmax(-1)
        return -(target * model(tokens).log_softmax(-1)).mean()

    pair = Pair(rank, run=run)
    with captures_on_cpu():
        for number in range(5):
            pair.step(number)
            pair.update()
            with torch.no_grad():
                pair.graphed(*token_batch(rank, number))  # an evaluation does not cause another capture
        assert (pair.call.captures, pair.call.replays) == (1, 3)
        pair.ends(5)


@distributed(world=2)
def test_a_replay_waits_for_the_event_of_the_optimizer_and_forgets_it(rank, world):
    waits = []

    class Event:
        def wait(self):
            waits.append(self)

    pair = Pair(rank)
    with captures_on_cpu():
        for number in range(4):
            pair.step(number)
            pair.update()
        event = Event()
        pair.graphed.set_post_optim_event(event)
        pair.step(4)
        assert waits == [event]
        pair.update()
        pair.step(5)
        assert waits == [event]


@distributed(world=2)
def test_an_interrupted_capture_leaves_the_state_as_it_was(rank, world):
    pair, stops = Pair(rank), []

    def run(model, tokens):
        loss = next_token_loss(model, tokens)
        if stops and model is pair.graphed:
            loss.backward()
            raise KeyboardInterrupt
        return loss

    pair._run = run
    with captures_on_cpu():
        for number in range(2):
            pair.step(number)
            pair.update()
        stops.append(True)
        with pytest.raises(KeyboardInterrupt):
            pair.call(*token_batch(rank, 2))
        stops.clear()
        assert all(parameter.grad is None for parameter in pair.graphed.parameters())
        for number in range(3, 6):
            pair.step(number)
            pair.update()
        assert pair.call.replays == 3


@distributed(world=2)
def test_the_stopwatch_of_a_user_and_unsharded_parameters_survive_captures(rank, world):
    pair = Pair(rank)
    with captures_on_cpu():
        for number in range(4):
            pair.step(number)
            pair.update()
        cs.watch(pair.graphed)  # before the next eager step
        pair.graphed.unshard()
        with torch.no_grad():
            for number in range(3):
                pair.graphed(*token_batch(rank, number))
                assert torch.equal(pair.graphed.head.weight, pair.eager.head.weight.full_tensor())
                gathers = [action for action in cs.last_record(pair.graphed).actions if str(action.kind) == "UNSHARD"]
                assert "root" not in {action.fqn for action in gathers}
        assert cs.last_record(pair.graphed).spans


@distributed(world=2)
def test_more_keys_than_graphs_run_eagerly_with_one_warning(rank, world):
    pair = Pair(rank, max_graphs=1)
    with captures_on_cpu(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(12):
            pair.step(number, token_batch(rank, number, length=(6, 7, 8)[number % 3])[0])
            pair.update()
    ours = [str(each.message) for each in caught if "make_graphed_step" in str(each.message)]
    assert len(ours) == 1
    assert "1 graphs are captured, and calls with further keys run eagerly" in ours[0]
    assert pair.call.captures == 1
    assert pair.call.eager_reasons["1 graphs were captured before"] >= 4


@distributed(world=2)
def test_the_optimizer_can_be_part_of_the_step(rank, world):
    models = [decoder(), decoder()]
    rate = torch.tensor(0.01)

    def make(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True, foreach=True)

        def step(tokens):
            loss = next_token_loss(model, tokens)
            loss.backward()
            cs.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    graphed, eager = cs.make_graphed_step(make(models[0])), make(models[1])
    with captures_on_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])  # torch allows CUDA only
        for number in range(6):
            rate.fill_(0.01 / (1 + number))
            tokens = token_batch(rank, number)[0]
            assert torch.equal(graphed(tokens), eager(tokens)), number
        assert graphed.replays == 4
        with torch.no_grad():
            assert torch.equal(*(model(tokens) for model in models))
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(ours.to_local(), theirs.to_local())
            assert ours.grad is None


def stepping_in_backward(model, **how):
    rate = torch.tensor(0.01)
    make = lambda params: torch.optim.AdamW(params, lr=rate, capturable=True, foreach=True)  # noqa: E731
    optimizer = cs.optim.in_backward(model, make, **how)

    def step(tokens):
        loss = next_token_loss(model, tokens)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@distributed(world=2)
def test_an_optimizer_that_steps_in_backward_is_captured_unless_it_needs_the_last_norm(rank, world):
    models = [decoder(), decoder()]
    eager = stepping_in_backward(models[1], max_norm=0.01)
    graphed = cs.make_graphed_step(stepping_in_backward(models[0], max_norm=0.01))
    delayed = cs.make_graphed_step(stepping_in_backward(decoder(), max_norm=1.0, norm_of="delayed"))
    with captures_on_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])
        for number in range(5):
            tokens = token_batch(rank, number)[0]
            assert torch.equal(graphed(tokens), eager(tokens)), number
        assert graphed.replays == 3
        with torch.no_grad():
            assert torch.equal(*(model(tokens) for model in models))
        for number in range(2):
            delayed(*token_batch(rank, number))
        with pytest.raises(ShardConfigStateError, match="norm_of='delayed' cannot be captured"):
            delayed(*token_batch(rank, 2))


@distributed(world=2)
def test_a_learning_rate_that_is_a_number_is_refused_and_eager_steps_go_on(rank, world):
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(tokens):
        next_token_loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    call = cs.make_graphed_step(step)
    with captures_on_cpu():
        for number in range(2):
            call(*token_batch(rank, number))
        for _ in range(2):
            with pytest.raises(ShardConfigStateError, match=r"SGD.step\(\).*learning rate is a Python number"):
                call(*token_batch(rank, 3))
        assert all(parameter.grad is None for parameter in model.parameters())
        step(*token_batch(rank, 3))


@distributed(world=2)
def test_a_step_that_reads_a_value_explains_why_it_cannot_be_captured(rank, world):
    pair = Pair(rank, run=lambda model, tokens: next_token_loss(model, tokens))
    pair.run = lambda model, tokens: (loss := next_token_loss(model, tokens), loss.backward(), loss.item())[0].detach()
    with captures_on_cpu():
        for number in range(2):
            pair.call(*token_batch(rank, number))
            pair.run(pair.eager, *token_batch(rank, number))
            pair.update()
        with pytest.raises(ShardConfigStateError, match=r"cannot be captured: .*no .item\(\).*GradScaler.step"):
            pair.call(*token_batch(rank, 2))
        pair.ends(3)


@distributed(world=2)
def test_without_cuda_all_calls_are_eager(rank, world):
    pair = Pair(rank)
    for number in range(4):
        pair.step(number)
        pair.update()
    assert (pair.call.captures, pair.call.replays, pair.call.eager_calls) == (0, 0, 4)
    assert "3 because no CUDA graphs on cpu" in repr(pair.call)


@distributed(world=2)
def test_gradients_of_unsharded_modules_are_put_back(rank, world):
    pair = Pair(rank)
    critics = [nn.Linear(37, 1), nn.Linear(37, 1)]
    critics[1].load_state_dict(critics[0].state_dict())
    optimizers = [torch.optim.SGD(critic.parameters(), lr=0.1) for critic in critics]

    def run(model, tokens):
        critic = critics[model is pair.eager]
        return next_token_loss(model, tokens) + critic(model(tokens)).mean()

    pair._run = run
    with captures_on_cpu():
        for number in range(6):
            pair.step(number)
            assert torch.equal(critics[0].weight.grad, critics[1].weight.grad), number
            pair.update()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert pair.call.replays == 3


@distributed(world=2)
def test_a_key_of_the_user_separates_steps(rank, world):
    model, config = decoder(), {"scale": 1.0}

    def step(tokens):
        loss = config["scale"] * next_token_loss(model, tokens)
        loss.backward()
        return loss.detach()

    call = cs.make_graphed_step(step, key=lambda: config["scale"])
    with captures_on_cpu():
        for scale in (1.0, 2.0):
            config["scale"] = scale
            for _ in range(3):
                loss = call(*token_batch(rank, 0))
                model.zero_grad()
            assert torch.equal(loss, scale * next_token_loss(model, *token_batch(rank, 0)).detach())
        assert call.captures == 2


@distributed(world=2)
def test_bad_arguments_are_explained(rank, world):
    with pytest.raises(ShardConfigTypeError, match="step and key must be functions"):
        cs.make_graphed_step(3)
    with pytest.raises(ShardConfigValueError, match="max_graphs: expected at least 1, got 0"):
        cs.make_graphed_step(print, max_graphs=0)
    with pytest.raises(ShardConfigValueError, match="the step has run no sharded model; call fully_shard first"):
        cs.make_graphed_step(lambda: None)()


@distributed(world=2)
def test_compiled_models_are_captured(rank, world):
    compiled = {}

    def run(model, tokens):
        if model not in compiled:
            compiled[model] = cs.compile(model, backend="aot_eager")
        return next_token_loss(compiled[model], tokens)

    pair = Pair(rank, run=run)
    with captures_on_cpu():
        for number in range(5):
            pair.step(number)
            pair.update()
        assert pair.call.replays == 3
        pair.ends(5)


def outer_sharded():
    """Optimizer state over both axes of a mesh."""
    return decoder(mesh=mesh_of(2, 2), outer_sharding="optimizer")


@distributed(world=4)
def test_steps_with_outer_sharding_have_graphs_for_first_and_later_microbatches(rank, world):
    pair = Pair(rank, outer_sharded)
    with captures_on_cpu():
        for number in range(24):
            for model in pair.models:
                model.set_requires_gradient_sync(number % 3 == 2)
            pair.step(number)
            if number % 3 == 2:
                pair.update()
            if number == 14:  # no version increases, and a replay must see it
                with torch.no_grad():
                    for model in pair.models:
                        torch._foreach_mul_(list(model.parameters()), 1.5)
        assert pair.call.captures == 3
        assert pair.call.replays >= 10
        pair.ends(24)


@distributed(world=4)
def test_an_evaluation_or_a_forward_between_replays_changes_no_result_with_outer_sharding(rank, world):
    pair = Pair(rank, outer_sharded)
    with captures_on_cpu():
        for number in range(10):
            pair.step(number)
            pair.update()
            tokens = token_batch(rank, number)[0]
            losses = []
            for model in pair.models:
                with torch.set_grad_enabled(number % 2 == 0):
                    losses.append(next_token_loss(model, tokens))
            assert torch.equal(*losses)
        assert pair.call.captures == 1
        assert pair.call.replays >= 6
        pair.ends(10)


@distributed(world=4)
def test_an_evaluation_between_microbatches_makes_later_ones_refresh_with_outer_sharding(rank, world):
    """Of swapped weights, without a change of any version."""
    pair = Pair(rank, outer_sharded)
    with captures_on_cpu():
        for number in pair.accumulate(24, microbatches=2):
            if number % 2 == 0 and number > 11:
                tokens, losses = token_batch(rank, number)[0], []
                for model in pair.models:
                    shards = list(model.parameters())
                    with torch.no_grad():
                        torch._foreach_mul_(shards, 2.0)
                        losses.append(next_token_loss(model, tokens))
                        torch._foreach_mul_(shards, 0.5)
                assert torch.equal(*losses)
        assert pair.call.captures >= 3  # later microbatches with and without a refresh
        pair.ends(24)
