"""The settings of a sharded module: each has the effect that it has on torch's FSDP2, or a better one."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

import composable_shard
from _engines import ENGINES, fully_shard, mesh_of
from _models import Stack, shard_blocks, vectors
from _pool import distributed
from _stepping import counted_gathers, engine_of, kinds, loss_of, resident, train_step, twins
from composable_shard import last_record
from composable_shard._torch import all_gather_options, reduce_scatter_options


def both(make=Stack, shard=shard_blocks, **options):
    """The same model under each engine."""
    torch.manual_seed(3)
    plain = make()
    models = {name: copy.deepcopy(plain) for name in ENGINES}
    for name, model in models.items():
        shard(model, ENGINES[name], **options)
    return models


def run_both(models, train, steps=2):
    """`train(model, step)` and an optimizer's step, on each side; the gradients and parameters must agree."""
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    for step in range(steps):
        for model in models.values():
            train(model, step)
        assert_same(models["ours"], models["fsdp2"])
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    assert_same(models["ours"], models["fsdp2"])


def assert_same(ours, theirs):
    for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(mine.to_local(), other.to_local(), msg=lambda m, n=name: f"{n}: {m}")
        assert (mine.grad is None) == (other.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(
                mine.grad.to_local(), other.grad.to_local(), msg=lambda m, n=name: f"grad {n}: {m}"
            )


def backward(model, rank, step):
    model(*vectors(rank, step)).square().mean().backward()


def call(model, name, *args):
    """A method that the installed torch may not have yet; ours always has."""
    if isinstance(model, composable_shard.FSDPModule) or hasattr(model, name):
        getattr(model, name)(*args)
        return True
    return False


# ---- the contract


# What torch's `FSDPModule` has, as reviewed: whoever adds a version looks at what is new in it.
SINCE_2_11 = {
    "_apply",
    "_get_fsdp_state",
    "_set_unshard_async_op",
    "reshard",
    "set_all_reduce_hook",
    "set_allocate_memory_from_process_group_for_comm",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_force_sum_reduction_for_comms",
    "set_gradient_divide_factor",
    "set_is_last_backward",
    "set_modules_to_backward_prefetch",
    "set_modules_to_forward_prefetch",
    "set_post_optim_event",
    "set_reduce_scatter_divide_factor",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "set_unshard_in_backward",
    "unshard",
}
SINCE_2_13 = {
    "reset_iter_state",
    "set_reduce_scatter_max_input_buffers",
    "set_reduce_scatter_unused_params",
    "set_separate_reduce_scatter_group",
    "set_symm_mem_for_comm",
}
SINCE_2_15 = {
    "finalize_backward",
    "set_keep_unsharded_storage",
    "set_manual_backward_finalization",
}
REVIEWED = {
    "2.11": SINCE_2_11,
    "2.13": SINCE_2_11 | SINCE_2_13,
    "2.15": SINCE_2_11 | SINCE_2_13 | SINCE_2_15,
}


def test_the_methods_of_every_reviewed_version_are_ours_whichever_is_installed():
    missing = {name for name in REVIEWED["2.15"] if name not in dir(composable_shard.FSDPModule)}
    assert missing == set()


def test_the_installed_version_has_the_methods_that_were_reviewed():
    version = ".".join(torch.__version__.split(".")[:2])
    if version in REVIEWED:
        theirs = {n for n, v in vars(fsdp.FSDPModule).items() if inspect.isfunction(v) and not n.startswith("__")}
        assert theirs == REVIEWED[version]


def test_the_class_is_a_kind_of_torchs():
    assert issubclass(composable_shard.FSDPModule, fsdp.FSDPModule)
    assert issubclass(composable_shard.UnshardHandle, fsdp.UnshardHandle)


def test_every_method_of_torchs_is_our_own():
    inherited = {
        name
        for name, value in vars(fsdp.FSDPModule).items()
        if inspect.isfunction(value) and getattr(composable_shard.FSDPModule, name) is value
    }
    assert inherited == set()


@pytest.mark.parametrize(
    "name", [n for n, v in vars(fsdp.FSDPModule).items() if inspect.isfunction(v) and not n.startswith("_")]
)
def test_signatures_are_those_of_torch(name):
    ours, theirs = (inspect.signature(getattr(c, name)) for c in (composable_shard.FSDPModule, fsdp.FSDPModule))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


@distributed(world=1)
def test_a_container_that_is_sliced_gives_one_of_its_own_kind(rank, world):
    class Both(nn.Sequential):
        pass

    model = fully_shard(Both(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert isinstance(model, fsdp.FSDPModule)
    assert isinstance(model, Both)
    assert type(model[:1]) is Both


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("set_requires_gradient_sync", 1, ValueError),
        ("set_requires_all_reduce", None, ValueError),
        ("set_reshard_after_forward", 2, ValueError),
        ("set_reshard_after_backward", "no", ValueError),
        ("set_unshard_in_backward", 0, ValueError),
        ("set_is_last_backward", 1, ValueError),
        ("set_force_sum_reduction_for_comms", 1, ValueError),
        ("set_reduce_scatter_unused_params", 1, ValueError),
        ("set_gradient_divide_factor", 0, ValueError),
        ("set_gradient_divide_factor", True, ValueError),
        ("set_reduce_scatter_max_input_buffers", True, TypeError),
        ("set_reduce_scatter_max_input_buffers", 1.5, TypeError),
        ("set_reduce_scatter_max_input_buffers", 0, ValueError),
    ],
)
@distributed(world=1)
def test_values_of_a_wrong_kind_are_refused_by_name(rank, world, name, value, kind):
    model = fully_shard(nn.Linear(2, 2))
    argument = next(iter(inspect.signature(getattr(model, name)).parameters))
    with pytest.raises(kind, match=f"{argument}: "):
        getattr(model, name)(value)


# ---- gradients


@distributed(world=4)
def test_all_reduce_switched_off_keeps_pieces_until_it_is_on_again(rank, world):
    def train(model, step):
        for micro in range(3):
            model.set_requires_all_reduce(micro == 2)
            backward(model, rank, 3 * step + micro)

    run_both(both(mesh=mesh_of(2, 2)), train)


@distributed(world=4)
def test_pieces_that_wait_for_the_all_reduce_are_kept_apart_from_grad_and_cleared_with_it(rank, world):
    model, _ = twins(mesh=mesh_of(2, 2))
    twin, _ = twins(mesh=mesh_of(2, 2))
    for clear in (lambda: model.zero_grad(), lambda: model.zero_grad(set_to_none=False)):
        model.set_requires_all_reduce(False)
        backward(model, rank, 0)
        assert all(
            p.grad is not None and not p.grad.to_local().any() for p in model.parameters() if p.to_local().numel()
        )
        clear()
        model.set_requires_all_reduce(True)
        backward(model, rank, 1)
        twin.zero_grad()
        backward(twin, rank, 1)
        for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine.grad.to_local(), other.grad.to_local()), name
        model.zero_grad()


@distributed(world=4)
def test_all_reduce_off_for_a_group_that_is_used_twice_loses_nothing(rank, world):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            return self.lin(torch.tanh(self.lin(x)))

    torch.manual_seed(3)
    plain = Twice()
    model = copy.deepcopy(plain)
    fully_shard(model.lin, mesh=mesh_of(2, 2))
    fully_shard(model, mesh=mesh_of(2, 2))
    for micro in range(3):
        model.set_requires_all_reduce(micro == 2)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(micro))
        model(x).sum().backward()
        plain(x).sum().backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), p.grad)


@distributed(world=2)
def test_the_divide_factor_takes_the_place_of_the_number_of_ranks_also_on_gloo(rank, world):
    model, _ = twins()
    twin, _ = twins()
    for module in model.modules():
        if isinstance(module, composable_shard.FSDPModule):
            module.set_gradient_divide_factor(5.0)
    for each in (model, twin):
        backward(each, rank, 0)
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_local() * 5.0, other.grad.to_local() * world, msg=name)


@distributed(world=2)
def test_torchs_fsdp2_has_no_divide_factor_on_gloo(rank, world):
    model = both()["fsdp2"]
    model.set_gradient_divide_factor(5.0)
    with pytest.raises(RuntimeError, match=r"PREMUL_SUM|ReduceOp"):
        backward(model, rank, 0)


@distributed(world=2)
def test_a_changed_divide_factor_holds_from_the_next_backward_on(rank, world):
    model, _ = twins()
    seen = []
    for factor in (2.0, 4.0):
        for module in model.modules():
            if isinstance(module, composable_shard.FSDPModule):
                module.set_gradient_divide_factor(factor)
        backward(model, rank, 0)
        seen.append([p.grad.to_local() for p in model.parameters()])
        model.zero_grad()
    for first, second in zip(*seen, strict=True):
        assert torch.equal(first, second * 2)


@distributed(world=4)
def test_sums_only_give_the_same_mean(rank, world):
    def shard(model, engine, **options):
        shard_blocks(model, engine, **options)
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    run_both(both(shard=shard, mesh=mesh_of(2, 2)), lambda model, step: backward(model, rank, step))


@distributed(world=4)
def test_float16_gradients_neither_overflow_nor_vanish(rank, world):
    policy = composable_shard.MixedPrecisionPolicy(reduce_dtype=torch.float16)

    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return (self.w * x).sum()

    for scale in (3e4, 1.2e-7):  # near the ends of float16: a sum of four overflows, a quarter of it vanishes
        models = both(Large, lambda model, engine: engine(model, mp_policy=policy))
        for model in models.values():
            model(torch.full((8,), scale)).backward()
        assert_same(models["ours"], models["fsdp2"])
        got = models["ours"].w.grad.full_tensor()
        torch.testing.assert_close(got, torch.full((8,), scale).half().float(), rtol=0.5, atol=0)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, use_b=True):
        x = self.a(x)
        return self.b(x) if use_b else self.c(x)


def shard_branches(model, engine, **options):
    for child in (model.a, model.b, model.c):
        engine(child, **options)
    engine(model, **options)


@distributed(world=2)
def test_modules_that_only_some_ranks_use_get_zeros_on_request(rank, world):
    models = both(Branches, shard_branches, reshard_after_forward=False)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    for name, model in list(models.items()):
        if not call(model, "set_reduce_scatter_unused_params", True):
            del models[name]  # it would hang
            continue
        for module in (model.a, model.b, model.c):  # gathers are the user's own then, on all ranks
            module.unshard()
        model(x, use_b=rank == 0).sum().backward()
    assert_same(models["ours"], models.get("fsdp2", models["ours"]))
    for child in (models["ours"].b, models["ours"].c):
        assert child.weight.grad is not None


@distributed(world=2)
def test_a_module_that_was_gathered_and_not_used_gets_zeros_only_on_request(rank, world):
    models = both(Branches, shard_branches)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    for wanted in (False, True, False):
        for gathered in (True, False):
            for model in models.values():
                supported = call(model, "set_reduce_scatter_unused_params", wanted)
                model.zero_grad()
                if gathered:
                    model.c.unshard()
                model(x).sum().backward()
                model.c.reshard()
            mine, theirs = (model.c.weight.grad for model in models.values())
            assert (mine is not None) is (wanted and gathered)
            if gathered and supported:  # the last one is torch's
                assert (theirs is not None) is wanted


@distributed(world=2)
def test_a_backward_that_is_not_the_last_leaves_its_reductions_to_the_next_or_to_the_step(rank, world):
    def train(model, step):
        model.set_is_last_backward(False)
        backward(model, rank, 2 * step)
        model.set_is_last_backward(True)
        backward(model, rank, 2 * step + 1)

    run_both(both(), train)
    model, _ = twins()
    twin, _ = twins()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    model.set_is_last_backward(False)
    for each in (model, twin):
        backward(each, rank, 0)
    assert model.blocks[0].up.weight.grad is None or engine_of(model)._do._reductions
    for optimizer in optimizers:
        optimizer.step()
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.to_local(), other.to_local()), name


@distributed(world=2)
def test_reductions_in_flight_are_bounded(rank, world):
    for bound in (1, 2, 4):
        model, _ = twins()
        model.set_reduce_scatter_max_input_buffers(bound)
        train_step(model)
        flying = most = 0
        for action in last_record(model).actions:
            flying += {"REDUCE": 1, "REDUCED": -1}.get(action.kind, 0)
            most = max(most, flying)
        assert most == bound


@distributed(world=2)
def test_a_backward_may_be_ended_by_hand(rank, world):
    model, _ = twins()
    twin, _ = twins()
    assert model.finalize_backward() is None, "nothing has run"
    model.set_manual_backward_finalization(True)
    for async_op in (False, True):
        for each in (model, twin):
            each.set_requires_gradient_sync(False)
            backward(each, rank, 0)
            each.set_requires_gradient_sync(True)
            backward(each, rank, 1)
        handle = model.finalize_backward(async_op=async_op)
        assert (handle is not None) is async_op
        if handle is not None:
            handle.wait()
        for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine.grad.to_local(), other.grad.to_local()), name
        assert resident(model) == []
        for each in (model, twin):
            each.zero_grad()


# ---- parameters


@distributed(world=2)
def test_storage_that_is_kept_has_the_same_address_in_every_gather_and_is_given_back_on_request(rank, world):
    model, _ = twins(reshard_after_forward=True)
    twin, _ = twins(reshard_after_forward=True)
    model.set_keep_unsharded_storage(True)
    seen = {}
    for block in model.blocks:
        block.up.register_forward_pre_hook(lambda m, _: seen.setdefault(m, []).append(m.weight.data_ptr()))
    for step in range(3):
        for each in (model, twin):
            backward(each, rank, step)
    assert [len(set(addresses)) for addresses in seen.values()] == [1, 1, 1]
    assert len({addresses[0] for addresses in seen.values()}) == 3, "and nobody else's"
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), other.grad.to_local()), name
    pool = engine_of(model).pool
    assert pool.live_bytes > 0
    model.set_keep_unsharded_storage(False)
    backward(model, rank, 0)
    assert pool.live_bytes == 0
    model.set_keep_unsharded_storage(True)
    backward(model, rank, 0)
    model.double()
    model(vectors(rank, 0)[0].double()).sum().backward()
    kept = sum(bucket._reserved.nbytes for group in engine_of(model).groups for bucket in group.buckets)
    assert pool.live_bytes == kept, "the conversion gave the old storage back"


@distributed(world=2)
def test_an_embedding_need_not_be_gathered_in_backward(rank, world):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, ids):
            return self.head(self.embed(ids))

    def shard(model, engine):
        engine(model.embed, reshard_after_forward=True)
        engine(model.head)
        engine(model)
        model.embed.set_unshard_in_backward(False)

    models = both(Words, shard)
    ids = torch.arange(6) + rank

    run_both(models, lambda model, step: model(ids + step).square().sum().backward())
    assert kinds(last_record(models["ours"]), "UNSHARD").count("embed") == 1


@distributed(world=2)
def test_a_weight_that_backward_needs_after_all_is_gathered(rank, world):
    model, plain = twins(reshard_after_forward=True)
    for block in model.blocks:
        block.set_unshard_in_backward(False)
    train_step(model)
    train_step(plain)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), p.grad)


@distributed(world=2)
def test_prefetch_lists_are_gathered_in_the_place_of_the_next_module(rank, world):
    models = both()
    for model in models.values():
        blocks = list(model.blocks)
        model.set_modules_to_forward_prefetch(blocks)
        blocks[0].set_modules_to_forward_prefetch([blocks[1], blocks[2]])
        blocks[2].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
        blocks[1].set_modules_to_backward_prefetch([])
    run_both(models, lambda model, step: backward(model, rank, step))
    done = [str(action) for action in last_record(models["ours"]).actions]
    first = done.index("WAIT blocks.0")
    assert {"UNSHARD blocks.1", "UNSHARD blocks.2"} <= set(done[:first])
    back = done.index("WAIT blocks.2", done.index("RESHARD blocks.2"))
    assert done[back + 1 : back + 3] == ["UNSHARD blocks.1", "UNSHARD blocks.0"]


@distributed(world=1)
def test_prefetch_lists_hold_sharded_modules_only(rank, world):
    model = fully_shard(nn.Linear(2, 2))
    for name in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
        with pytest.raises(ValueError, match="Linear is not sharded"):
            getattr(model, name)([nn.Linear(2, 2)])


@distributed(world=2)
def test_an_event_behind_the_optimizer_is_used_once(rank, world):
    model, _ = twins()
    event = object()  # on a CPU nothing waits for it
    model.set_post_optim_event(event)
    train_step(model)
    engine = engine_of(model)
    assert engine.changed_at is None
    model.set_post_optim_event(event)
    assert engine.changed_at is event
    train_step(model)
    assert engine.changed_at is None
    model._set_unshard_async_op(True)
    train_step(model)


# ---- communication


class LoggedGather(AllGather):
    def __init__(self):
        self.sizes, self.calls = [], 0

    def allocate(self, size, *, dtype, device):
        self.sizes.append(tuple(size))
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        work = group._allgather_base(output_tensor, input_tensor, all_gather_options())
        if async_op:
            return work
        return work.wait()


class LoggedScatter(ReduceScatter):
    def __init__(self):
        self.ops = []

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.ops.append(op)
        group._reduce_scatter_base(output_tensor, input_tensor, reduce_scatter_options(op)).wait()


@pytest.mark.parametrize("early", [True, False])
@distributed(world=2)
def test_custom_communication_moves_the_module_it_was_set_on(rank, world, early):
    models = both(reshard_after_forward=True)
    comms = {name: (LoggedGather(), LoggedScatter()) for name in models}
    if not early:
        for model in models.values():
            backward(model, rank, 0)
            model.zero_grad()
    for name, model in models.items():
        model.blocks[1].set_custom_all_gather(comms[name][0])
        model.blocks[1].set_custom_reduce_scatter(comms[name][1])
    run_both(models, lambda model, step: backward(model, rank, step))
    for gather, scatter in comms.values():
        assert gather.calls == 4
        assert len(scatter.ops) == 2
    models["ours"].blocks[1].set_custom_all_gather(None)
    backward(models["ours"], rank, 0)
    assert comms["ours"][0].calls == 4


@distributed(world=2)
def test_the_all_reduce_hook_sees_and_may_change_the_mean(rank, world):
    def shard(model, engine, **options):
        shard_blocks(model, engine, **options)
        model.blocks[0].set_all_reduce_hook(lambda reduced: reduced.mul_(3))

    models = both(shard=shard)
    run_both(models, lambda model, step: backward(model, rank, step))
    twin, _ = twins()
    hooked, _ = twins()
    shapes = []
    hooked.blocks[0].set_all_reduce_hook(lambda reduced: shapes.append(tuple(reduced.shape)) or reduced.mul_(3))
    for each in (twin, hooked):
        backward(each, rank, 0)
    for name, p in twin.named_parameters():
        factor = 3 if name.startswith("blocks.0.") else 1
        assert torch.equal(hooked.get_parameter(name).grad.to_local(), p.grad.to_local() * factor), name
    assert [len(shape) for shape in shapes] == [1]


@distributed(world=2)
def test_a_stream_for_the_hook_is_refused_where_replicas_are_reduced(rank, world):
    model = fully_shard(nn.Linear(2, 2), mesh=mesh_of(2, 1))
    with pytest.raises(ValueError, match="stream: "):
        model.set_all_reduce_hook(lambda reduced: None, stream=object())


@distributed(world=2)
def test_reductions_may_have_a_process_group_of_their_own(rank, world):
    models = both()
    before = set(dist.distributed_c10d._world.pg_map)
    engines = sum(call(model, "set_separate_reduce_scatter_group") for model in models.values())
    made = set(dist.distributed_c10d._world.pg_map) - before
    assert len(made) == engines, "one for each engine"
    run_both(models, lambda model, step: backward(model, rank, step))
    models["ours"].set_separate_reduce_scatter_group(False)
    backward(models["ours"], rank, 0)
    for group in made:
        dist.destroy_process_group(group)


@distributed(world=2)
def test_buffers_from_the_process_group_where_its_backend_allocates_none_are_ordinary_ones(rank, world):
    models = both()
    for model in models.values():
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_allocate_memory_from_process_group_for_comm(True)
    run_both(models, lambda model, step: backward(model, rank, step))
    with pytest.raises(RuntimeError, match="set only one"):
        models["ours"].set_symm_mem_for_comm()


# ---- state


@distributed(world=2)
def test_reset_gives_up_what_is_kept_and_is_for_the_root(rank, world):
    model, _ = twins()
    model.reset_iter_state()  # before the first forward there is nothing to forget
    twin, _ = twins()
    model.set_requires_gradient_sync(False)
    backward(model, rank, 0)
    model.set_requires_gradient_sync(True)
    with pytest.raises(RuntimeError, match="on the root"):
        model.blocks[0].reset_iter_state()
    model.reset_iter_state()
    assert resident(model) == []
    model.zero_grad()
    for each in (model, twin):
        backward(each, rank, 1)
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), other.grad.to_local()), name


@distributed(world=2)
def test_the_state_has_the_names_that_torchs_pipelining_reads(rank, world):
    model, _ = twins()
    twin, _ = twins()
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    for micro in range(2):
        backward(model, rank, micro)
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    state = fully_shard.state(model)
    assert len(state._state_ctx.all_states) == 4
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()
    twin.set_requires_gradient_sync(False)
    backward(twin, rank, 0)
    twin.set_requires_gradient_sync(True)
    backward(twin, rank, 1)
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), other.grad.to_local()), name
    assert resident(model) == []
    assert model._get_fsdp_state()._fsdp_param_group is not None
    with pytest.raises(RuntimeError, match="not sharded"):
        fully_shard.state(nn.Linear(2, 2))


@distributed(world=2)
def test_no_setting_costs_a_gather(rank, world):
    model, _ = twins()
    train_step(model)
    with counted_gathers() as plain:
        train_step(model)
    model.set_requires_all_reduce(True)
    model.set_force_sum_reduction_for_comms(False)
    model.set_is_last_backward(True)
    with counted_gathers() as found:
        loss_of(model).backward()
    assert found == plain
    assert all(isinstance(p, DTensor) for p in model.parameters())
