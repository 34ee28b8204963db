"""Backward in a different thread than forward, as autograd does on an accelerator."""

from __future__ import annotations

import threading

import torch
from torch.utils.checkpoint import checkpoint

from _blocks import next_token_loss, token_batch
from _decoders import Training
from _pool import distributed

LIMIT_S = 60


def in_thread(call):
    """Run `call` in a new thread, without this thread's state; raise its error in this thread."""
    errors = []

    def run():
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def checkpointed(module, use_reentrant):
    forward = module.forward

    def around(*inputs):
        if not torch.is_grad_enabled():  # the reentrant variant would warn
            return forward(*inputs)
        return checkpoint(forward, *inputs, use_reentrant=use_reentrant)

    module.forward = around


class AroundRoot(torch.nn.Module):
    """The decoder in a single checkpoint."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return checkpoint(self.model, tokens, use_reentrant=False)


def train(rank, world, way):
    training = Training(rank, world)
    if way.endswith("checkpoints"):
        for block in training.model.blocks:
            checkpointed(block, use_reentrant=way.startswith("reentrant"))
    model = AroundRoot(training.model) if way == "root in a checkpoint" else training.model
    for _ in range(2):
        for is_last in (False, True) if way == "sync off" else (True,):
            training.model.set_requires_gradient_sync(is_last)
            loss = next_token_loss(model, *token_batch(rank, training.at))
            torch.testing.assert_close(loss, next_token_loss(training.plain, *token_batch(rank, training.at)))
            in_thread(loss.backward)
            training.backward_of_plain()
        training.check_gradients()
        training.update()
    training.goes_on_exactly()


@distributed(world=2)
def test_gradients_and_parameters_equal_those_of_the_unsharded_decoder(rank, world):
    for way in ("plain", "checkpoints", "reentrant checkpoints", "root in a checkpoint", "sync off"):
        train(rank, world, way)


def losses(rank, call):
    """Losses with an optimizer that steps each parameter in the backward that `call` runs, once its gradient is set."""

    def step_now(parameter):
        parameter.to_local().data.sub_(parameter.grad.to_local(), alpha=0.1)
        parameter.grad = None

    model = Training(rank, 2).model
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    values = []
    for step in range(4):
        loss = next_token_loss(model, *token_batch(rank, step))
        call(loss.backward)
        values.append(loss.item())
    return values


@distributed(world=2)
def test_an_optimizer_in_backward_gives_the_same_losses_as_in_one_thread(rank, world):
    in_one = losses(rank, lambda backward: backward())
    assert losses(rank, in_thread) == in_one
    assert in_one[-1] != in_one[0]
