"""Rows for torch.nn.utils, torch.optim.swa_utils and torch.amp: sharded models compared with unsharded ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _transformer import UNEVEN, Config, average_gradients, evaluate, loss_of, shard, train, transformer, whole
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import swa_utils

from _rows import Rows, Run

rows = Rows("torch.nn.utils, swa_utils, amp", environment="torch", versions=("torch",))


def both(config: Config = UNEVEN, **settings: Any) -> tuple[Any, Any]:
    """Return a sharded and an unsharded transformer with equal weights."""
    dist.init_process_group("gloo")
    model = transformer(config)
    plain = copy.deepcopy(model)
    return shard(model, **settings), plain


def full(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


# ---- clipping


def clips(run: Run, clip: Callable[[Any], Any]) -> None:
    """Compare norms and clipped gradients. Norms are added in another order across ranks than in one process."""
    model, plain = both()
    run.sharded(model)
    for step in range(3):
        norms = []
        for each in (model, plain):
            loss_of(each, step, run.rank).backward()
            if each is plain:
                average_gradients(plain.parameters())
            norms.append(full(clip(each)))
        run.note(f"norm {step}", norms[0])
        run.agrees("norm", *norms)
        run.gradients(model, f"gradients {step}")
        grads = [{n: p.grad for n, p in each.named_parameters()} for each in (model, plain)]
        run.agrees("gradients", *grads, tolerance=1e-4)
        for each in (model, plain):
            with torch.no_grad():
                for p in each.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
    run.weights(model)
    run.note("evaluation", evaluate(model, run.rank))


def by_norm(model: Any, **settings: Any) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1, **settings)


def by_value(model: Any, **settings: Any) -> Any:
    return nn.utils.clip_grad_value_(model.parameters(), 0.001, **settings)


for kind in (1.0, 2.0, 3.0, float("inf"), 0.5):
    for foreach in (None, True, False):
        clip = partial(by_norm, norm_type=kind, foreach=foreach)
        rows.add(f"clip_grad_norm_(norm_type={kind:g}, foreach={foreach})", partial(clips, clip=clip))
for foreach in (None, True, False):
    rows.add(f"clip_grad_value_(foreach={foreach})", partial(clips, clip=partial(by_value, foreach=foreach)))


def in_two(model: Any, kind: float, foreach: bool | None) -> Any:
    parameters = list(model.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters], kind, foreach=foreach)
    nn.utils.clip_grads_with_norm_(parameters, 0.1, full(norm), foreach=foreach)
    return norm


for kind in (2.0, float("inf")):
    for foreach in (None, True, False):
        program = partial(clips, clip=partial(in_two, kind=kind, foreach=foreach))
        rows.add(f"get_total_norm({kind:g}, foreach={foreach}), then clip_grads_with_norm_", program)
rows.add(
    "clip_grad_norm_ of the embedding alone, one tensor instead of an iterable",
    partial(clips, clip=lambda m: nn.utils.clip_grad_norm_(m.embed.weight, 0.01)),
)


@rows("error_if_nonfinite, where the gradients of one rank are infinite")
def nonfinite(run: Run) -> None:
    model, _ = both()
    run.sharded(model)
    (loss_of(model, 0, run.rank) * (float("inf") if run.rank else 1.0)).backward()
    for foreach in (None, True, False):
        try:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True, foreach=foreach)
        except RuntimeError as error:
            run.note(f"error {foreach}", str(error))
        else:
            raise AssertionError("no error")
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    run.note("norm", norm)
    run.gradients(model)


# ---- vectors


@rows("parameters_to_vector and vector_to_parameters of local shards and of full parameters")
def vectors(run: Run) -> None:
    model, plain = both()
    run.sharded(model)
    local = nn.utils.parameters_to_vector([p.to_local() for p in model.parameters()])
    run.note("local", local)
    pieces = [torch.empty_like(p.to_local()) for p in model.parameters()]
    nn.utils.vector_to_parameters(local * 2, pieces)
    with torch.no_grad():
        for p, piece in zip(model.parameters(), pieces, strict=True):
            p.to_local().copy_(piece)
    vector = nn.utils.parameters_to_vector([p.full_tensor() for p in model.parameters()])
    run.agrees("vector", vector, nn.utils.parameters_to_vector(plain.parameters()) * 2, 0.0)
    run.note("losses", train(model, torch.optim.SGD(model.parameters(), lr=0.1), run.rank))


@rows("parameters_to_vector of sharded parameters as they are")
def vector_of_sharded(run: Run) -> None:
    model, plain = both(Config(vocabulary=32, dim=16, hidden=24, head_dim=4))
    run.sharded(model)
    vector = nn.utils.parameters_to_vector(model.parameters())
    run.agrees("vector", full(vector), nn.utils.parameters_to_vector(plain.parameters()))
    run.note("vector", vector)


# ---- parametrizations and pruning


class Net(nn.Module):
    """Three layers, each its own group. The second layer gets the parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 7), nn.Linear(7, 9), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).tanh()).tanh())


def net(prepare: Callable[[Any], Any] = lambda model: None) -> Any:
    torch.manual_seed(0)
    model = Net()
    prepare(model)
    return model


def shard_layers(model: Any) -> Any:
    for layer in (model.first, model.second, model.third):
        fully_shard(layer)
    return fully_shard(model)


def train_net(run: Run, model: Any, plain: Any, make: Any = torch.optim.AdamW, tolerance: float = 1e-5) -> None:
    run.sharded(model)
    for each in (model, plain):
        optimizer = make(each.parameters(), lr=0.01)
        losses = []
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + run.rank))
            loss = each(x).square().mean()
            loss.backward()
            if each is plain:
                average_gradients(plain.parameters())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        each.eval()
        out = each(torch.ones(2, 6))
        run.note(f"losses {each is model}", losses)
        run.note(f"evaluation {each is model}", out)
    run.weights(model)
    run.agrees("weights", whole(model), whole(plain), tolerance)
    run.agrees("evaluation", out, model(torch.ones(2, 6)), tolerance)


class Symmetric(nn.Module):
    """A parametrization that replaces weights by their absolute values. It supports matrices of any shape."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.abs()

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


def legacy(function: Any) -> Callable[[Any], Any]:
    return lambda model: function(model.second)


PARAMETRIZATIONS: dict[str, Callable[[Any], Any]] = {
    "parametrizations.weight_norm": legacy(parametrizations.weight_norm),
    "parametrizations.weight_norm(dim=None)": lambda m: parametrizations.weight_norm(m.second, dim=None),  # type: ignore[arg-type]
    "parametrizations.spectral_norm": legacy(parametrizations.spectral_norm),
    "parametrizations.orthogonal": legacy(parametrizations.orthogonal),
    "parametrizations.orthogonal(orthogonal_map='householder')": lambda m: parametrizations.orthogonal(
        m.second, orthogonal_map="householder"
    ),
    "parametrize.register_parametrization": lambda m: parametrize.register_parametrization(
        m.second, "weight", Symmetric()
    ),
    "the older nn.utils.weight_norm": legacy(nn.utils.weight_norm),
    "the older nn.utils.spectral_norm": legacy(nn.utils.spectral_norm),
}


def parametrized_before(run: Run, prepare: Callable[[Any], Any]) -> None:
    dist.init_process_group("gloo")
    model = net(prepare)
    plain = net(prepare)
    train_net(run, shard_layers(model), plain)


def parametrized_after(run: Run, prepare: Callable[[Any], Any]) -> None:
    dist.init_process_group("gloo")
    model = shard_layers(net())
    torch.manual_seed(5)
    prepare(model)
    plain = net()
    torch.manual_seed(5)
    prepare(plain)
    train_net(run, model, plain)


for title, prepare in PARAMETRIZATIONS.items():
    rows.add(f"{title}, before sharding", partial(parametrized_before, prepare=prepare))
    rows.add(f"{title}, after sharding", partial(parametrized_after, prepare=prepare))


@rows("parametrize.cached around two forwards")
def cached(run: Run) -> None:
    dist.init_process_group("gloo")
    prepare = PARAMETRIZATIONS["parametrize.register_parametrization"]
    model, plain = shard_layers(net(prepare)), net(prepare)
    outs = []
    for each in (model, plain):
        with parametrize.cached():
            outs.append([each(torch.ones(2, 6)), each(torch.zeros(2, 6))])
    run.agrees("outputs", *outs)
    run.note("outputs", outs[0])
    train_net(run, model, plain)


@rows("a parametrization that is removed after sharding")
def removed(run: Run) -> None:
    dist.init_process_group("gloo")
    prepare = PARAMETRIZATIONS["parametrize.register_parametrization"]
    model, plain = shard_layers(net(prepare)), net(prepare)
    for each in (model, plain):
        parametrize.remove_parametrizations(each.second, "weight", leave_parametrized=False)
    train_net(run, model, plain)


def prune_all(model: Any) -> None:
    prune.random_unstructured(model.first, "weight", amount=0.3)
    prune.l1_unstructured(model.second, "weight", amount=0.4)
    prune.ln_structured(model.third, "weight", amount=1, n=2, dim=1)


@rows("prune before sharding: masks stay in force")
def pruned(run: Run) -> None:
    dist.init_process_group("gloo")
    model = net(prune_all)
    train_net(run, shard_layers(model), net(prune_all))


@rows("prune and prune.remove before sharding")
def pruned_for_good(run: Run) -> None:
    def prepare(model: Any) -> None:
        prune_all(model)
        for layer in (model.first, model.second, model.third):
            prune.remove(layer, "weight")

    dist.init_process_group("gloo")
    model = net(prepare)
    train_net(run, shard_layers(model), net(prepare))


@rows("prune after sharding")
def pruned_after(run: Run) -> None:
    dist.init_process_group("gloo")
    model = shard_layers(net())
    plain = net()
    for each in (model, plain):
        prune.l1_unstructured(each.second, "weight", amount=0.4)
    train_net(run, model, plain)


# ---- averaged models


Averaging = Callable[[Any], Any]
AVERAGES: dict[str, dict[str, Any]] = {
    "": {},
    "(multi_avg_fn=get_ema_multi_avg_fn(0.9))": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "(avg_fn=get_ema_avg_fn(0.9))": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    "(multi_avg_fn=get_swa_multi_avg_fn())": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    "(avg_fn=lambda ...)": {"avg_fn": lambda average, new, count: 0.7 * average + 0.3 * new},
    "(use_buffers=True)": {"use_buffers": True},
}


def averaged(run: Run, early: bool, **settings: Any) -> None:
    dist.init_process_group("gloo")
    model = transformer()
    plain = copy.deepcopy(model)
    averages = [swa_utils.AveragedModel(plain, **settings)]
    if early:
        average = swa_utils.AveragedModel(model, **settings)
        shard(average.module)
    shard(model)
    if not early:
        average = swa_utils.AveragedModel(model, **settings)
    run.sharded(model)
    run.sharded(average, "sharded average")
    averages.insert(0, average)
    for each, average in zip((model, plain), averages, strict=True):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.05)
        schedule = swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)
        for step in range(4):
            train(each, optimizer, run.rank, range(step, step + 1), sharded=each is model)
            average.update_parameters(each)
            schedule.step()
        run.note(f"rates {each is model}", schedule.get_last_lr())
    run.agrees("weights", whole(model), whole(plain), 0.0)
    run.agrees("averages", whole(averages[0]), whole(averages[1]))
    run.note("average", {**averages[0].state_dict()})
    run.agrees("evaluation", evaluate(averages[0], run.rank), evaluate(averages[1], run.rank))
    run.note("evaluation", evaluate(averages[0], run.rank))


for words, settings in AVERAGES.items():
    rows.add(f"AveragedModel{words} of a sharded model", partial(averaged, early=False, **settings))
    rows.add(f"AveragedModel{words} made before both are sharded", partial(averaged, early=True, **settings))


@rows("update_bn of a model with batch norm")
def batch_norm(run: Run) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))
    plain = copy.deepcopy(model)
    for layer in (model[0], model[3]):
        fully_shard(layer)
    fully_shard(model)
    run.sharded(model)
    loader = [torch.randn(5, 6, generator=torch.Generator().manual_seed(i + 10 * run.rank)) for i in range(3)]
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.05)
        for x in loader:
            each(x).square().mean().backward()
            if each is plain:
                average_gradients(plain.parameters())
            optimizer.step()
            optimizer.zero_grad()
        swa_utils.update_bn(loader, each)
        each.eval()
    run.weights(model)
    run.agrees("weights", whole(model), whole(plain))
    run.agrees("buffers", dict(model.named_buffers()), dict(plain.named_buffers()))
    run.agrees("evaluation", model(loader[0]), plain(loader[0]))


# ---- gradient scaling


def scaled(run: Run, dtype: torch.dtype | None, autocast: bool, optimizer: Any) -> None:
    """Train with a gradient scaler. The loss of rank 1 in step 1 is infinite, so all ranks must skip that step."""
    policy = MixedPrecisionPolicy(param_dtype=dtype) if dtype else MixedPrecisionPolicy()
    model, plain = both(mp_policy=policy)
    run.sharded(model)
    compares = dtype is None
    for each in (model, plain) if compares else (model,):
        made = optimizer(each.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(4):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of(each, step, run.rank)
            if step == 1 and run.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if each is plain:
                average_gradients(plain.parameters())
            scaler.unscale_(made)
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            before = whole(each) if step == 1 else {}
            scaler.step(made)
            scaler.update()
            made.zero_grad()
            if step == 1:
                run.agrees("skipped", whole(each), before, 0.0)
            run.note(f"step {step} {each is model}", [loss, scaler.get_scale()])
    if compares:
        run.agrees("weights", whole(model), whole(plain), 1e-3)
    run.note("scaler", scaler.state_dict())
    run.weights(model)
    run.note("evaluation", evaluate(model, run.rank))


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
FUSED = partial(torch.optim.AdamW, lr=0.01, fused=True)
rows.add("GradScaler with a step that is skipped", partial(scaled, dtype=None, autocast=False, optimizer=SGD))
rows.add("GradScaler, parameters in float16", partial(scaled, dtype=torch.float16, autocast=False, optimizer=SGD))
rows.add("GradScaler, autocast to bfloat16", partial(scaled, dtype=None, autocast=True, optimizer=SGD))
rows.add("GradScaler and a fused optimizer", partial(scaled, dtype=None, autocast=False, optimizer=FUSED))


@rows("init functions, copies and conversions of sharded parameters")
def initialised(run: Run) -> None:
    model, plain = both()
    run.sharded(model)
    with torch.no_grad():
        for each in (model, plain):
            for name, p in each.named_parameters():
                if name.endswith("norm.weight"):
                    nn.init.ones_(p)
                elif p.ndim == 1:
                    nn.init.zeros_(p)
                elif "embed" in name:
                    nn.init.constant_(p, 0.02)
                else:
                    p.copy_(p * 0.5)
    run.agrees("weights", whole(model), whole(plain), 0.0)
    run.note("losses", train(model, torch.optim.SGD(model.parameters(), lr=0.1), run.rank))
    model.double()
    run.note("double", evaluate(model, run.rank))
    run.weights(model)


@rows("random init functions on sharded parameters")
def random(run: Run) -> None:
    model, _ = both()
    run.sharded(model)
    torch.manual_seed(11)
    functions = (
        nn.init.normal_,
        nn.init.uniform_,
        nn.init.trunc_normal_,
        nn.init.xavier_uniform_,
        nn.init.kaiming_normal_,
    )
    matrices = [p for p in model.parameters() if p.ndim == 2]
    for index, p in enumerate(matrices):
        functions[index % len(functions)](p)
    run.weights(model)


@rows("copy.deepcopy of a sharded model, which continues training")
def copied(run: Run) -> None:
    model, plain = both()
    run.sharded(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), run.rank)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), run.rank, sharded=False)
    twin = copy.deepcopy(model)
    run.sharded(twin, "sharded twin")
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), run.rank)
    run.agrees("weights", whole(model), whole(plain), 0.0)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), run.rank, sharded=False)
    run.agrees("weights of the copy", whole(twin), whole(plain), 0.0)
