"""Rows for torch.distributed.pipelining: every schedule with sharded stages, compared with the unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _transformer import Block, Config, tokens_of, whole
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.distributed.pipelining import schedules as of_torch
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from _rows import Rows, Run

rows = Rows("torch.distributed.pipelining", environment="torch", versions=("torch",))

MICROBATCHES = 4
CONFIG = Config(layers=4, dropout=0.0)
PLACES = {  # the stages of each pipeline rank
    "GPipe": ((0,), (1,)),
    "1F1B": ((0,), (1,)),
    "Interleaved1F1B": ((0, 2), (1, 3)),
    "LoopedBFS": ((0, 2), (1, 3)),
    "InterleavedZeroBubble": ((0, 2), (1, 3)),
    "ZBVZeroBubble": ((0, 3), (1, 2)),
    "DualPipeV": ((0, 3), (1, 2)),
}


class Stage(nn.Module):
    """Some blocks of a decoder. The first stage also has the embedding, the last stage the norm and the head."""

    def __init__(self, config: Config, index: int, stages: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.dim) if index == 0 else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers // stages))
        last = index == stages - 1
        self.norm = nn.RMSNorm(config.dim) if last else None
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def loss_fn(logits: Tensor, tokens: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction=reduction)


def batch(step: int, dp_rank: int, microbatches: int) -> Tensor:
    return tokens_of(step, dp_rank, CONFIG, batch=microbatches)


class Training:
    """The sharded stages of this rank, their schedule, and the full unsharded model for comparison."""

    def __init__(
        self,
        run: Run,
        name: str,
        reshard: bool | None = None,
        config: Config = CONFIG,
        microbatches: int = MICROBATCHES,
        prepare: Callable[[Any], Any] = lambda stage: None,
        make: Callable[[list[PipelineStage]], Any] | None = None,
        scale_grads: bool = True,
        **settings: Any,
    ) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.run, self.microbatches, self.scale_grads = run, microbatches, scale_grads
        mesh = init_device_mesh("cpu", (2, run.world // 2), mesh_dim_names=("pp", "dp"))
        self.dp_rank, self.dp_group = mesh.get_local_rank("dp"), mesh["dp"].get_group()
        places = PLACES[name]
        self.own, self.count = places[mesh.get_local_rank("pp")], 2 * len(places[0])
        torch.manual_seed(0)
        self.plain = nn.Sequential(*(Stage(config, index, self.count) for index in range(self.count)))
        self.stages: dict[int, Any] = {index: copy.deepcopy(self.plain[index]) for index in self.own}
        for stage in self.stages.values():
            prepare(stage)
            for block in stage.blocks:
                fully_shard(block, mesh=mesh["dp"], reshard_after_forward=reshard, **settings)
            fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=reshard, **settings)
        made = [
            PipelineStage(stage, index, self.count, torch.device("cpu"), group=mesh.get_group("pp"))
            for index, stage in self.stages.items()
        ]
        self.loss_fn = loss_fn if scale_grads else partial(loss_fn, reduction="sum")
        if make is not None:
            self.schedule = make(made)
        else:
            kind = get_schedule_class(name)
            given: Any = made if issubclass(kind, PipelineScheduleMulti) else made[0]
            self.schedule = kind(given, microbatches, loss_fn=self.loss_fn, scale_grads=scale_grads)
        for index, stage in self.stages.items():
            run.sharded(stage, f"sharded {index}{name}{reshard}")
        self.optimizers = [torch.optim.AdamW(s.parameters(), lr=0.01) for s in (*self.stages.values(), self.plain)]

    def step(self, step: int) -> list[float]:
        """Run one step of the pipeline. Return the losses of the microbatches, or [] without the last stage."""
        tokens = batch(step, self.dp_rank, self.microbatches)
        last = self.count - 1 in self.own
        losses: list[Tensor] | None = [] if last else None
        self.schedule.step(*((tokens,) if 0 in self.own else ()), target=tokens if last else None, losses=losses)
        return [loss.item() for loss in losses or []]

    def unsharded_step(self, step: int) -> list[float]:
        """Run the same step with the unsharded model, average gradients over data-parallel ranks, return losses."""
        losses = []
        for tokens in batch(step, self.dp_rank, self.microbatches).chunk(self.microbatches):
            loss = self.loss_fn(self.plain(tokens), tokens)
            loss.backward()
            losses.append(loss.item())
        for p in self.plain.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad, group=self.dp_group)
            p.grad /= dist.get_world_size(self.dp_group) * (self.microbatches if self.scale_grads else 1)
        return losses

    def train(self, steps: int = 3, compares: bool = True) -> None:
        for step in range(steps):
            losses = self.step(step)
            self.run.note(f"losses {step}", losses)
            for index, stage in self.stages.items():
                self.run.gradients(stage, f"gradients {index} {step}")
            if compares:
                wanted = self.unsharded_step(step)
                if losses:
                    self.run.agrees("losses", losses, wanted)
                for index, stage in self.stages.items():
                    grads, theirs = ({n: p.grad for n, p in m.named_parameters()} for m in (stage, self.plain[index]))
                    self.run.agrees(f"gradients of stage {index}", grads, theirs)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for index, stage in self.stages.items():
            self.run.weights(stage, f"weights {index}")
            if compares:
                self.run.agrees(f"weights of stage {index}", whole(stage), whole(self.plain[index]), 1e-3)


def by_schedule(run: Run, name: str, **settings: Any) -> None:
    Training(run, name, **settings).train()


def missing() -> list[str]:
    """Return the names of the schedules of torch without a row."""
    known = {get_schedule_class(name) for name in PLACES}
    known |= {of_torch.PipelineScheduleMulti, of_torch.PipelineScheduleSingle, of_torch._PipelineScheduleRuntime}
    known |= {of_torch._PipelineSchedule, of_torch._ScheduleForwardOnly}
    found = [each for each in vars(of_torch).values() if isinstance(each, type)]
    return [each.__name__ for each in found if issubclass(each, of_torch._PipelineSchedule) and each not in known]


assert not missing(), f"schedules without a row: {missing()}"

for name in PLACES:
    for reshard in (True, False):
        program = partial(by_schedule, name=name, reshard=reshard)
        rows.add(f"{name}, reshard_after_forward={reshard}", program, world=4)

rows.add("GPipe on 2 ranks, each stage sharded over one", partial(by_schedule, name="GPipe"))
rows.add("1F1B, 8 microbatches", partial(by_schedule, name="1F1B", microbatches=8), world=4)
for name in ("1F1B", "InterleavedZeroBubble"):
    program = partial(by_schedule, name=name, reshard=False, scale_grads=False)
    rows.add(f"{name}, scale_grads=False with a loss that is a sum", program, world=4)


def checkpointed(stage: Stage) -> None:
    for name, block in list(stage.blocks.named_children()):
        stage.blocks.register_module(name, checkpoint_wrapper(block))


def with_dropout(run: Run, name: str, **settings: Any) -> None:
    Training(run, name, config=Config(layers=4), **settings).train(compares=False)


for name in ("1F1B", "Interleaved1F1B"):
    program = partial(with_dropout, name=name, prepare=checkpointed)
    rows.add(f"{name}, checkpointed blocks with dropout", program, world=4)
rows.add("GPipe, dropout", partial(with_dropout, name="GPipe"), world=4)


@rows("1F1B, bfloat16 with gradients reduced in float32", world=4)
def mixed(run: Run) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    Training(run, "1F1B", mp_policy=policy).train(compares=False)


@rows("_PipelineScheduleRuntime from a CSV of another schedule", world=4)
def runtime(run: Run) -> None:
    first = Training(run, "Interleaved1F1B", reshard=False)
    file = str(run.folder / f"schedule{run.rank}.csv")
    PipelineScheduleMulti._dump_csv(first.schedule, file)

    def make(stages: list[PipelineStage]) -> Any:
        schedule = of_torch._PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=loss_fn)
        schedule._load_csv(file, format="compute_only")
        return schedule

    Training(run, "Interleaved1F1B", reshard=None, make=make).train()


@rows("evaluation between steps", world=4)
def evaluation(run: Run) -> None:
    training = Training(run, "1F1B")
    for step in range(2):
        training.step(step)
        training.unsharded_step(step)
        for optimizer in training.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        tokens = batch(9 + step, training.dp_rank, MICROBATCHES)
        last = training.count - 1 in training.own
        losses: list[Tensor] | None = [] if last else None
        arguments = (tokens,) if 0 in training.own else ()
        out = training.schedule.eval(*arguments, target=tokens if last else None, losses=losses)
        run.note(f"evaluation {step}", [out, losses])
        if last:
            with torch.no_grad():
                run.agrees("evaluation", out, training.plain(tokens))


@rows("clipping by the norm of all stages; states of a stage saved and loaded", world=4)
def clipped(run: Run) -> None:
    training = Training(run, "1F1B")
    (stage,), (optimizer, _) = training.stages.values(), training.optimizers
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")).get_group("pp")
    for step in range(3):
        training.step(step)
        grads = [p.grad for p in stage.parameters()]
        norm = nn.utils.get_total_norm(grads).full_tensor().square()
        dist.all_reduce(norm, group=group)
        nn.utils.clip_grads_with_norm_(stage.parameters(), 0.1, norm.sqrt_())
        training.unsharded_step(step)
        run.agrees("norm", norm, nn.utils.clip_grad_norm_(training.plain.parameters(), 0.1))
        run.note(f"norm {step}", norm)
        for each in training.optimizers:
            each.step()
            each.zero_grad()
        options = StateDictOptions(full_state_dict=True)
        weights, moments = get_state_dict(stage, optimizer, options=options)
        run.note(f"states {step}", [weights, moments])
        set_state_dict(stage, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)
    run.agrees("weights", whole(stage), whole(training.plain[training.own[0]]), 1e-3)


@rows("stages that torch's pipeline() cuts out of a model", world=4)
def traced(run: Run) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    index, dp_rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(4)))
    plain = copy.deepcopy(model)
    pipe = pipeline(model, mb_args=(torch.zeros(2, 7),), split_spec={"2": SplitPoint.BEGINNING})
    stage_module = pipe.get_stage_module(index)
    fully_shard(stage_module, mesh=mesh["dp"])
    run.sharded(stage_module)
    stage = PipelineStage(stage_module, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = of_torch.ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out - target).square().mean())
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(dp_rank))
    schedule.step(*((x,) if index == 0 else ()), target=x if index == 1 else None)
    for part in x.chunk(2):
        ((plain(part) - part).square().mean() / 2).backward()
    for name, p in plain.named_parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad, group=mesh["dp"].get_group())
        if name in dict(stage_module.named_parameters()):
            run.agrees(name, stage_module.get_parameter(name).grad, p.grad / 2)
    run.gradients(stage_module)
