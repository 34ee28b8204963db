"""Optimizers that quantize state by blocks are bitwise identical on shards that do not split blocks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _pool import distributed, more

ROWS, BLOCK = 4, 32  # 4 rows of 16 or 24 elements are 2 or 3 blocks


class EightBit(torch.optim.Optimizer):
    """Momentum in 8 bits, with a scale for each block of the flattened parameter (Dettmers et al., 2021)."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, self.state[param], group["lr"], group["beta"])

    def _step(self, param, state, lr, beta):
        if not state:
            state["codes"] = torch.zeros_like(param, dtype=torch.int8)
            state["scales"] = self._scales(param)
        codes, scales, value = (local(each) for each in (state["codes"], state["scales"], param))
        momentum = in_blocks(codes).float() * scales.view(-1, 1)
        momentum = beta * momentum + in_blocks(local(param.grad))
        value -= lr * momentum.view(-1)[: value.numel()].view(value.shape)
        largest = momentum.abs().amax(1) / 127
        codes.copy_(
            (momentum / largest.clamp(min=1e-30).view(-1, 1)).round().view(-1)[: value.numel()].view(codes.shape)
        )
        scales.copy_(largest.view(scales.shape))

    @staticmethod
    def _scales(param):
        """One scale per block. For a sharded parameter, the scales of each rank's rows are on that rank."""
        own = len(in_blocks(local(param)))
        if not isinstance(param, DTensor):
            return torch.zeros(own)
        # One row of this tensor stands for `ROWS` rows. torch shards it like `Ragged` shards those.
        width = ROWS * param.shape[1] // BLOCK
        shape = torch.Size([-(-param.shape[0] // ROWS), width])
        scales = torch.zeros(own // width, width)
        return DTensor.from_local(scales, param.device_mesh, as_rows(param), shape=shape, stride=(width, 1))

    def load_state_dict(self, state_dict):
        """Accept state whose shape is not the full parameter's."""
        super().load_state_dict(state_dict)
        for param, state in self.state.items():
            state["scales"] = state["scales"].redistribute(placements=as_rows(param))


def as_rows(param):
    return [Shard(0) if isinstance(each, cs.Ragged) else each for each in param.placements]


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def in_blocks(tensor):
    return torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % BLOCK)).view(-1, BLOCK)


def matrices(model):
    return [p for p in model.parameters() if p.ndim == 2 and p.shape[0] % ROWS == 0]


def pair(**options):
    torch.manual_seed(0)
    plain = Transformer(layers=1)
    return plain, sharded(copy.deepcopy(plain), **options)


def sharded(model, choose=lambda p: cs.Ragged(ROWS) if p.ndim == 2 else None, **options):
    for module in (*model.blocks, model):
        cs.fully_shard(module, shard_placement_fn=choose, **options)
    return model


def train(model, optimizer, rank, first, steps):
    for step in range(first, first + steps):
        next_token_loss(model, *token_batch(rank, step)).backward()
        optimizer.step()
        model.zero_grad()


def assert_alike(model, plain):
    for (name, ours), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        ours, other = (each.full_tensor() if isinstance(each, DTensor) else each for each in (ours, other))
        torch.testing.assert_close(ours, other, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("hsdp", [False, more(True)])
@distributed(world=(4, more(2)))
def test_steps_are_bitwise_identical_to_one_process(rank, world, hsdp):
    mesh = init_device_mesh("cpu", (2, world // 2) if hsdp else (world,), mesh_dim_names=("r", "s") if hsdp else ("s",))
    plain, model = pair(mesh=mesh)
    ours, alone = EightBit(matrices(model)), EightBit(matrices(plain))
    for step in range(4):
        next_token_loss(model, *token_batch(rank, step)).backward()
        for param, own in zip(model.parameters(), plain.parameters(), strict=True):
            own.grad = param.grad.full_tensor()
        for each in (ours, alone):
            each.step()
            each.zero_grad()
        assert_alike(model, plain)
    for param, own in zip(matrices(model), matrices(plain), strict=True):
        state, other = ours.state[param], alone.state[own]
        assert torch.equal(state["codes"].full_tensor(), other["codes"])
        assert torch.equal(state["scales"].full_tensor().flatten(), other["scales"])


@distributed(world=2)
def test_shards_that_split_blocks_give_different_weights(rank, world):
    """This shows that the test above can fail."""
    torch.manual_seed(0)
    cut = torch.nn.Linear(24, 10, bias=False)
    alone = torch.nn.Parameter(cut.weight.detach().clone())
    cs.fully_shard(cut)  # 5 rows of 24: in the middle of a block
    gradient = torch.randn(10, 24, generator=torch.Generator().manual_seed(1))
    ours = torch.nn.Parameter(local(cut.weight).detach().clone())
    optimizers = EightBit([ours]), EightBit([alone])
    for _ in range(2):
        ours.grad, alone.grad = gradient[5 * rank : 5 * rank + 5].clone(), gradient.clone()
        for each in optimizers:
            each.step()
    assert not torch.equal(alone[5 * rank : 5 * rank + 5], ours)


def goes_on(rank, world, path):
    _, model = pair()
    optimizer = EightBit(matrices(model))
    train(model, optimizer, rank, 0, 2)
    cs.checkpoint.save(path, {"model": model, "optimizer": optimizer}, step=2)
    _, other = pair()
    again = EightBit(matrices(other))
    cs.checkpoint.load(path, {"model": other, "optimizer": again})
    for net, each in ((model, optimizer), (other, again)):
        train(net, each, rank, 2, 2)
    assert_alike(model, other)


@distributed(world=2)
def test_a_checkpoint_stores_its_state(rank, world, tmp_path):
    goes_on(rank, world, tmp_path)


@distributed(world=2)
def test_it_steps_inside_of_backward(rank, world):
    _, model = pair()
    _, ordinary = pair()
    optimizer = cs.optim.in_backward(model, lambda params: EightBit([p for p in params if p in set(matrices(model))]))
    plain = EightBit(matrices(ordinary))
    train(model, optimizer, rank, 0, 2)
    train(ordinary, plain, rank, 0, 2)
    assert_alike(model, ordinary)
