"""What arrives of weights and gradients that travel in fewer bits, computed without any rank but one."""

from __future__ import annotations

import torch

from _blocks import Transformer, next_token_loss, token_batch
from composable_shard import Ragged, fully_shard, make_plan
from composable_shard._comm.rounding import Rounding, dequantise, noise_like, quantise, rounded, to_bf16
from composable_shard._plan.parcel import block_of, parcel
from composable_shard._policies import Wire
from composable_shard._torch.ragged import rows_of_chunk


def round_weights(model, wire, dtype=None):
    """Have a model compute with what a gather gives."""
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(rounded(param, wire, dtype=dtype))


def by_piece(gradient, world, rows=1):
    """A gradient as (world, rows, elements of a row), with zeros behind the last rows; cut at multiples of `rows`."""
    flat = gradient.reshape(gradient.shape[0], -1)
    chunk = rows_of_chunk(flat.shape[0], world, rows)
    padded = flat.new_zeros(world * chunk, flat.shape[1])
    padded[: flat.shape[0]] = flat
    return padded.view(world, chunk, flat.shape[1])


def arrived(pieces, wire, noise):
    """What pieces, (world, rows, row), stand for when they arrive."""
    world, rows, row = pieces.shape
    sent = parcel([(rows, row)], pieces.element_size(), wire)
    if sent is None:
        return pieces.clone()
    out = torch.empty_like(pieces)
    if wire.form == "bf16":
        made = torch.empty(pieces.shape, dtype=torch.bfloat16)
        to_bf16(made, pieces, None if noise is None else noise.view(pieces.shape))
        return out.copy_(made)
    blocks = pieces.reshape(world, -1, block_of(row, wire.block))
    codes = torch.empty(blocks.shape, dtype=torch.uint8)
    scales = torch.empty(*blocks.shape[:-1], 1)
    quantise(codes, scales, blocks, wire.form, noise)
    dequantise(out.view(blocks.shape), codes, scales, wire.form)
    return out


def arrived_at_random(pieces, wire, generator):
    """The same of numbers that are rounded stochastically."""
    if parcel([pieces.shape[1:]], 4, wire) is None:
        return pieces
    blocks = pieces
    if wire.form != "bf16":
        blocks = pieces.reshape(len(pieces), -1, block_of(pieces.shape[2], wire.block))
    return arrived(pieces, wire, noise_like(blocks, generator))


def whole_of(pieces, like):
    """Pieces, (world, rows, elements of a row), as the gradient that was cut into them."""
    return pieces.flatten(0, 1)[: like.shape[0]].view(like.shape)


class Ranks:
    """Ranks that round gradients and add up what arrives, in their order.

    Args:
        names: of the parameters of each group.
        wire: what gradients travel as.
        world: ranks.
        feedback: whether they feed back what rounding leaves.
        rows: of which the cuts are multiples.
    """

    def __init__(self, names: list[list[str]], wire: Wire, world: int, feedback: bool = False, rows: int = 1) -> None:
        self.names, self.wire, self.world, self.rows = names, wire, world, rows
        self.feedback = feedback
        self.number = 0
        self.left = {}

    def mean(self, gradients):
        """The mean of all ranks' gradients, by name; `gradients` are those of each rank, by name."""
        sums = {}
        for group in self.names:
            for rank, own in enumerate(gradients):
                rounding = Rounding()
                rounding.put(self.number, {})
                generator = rounding.seeded(group[0], rank, torch.device("cpu"))
                for name in group:
                    pieces = by_piece(own[name], self.world, self.rows)
                    got = self._arrived(rank, name, pieces, generator)
                    sums[name] = got if rank == 0 else sums[name] + got
        self.number += 1
        return {name: whole_of(total, gradients[0][name]) / self.world for name, total in sums.items()}

    def _arrived(self, rank, name, pieces, generator):
        if self.feedback:
            pieces = pieces + self.left.get((rank, name), 0)
            got = arrived(pieces, self.wire, None)
            self.left[rank, name] = pieces - got
            return got
        return arrived_at_random(pieces, self.wire, generator)


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
    """Of a plain model on a rank's batch."""
    model.zero_grad()
    loss = next_token_loss(model, *token_batch(rank, step))
    loss.backward()
    return loss.detach(), {name: param.grad.clone() for name, param in model.named_parameters()}


def assert_trains_alike(rank, world, model, masters, mean, reference=None, renew=lambda: None):
    """Three steps of AdamW and an evaluation of a sharded decoder have the bits of a plain one.

    Args:
        rank, world: of this process.
        model: sharded.
        masters: the plain one, which is stepped.
        mean: makes of the gradients of each rank, by name, the ones to step by.
        reference: computes with the weights of `masters`; by default those themselves.
        renew: is called before each step and the evaluation, to give `reference` the weights.
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
    """Three steps and an evaluation of a sharded decoder have the bits of a model that rounds by itself.

    Args:
        rank, world: of this process.
        policy: of communication.
        rows: of which the cuts are multiples.
        options: of `fully_shard`.
    """
    placed = (lambda param: Ragged(rows)) if rows > 1 else None
    model = sharded(policy, shard_placement_fn=placed, **options)
    masters, reference = plain(), plain()
    ranks = Ranks(groups_of(model), policy.reduce and Wire(policy.reduce, BLOCK), world, policy.error_feedback, rows)

    def renew():
        reference.load_state_dict(masters.state_dict())
        if policy.gather:
            round_weights(reference, Wire(policy.gather, BLOCK))

    def mean(own):
        return ranks.mean(own) if policy.reduce else {n: sum([each[n] for each in own]) / world for n in own[0]}

    assert_trains_alike(rank, world, model, masters, mean, reference, renew)
    return model
