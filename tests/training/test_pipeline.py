"""Pipeline stages (`torch.distributed.pipelining`) whose modules are sharded over data-parallel ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, UnshardHandle
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from _blocks import TransformerBlock, rotary
from _engines import fully_shard, named_mesh
from _models import Block
from _pool import distributed, more
from _stepping import assert_at_rest
from composable_shard import last_record

DIM, MICROBATCHES, LENGTH = 8, 4, 5


class Stage(nn.Module):
    """A stage with two blocks and its own linear layer."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(DIM, 2 * DIM) for _ in range(2))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return x


def shard(stage, engine, mesh, reshard):
    for block in stage.blocks:
        engine(block, mesh=mesh, reshard_after_forward=reshard)
    return engine(stage, mesh=mesh, reshard_after_forward=reshard)


def loss_fn(output, target):
    return nn.functional.mse_loss(output, target)


def batch(dp_rank, step):
    generator = torch.Generator().manual_seed(10 * step + dp_rank)
    x, target = torch.randn(2, 2 * MICROBATCHES, DIM, generator=generator)
    return x, target


def reference_step(plain, step, backwards):
    """Compute the gradients in one process: the mean over data-parallel ranks, each with its microbatches in order.

    Args:
        backwards: run the last microbatch first.

    Returns:
        The losses of each data-parallel rank.
    """
    sums, losses = [], []
    for dp_rank in range(2):
        plain.zero_grad()
        x, target = batch(dp_rank, step)
        losses.append([loss_fn(plain(x), wanted) for x, wanted in zip(x.chunk(4), target.chunk(4), strict=True)])
        for loss in reversed(losses[-1]) if backwards else losses[-1]:
            loss.backward()
        sums.append([p.grad for p in plain.parameters()])
    for p, first, second in zip(plain.parameters(), *sums, strict=True):
        p.grad = ((first + second) / 2) / MICROBATCHES
    return losses


def build(name, stages, count, mesh):
    """Create torch's schedule for the stages of this rank."""
    group = mesh.get_group("pp")
    made = [PipelineStage(stage, i, count, torch.device("cpu"), group=group) for i, stage in stages.items()]
    kind = get_schedule_class(name)
    return kind(made if issubclass(kind, PipelineScheduleMulti) else made[0], MICROBATCHES, loss_fn=loss_fn)


def run(schedule, own, count, dp_rank, step):
    """Run a step of the pipeline. Returns the losses of the last stage, or None on ranks that do not have it."""
    x, target = batch(dp_rank, step)
    losses = [] if count - 1 in own else None
    schedule.step(*((x,) if 0 in own else ()), target=target if losses is not None else None, losses=losses)
    return losses


PLACES = {  # stages of each pipeline rank
    "GPipe": ((0,), (1,)),
    "1F1B": ((0,), (1,)),
    "Interleaved1F1B": ((0, 2), (1, 3)),
    "LoopedBFS": ((0, 2), (1, 3)),
    "InterleavedZeroBubble": ((0, 2), (1, 3)),
    "ZBVZeroBubble": ((0, 3), (1, 2)),
    "DualPipeV": ((0, 3), (1, 2)),
}


CASES = [("1F1B", True), ("Interleaved1F1B", False), ("InterleavedZeroBubble", False), ("ZBVZeroBubble", True)]
ALL = [(name, reshard) for name in PLACES for reshard in (True, False)]
MORE = [pytest.param(*case, marks=pytest.mark.matrix) for case in ALL if case not in CASES]


def same_pieces(stage, plain, dp_rank, of):
    for name, whole in plain.named_parameters():
        got = of(stage.get_parameter(name))
        assert torch.equal(got.to_local(), of(whole).chunk(2)[dp_rank]), name


@pytest.mark.parametrize(("name", "reshard"), CASES + MORE)
@distributed(world=4)
def test_pipeline_training_is_bitwise_identical_to_one_process(rank, world, name, reshard):
    mesh = named_mesh((2, 2), ("pp", "dp"))
    dp_rank, places = mesh.get_local_rank("dp"), PLACES[name]
    torch.manual_seed(3)
    plain = nn.Sequential(*(Stage() for _ in range(2 * len(places[0]))))
    own = places[mesh.get_local_rank("pp")]
    stages = {i: shard(copy.deepcopy(plain[i]), fully_shard, mesh["dp"], reshard) for i in own}
    schedule = build(name, stages, len(plain), mesh)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (*stages.values(), plain)]
    for step in range(3):
        want = reference_step(plain, step, backwards=name == "LoopedBFS")
        losses = run(schedule, own, len(plain), dp_rank, step)
        assert losses is None or torch.equal(torch.stack(losses), torch.stack(want[dp_rank])), f"losses of step {step}"
        for i, stage in stages.items():
            same_pieces(stage, plain[i], dp_rank, lambda p: p.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for i, stage in stages.items():
            same_pieces(stage, plain[i], dp_rank, lambda p: p.detach())
    for stage in stages.values():
        assert_at_rest(stage)
        reductions = [action.fqn for action in last_record(stage).actions if action.kind.name == "REDUCE"]
        assert sorted(reductions) == ["", "blocks.0", "blocks.1"], "one for each group, not for each microbatch"


def make_optimizer(model):
    """AdamW with the fused kernel for every other parameter, and foreach functions for the rest."""
    params = list(model.parameters())
    groups = [{"params": params[::2], "fused": True, "foreach": False}, {"params": params[1::2], "foreach": True}]
    return torch.optim.AdamW(groups, lr=0.1)


def clip(stage, group, most):
    """Clip the gradients of a stage by the norm of the whole pipeline."""
    norm = nn.utils.get_total_norm([p.grad for p in stage.parameters()]).full_tensor().square()
    dist.all_reduce(norm, group=group)
    nn.utils.clip_grads_with_norm_(stage.parameters(), most, norm.sqrt_())
    return norm


@distributed(world=4)
def test_stages_clip_by_a_common_norm_and_resume_from_a_checkpoint(rank, world, tmp_path):
    mesh = named_mesh((2, 2), ("pp", "dp"))
    dp_rank, own = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    torch.manual_seed(3)
    plain = nn.Sequential(Stage(), Stage())
    sides = []  # the second one resumes from the checkpoint of the first
    for _ in range(2):
        stage = shard(copy.deepcopy(plain[own]), fully_shard, mesh["dp"], True)
        sides.append((stage, make_optimizer(stage), build("1F1B", {own: stage}, 2, mesh)))
    plain_optimizer = make_optimizer(plain)

    def train(side, step):
        stage, optimizer, schedule = side
        run(schedule, (own,), 2, dp_rank, step)
        norm = clip(stage, mesh.get_group("pp"), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    for step in range(3):
        reference_step(plain, step, backwards=False)
        torch.testing.assert_close(train(sides[0], step), nn.utils.clip_grad_norm_(plain.parameters(), 0.01))
        plain_optimizer.step()
    (stage, optimizer, _), (other, other_optimizer, _) = sides
    for name, want in plain[own].named_parameters():
        torch.testing.assert_close(stage.get_parameter(name).full_tensor(), want)

    def state_of(stage, optimizer):
        return {f"{own}": dict(zip(("model", "optimizer"), get_state_dict(stage, optimizer), strict=True))}

    dcp.save(state_of(stage, optimizer), checkpoint_id=tmp_path)
    found = state_of(other, other_optimizer)
    dcp.load(found, checkpoint_id=tmp_path)
    found = found[f"{own}"]
    set_state_dict(other, other_optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    for side in sides:
        train(side, 3)
    for name, p in stage.named_parameters():
        assert torch.equal(p.to_local(), other.get_parameter(name).to_local()), name


# ---- every schedule, compared with FSDP2


class Layers(nn.Module):
    """A stage of transformer blocks without own weights: all weights belong to sharded modules in it."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(TransformerBlock(DIM, 2, 1, 12, dropout) for _ in range(2))
        cos, sin = rotary(LENGTH, DIM // 2)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x


class Padded(Layers):
    """A stage with two own linear layers, one of which is frozen."""

    def __init__(self):
        super().__init__()
        self.inp, self.frozen = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return super().forward(self.inp(x)) + self.frozen(x)


def text_batch(dp_rank, step):
    generator = torch.Generator().manual_seed(10 * step + dp_rank)
    return torch.randn(2, MICROBATCHES, LENGTH, DIM, generator=generator)


def text_reference(plain, step, dp_ranks):
    """Compute the mean gradients in one process. Returns the losses of each data-parallel rank."""
    sums, losses = [], []
    for dp_rank in range(dp_ranks):
        plain.zero_grad()
        x, target = text_batch(dp_rank, step)
        losses.append([loss_fn(plain(x), wanted) for x, wanted in zip(x.chunk(4), target.chunk(4), strict=True)])
        for loss in losses[-1]:
            loss.backward()
        sums.append([p.grad for p in plain.parameters()])
    for p, *grads in zip(plain.parameters(), *sums, strict=True):
        p.grad = None if grads[0] is None else sum(grads) / dp_ranks / MICROBATCHES
    return losses


def check_schedule(name, kind, dp_ranks, reshard, engines):
    """Train for two steps with each engine, and compare with the unsharded model."""
    mesh = named_mesh((2, dp_ranks), ("pp", "dp"))
    dp_rank, places = mesh.get_local_rank("dp"), PLACES[name]
    own, count = places[mesh.get_local_rank("pp")], 2 * len(places[0])
    torch.manual_seed(3)
    plain = nn.Sequential(*(kind() for _ in range(count)))
    sides = []
    for engine in engines:
        stages = {i: shard(copy.deepcopy(plain[i]), engine, mesh["dp"], reshard) for i in own}
        sides.append((stages, build(name, stages, count, mesh)))
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, *(s for st, _ in sides for s in st.values()))
    ]
    for step in range(2):
        want = text_reference(plain, step, dp_ranks)
        for stages, schedule in sides:
            x, target = text_batch(dp_rank, step)
            losses = [] if count - 1 in own else None
            schedule.step(*((x,) if 0 in own else ()), target=target if losses is not None else None, losses=losses)
            if losses is not None:
                torch.testing.assert_close(torch.stack(losses), torch.stack(want[dp_rank]))
            for i, stage in stages.items():
                for key, param in plain[i].named_parameters():
                    grad = stage.get_parameter(key).grad
                    assert (grad is None) == (param.grad is None), f"{i}.{key}"
                    if grad is not None:
                        torch.testing.assert_close(grad.full_tensor(), param.grad, msg=lambda m, k=key: f"{k}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for stage in sides[0][0].values():
        assert_at_rest(stage)


def loses_gradients(name, reshard):
    """Whether FSDP2 loses gradients with this schedule. A test below shows it."""
    return name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV") and reshard


@pytest.mark.parametrize("kind", ["Layers", more("Padded")])
@pytest.mark.parametrize("name", PLACES)
@distributed(world=2)
def test_stages_on_meshes_of_one_rank_train_with_every_schedule(rank, world, name, kind):
    engines = [fully_shard] if loses_gradients(name, True) else [fully_shard, fsdp2]
    check_schedule(name, {"Layers": Layers, "Padded": Padded}[kind], 1, True, engines)


@pytest.mark.parametrize(("name", "reshard"), [("DualPipeV", False), *(more(*at) for at in ALL)])
@distributed(world=4)
def test_stages_without_own_weights_train_with_every_schedule(rank, world, name, reshard):
    engines = [fully_shard] if loses_gradients(name, reshard) else [fully_shard, fsdp2]
    check_schedule(name, Layers, 2, reshard, engines)


@pytest.mark.parametrize("kind", [Layers, Padded])
@distributed(world=2)
def test_separate_input_and_weight_gradients_are_exact_with_manual_finalization(rank, world, kind):
    """Makes the calls of torch 2.15's zero-bubble schedules on one stage."""
    torch.manual_seed(3)
    plain = kind()
    model = shard(copy.deepcopy(plain), fully_shard, None, False)
    for step in range(2):
        want = text_reference(plain, step, world)[rank]
        halves = zip(*(part.chunk(MICROBATCHES) for part in text_batch(rank, step)), strict=True)
        inputs, waiting = [], []
        for x, target in halves:
            model.set_manual_backward_finalization(True)
            inputs.append(x.requires_grad_())
            loss = loss_fn(model(x), target)
            torch.testing.assert_close(loss, want[len(waiting)])
            model.set_reshard_after_backward(False)
            model.set_requires_gradient_sync(False)
            waiting.append(stage_backward_input([loss], None, [x], model.parameters())[1])
        for param_groups in waiting:
            stage_backward_weight(model.parameters(), param_groups)
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        model.finalize_backward()
        model.set_manual_backward_finalization(False)
        reduced = [action.fqn for action in last_record(model).actions if action.kind == "REDUCE"]
        assert len(reduced) == len(set(reduced)) == (2 if kind is Layers else 3), (
            "each group is reduced once, not in each backward"
        )
        assert all(x.grad is not None for x in inputs)
        for name, param in plain.named_parameters():
            grad = model.get_parameter(name).grad
            assert (grad is None) == (param.grad is None), name
            if grad is not None:
                torch.testing.assert_close(
                    grad.full_tensor() / MICROBATCHES, param.grad, msg=lambda m, at=name: f"{at}: {m}"
                )
        model.zero_grad()
    assert_at_rest(model)


@distributed(world=1)
def test_an_asynchronous_unshard_returns_a_handle_even_without_parameters(rank, world):
    for engine in (fully_shard, fsdp2):
        stage = shard(Layers(), engine, named_mesh((1,), ("dp",)), True)
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                handle = module.unshard(async_op=True)
                assert isinstance(handle, UnshardHandle)
                handle.wait()
        assert stage.unshard() is None


@pytest.mark.matrix
@distributed(world=4)
def test_fsdp2_loses_gradients_in_zero_bubble_schedules_with_resharding_after_forward(rank, world):
    mesh = named_mesh((2, 2), ("pp", "dp"))
    dp_rank, own = mesh.get_local_rank("dp"), PLACES["ZBVZeroBubble"][mesh.get_local_rank("pp")]
    torch.manual_seed(3)
    plain = nn.Sequential(*(Stage() for _ in range(4)))
    stages = {i: shard(copy.deepcopy(plain[i]), fsdp2, mesh["dp"], True) for i in own}
    run(build("ZBVZeroBubble", stages, 4, mesh), own, 4, dp_rank, 0)
    reference_step(plain, 0, backwards=False)
    for i, stage in stages.items():
        pieces = {name: p.grad.chunk(2)[dp_rank] for name, p in plain[i].named_parameters()}
        grads = {name: stage.get_parameter(name).grad for name in pieces}
        lost = [
            name for name, grad in grads.items() if grad is None or not torch.allclose(grad.to_local(), pieces[name])
        ]
        assert (lost == []) is (i == 0), "only the first stage runs a full backward"


@distributed(world=1)
def test_torch_finds_the_state_of_a_module_and_of_its_copy(rank, world):
    """A pipeline gets this state from torch's own `fully_shard`."""
    model = fully_shard(nn.Linear(2, 2))
    made = copy.deepcopy(model)
    for each in (model, made):
        state = fsdp2.state(each)
        each(torch.ones(1, 2)).sum().backward()
        assert [type(found) for found in state._state_ctx.all_states] == [type(state)]
        assert state._own is each._own_state()
    assert fsdp2.state(nn.Linear(2, 2)) is None
    with pytest.raises(AssertionError, match="already been applied"):
        fsdp2(model)
