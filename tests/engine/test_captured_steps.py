"""Eager steps captured in CUDA graphs: replays with new data equal eager steps bit for bit.

Captures are simulated (`_replaying.py`). The graph is captured after one eager step, as torchtitan does it: forward and
backward of each microbatch are captured, gradients are clipped and the optimizer steps eagerly, and gradients are set
to zero in place. Twins train eagerly: a sharded one, which must be equal, and an unsharded one, which must be close.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import adam
from torch.utils.checkpoint import checkpoint

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _pool import distributed, more
from _replaying import captures_on_cpu
from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard._group.reduction import GroupReduced
from composable_shard.errors import ShardConfigStateError

STEPS = 4


def checkpoint_blocks(model):
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def freeze_and_skip(model):
    """Freeze a group and a part of another one, and leave parameters of two groups without gradients."""
    for parameter in (*model.blocks[0].parameters(), model.blocks[1].attention.q.weight):
        parameter.requires_grad_(False)
    model.blocks[1].feed_forward.forward = lambda x: x
    model.blocks[2].forward = lambda x, *_: x


def keep_unsharded(model):
    model.set_reshard_after_backward(False)


SCENARIOS = {
    "plain": {},
    "zero2": {"options": {"reshard_after_forward": False}},
    "replicas": {"mesh": (2, 2)},
    "few-ranks": {"mesh": (4,), "options": {"reshard_after_forward": 2}},
    "checkpointed": {"prepare": checkpoint_blocks},
    "frozen and unused": {"prepare": freeze_and_skip},
    "mixed precision": {
        "options": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        "tolerance": 0.05,
    },
    "kept after backward": {"after": keep_unsharded},
    "dropout": {"dropout": 0.2},
}


class Twins:
    """A decoder that is captured, an equal one that trains eagerly, and an unsharded one."""

    def __init__(self, rank, world, options=None, mesh=None, prepare=None, after=None, dropout=0.0, tolerance=1e-5):
        self.rank, self.world, self.tolerance, self.is_random = rank, world, tolerance, dropout > 0
        mesh = mesh or (world,)
        names = ("replicate", "shard")[-len(mesh) :]
        on = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        self.models = []
        for is_sharded in (True, True, False):
            torch.manual_seed(0)
            model = Transformer(layers=3, dropout=dropout)
            if prepare:
                prepare(model)
            for module in (*model.blocks, model) if is_sharded else ():
                fully_shard(module, mesh=on, **(options or {}))
            if after and is_sharded:
                after(model)
            self.models.append(model)
        self.captured, self.eager, self.plain = self.models
        self.optimizers = [
            torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01) for model in self.models
        ]

    def tokens(self, step):
        return token_batch(self.rank, step)[0]

    def run(self, model, step):
        torch.manual_seed(1000 + step)
        loss = next_token_loss(model, self.tokens(step))
        loss.backward()
        return loss.detach()

    def run_plain(self, step, share=1.0):
        for rank in range(self.world):
            torch.manual_seed(1000 + step)
            (share * next_token_loss(self.plain, *token_batch(rank, step)) / self.world).backward()

    def check_gradients(self, step):
        pairs = zip(self.captured.named_parameters(), self.eager.parameters(), strict=True)
        for (name, ours), theirs in pairs:
            assert (ours.grad is None) == (theirs.grad is None), (step, name)
            if ours.grad is not None:
                assert torch.equal(ours.grad.to_local(), theirs.grad.to_local()), (step, name)

    def update(self, set_to_none=False):
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            clip = torch.nn.utils.clip_grad_norm_ if model is self.plain else cs.clip_grad_norm_
            clip(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    def goes_on(self, step):
        """Compare an eager step after the replays, and an evaluation."""
        assert torch.equal(self.run(self.captured, step), self.run(self.eager, step))
        self.run_plain(step)
        self.check_gradients(step)
        self.update(set_to_none=True)
        with torch.no_grad():
            for model in self.models:
                model.eval()
            ours, theirs, plain = (next_token_loss(model, self.tokens(step)) for model in self.models)
        assert torch.equal(ours, theirs)
        if not self.is_random:  # ranks draw other masks than the unsharded model
            torch.testing.assert_close(ours, plain, atol=self.tolerance, rtol=self.tolerance)


def has_no_memory(model):
    return cs.stats(model)["pool/held_bytes"] == cs.stats(model)["pool/live_bytes"] == 0


def capture(twins, captures, step):
    """Capture forward and backward. Returns the graph, its buffer of tokens, and its loss."""
    tokens, losses = twins.tokens(step).clone(), []

    def work():
        loss = next_token_loss(twins.captured, tokens)
        loss.backward()
        losses.append(loss.detach())

    graph, _ = captures.capture(work, None)
    assert has_no_memory(twins.captured)  # nothing outside of the graph refers to its memory
    return graph, tokens, losses[0]


def replay(graph, twins, step):
    recorded, tokens, loss = graph
    tokens.copy_(twins.tokens(step))
    torch.manual_seed(1000 + step)
    recorded.replay()
    assert torch.equal(loss, twins.run(twins.eager, step)), step


def train(rank, world, name):
    twins = Twins(rank, world, **SCENARIOS[name])
    with captures_on_cpu() as captures:
        for model in (twins.captured, twins.eager):
            twins.run(model, 0)
        twins.run_plain(0)
        twins.update()
        graph = capture(twins, captures, 0)
        for step in range(1, STEPS):
            replay(graph, twins, step)
            twins.run_plain(step)
            twins.check_gradients(step)
            twins.update()
        twins.goes_on(STEPS)


@pytest.mark.parametrize("name", ["zero2", "checkpointed", "frozen and unused"])
@distributed(world=2)
def test_replayed_steps_equal_eager_ones(rank, world, name):
    train(rank, world, name)


@pytest.mark.parametrize("name", ["replicas", "few-ranks"])
@distributed(world=4)
def test_replayed_steps_on_meshes_equal_eager_ones(rank, world, name):
    train(rank, world, name)


@pytest.mark.parametrize(
    "name", [more(each) for each in ("plain", "mixed precision", "kept after backward", "dropout")]
)
@distributed(world=2)
def test_replayed_steps_equal_eager_ones_in_further_scenarios(rank, world, name):
    train(rank, world, name)


@distributed(world=2)
def test_microbatches_without_gradient_sync_are_captured_one_by_one(rank, world):
    twins = Twins(rank, world)
    syncs = (False, False, True)

    def eagerly(model, step):
        model.set_requires_gradient_sync(syncs[step % 3])
        return twins.run(model, step)

    with captures_on_cpu() as captures:
        for step in range(3):
            eagerly(twins.captured, step), eagerly(twins.eager, step)
            twins.run_plain(step)
        twins.update(set_to_none=True)
        graphs = []
        for step in range(3):
            twins.captured.set_requires_gradient_sync(syncs[step])
            graphs.append(capture(twins, captures, step))
        for step in range(3, 9):
            twins.eager.set_requires_gradient_sync(syncs[step % 3])
            replay(graphs[step % 3], twins, step)
            twins.run_plain(step)
            if syncs[step % 3]:
                twins.check_gradients(step)
                # A captured first microbatch has marked the `.grad` that it found, so it must be the same each time.
                twins.update()
        twins.goes_on(9)


@distributed(world=2)
def test_several_microbatches_are_captured_in_one_graph(rank, world):
    twins = Twins(rank, world, options={"reshard_after_forward": False})

    def step_of(model, batches):
        losses = []
        for micro, tokens in enumerate(batches):
            model.set_requires_gradient_sync(micro == 1)
            loss = next_token_loss(model, tokens)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    def batches(step):
        return [twins.tokens(2 * step), twins.tokens(2 * step + 1)]

    with captures_on_cpu() as captures:
        for model in (twins.captured, twins.eager):
            step_of(model, batches(0))
        for micro in range(2):
            twins.run_plain(micro)
        twins.update()
        static, results = batches(0), []
        graph, _ = captures.capture(lambda: results.append(step_of(twins.captured, static)), None)
        for step in range(1, STEPS):
            for buffer, tokens in zip(static, batches(step), strict=True):
                buffer.copy_(tokens)
            graph.replay()
            assert torch.equal(results[0], step_of(twins.eager, batches(step)))
            twins.check_gradients(step)
            for micro in range(2):
                twins.run_plain(2 * step + micro)
            twins.update()
        twins.goes_on(2 * STEPS)


@distributed(world=2)
def test_a_captured_evaluation_uses_the_weights_of_each_replay(rank, world):
    twins = Twins(rank, world)
    with captures_on_cpu() as captures:
        for model in (twins.captured, twins.eager):
            twins.run(model, 0)
        twins.run_plain(0)
        twins.update()
        twins.captured.unshard()  # would be used by each replay, if the graph did not gather
        tokens, results = twins.tokens(0).clone(), []
        with torch.no_grad():
            graph, _ = captures.capture(lambda: results.append(twins.captured(tokens)), None)
        assert has_no_memory(twins.captured)
        assert graph.count("allgather") + graph.count("broadcast") + graph.count("recv") >= 4
        for step in range(1, STEPS):
            tokens.copy_(twins.tokens(step))
            graph.replay()
            with torch.no_grad():
                assert torch.equal(results[0], twins.eager(tokens))
            for model in (twins.captured, twins.eager):
                twins.run(model, step)
            twins.run_plain(step)
            twins.update()
        twins.goes_on(STEPS)


@distributed(world=2)
def test_weights_that_a_user_keeps_unsharded_are_gathered_again_after_a_captured_optimizer_step(rank, world):
    twins = Twins(rank, world)
    rate = torch.tensor(0.01)
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=rate, capturable=True, foreach=True)
        for model in (twins.captured, twins.eager)
    ]

    def step_of(which, tokens):
        next_token_loss(twins.models[which], tokens).backward()
        optimizers[which].step()
        optimizers[which].zero_grad(set_to_none=False)

    with captures_on_cpu() as captures, pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])  # torch allows CUDA only
        for which in (0, 1):
            step_of(which, twins.tokens(0))
        tokens = twins.tokens(0).clone()
        graph, _ = captures.capture(lambda: step_of(0, tokens), None)
        twins.captured.unshard()
        for step in range(1, STEPS):
            tokens.copy_(twins.tokens(step))
            graph.replay()
            step_of(1, tokens)
            for ours, theirs in zip(*(each.param_groups[0]["params"] for each in optimizers), strict=True):
                assert torch.equal(ours.to_local(), theirs.to_local()), step
            with torch.no_grad():
                assert torch.equal(twins.captured(tokens), twins.eager(tokens)), step
            twins.captured.unshard()
            weight = twins.captured.head.weight
            assert torch.equal(weight, twins.eager.head.weight.full_tensor()), step


# ---- errors


def refused(twins, captures, match, work=None):
    with pytest.raises(ShardConfigStateError, match=match):
        captures.capture(work or (lambda: twins.run(twins.captured, 1)), None)


@distributed(world=2)
def test_a_capture_before_the_first_training_step_is_an_error(rank, world):
    twins = Twins(rank, world)
    with captures_on_cpu() as captures:
        with torch.no_grad():
            twins.captured(twins.tokens(0)), twins.eager(twins.tokens(0))
        refused(twins, captures, "its plan is made in the first step that trains; run one step eagerly")
        for model in (twins.captured, twins.eager):
            twins.run(model, 0)
        twins.run_plain(0)
        twins.update()
        twins.goes_on(1)


@distributed(world=2)
def test_unsupported_features_are_refused_and_the_next_eager_step_is_exact(rank, world):
    twins = Twins(rank, world)
    with captures_on_cpu() as captures:
        for model in (twins.captured, twins.eager):
            twins.run(model, 0)
        twins.run_plain(0)
        twins.update()
        was = cs.set_debug(True)
        try:
            refused(twins, captures, r"debug mode reads values on the host; call set_debug\(False\)")
        finally:
            cs.set_debug(was)
        optimizer = torch.optim.SGD(twins.captured.parameters(), lr=0.0)
        refused(twins, captures, "SGD.*learning rate is a Python number.*lr=torch.tensor", optimizer.step)
        optimizer = torch.optim.Adam(twins.captured.parameters(), lr=torch.tensor(0.0), foreach=False)
        refused(twins, captures, "Adam.*counts its steps on the host.*capturable=True", optimizer.step)
        twins.goes_on(1)


@distributed(world=2)
def test_gradients_in_fewer_bits_are_refused(rank, world):
    model = fully_shard(torch.nn.Linear(4, 4))
    model.set_comm_policy(cs.CommPolicy(reduce="int8", block=8))
    model(torch.ones(2, 4)).sum().backward()
    with captures_on_cpu() as captures, pytest.raises(ShardConfigStateError, match="rounded with random numbers"):
        captures.capture(lambda: model(torch.ones(2, 4)).sum().backward(), None)
    model(torch.ones(2, 4)).sum().backward()


class Writes(torch.nn.Linear):
    writes = False

    def forward(self, x):
        if self.writes:
            with torch.no_grad():
                self.weight.clamp_(-10, 10)
        return super().forward(x)


@distributed(world=2)
def test_a_captured_forward_that_writes_to_its_weights_is_an_error(rank, world):
    model = fully_shard(Writes(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    model.writes = True
    model(torch.ones(2, 4)).sum().backward()  # allowed eagerly, because no value changes
    with (
        captures_on_cpu() as captures,
        pytest.raises(ShardConfigStateError, match="writes to its unsharded parameters"),
    ):
        captures.capture(lambda: model(torch.ones(2, 4)).sum().backward(), None)
    model(torch.ones(2, 4)).sum().backward()


@distributed(world=2)
def test_parameters_replaced_before_a_capture_need_an_eager_step(rank, world):
    model = fully_shard(torch.nn.Linear(4, 4, bias=False))
    model(torch.ones(2, 4)).sum().backward()
    with captures_on_cpu() as captures:
        model.weight = torch.nn.Parameter(model.weight.detach() * 2)
        with pytest.raises(ShardConfigStateError, match=r"parameters were replaced.*run one step eagerly"):
            captures.capture(lambda: model(torch.ones(2, 4)).sum().backward(), None)
        model(torch.ones(2, 4)).sum().backward()
        captures.capture(lambda: model(torch.ones(2, 4)).sum().backward(), None)


@distributed(world=2)
def test_more_unused_parameters_than_in_the_eager_step_are_an_error(rank, world):
    twins = Twins(rank, world)
    block = twins.captured.blocks[1]
    with captures_on_cpu() as captures:
        twins.run(twins.captured, 0)
        block.feed_forward.forward = lambda x: x
        refused(twins, captures, "a captured step computes no gradient for 3 parameters of a group")
        twins.run(twins.captured, 0)  # decides that no rank has these gradients
        graph = capture(twins, captures, 0)
        graph[0].replay()


class Pieces(NamedTuple):
    pieces: list
    used: list


class Result:
    is_uncut, marks = True, None

    def __init__(self, used):
        self.used = torch.tensor(used)

    def parts(self):
        return Pieces([torch.ones(1) for _ in self.used], list(self.used))


@pytest.mark.parametrize("used", [(1.0, 0.0, 1.0), (1.0, 1.0, 1.0), (1.0, 0.0, 0.0)])
def test_a_graph_asserts_that_other_ranks_use_the_same_parameters_as_in_the_eager_step(used):
    reduced = GroupReduced([([0, 1, 2], Result(used))], [1, 2], (), {(1, 2): [1]}, captured=True)
    if used == (1.0, 0.0, 1.0):
        assert [*reduced.pieces()] == [0, 2]
        assert reduced.unused == [1]
        return
    with pytest.raises(RuntimeError, match="other ranks have a gradient for other parameters than in the last eager"):
        reduced.pieces()


@distributed(world=2)
def test_the_test_tool_notices_reads_of_the_host(rank, world):
    with captures_on_cpu() as captures, pytest.raises(RuntimeError, match="host reads a value"):
        captures.capture(lambda: torch.ones(1).item(), None)
