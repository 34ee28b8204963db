"""On an accelerator one operator copies all parameters out of a buffer, and another all gradients into one."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from composable_shard._comm.copies import GatherCopies, GradientCopies
from composable_shard._comm.lanes import Lane
from composable_shard._plan.layout import Route, gather_layout, reduce_layout

WORLD, RANK = 2, 1
EVEN = [(4, 3), (6,), (2, 5)]
UNEVEN = [(3, 3), (6,), (5, 5)]
CPU = torch.device("cpu")


class Counted(TorchDispatchMode):
    """Records the names of the operators that copy, concatenate or fill."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(word in func.__name__ for word in ("copy", "cat", "fill")):
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Echo:
    """A transport that fills every rank's chunk with this rank's chunk plus that rank's number."""

    route = Route("echo")
    averages = False

    def all_gather(self, wholes, pieces):
        for whole, piece in zip(wholes, pieces, strict=True):
            chunk = piece.clone()
            for rank, row in enumerate(whole.view(WORLD, -1)):
                row.copy_(chunk + rank)
        return Done()


class Done:
    def wait(self):
        return True


def gathered(shapes, streams):
    layout = gather_layout(shapes, WORLD, 4, [0] * len(shapes), Echo.route)
    like = torch.empty(0)
    copies = GatherCopies(layout, RANK, Echo(), like=like, streams=streams)
    memory = torch.full((layout.places.total,), -1.0)
    begins, params = layout.places.begins, layout.places.params
    regions = [memory[begin : begin + WORLD * at.piece] for begin, at in zip(begins, params, strict=True)]
    landing = copies.landing(torch.zeros(layout.landing_bytes // 4))
    shards = [torch.arange(at.rows_of(RANK) * at.row).float().view(at.local_shape(RANK)) for at in params]
    wholes = copies.into(regions)
    with Counted() as counted:
        Lane().start(copies.steps(wholes, landing, shards)).finish()
    return [region.clone() for region in regions], counted.names


@pytest.mark.parametrize("shapes", [EVEN, UNEVEN])
def test_one_operator_copies_all_parameters_out_of_the_buffer(shapes):
    plain, names = gathered(shapes, streams=False)
    fused, fused_names = gathered(shapes, streams=True)
    assert all(map(torch.equal, plain, fused))
    assert "split_with_sizes_copy.out" in fused_names
    assert fused_names.count("split_with_sizes_copy.out") == 1
    assert names.count("_foreach_copy_.default") == fused_names.count("_foreach_copy_.default") + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_operator_copies_gradients_of_either_dtype_into_a_float32_buffer(dtype):
    layout = reduce_layout(EVEN, WORLD, 4, [0] * len(EVEN), Echo.route)
    gradients = [torch.randn(shape).to(dtype) for shape in EVEN]
    filled = []
    for streams in (False, True):
        copies = GradientCopies(layout, torch.float32, [dtype] * len(EVEN), RANK, CPU, streams)
        chunks = torch.full((WORLD, layout.numel), -1.0)
        with Counted() as counted:
            copies.fill(chunks, gradients)
        filled.append(chunks)
        if streams or dtype == torch.float32:
            assert counted.names == ["_chunk_cat.out"]
    plain, fused = (chunks[:, : layout.result.numel + len(EVEN)] for chunks in filled)
    assert torch.equal(plain, fused)
    assert torch.equal(fused[:, layout.result.numel :], torch.ones(WORLD, len(EVEN)))


@pytest.mark.parametrize("itemsize", [2, 4])
def test_chunks_of_a_llama_block_begin_at_multiples_of_16_bytes_on_every_rank(itemsize):
    shapes = [(4096,), (4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (4096,), (14336, 4096), (14336, 4096)]
    layout = reduce_layout(shapes, 8, itemsize, [0] * len(shapes), Echo.route)
    assert [rank * layout.numel * itemsize % 16 for rank in range(8)] == [0] * 8
