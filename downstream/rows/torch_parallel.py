"""Rows for torch's other parallelisms with sharding, and for the settings of `fully_shard`.

Each row compares with the unsharded model. There is no row for `context_parallel`, because torch does not implement its
attention for CPUs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
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
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from _rows import Rows, Run

rows = Rows("torch's parallelism and fully_shard's settings", environment="torch", versions=("torch",))

ADAM = partial(torch.optim.AdamW, lr=0.01)
NO_DROPOUT = Config(dropout=0.0)
ORDER = "on gloo, FSDP2 and ours add the gradients of more than two ranks in different orders"


def compare(
    run: Run,
    model: Any,
    plain: Any,
    make: Any = ADAM,
    tolerance: float = 0.0,
    before: Callable[[Any], Any] = lambda model: None,
) -> None:
    """Train the sharded and the unsharded model, compare them, and record the results.

    Args:
        before: a function that is called with the sharded model after its optimizer is created.
    """
    run.sharded(model)
    rank = run.rank
    optimizer = make(model.parameters())
    before(model)
    losses = train(model, optimizer, rank)
    wanted = train(plain, make(plain.parameters()), rank, sharded=False)
    run.note("losses", losses)
    run.agrees("losses", losses, wanted, tolerance)
    run.agrees("weights", whole(model), whole(plain), tolerance)
    run.weights(model)
    out = evaluate(model, rank)
    run.agrees("evaluation", out, evaluate(plain, rank), tolerance)
    run.note("evaluation", out)


# ---- tensor and sequence parallelism on a two-dimensional mesh


def parallelize(model: Any, mesh: Any, sequence: bool) -> None:
    """Apply tensor parallelism like torch's tutorial on two-dimensional parallelism does for Llama."""
    along = Shard(1) if sequence else Replicate()
    into = PrepareModuleInput(input_layouts=(along,), desired_input_layouts=(Replicate(),))
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=along),
            **({"norm": SequenceParallel()} if sequence else {}),
            "head": ColwiseParallel(input_layouts=along, output_layouts=Replicate()),
        },
    )
    for block in model.blocks:
        plan: dict[str, Any] = {
            "attention": into,
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.o": RowwiseParallel(output_layouts=along),
            "feed_forward": into,
            "feed_forward.gate": ColwiseParallel(),
            "feed_forward.up": ColwiseParallel(),
            "feed_forward.down": RowwiseParallel(output_layouts=along),
        }
        if sequence:
            plan |= {"attention_norm": SequenceParallel(), "feed_forward_norm": SequenceParallel()}
        parallelize_module(block, mesh, plan)


TP = Config(vocabulary=32, dim=16, hidden=24, head_dim=4, dropout=0.0)


def two_dimensional(run: Run, sequence: bool, clip: bool = False, **settings: Any) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = transformer(TP)
    plain = copy.deepcopy(model)
    parallelize(model, mesh["tp"], sequence)
    shard(model, mesh=mesh["dp"], **settings)
    run.sharded(model)
    rank, group = mesh.get_local_rank("dp"), mesh.get_group("dp")
    losses = []
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        for step in range(3):
            tokens = tokens_of(step, rank, TP, length=8)
            loss = next_token_loss(each(tokens), tokens)
            loss.backward()
            if each is plain:
                average_gradients(plain.parameters(), group)
            if clip:
                nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    run.note("losses", losses[:3])
    run.agrees("losses", losses[:3], losses[3:])
    run.agrees("weights", whole(model), whole(plain), 1e-3)
    run.weights(model)
    with torch.no_grad():
        out = model.eval()(tokens)
    run.agrees("evaluation", out, plain.eval()(tokens), 1e-3)
    run.note("evaluation", out)


for sequence in (False, True):
    words = "tensor and sequence parallel" if sequence else "tensor parallel"
    rows.add(f"{words}, sharded along the other axis", partial(two_dimensional, sequence=sequence), world=4)
rows.add(
    "tensor parallel, reshard_after_forward=False, clipped",
    partial(two_dimensional, sequence=True, clip=True, reshard_after_forward=False),
    world=4,
)


@rows("loss_parallel on logits that stay sharded", world=4)
def parallel_loss(run: Run) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 10))
    plain = copy.deepcopy(model)
    parallelize_module(
        model,
        mesh["tp"],
        {"0": ColwiseParallel(output_layouts=Replicate()), "2": ColwiseParallel(use_local_output=False)},
    )
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    run.sharded(model)
    rank = mesh.get_local_rank("dp")
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x, target = torch.randn(4, 6, generator=generator), torch.randint(0, 10, (4,), generator=generator)
        with loss_parallel():
            F.cross_entropy(model(x), target).backward()
        F.cross_entropy(plain(x), target).backward()
        average_gradients(plain.parameters(), mesh.get_group("dp"))
        for each in (model, plain):
            with torch.no_grad():
                for p in each.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
    run.agrees("weights", whole(model), whole(plain))
    run.weights(model)


# ---- meshes and layouts


def on_mesh(run: Run, shape: tuple[int, ...], names: tuple[str, ...], **settings: Any) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    config = EVEN if "shard_placement_fn" in settings else UNEVEN
    model = transformer(config)
    plain = copy.deepcopy(model)
    shard(model, mesh=mesh, **settings)
    compare(run, model, plain, partial(torch.optim.SGD, lr=0.1), 0.0 if run.world == 2 else 1e-5)


def by_columns(p: nn.Parameter) -> Shard | None:
    return Shard(1) if p.ndim == 2 else None


TWO, FOUR, SQUARE = (((2,), ("shard",)), ((4,), ("shard",)), ((2, 2), ("replicate", "shard")))
for (shape, names), world in ((TWO, 2), (FOUR, 4), (SQUARE, 4), (((4, 1), SQUARE[1]), 4), (((1, 2), SQUARE[1]), 2)):
    for reshard in (True, False):
        rows.add(
            f"mesh of {' x '.join(map(str, shape))}, reshard_after_forward={reshard}",
            partial(on_mesh, shape=shape, names=names, reshard_after_forward=reshard),
            world=world,
            **({"tolerance": 1e-5, "why": ORDER} if 4 in shape else {}),
        )
rows.add(
    "reshard_after_forward=2 of four ranks",
    partial(on_mesh, shape=(4,), names=("shard",), reshard_after_forward=2),
    world=4,
    tolerance=1e-5,
    why=ORDER,
)
rows.add("cut along columns", partial(on_mesh, shape=(2,), names=("shard",), shard_placement_fn=by_columns))


@rows("sets of modules in one call, ignored_params, a frozen block")
def grouped(run: Run) -> None:
    dist.init_process_group("gloo")
    model = transformer()
    plain = copy.deepcopy(model)
    ignored = {model.norm.weight}
    for each in (model, plain):
        each.blocks[1].requires_grad_(False)
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard([model.norm, model.head], ignored_params=ignored)
    fully_shard(model, ignored_params=ignored)

    def trained(parameters: Any) -> Any:
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.01, foreach=False)

    model.norm.weight.register_post_accumulate_grad_hook(lambda p: average_gradients([p]))
    compare(run, model, plain, trained)


@rows("tied embedding and head")
def tied(run: Run) -> None:
    dist.init_process_group("gloo")
    model = transformer(Config(tied=True))
    plain = copy.deepcopy(model)
    compare(run, shard(model), plain, partial(torch.optim.SGD, lr=0.1))


@rows("the meta device: to_empty, then init functions on the shards")
def meta(run: Run) -> None:
    dist.init_process_group("gloo")
    with torch.device("meta"):
        model = transformer()
    shard(model)
    model.to_empty(device="cpu")
    plain = transformer()
    with torch.no_grad():
        for index, (p, other) in enumerate(zip(model.parameters(), plain.parameters(), strict=True)):
            nn.init.constant_(p, 0.01 * index)
            nn.init.constant_(other, 0.01 * index)
    compare(run, model, plain, partial(torch.optim.SGD, lr=0.1))


# ---- policies

BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16
POLICIES: dict[str, dict[str, Any]] = {
    "param_dtype=bfloat16": {"param_dtype": BF16},
    "param_dtype=bfloat16, reduce_dtype=float32": {"param_dtype": BF16, "reduce_dtype": F32},
    "reduce_dtype=bfloat16": {"reduce_dtype": BF16},
    "reduce_dtype=float16": {"reduce_dtype": F16},
    "param_dtype=float16": {"param_dtype": F16},
    "output_dtype=float32": {"param_dtype": BF16, "output_dtype": F32},
    "output_dtype=bfloat16 alone": {"output_dtype": BF16},
    "output_dtype=float64": {"output_dtype": torch.float64},
    "cast_forward_inputs=False": {"param_dtype": F32, "cast_forward_inputs": False},
    "all fields": {"param_dtype": BF16, "reduce_dtype": F32, "output_dtype": F32, "cast_forward_inputs": True},
}


def precise(run: Run, policy: dict[str, Any], **settings: Any) -> None:
    dist.init_process_group("gloo")
    model = transformer()
    for block in model.blocks:  # blocks keep no output_dtype: the next module may not cast its inputs
        inner = MixedPrecisionPolicy(**{name: value for name, value in policy.items() if name != "output_dtype"})
        fully_shard(block, mp_policy=inner, **settings)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(**policy), **settings)
    run.sharded(model)
    kinds: list[str] = []
    model.blocks[0].register_forward_hook(lambda module, inputs, out: kinds.append(f"{inputs[0].dtype} {out.dtype}"))
    for step in range(3):
        model.set_requires_gradient_sync(step != 1)
        loss_of(model, step, run.rank).backward()
        run.gradients(model, f"gradients {step}")
    run.note("dtypes", kinds)
    model.set_requires_gradient_sync(True)
    run.note("losses", train(model, ADAM(model.parameters()), run.rank))
    run.weights(model)
    out = evaluate(model, run.rank)
    run.note("evaluation", [str(out.dtype), out])


for words, policy in POLICIES.items():
    rows.add(f"MixedPrecisionPolicy: {words}", partial(precise, policy=policy))
rows.add(
    "MixedPrecisionPolicy: all fields, reshard_after_forward=False",
    partial(precise, policy=POLICIES["all fields"], reshard_after_forward=False),
)


@rows("blocks of different precision, norms in float32")
def mixed(run: Run) -> None:
    dist.init_process_group("gloo")
    model = transformer()
    half = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
    exact = MixedPrecisionPolicy(param_dtype=F32, output_dtype=BF16)
    for block in model.blocks:
        for norm in (block.attention_norm, block.feed_forward_norm):
            fully_shard(norm, mp_policy=exact)
        fully_shard(block, mp_policy=half)
    fully_shard(model, mp_policy=half)
    run.sharded(model)
    run.note("losses", train(model, ADAM(model.parameters()), run.rank))
    run.weights(model)
    run.note("evaluation", evaluate(model, run.rank))


def offloaded(run: Run, policy: Any) -> None:
    dist.init_process_group("gloo")
    model = transformer()
    plain = copy.deepcopy(model)
    compare(run, shard(model, offload_policy=policy), plain)


rows.add("OffloadPolicy()", partial(offloaded, policy=OffloadPolicy()))
for pins in (True, False):
    rows.add(f"CPUOffloadPolicy(pin_memory={pins})", partial(offloaded, policy=CPUOffloadPolicy(pin_memory=pins)))


# ---- functions and methods


class Generator(nn.Module):
    """A model with other methods in addition to `forward`, like models with `generate`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = transformer(NO_DROPOUT)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.net.embed(tokens)
        for block in self.net.blocks:
            x = block(x)
        return self.net.norm(x)

    def score(self, tokens: Tensor) -> Tensor:
        return self.net.head(self.encode(tokens)).logsumexp(-1)


@rows(
    "register_fsdp_forward_method, in training and under no_grad",
    tolerance=1e-6,
    why="ours reduces the gradients of each forward separately; FSDP2 adds the gradients before it reduces them",
)
def methods(run: Run) -> None:
    dist.init_process_group("gloo")
    model = Generator()
    plain = copy.deepcopy(model)
    for block in model.net.blocks:
        fully_shard(block)
    fully_shard(model)
    for name in ("encode", "score"):
        register_fsdp_forward_method(model, name)
    run.sharded(model)
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for step in range(3):
            tokens = tokens_of(step, run.rank)
            (each.score(tokens).mean() + each.encode(tokens).square().mean() + each(tokens).mean()).backward()
            if each is plain:
                average_gradients(plain.parameters())
            optimizer.step()
            optimizer.zero_grad()
    run.agrees("weights", whole(model), whole(plain))
    run.weights(model)
    with torch.no_grad():
        out = model.encode(tokens)
    run.agrees("evaluation", out, plain.encode(tokens))
    run.note("evaluation", out)


@rows("share_comm_ctx of two roots")
def shared(run: Run) -> None:
    dist.init_process_group("gloo")
    first, second = transformer(NO_DROPOUT), transformer(NO_DROPOUT)
    plains = copy.deepcopy([first, second])
    shard(first)
    shard(second)
    share_comm_ctx([first, second])
    run.sharded(first, "sharded first")
    run.sharded(second, "sharded second")
    for pair in ([first, second], plains):
        optimizer = torch.optim.SGD([p for each in pair for p in each.parameters()], lr=0.1)
        for step in range(3):
            tokens = tokens_of(step, run.rank)
            (pair[0](tokens) - pair[1](tokens.flip(1))).square().mean().backward()
            if pair is plains:
                average_gradients([p for each in plains for p in each.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    for name, model, plain in (("first", first, plains[0]), ("second", second, plains[1])):
        run.agrees(name, whole(model), whole(plain))
        run.weights(model, f"weights {name}")


def prefetching(model: Any) -> None:
    model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])


def ahead(model: Any) -> None:
    handle = model.blocks[1].unshard(async_op=True)
    model.unshard()
    if handle is not None:
        handle.wait()


def not_gathered(model: Any) -> None:
    model.set_unshard_in_backward(False)
    model.set_reshard_after_forward(False)


METHODS: dict[str, Callable[[Any], Any]] = {
    "set_modules_to_forward_prefetch, set_modules_to_backward_prefetch": prefetching,
    "set_unshard_in_backward(False), set_reshard_after_forward(False)": not_gathered,
    "unshard(async_op=True), unshard()": ahead,
    "set_is_last_backward(True), set_requires_all_reduce(True)": lambda m: [
        m.set_is_last_backward(True),
        m.set_requires_all_reduce(True),
    ],
    "set_allocate_memory_from_process_group_for_comm(False)": lambda m: (
        m.set_allocate_memory_from_process_group_for_comm(False)
    ),
    "set_force_sum_reduction_for_comms(True)": lambda m: m.set_force_sum_reduction_for_comms(True),
}


def after(run: Run, method: Callable[[Any], Any]) -> None:
    dist.init_process_group("gloo")
    model = transformer()
    plain = copy.deepcopy(model)
    compare(run, shard(model), plain, before=method)


for words, method in METHODS.items():
    rows.add(words, partial(after, method=method))


@rows("micro-batches that keep weights gathered: set_reshard_after_backward, set_requires_gradient_sync")
def kept(run: Run) -> None:
    dist.init_process_group("gloo")
    model = transformer()
    plain = copy.deepcopy(model)
    shard(model)
    run.sharded(model)
    first, second = (ADAM(each.parameters()) for each in (model, plain))
    for step in range(2):
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            model.set_reshard_after_backward(part == 2)
            for each in (model, plain):
                loss_of(each, 3 * step + part, run.rank).backward()
        average_gradients(plain.parameters())
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    run.agrees("weights", whole(model), whole(plain), 0.0)
    run.weights(model)
    run.note("evaluation", evaluate(model, run.rank))


@rows("set_gradient_divide_factor(1)")
def summed(run: Run) -> None:
    dist.init_process_group("gloo")
    model = transformer()
    plain = copy.deepcopy(model)
    shard(model)
    for module in (*model.blocks, model):
        module.set_gradient_divide_factor(1.0)
    run.sharded(model)
    for each in (model, plain):
        loss_of(each, 0, run.rank).backward()
    for p in plain.parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad)
    grads = [{n: p.grad for n, p in each.named_parameters()} for each in (model, plain)]
    run.agrees("gradients", *grads, tolerance=0.0)
    run.gradients(model)


@rows("micro-batches on replicas: set_requires_all_reduce, set_is_last_backward, set_all_reduce_hook", world=4)
def replicas(run: Run) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = transformer()
    plain = copy.deepcopy(model)
    shard(model, mesh=mesh)
    run.sharded(model)
    seen: list[int] = []
    for block in model.blocks:
        block.set_all_reduce_hook(lambda reduced: seen.append(reduced.numel()))
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    for step in range(2):
        for part in range(3):
            model.set_requires_all_reduce(part == 2)
            model.set_is_last_backward(part == 2)
            for each in (model, plain):
                loss_of(each, 3 * step + part, run.rank).backward()
        average_gradients(plain.parameters())
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    run.note("calls of the hook", len(seen))
    run.agrees("weights", whole(model), whole(plain))
    run.weights(model)


@rows("replicate and DistributedDataParallel next to sharded modules")
def replicated(run: Run) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    plain = copy.deepcopy(model)
    fully_shard(model[2])
    run.sharded(model)
    replicate(model[0])
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, foreach=False)
        for step in range(3):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + run.rank))
            each(x).square().mean().backward()
            if each is plain:
                average_gradients(plain.parameters())
            optimizer.step()
            optimizer.zero_grad()
    run.agrees("weights", whole(model), whole(plain))
    run.weights(model)


@rows("an exception in forward, then training continues")
def exception(run: Run) -> None:
    dist.init_process_group("gloo")
    model = transformer()
    plain = copy.deepcopy(model)
    shard(model)
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        model(tokens_of(0, run.rank))
    except ZeroDivisionError:
        handle.remove()
    model.reset_iter_state() if hasattr(model, "reset_iter_state") else None
    compare(run, model, plain)
