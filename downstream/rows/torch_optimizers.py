"""Rows for torch.optim: every optimizer in every variant, over uneven and empty shards; schedulers and states.

Each row trains the sharded and the unsharded model in the same process, and compares them. If a variant raises an
error for the unsharded model, it must raise an error of the same type for the sharded model.
"""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _transformer import average_gradients, evaluate, loss_of, shard, train, transformer, whole
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.optim import lr_scheduler

from _rows import Rows, Run

rows = Rows("torch.optim", environment="torch", versions=("torch",))

Make = Callable[[Any], torch.optim.Optimizer]
MATRICES_ONLY = {"Muon"}
NOT_ELEMENTWISE = {"Muon", "LBFGS", "Adafactor"}
SETTINGS: dict[str, dict[str, Any]] = {
    "LBFGS": {"lr": 0.5, "max_iter": 4, "line_search_fn": "strong_wolfe"},
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Adafactor": {"lr": 0.05},
    "Rprop": {"lr": 0.01},
    "Muon": {"lr": 0.02},
}
FLAGS = ("foreach", "fused", "capturable", "amsgrad", "maximize", "differentiable", "decoupled_weight_decay")


def optimizers() -> Iterator[tuple[str, type[torch.optim.Optimizer]]]:
    """Yield all optimizers of torch.optim with their names."""
    for name, kind in sorted(vars(torch.optim).items()):
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            yield name, kind


def variants(kind: type[torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
    """Yield each setting that an optimizer supports alone, and some combinations."""
    known = inspect.signature(kind).parameters
    yield {}
    for flag in FLAGS:
        if flag in known:
            yield {flag: True}
    if "foreach" in known:
        yield {"foreach": False}
        yield {"foreach": False, "lr": "tensor"}
        if "amsgrad" in known:
            yield {"foreach": False, "amsgrad": True, "maximize": True}
            yield {"fused": True, "amsgrad": True, "maximize": True}


class Net(nn.Module):
    """Three layers. The default widths are not divisible by the world size; some have fewer rows than ranks."""

    def __init__(self, matrices: bool, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(6, widths[0], bias=not matrices)
        self.norm = nn.Identity() if matrices else nn.RMSNorm(widths[0])
        self.second = nn.Linear(widths[0], widths[1], bias=not matrices)
        self.last = nn.Linear(widths[1], widths[2], bias=not matrices)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.norm(self.first(x).tanh())).tanh())


def sharded_and_plain(matrices: bool = False, widths: tuple[int, ...] = (7, 3, 1)) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Net(matrices, widths)
    plain = copy.deepcopy(model)
    for layer in (model.first, model.second):
        fully_shard(layer)
    fully_shard(model)
    return model, plain


def steps(model: Any, make: Make, rank: int, plain: bool) -> list[float]:
    """Train four steps and return the losses.

    With two ranks, each rank has its own data. With more ranks, all ranks have the same data. In both cases the mean
    does not depend on the order of the additions.
    """
    optimizer = make(model.parameters())
    rank = rank if dist.get_world_size() == 2 else 0
    losses = []
    for step in range(4):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x[:, :1]).square().mean()
            loss.backward()
            if plain:
                average_gradients(model.parameters())
            mean = loss.detach().clone()  # a line search must take the same decisions on all ranks
            dist.all_reduce(mean)
            return mean / dist.get_world_size()

        if isinstance(optimizer, torch.optim.LBFGS):
            losses.append(optimizer.step(closure).item())  # type: ignore[arg-type]
        else:
            losses.append(closure().item())
            optimizer.step()
    return losses


def made(kind: type[torch.optim.Optimizer], settings: dict[str, Any]) -> Make:
    def make(parameters: Any) -> torch.optim.Optimizer:
        own = dict(settings)
        if own.get("lr") == "tensor":
            own["lr"] = torch.tensor(0.01)
        return kind(parameters, **own)

    return make


def trains_as_the_unsharded(run: Run, name: str, make: Make, **settings: Any) -> None:
    dist.init_process_group("gloo")
    model, plain = sharded_and_plain(name in MATRICES_ONLY, **settings)
    run.sharded(model)
    try:
        wanted = steps(plain, make, run.rank, plain=True)
    except Exception as refusal:
        try:
            steps(model, make, run.rank, plain=False)
        except type(refusal) as same:
            run.note("refusals", [str(each).splitlines()[0] for each in (refusal, same)])
            return
        raise AssertionError(f"only the unsharded model raises an error: {refusal}") from refusal
    losses = steps(model, make, run.rank, plain=False)
    run.note("losses", losses)
    run.weights(model)
    tolerance = 1e-4 if name in NOT_ELEMENTWISE else 0.0
    run.agrees("losses", losses, wanted, tolerance)
    run.agrees("weights", whole(model), whole(plain), tolerance)


def add(name: str, kind: type[torch.optim.Optimizer]) -> None:
    for each in variants(kind):
        words = ", ".join(f"{key}={value}" for key, value in each.items())
        make = made(kind, SETTINGS.get(name, {}) | each)
        rows.add(f"{name}({words})", partial(trains_as_the_unsharded, name=name, make=make))
    make = made(kind, SETTINGS.get(name, {}))
    program = partial(trains_as_the_unsharded, name=name, make=make)
    rows.add(f"{name}() where some ranks have empty shards", program, world=4)
    if name in NOT_ELEMENTWISE:  # some of them raise an error on uneven shards
        program = partial(program, widths=(8, 4, 2))
        rows.add(f"{name}() on shards of equal sizes", program)


for found in optimizers():
    add(*found)


# ---- with a transformer: schedulers, parameter groups, states, steps in backward


def both(config: Any = None) -> tuple[Any, Any]:
    """Return a sharded and an unsharded transformer with equal weights."""
    dist.init_process_group("gloo")
    model = transformer()
    plain = copy.deepcopy(model)
    return shard(model), plain


def compare(run: Run, model: Any, plain: Any) -> None:
    """Check that weights and evaluation of the two models are bitwise identical, and record them."""
    run.agrees("weights", whole(model), whole(plain), 0.0)
    run.weights(model)
    out = evaluate(model, run.rank)
    run.agrees("evaluation", out, evaluate(plain, run.rank), 0.0)
    run.note("evaluation", out)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 3)], milestones=[2]
    ),
}


@rows("every lr_scheduler, saved and loaded on the way", timeout=300)
def schedulers(run: Run) -> None:
    missing = set(lr_scheduler.__all__) - set(SCHEDULERS) - {"LRScheduler"}
    assert not missing, f"schedulers without settings: {missing}"
    model, plain = both()
    run.sharded(model)
    for name, make in SCHEDULERS.items():
        rates = []
        for each in (model, plain):
            optimizer = torch.optim.SGD(each.parameters(), lr=torch.tensor(0.05), momentum=0.5, foreach=False)
            scheduler = make(optimizer)
            for step in range(4):
                if step == 2:
                    state = copy.deepcopy(scheduler.state_dict())
                    scheduler = make(optimizer)
                    scheduler.load_state_dict(state)
                loss = loss_of(each, step, run.rank)
                loss.backward()
                if each is plain:
                    average_gradients(plain.parameters())
                optimizer.step()
                optimizer.zero_grad()
                arguments = (1.0,) if name == "ReduceLROnPlateau" else ()
                scheduler.step(*arguments)
                rates.append([float(group["lr"]) for group in optimizer.param_groups])
        assert rates[:4] == rates[4:]
        run.note(name, rates[:4])
    compare(run, model, plain)


def groups_of(model: Any) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.003}]


@rows("parameter groups; a frozen block joins them later (add_param_group)")
def groups(run: Run) -> None:
    model, plain = both()
    run.sharded(model)
    for each in (model, plain):
        each.blocks[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(groups_of(each), lr=0.01)
        losses = train(each, optimizer, run.rank, range(2), sharded=each is model)
        each.blocks[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(each.blocks[0].parameters()), "lr": 0.02})
        losses += train(each, optimizer, run.rank, range(2, 4), sharded=each is model)
        run.note(f"losses {each is model}", losses)
    compare(run, model, plain)


@rows("an optimizer of named parameters")
def named(run: Run) -> None:
    model, plain = both()
    run.sharded(model)
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.named_parameters(), lr=0.01)
        train(each, optimizer, run.rank, sharded=each is model)
    run.note("names", optimizer.state_dict()["param_groups"][0]["param_names"])
    compare(run, model, plain)


@rows("matrices by Muon, the rest by AdamW")
def muon(run: Run) -> None:
    model, plain = both()
    run.sharded(model)
    for each in (model, plain):
        matrices = [p for name, p in each.named_parameters() if p.ndim == 2 and name.startswith("blocks")]
        others = [p for p in each.parameters() if not any(p is m for m in matrices)]
        first, second = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)
        losses = []
        for step in range(3):
            loss = loss_of(each, step, run.rank)
            loss.backward()
            losses.append(loss.item())
            if each is plain:
                average_gradients(plain.parameters())
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        run.note(f"losses {each is model}", losses)
    run.weights(model)
    run.agrees("weights", whole(model), whole(plain), 1e-2)  # Muon computes in bfloat16
    run.note("evaluation", evaluate(model, run.rank))


@rows("SparseAdam over an embedding with sparse gradients")
def sparse(run: Run) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(13, 5, sparse=True), nn.Linear(5, 3))
    fully_shard(model[0])
    fully_shard(model)
    run.sharded(model)
    optimizers = torch.optim.SparseAdam(model[0].parameters()), torch.optim.Adam(model[1].parameters())
    model(torch.tensor([1, 4, 12])).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    run.weights(model)


@rows("states saved with torch.save on each rank and loaded into another model")
def saved(run: Run) -> None:
    model, plain = both()
    run.sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    train(model, optimizer, run.rank, range(2))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed = shard(transformer())
    other = torch.optim.AdamW(resumed.parameters(), lr=1.0)
    resumed.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    for each, of in ((model, optimizer), (resumed, other)):
        train(each, of, run.rank, range(2, 4))
    run.agrees("weights", whole(resumed), whole(model), 0.0)
    run.note("states", optimizer.state_dict()["state"])
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01, amsgrad=True), run.rank, range(4), sharded=False)
    compare(run, resumed, plain)


@rows("an optimizer of the unsharded model loads its states for the sharded one")
def handed_over(run: Run) -> None:
    """Load plain states, which torch copies unchanged. The first step must fail because the shapes do not match."""
    model, plain = both()
    run.sharded(model)
    first = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train(plain, first, run.rank, range(1), sharded=False)
    second = torch.optim.AdamW(model.parameters(), lr=0.01)
    second.load_state_dict(first.state_dict())
    loss_of(model, 0, run.rank).backward()
    try:
        second.step()
    except RuntimeError as error:
        run.note("error", str(error).splitlines()[0].split(":")[0])


@rows("hooks of an optimizer, before and after its steps")
def hooks(run: Run) -> None:
    model, plain = both()
    run.sharded(model)
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        seen: list[float] = []

        def before(optimizer: Any, *_: Any) -> None:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.mul_(0.5)

        def after(optimizer: Any, arguments: Any, settings: Any, seen: list[float] = seen) -> None:
            p = optimizer.param_groups[0]["params"][0].detach()
            seen.append(float(getattr(p, "full_tensor", lambda p=p: p)().sum()))

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        train(each, optimizer, run.rank, sharded=each is model)
        run.note(f"seen {each is model}", seen)
    compare(run, model, plain)


@rows("a step for each parameter in its post-accumulate hook")
def in_backward(run: Run) -> None:
    model, plain = both()
    run.sharded(model)
    for each in (model, plain):
        optimizers = {p: torch.optim.AdamW([p], lr=0.01) for p in each.parameters()}

        def step(p: Any, optimizers: Any = optimizers, averages: bool = each is plain) -> None:
            if averages:
                average_gradients([p])
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in each.parameters():
            p.register_post_accumulate_grad_hook(step)
        for number in range(3):
            loss_of(each, number, run.rank).backward()
        assert all(p.grad is None for p in each.parameters())
    compare(run, model, plain)


@rows("torch's _apply_optimizer_in_backward, after sharding")
def applied(run: Run) -> None:
    model, plain = both()
    run.sharded(model)
    _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 0.01})
    for step in range(3):
        loss_of(model, step, run.rank).backward()
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), run.rank, sharded=False)
    compare(run, model, plain)


@rows("a post-accumulate hook that is registered before sharding")
def hook_before(run: Run) -> None:
    dist.init_process_group("gloo")
    model = transformer()
    plain = copy.deepcopy(model)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    shard(model)
    run.sharded(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), run.rank)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.05), run.rank, sharded=False)
    run.agrees("weights", whole(model), whole(plain))
    run.weights(model)


@rows("gradients of three batches added up, with and without sync; zero_grad(set_to_none=False)")
def accumulated(run: Run) -> None:
    for sync in (False, True):
        if sync:
            dist.destroy_process_group()
            dist.init_process_group(
                "gloo", store=dist.FileStore(str(run.folder / "store"), run.world), rank=run.rank, world_size=run.world
            )
            model = transformer()
            plain = copy.deepcopy(model)
            shard(model)
        else:
            model, plain = both()
        run.sharded(model, f"sharded {sync}")
        first, second = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, plain))
        for step in range(3):
            for part in range(3):
                model.set_requires_gradient_sync(sync or part == 2)
                for each in (model, plain):
                    (loss_of(each, 3 * step + part, run.rank) / 3).backward()
            average_gradients(plain.parameters())
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        run.weights(model, f"weights {sync}")
        # With sync, gradients are reduced before they are added, so the order of additions differs.
        run.agrees("weights", whole(model), whole(plain), 1e-4 if sync else 0.0)


@rows("a compiled optimizer step")
def compiled(run: Run) -> None:
    model, plain = both()
    run.sharded(model)
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=torch.tensor(0.01))
        optimizer.step = torch.compile(optimizer.step, backend="aot_eager")  # type: ignore[method-assign]
        train(each, optimizer, run.rank, sharded=each is model)
    run.agrees("weights", whole(model), whole(plain))
    run.weights(model)


@rows("ZeroRedundancyOptimizer over sharded parameters")
def redundancy(run: Run) -> None:
    model, plain = both()
    run.sharded(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    train(model, optimizer, run.rank)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), run.rank, sharded=False)
    compare(run, model, plain)
