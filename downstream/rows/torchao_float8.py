"""Rows for torchao's float8 training: compiled blocks, whole graphs, checkpoints, bytes sent, and the loss."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _llama import (
    ADAMW,
    GATHERED,
    HALF,
    INDUCTOR,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Llama,
    Recipe,
    batch,
    build,
    compile_blocks,
    compile_whole,
    compiled,
    evaluated,
    float8,
    inner,
    life,
    nothing,
    train,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
from torchao.float8.float8_linear import Float8Linear

from _rows import Rows, Run, plain
from composable_shard import checkpoint, testing

rows = Rows("torchao: float8 training", environment="torchao", versions=("torchao", "torch"))


def from_recipe(model: nn.Module, name: str) -> None:
    config = replace(Float8LinearConfig.from_recipe_name(name), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=inner)


def without_small(model: nn.Module, gathered: bool = True) -> None:
    """Convert only layers with at least `WIDTH` outputs: not the projections of keys and values."""
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gathered),
        module_filter_fn=lambda module, name: inner(module, name) and module.out_features >= WIDTH,
    )


FULL = Recipe(float8)
PRECOMPUTED = Recipe(GATHERED, precompute_float8_dynamic_scale_for_fsdp, float8)
RECIPES = {
    "weights gathered in full": FULL,
    "weights gathered in float8": Recipe(GATHERED, unsharded=float8),
    "scales computed after each step": PRECOMPUTED,
    "small layers not converted": Recipe(
        without_small, precompute_float8_dynamic_scale_for_fsdp, partial(without_small, gathered=False)
    ),
    "rowwise": Recipe(partial(from_recipe, name="rowwise")),
    "rowwise_with_gw_hp": Recipe(partial(from_recipe, name="rowwise_with_gw_hp")),
}


# ---- eager, compiled blocks and whole graphs


def trained(run: Run, recipe: Recipe, given: dict[str, Any]) -> None:
    life(run, recipe.convert, after=recipe.after, **given)


def as_unsharded(run: Run, recipe: Recipe, whole: bool) -> None:
    """Compile with Inductor, and compare with the unsharded model under Inductor. All ranks get the same batches."""
    dist.init_process_group("gloo")
    model = build(recipe.convert)
    run.sharded(model)
    torch.manual_seed(0)
    other = Llama()
    (recipe.unsharded or recipe.convert)(other)

    def losses_of(one: nn.Module, after: Any) -> list[float]:
        called = (compile_whole if whole else compile_blocks)(one, INDUCTOR)
        return train(run, called, ADAMW(list(one.parameters())), range(4), after, lambda _, step: batch(0, step))

    losses = losses_of(model, recipe.after)
    run.agrees("losses", losses, losses_of(other, nothing), 0.0)
    run.agrees("weights", *(dict(each.named_parameters()) for each in (model, other)), 0.0)
    run.note("losses", losses)
    run.weights(model)


def add_compiled(title: str, recipe: Recipe) -> None:
    both, also = recipe.with_checkpoints(), "bfloat16, activation checkpoints"
    rows.add(f"eager, {also}, {title}", partial(trained, recipe=both, given=HALF))
    for text, whole in (("compiled blocks", False), ("whole graph", True)):
        rows.add(f"{text}, {title}", partial(compiled, recipe=recipe, whole=whole), timeout=300.0)
        rows.add(f"{text}, {also}, {title}", partial(compiled, recipe=both, whole=whole, **HALF), timeout=300.0)
        rows.add(f"{text}, Inductor, {title}", partial(as_unsharded, recipe=recipe, whole=whole), timeout=600.0)


for name, given in RECIPES.items():
    add_compiled(name, given)


# ---- bytes sent


def expected_bytes(model: nn.Module) -> int:
    """The bytes gathered in a step, in full tensors: two gathers for each block, and one for the root."""
    converted = {id(module.weight) for module in model.modules() if isinstance(module, Float8Linear)}
    total = 0
    for name, param in model.named_parameters():
        gathers = 2 if name.startswith("blocks") else 1
        total += gathers * param.numel() * (1 if id(param) in converted else param.element_size())
    return total


def sent(run: Run, recipe: Recipe, scales: tuple[int, int]) -> None:
    """Count the collectives below the process group.

    Args:
        scales: the all-reduces of a scale in forward and backward, and after a step.
    """
    with testing.fabric(2, latency_s=1e-6, bandwidth_Bps=1e9, clock="virtual") as net:
        model = build(recipe.convert)
        run.sharded(model)
        optimizer = ADAMW(list(model.parameters()))
        found = []
        for step in range(3):
            net.reset()
            train(run, model, optimizer, range(step, step + 1), nothing)
            within = Counter(event.kind for event in net.events)
            gathered = sum(event.nbytes for event in net.events if event.kind == "all_gather")
            net.reset()
            recipe.after(model)
            found.append([gathered, within["all_reduce"], [[event.kind, event.nbytes] for event in net.events]])
        run.note("bytes gathered, all-reduces, and collectives after the step", found)
        gathered, inside, later = found[-1]
        assert gathered == expected_bytes(model), f"{gathered} bytes instead of {expected_bytes(model)}"
        assert (inside, len(later)) == scales, f"{inside} all-reduces in a step, then {later}"


CONVERTED = 2 * 7  # weights: seven in each of the two blocks
rows.add(
    "bytes sent, weights gathered in float8",
    partial(sent, recipe=RECIPES["weights gathered in float8"], scales=(2 * CONVERTED, 0)),
    world=1,
)
rows.add("bytes sent, scales computed after each step", partial(sent, recipe=PRECOMPUTED, scales=(0, 1)), world=1)


# ---- checkpoints


def tensors_of(model: nn.Module) -> dict[str, Any]:
    return {name: plain(param) for name, param in model.named_parameters()}


def save_dcp(model: nn.Module, optimizer: torch.optim.Optimizer, group: Any) -> None:
    states, kept = get_state_dict(model, optimizer)
    dcp.save({"model": states, "optimizer": kept}, checkpoint_id="saved", process_group=group)


def load_dcp(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    states, kept = get_state_dict(model, optimizer)
    read = {"model": states, "optimizer": kept}
    dcp.load(read, checkpoint_id="saved")
    set_state_dict(model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])


def save_own(model: nn.Module, optimizer: torch.optim.Optimizer, group: Any) -> None:
    checkpoint.save("saved", {"model": model, "optimizer": optimizer}, step=3, process_group=group)


def load_own(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    checkpoint.load("saved", {"model": model, "optimizer": optimizer})


def resumed(run: Run, recipe: Recipe, save: Any, load: Any) -> None:
    """Train on two ranks and save; then load on four ranks, and continue."""
    dist.init_process_group("gloo")
    few = DeviceMesh("cpu", [0, 1])
    if run.rank < 2:
        model = build(recipe.convert, mesh=few)
        optimizer = ADAMW(list(model.parameters()))
        train(run, model, optimizer, range(3), recipe.after)
        run.note("saved", tensors_of(model))
        save(model, optimizer, few.get_group())
    dist.barrier()
    other = build(recipe.convert, seed=1)
    run.sharded(other)
    again = ADAMW(list(other.parameters()))
    load(other, again)
    loaded = tensors_of(other)
    if run.rank < 2:
        run.agrees("loaded", loaded, run.noted["saved"], 0.0)
    run.note("loaded", loaded)
    recipe.after(other)
    run.note("losses", train(run, other, again, range(3, 6), recipe.after))
    run.weights(other)


ORDER = "gloo adds the gradients of four ranks in another order with FSDP2"
for title, save, load in (
    ("torch's distributed checkpoint", save_dcp, load_dcp),
    ("our checkpoint", save_own, load_own),
):
    program = partial(resumed, recipe=PRECOMPUTED, save=save, load=load)
    rows.add(f"{title}, saved by two ranks and resumed by four", program, world=4, tolerance=1e-4, why=ORDER)


@rows("exported as bfloat16 safetensors, and loaded without torchao")
def exported(run: Run) -> None:
    model = life(run, GATHERED, after=precompute_float8_dynamic_scale_for_fsdp, saves=False)
    checkpoint.export_safetensors("exported", model, dtype=torch.bfloat16)
    whole = Llama().to(torch.bfloat16)
    checkpoint.import_safetensors("exported", whole)
    assert {type(param.data) for param in whole.parameters()} == {torch.Tensor}
    rounded = {name: each.to(torch.bfloat16) for name, each in tensors_of(model).items()}
    run.agrees("exported", tensors_of(whole), rounded, 0.0)
    run.note("evaluated without torchao", evaluated(run, whole))


# ---- the loss

STEPS, LAST, SEEDS = 200, 20, 3


def chain(rank: int, step: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels of eight sequences in which one of two tokens follows each token."""
    followers = torch.randint(VOCABULARY, (VOCABULARY, 2), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1000 * seed + 2 * step + rank)
    tokens = [torch.randint(VOCABULARY, (8,), generator=generator)]
    for choice in torch.randint(2, (LENGTH, 8), generator=generator):
        tokens.append(followers[tokens[-1], choice])
    made = torch.stack(tokens, dim=1)
    return made[:, :-1], made[:, 1:]


@rows("200 steps: the loss is that of bfloat16 within the spread over seeds", timeout=600.0)
def losses(run: Run) -> None:
    dist.init_process_group("gloo")
    found: dict[str, list[float]] = {}
    for name, recipe in {"bfloat16": Recipe(nothing), "float8": PRECOMPUTED}.items():
        for seed in range(SEEDS):
            model = build(recipe.convert, seed=seed, **HALF)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            by_step = train(run, model, optimizer, range(STEPS), recipe.after, partial(chain, seed=seed))
            found.setdefault(name, []).append(statistics.fmean(by_step[-LAST:]))
    run.sharded(model)
    run.note("losses", found)
    apart = abs(statistics.fmean(found["float8"]) - statistics.fmean(found["bfloat16"]))
    spread = max(found["bfloat16"]) - min(found["bfloat16"])
    print(f"mean loss of the last {LAST} steps: {found}; difference {apart:.4f}, spread over seeds {spread:.4f}")
    assert apart <= spread, f"the loss differs by {apart:.4f}; the spread over {SEEDS} seeds is {spread:.4f}"
