"""Rows for torch's tools with sharded models: activation checkpointing, torch.func, compilers, counters, recorders."""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _transformer import (
    EVEN,
    UNEVEN,
    Config,
    average_gradients,
    evaluate,
    loss_of,
    next_token_loss,
    shard,
    tokens_of,
    train,
    transformer,
    whole,
)
from torch import Tensor, func, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from _rows import Rows, Run

rows = Rows("torch's tools", environment="torch", versions=("torch",))

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def both(config: Config = UNEVEN, **settings: Any) -> tuple[Any, Any]:
    """Return a sharded and an unsharded transformer with equal weights."""
    dist.init_process_group("gloo")
    model = transformer(config)
    plain = copy.deepcopy(model)
    return shard(model, **settings), plain


def trains(run: Run, model: Any, plain: Any, tolerance: float = 0.0, make: Any = SGD) -> None:
    """Train the sharded and the unsharded model, compare them, and record the results."""
    run.sharded(model)
    losses = train(model, make(model.parameters()), run.rank)
    wanted = train(plain, make(plain.parameters()), run.rank, sharded=False)
    run.note("losses", losses)
    run.agrees("losses", losses, wanted, tolerance)
    run.agrees("weights", whole(model), whole(plain), tolerance)
    run.weights(model)
    out = evaluate(model, run.rank)
    run.agrees("evaluation", out, evaluate(plain, run.rank), tolerance)
    run.note("evaluation", out)


# ---- activation checkpointing


def save_products(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def selective(policy: Any) -> Callable[[], Any]:
    return partial(create_selective_checkpoint_contexts, policy)


def around_blocks(**settings: Any) -> Callable[[Any], Any]:
    """Return a function that changes the model's forward to call each block through torch.utils.checkpoint."""

    def prepare(model: Any) -> None:
        def forward(tokens: Tensor) -> Tensor:
            x = model.embed(tokens)
            for block in model.blocks:
                x = checkpoint(block, x, **settings)
            return model.head(model.norm(x))

        model.forward = forward

    return prepare


def in_blocks(**settings: Any) -> Callable[[Any], Any]:
    """Return a function that changes each block to checkpoint its own parts, inside the sharded module."""

    def prepare(model: Any) -> None:
        for block in model.blocks:

            def forward(x: Tensor, block: Any = block) -> Tensor:
                attend = checkpoint(lambda v: block.attention(block.attention_norm(v)), x, **settings)
                x = x + block.attention_dropout(attend)
                feed = checkpoint(lambda v: block.feed_forward(block.feed_forward_norm(v)), x, **settings)
                return x + block.feed_forward_dropout(feed)

            block.forward = forward

    return prepare


def in_sequence(model: Any) -> None:
    def forward(tokens: Tensor) -> Tensor:
        x = checkpoints.checkpoint_sequential(list(model.blocks), 2, model.embed(tokens), use_reentrant=False)
        return model.head(model.norm(x))

    model.forward = forward


def nested(model: Any) -> None:
    in_blocks(use_reentrant=False)(model)
    around_blocks(use_reentrant=False)(model)


def wrapped(wrapper: Any) -> Callable[[Any], Any]:
    def prepare(model: Any) -> None:
        wrappers.apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: type(module).__name__ == "Block"
        )

    return prepare


def composed(model: Any) -> None:
    for block in model.blocks:
        composable_checkpoint(block)


def on_cpu(model: Any) -> None:
    forward = model.forward

    def kept(tokens: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return forward(tokens)

    model.forward = kept


reentrant = partial(wrappers.checkpoint_wrapper, checkpoint_impl=wrappers.CheckpointImpl.REENTRANT)
chosen = partial(wrappers.checkpoint_wrapper, context_fn=selective(save_products))
CHECKPOINTS: dict[str, Callable[[Any], Any]] = {
    "checkpoint(block, use_reentrant=False)": around_blocks(use_reentrant=False),
    "checkpoint(block, use_reentrant=True)": around_blocks(use_reentrant=True),
    "checkpoint(block, determinism_check='none', debug=True)": around_blocks(
        use_reentrant=False, determinism_check="none", debug=True
    ),
    "checkpoint(block, early_stop=False)": around_blocks(use_reentrant=False, early_stop=False),
    "checkpoint(block) with a selective policy": around_blocks(
        use_reentrant=False, context_fn=selective(save_products)
    ),
    "checkpoint(block) with a list of operators to save": around_blocks(
        use_reentrant=False, context_fn=selective([torch.ops.aten.mm.default])
    ),
    "checkpoint in each block, use_reentrant=False": in_blocks(use_reentrant=False),
    "checkpoint in each block, use_reentrant=True": in_blocks(use_reentrant=True),
    "checkpoint in each block with a selective policy": in_blocks(
        use_reentrant=False, context_fn=selective(save_products)
    ),
    "checkpoint_sequential": in_sequence,
    "checkpoints in checkpoints": nested,
    "checkpoint_wrapper": wrapped(wrappers.checkpoint_wrapper),
    "checkpoint_wrapper, reentrant": wrapped(reentrant),
    "checkpoint_wrapper with a selective policy": wrapped(chosen),
    "offload_wrapper": wrapped(wrappers.offload_wrapper),
    "the composable checkpoint": composed,
    "save_on_cpu": on_cpu,
}


def checkpointed(run: Run, prepare: Callable[[Any], Any], reshard: bool) -> None:
    dist.init_process_group("gloo")
    model, plain = transformer(), transformer()
    prepare(model)
    prepare(plain)
    shard(model, reshard_after_forward=reshard)
    trains(run, model, plain)


for title, prepare in CHECKPOINTS.items():
    rows.add(title, partial(checkpointed, prepare=prepare, reshard=True))
for title in ("checkpoint(block, use_reentrant=False)", "checkpoint in each block with a selective policy"):
    program = partial(checkpointed, prepare=CHECKPOINTS[title], reshard=False)
    rows.add(f"{title}, reshard_after_forward=False", program)


@rows("checkpoint(block, preserve_rng_state=False), no dropout")
def without_generators(run: Run) -> None:
    dist.init_process_group("gloo")
    model, plain = (transformer(Config(dropout=0.0)) for _ in range(2))
    for each in (model, plain):
        around_blocks(use_reentrant=False, preserve_rng_state=False)(each)
    trains(run, shard(model), plain)


# ---- torch.func


class Transformed(nn.Module):
    """A module that applies a transform to its submodule `body`."""

    def __init__(self, transform: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        self.transform = transform

    def forward(self, x: Tensor) -> Tensor:
        return self.transform(self.body, x)


def slope(body: Any, x: Tensor) -> Tensor:
    return func.grad(lambda v: body(v).tanh().sum())(x) + body(x)


def tangent(body: Any, x: Tensor) -> Tensor:
    out, change = func.jvp(body, (x,), (torch.ones_like(x),))
    return out + change


def pulled(body: Any, x: Tensor) -> Tensor:
    out, pull = func.vjp(body, x)
    return out + pull(torch.ones_like(out))[0]


TRANSFORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "func.grad": slope,
    "func.vmap": lambda body, x: func.vmap(body)(x),
    "func.jvp": tangent,
    "func.vjp": pulled,
    "func.jacrev": lambda body, x: body(x) + func.vmap(func.jacrev(body))(x).sum(1),
    "func.jacfwd": lambda body, x: body(x) + func.vmap(func.jacfwd(body))(x).sum(1),
    "func.hessian": lambda body, x: body(x) + func.vmap(func.hessian(lambda v: body(v).square().sum()))(x).sum(1),
    "func.linearize": lambda body, x: func.linearize(body, x)[1](torch.ones_like(x)) + body(x),
    "func.functional_call with the module's own weights": lambda body, x: func.functional_call(
        body, dict(body.named_parameters()), (x,)
    ),
    "func.functional_call with doubled weights": lambda body, x: func.functional_call(
        body, {name: 2 * p for name, p in body.named_parameters()}, (x,)
    ),
    "a gradient for each sample: vmap over grad of functional_call": lambda body, x: (
        body(x)
        + func.vmap(
            func.grad(lambda weights, v: func.functional_call(body, weights, (v,)).square().sum()), in_dims=(None, 0)
        )({name: p.detach() for name, p in body.named_parameters()}, x)["2.bias"]
    ),
}


def transformed(run: Run, transform: Callable[[Any, Tensor], Tensor]) -> None:
    """Apply the transform in the forward of a sharded module, to a submodule."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 5), Transformed(transform), nn.Linear(5, 3))
    plain = copy.deepcopy(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    run.sharded(model)
    for each in (model, plain):
        optimizer = SGD(each.parameters())
        for step in range(3):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + run.rank))
            each(x).square().mean().backward()
            if each is plain:
                average_gradients(plain.parameters())
            optimizer.step()
            optimizer.zero_grad()
    run.agrees("weights", whole(model), whole(plain))
    run.weights(model)
    run.note("evaluation", model.eval()(x))


for title, transform in TRANSFORMS.items():
    rows.add(f"{title} in a sharded module", partial(transformed, transform=transform))


def around(run: Run, transform: Callable[[Any, Tensor], Any]) -> None:
    """Apply the transform to the whole sharded model."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    plain = copy.deepcopy(model)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    run.sharded(model)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(run.rank))
    out = transform(model, x)
    run.agrees("output", out, transform(plain, x))
    run.note("output", out)


rows.add("func.vmap around a sharded model", partial(around, transform=lambda m, x: func.vmap(m)(x)))
rows.add(
    "func.grad with respect to the input, around a sharded model",
    partial(around, transform=lambda m, x: func.grad(lambda v: m(v).square().sum())(x)),
)
rows.add(
    "func.jvp around a sharded model",
    partial(around, transform=lambda m, x: list(func.jvp(m, (x,), (torch.ones_like(x),)))),
)
rows.add("func.jacrev around a sharded model", partial(around, transform=lambda m, x: func.jacrev(m)(x)))
rows.add(
    "autograd.functional.jacobian around a sharded model",
    partial(around, transform=lambda m, x: torch.autograd.functional.jacobian(m, x)),
)
rows.add(
    "autograd.grad with respect to the input, twice",
    partial(
        around,
        transform=lambda m, x: _second_order(m, x.clone().requires_grad_()),
    ),
)


def _second_order(model: Any, x: Tensor) -> Tensor:
    (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return second


# ---- torch.compile and torch.export


def compiled(run: Run, compile_it: Callable[[Any], Any], late: bool = False, config: Config = UNEVEN) -> None:
    dist.init_process_group("gloo")
    model = transformer(config)
    plain = copy.deepcopy(model)
    if not late:
        compile_it(model)
    shard(model)
    run.sharded(model)
    call = compile_it(model) if late else None
    trains_called(run, model, model if call is None else call, plain)


def trains_called(run: Run, model: Any, call: Any, plain: Any) -> None:
    for each, calls in ((model, call), (plain, plain)):
        optimizer = SGD(each.parameters())
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            tokens = tokens_of(step, run.rank)
            loss = next_token_loss(calls(tokens), tokens)
            loss.backward()
            if each is plain:
                average_gradients(plain.parameters())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        run.note(f"losses {each is model}", losses)
        each.eval()
        with torch.no_grad():
            run.note(f"evaluation {each is model}", calls(tokens))
    run.agrees("weights", whole(model), whole(plain), 1e-4)
    run.weights(model)


def of_blocks(backend: str, **settings: Any) -> Callable[[Any], Any]:
    def compile_it(model: Any) -> None:
        for block in model.blocks:
            block.compile(backend=backend, **settings)

    return compile_it


def of_all(backend: str, **settings: Any) -> Callable[[Any], Any]:
    return lambda model: torch.compile(model, backend=backend, **settings)


COMPILED: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "block.compile() before sharding": (of_blocks("aot_eager"), False),
    "block.compile() before sharding, with Inductor": (of_blocks("inductor"), False),
    "block.compile(fullgraph=True) after sharding": (of_blocks("aot_eager", fullgraph=True), True),
    "torch.compile(model) of the sharded model": (of_all("aot_eager"), True),
    "torch.compile(model, fullgraph=True) of the sharded model": (of_all("aot_eager", fullgraph=True), True),
}
for title, (compile_it, late) in COMPILED.items():
    # Inductor uses another random number generator.
    config = Config(dropout=0.0) if "Inductor" in title else UNEVEN
    rows.add(title, partial(compiled, compile_it=compile_it, late=late, config=config), timeout=400)


@rows("torch.export.export of a sharded model")
def exported(run: Run) -> None:
    model, plain = both(Config(dropout=0.0))
    run.sharded(model)
    tokens = tokens_of(0, run.rank)
    program = torch.export.export(model.eval(), (tokens,))
    run.agrees("output", program.module()(tokens), plain(tokens))


@rows("torch.export.export of the unsharded model, with the weights of the sharded one")
def exported_unsharded(run: Run) -> None:
    model, plain = both(Config(dropout=0.0))
    run.sharded(model)
    train(model, SGD(model.parameters()), run.rank)
    plain.load_state_dict(whole(model))
    tokens = tokens_of(0, run.rank)
    program = torch.export.export(plain.eval(), (tokens,))
    out = program.module()(tokens)
    model.eval()
    run.agrees("output", model(tokens), out)
    run.note("output", out)


# ---- counters, trackers, recorders


def as_fsdp2_communicates() -> None:
    """Select the transport that uses torch's collectives, which tools can count. FSDP2 ignores the variable."""
    os.environ["COMPOSABLE_SHARD_TRANSPORT"] = "torch"


@rows("CommDebugMode")
def communication(run: Run) -> None:
    as_fsdp2_communicates()
    model, _ = both()
    run.sharded(model)
    for step in range(2):
        with CommDebugMode() as mode:
            loss_of(model, step, run.rank).backward()
        run.note(f"counts {step}", {str(op): count for op, count in mode.get_comm_counts().items() if count})
        run.note(f"total {step}", mode.get_total_counts())
    run.note("of modules", sorted(mode.get_sharding_info()))
    run.gradients(model)


@rows("FSDPMemTracker: bytes of parameters, gradients, optimizer state and activations")
def memory(run: Run) -> None:
    model, _ = both(EVEN)  # FSDP2 pads uneven shards, composable_shard does not
    run.sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    tokens = tokens_of(0, run.rank, EVEN)
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((tokens,))
    with tracker:
        for step in range(2):
            next_token_loss(model(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                tracker.reset_mod_stats()
    found = tracker.get_tracker_snapshot("current")
    kept = {str(kind): count for per in found.values() for kind, count in per.items() if "SHARDED_PARAM" in str(kind)}
    run.note("current", kept)
    peak = tracker.get_tracker_snapshot("peak")
    names = ("SHARDED_PARAM", "OPT", "INP")
    run.note("peak", {str(k): n for per in peak.values() for k, n in per.items() if str(k).split(".")[-1] in names})
    run.weights(model)


@rows("torch.profiler: ranges of FSDP2 and a record_function of one's own, over a schedule of steps")
def profiled(run: Run) -> None:
    model, plain = both()
    run.sharded(model)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=1),
        record_shapes=True,
        with_stack=True,
        with_modules=True,
    ) as profiler:
        optimizer = SGD(model.parameters())
        for step in range(3):
            with record_function("user forward"):
                loss = loss_of(model, step, run.rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    found = Counter(event.name for event in profiler.events())
    names = (
        "FSDP::pre_forward",
        "FSDP::post_forward",
        "FSDP::pre_backward",
        "FSDP::root_pre_forward",
        "user forward",
    )
    run.note("ranges", sorted(name for name in found if name.startswith(names)))
    profiler.export_chrome_trace(str(run.folder / f"trace{run.rank}.json"))
    run.note("events", bool(json.loads((run.folder / f"trace{run.rank}.json").read_text())["traceEvents"]))
    train(plain, SGD(plain.parameters()), run.rank, sharded=False)
    run.agrees("weights", whole(model), whole(plain), 0.0)


@rows("the flight recorder")
def recorder(run: Run) -> None:
    as_fsdp2_communicates()
    os.environ["TORCH_FR_BUFFER_SIZE"] = "1000"
    from torch._C._distributed_c10d import _dump_fr_trace_json

    model, _ = both()
    run.sharded(model)
    loss_of(model, 0, run.rank).backward()
    before = len(json.loads(_dump_fr_trace_json()).get("entries", []))
    loss_of(model, 1, run.rank).backward()
    entries = json.loads(_dump_fr_trace_json()).get("entries", [])[before:]
    run.note("entries", [[each["profiling_name"], each["state"], each["process_group"]] for each in entries])


@rows("FlopCounterMode")
def flops(run: Run) -> None:
    model, plain = both()
    run.sharded(model)
    counts = []
    for each in (model, plain):
        with FlopCounterMode(display=False) as mode:
            loss_of(each, 0, run.rank).backward()
        counts.append(mode.get_total_flops())
        run.note(f"flops {each is model}", {name: sum(ops.values()) for name, ops in mode.get_flop_counts().items()})
    assert counts[0] == counts[1], counts


@rows("ModuleTracker")
def modules(run: Run) -> None:
    model, plain = both()
    run.sharded(model)
    seen = []
    for each in (model, plain):
        names: list[str] = []
        with ModuleTracker() as tracker:
            each.blocks[0].feed_forward.up.register_forward_hook(
                lambda *_, names=names, tracker=tracker: names.append(
                    ",".join(sorted(name.removeprefix("FSDP") for name in tracker.parents))
                )
            )
            loss_of(each, 0, run.rank).backward()
        seen.append(names)
    run.note("parents", seen)
    assert seen[0] == seen[1], seen


@rows("hooks of modules: forward, backward, full backward pre-hooks, always_call and with_kwargs")
def hooks(run: Run) -> None:
    model, plain = both()
    for each in (model, plain):
        seen: list[str] = []
        for name, module in each.named_modules():
            if name.count(".") > 2 or "norm" in name:
                continue

            def tell(what: str, name: str = name, seen: list[str] = seen) -> Callable[..., None]:
                return lambda *_, **__: seen.append(f"{what} {name}")

            module.register_forward_pre_hook(tell("before"), with_kwargs=True)
            module.register_forward_hook(tell("after"), always_call=True)
            if name not in ("", "embed"):  # their inputs do not require gradients
                module.register_full_backward_pre_hook(tell("before backward"))
                module.register_full_backward_hook(tell("after backward"))
        loss_of(each, 0, run.rank).backward()
        each.zero_grad()
        run.note(f"seen {each is model}", seen)
        if each is plain:
            assert seen == run.noted["seen True"]
    trains(run, model, plain)


@rows("hooks on tensors, saved-tensor hooks and anomaly detection")
def graph_hooks(run: Run) -> None:
    model, plain = both()
    run.sharded(model)
    for each in (model, plain):
        seen = []
        with (
            torch.autograd.detect_anomaly(check_nan=True),
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        ):
            torch.manual_seed(1)
            tokens = tokens_of(0, run.rank)
            x = each.embed(tokens) if each is plain else None
            del x
            torch.manual_seed(1)
            out = each(tokens)
            out.register_hook(lambda grad, seen=seen: seen.append(float(grad.sum())))
            out.retain_grad()
            next_token_loss(out, tokens).backward()
        run.note(f"seen {each is model}", [seen, out.grad])
    average_gradients(plain.parameters())
    grads = [{n: p.grad for n, p in each.named_parameters()} for each in (model, plain)]
    run.agrees("gradients", *grads, tolerance=0.0)
    run.gradients(model)


def backward_twice(model: Any, rank: int) -> None:
    loss = loss_of(model, 0, rank)
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses(model: Any, rank: int) -> None:
    torch.autograd.backward([loss_of(model, 1, rank), loss_of(model, 2, rank)])


def one_of_two(model: Any, rank: int) -> None:
    (loss_of(model, 3, rank) + loss_of(model, 4, rank)).backward()


def backwards(run: Run, backward: Callable[[Any, int], None]) -> None:
    model, plain = both()
    run.sharded(model)
    for _ in range(2):
        for each in (model, plain):
            backward(each, run.rank)
    average_gradients(plain.parameters())
    run.agrees("gradients", *[{n: p.grad for n, p in each.named_parameters()} for each in (model, plain)])
    run.gradients(model)


rows.add("backward twice (retain_graph)", partial(backwards, backward=backward_twice))
for title, backward in (("autograd.backward of two losses", two_losses), ("a loss of two forwards", one_of_two)):
    rows.add(
        title,
        partial(backwards, backward=backward),
        tolerance=1e-6,
        why="ours reduces the gradients of each forward separately; FSDP2 adds the gradients before it reduces them",
    )


@rows("no_grad and inference_mode between training steps")
def inference(run: Run) -> None:
    model, plain = both()
    outs = []
    for each in (model, plain):
        with torch.inference_mode():
            outs.append(each.eval()(tokens_of(0, run.rank)).clone())
        with torch.no_grad():
            outs.append(each(tokens_of(1, run.rank)))
        each.train()
    run.agrees("outputs", outs[:2], outs[2:], 0.0)
    run.note("outputs", outs[:2])
    trains(run, model, plain)


@rows("Dropout under torch.random.fork_rng; states of generators saved and restored")
def generators(run: Run) -> None:
    model, plain = both()
    run.sharded(model)
    found = []
    for each in (model, plain):
        torch.manual_seed(3)
        with torch.random.fork_rng():
            first = each(tokens_of(0, run.rank))
        state = torch.get_rng_state()
        second = each(tokens_of(0, run.rank))
        torch.set_rng_state(state)
        third = each(tokens_of(0, run.rank))
        found.append([first, second, third])
        assert torch.equal(first, second)
        assert torch.equal(second, third)
    run.agrees("outputs", found[0], found[1], 0.0)
    run.note("outputs", found[0])
