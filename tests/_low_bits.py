"""Reference for weights and gradients that are sent in fewer bits, computed on one rank."""

from __future__ import annotations

import torch

from _blocks import Transformer, next_token_loss, token_batch
from composable_shard import Ragged, fully_shard, make_plan
from composable_shard._comm.rounding import Rounding, _noise, dequantise, numbers_in, quantise, to_bf16
from composable_shard._plan.parcel import block_of, parcel
from composable_shard._policies import Wire
from composable_shard._torch.ragged import rows_of_chunk


def noise_like(numbers, generator):
    """Return the random int16 of stochastic rounding, in the shape of a tensor."""
    return _noise(numbers.numel(), numbers.device, generator).view(numbers.shape)


def rounded(tensor, wire, dim=0, dtype=None):
    """Return a parameter as a gather rounds it, or a gradient rounded to nearest.

    Args:
        tensor: the whole parameter.
        wire: the format in which it is sent.
        dim: along which it is sharded.
        dtype: the dtype of the result; None for the tensor's own.
    """
    dtype = dtype or tensor.dtype
    size, row = tensor.shape[dim], tensor.numel() // max(tensor.shape[dim], 1)
    sent = parcel([(size, row)], dtype.itemsize, wire)
    if sent is None:
        return tensor.to(dtype)
    (numbers,) = numbers_in(torch.zeros(sent.nbytes, dtype=torch.uint8, device=tensor.device), sent.parts, dtype)
    by_row = tensor.movedim(dim, 0)
    numbers.put(by_row.reshape(numbers.values.shape))
    out = torch.empty(numbers.values.shape, dtype=dtype, device=tensor.device)
    numbers.fill(out)
    return out.view(by_row.shape).movedim(0, dim).contiguous()


def round_weights(model, wire, dtype=None):
    """Round the weights of a model like a gather does."""
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(rounded(param, wire, dtype=dtype))


def by_piece(gradient, world, rows=1):
    """Reshape a gradient to (world, rows, elements of a row), padded with zeros, in pieces of a multiple of `rows`."""
    flat = gradient.reshape(gradient.shape[0], -1)
    chunk = rows_of_chunk(flat.shape[0], world, rows)
    padded = flat.new_zeros(world * chunk, flat.shape[1])
    padded[: flat.shape[0]] = flat
    return padded.view(world, chunk, flat.shape[1])


def arrived_at_random(pieces, wire, generator):
    """The values of pieces, (world, rows, row), after they were rounded stochastically and sent."""
    world, rows, row = pieces.shape
    if parcel([(rows, row)], pieces.element_size(), wire) is None:
        return pieces
    out = torch.empty_like(pieces)
    if wire.form == "bf16":
        made = torch.empty(pieces.shape, dtype=torch.bfloat16)
        to_bf16(made, pieces, noise_like(pieces, generator))
        return out.copy_(made)
    blocks = pieces.reshape(world, -1, block_of(row, wire.block))
    codes = torch.empty(blocks.shape, dtype=torch.uint8)
    scales = torch.empty(*blocks.shape[:-1], 1)
    quantise(codes, scales, blocks, wire.form, noise_like(blocks, generator))
    dequantise(out.view(blocks.shape), codes, scales, wire.form)
    return out


def whole_of(pieces, like):
    """Assemble pieces, (world, rows, elements of a row), into the full gradient."""
    return pieces.flatten(0, 1)[: like.shape[0]].view(like.shape)


class Ranks:
    """Simulates ranks that round gradients and add the received values in the order of the ranks.

    Args:
        names: names of the parameters of each group.
        wire: format in which gradients are sent.
        world: world size.
        rows: the shards have a multiple of this number of rows.
    """

    def __init__(self, names: list[list[str]], wire: Wire, world: int, rows: int = 1) -> None:
        self.names, self.wire, self.world, self.rows = names, wire, world, rows
        self.number = 0

    def mean(self, gradients):
        """The mean of the gradients of all ranks, by name. `gradients` has the gradients of each rank, by name."""
        sums = {}
        for group in self.names:
            for rank, own in enumerate(gradients):
                generator = Rounding(self.number).seeded(group[0], rank, torch.device("cpu"))
                for name in group:
                    pieces = by_piece(own[name], self.world, self.rows)
                    got = arrived_at_random(pieces, self.wire, generator)
                    sums[name] = got if rank == 0 else sums[name] + got
        self.number += 1
        return {name: whole_of(total, gradients[0][name]) / self.world for name, total in sums.items()}


# ---- decoders

BLOCK = 16


def sharded(policy, seed=0, arch=None, **options):
    torch.manual_seed(seed)
    model = Transformer(**(arch or {}))
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.set_comm_policy(policy)
    return model


def plain(seed=0, arch=None):
    torch.manual_seed(seed)
    return Transformer(**(arch or {}))


def groups_of(model):
    return [[param.fqn for param in group.params] for group in make_plan(model).groups]


def gradients_of(model, rank, step):
    """Loss and gradients of an unsharded model on a rank's batch."""
    model.zero_grad()
    loss = next_token_loss(model, *token_batch(rank, step))
    loss.backward()
    return loss.detach(), {name: param.grad.clone() for name, param in model.named_parameters()}


def assert_trains_alike(rank, world, model, masters, mean, reference=None, renew=lambda: None):
    """Check that three steps of AdamW and an evaluation of a sharded decoder are bitwise identical to an unsharded one.

    Args:
        rank, world: rank of this process, and world size.
        model: the sharded decoder.
        masters: the unsharded decoder that the optimizer updates.
        mean: computes the mean gradients from the gradients of each rank, by name.
        reference: the unsharded decoder that computes the gradients; by default `masters`.
        renew: is called before each step and the evaluation to copy the weights to `reference`.
    """
    reference = masters if reference is None else reference
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, masters)]
    for step in range(3):
        renew()
        gradients = [gradients_of(reference, each, step) for each in range(world)]
        loss = next_token_loss(model, *token_batch(rank, step))
        loss.backward()
        assert torch.equal(loss, gradients[rank][0])
        means = mean([by_name for _, by_name in gradients])
        for name, param in model.named_parameters():
            assert torch.equal(param.grad.full_tensor(), means[name]), name
        for name, param in masters.named_parameters():
            param.grad = means[name]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, expected in zip(model.parameters(), masters.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), expected)
    renew()
    with torch.no_grad():
        assert torch.equal(*[next_token_loss(each.eval(), *token_batch(rank, 3)) for each in (model, reference)])


def trains_as_one_that_rounds(rank, world, policy, rows=1, **options):
    """Check that training a sharded decoder is bitwise identical to a model that rounds explicitly.

    Args:
        rank, world: rank of this process, and world size.
        policy: communication policy.
        rows: the shards have a multiple of this number of rows.
        options: arguments of `fully_shard`.

    Returns:
        The sharded decoder.
    """
    placed = (lambda param: Ragged(rows)) if rows > 1 else None
    model = sharded(policy, shard_placement_fn=placed, **options)
    masters, reference = plain(), plain()
    ranks = Ranks(groups_of(model), policy.reduce and Wire(policy.reduce, BLOCK), world, rows)

    def renew():
        reference.load_state_dict(masters.state_dict())
        if policy.gather:
            round_weights(reference, Wire(policy.gather, BLOCK))

    def mean(own):
        return ranks.mean(own) if policy.reduce else {n: sum([each[n] for each in own]) / world for n in own[0]}

    assert_trains_alike(rank, world, model, masters, mean, reference, renew)
    return model
