"""If one rank acts differently from the others, all ranks get an error before the action, and write nothing wrong."""

from __future__ import annotations

import copy
import tempfile

import pytest
import torch
import torch.distributed as dist

import composable_shard as cs
from _blocks import token_batch
from _decoders import Training
from _pool import distributed, more
from _replaying import captures_on_cpu
from composable_shard._faults.watch import WATCHER

LIMIT_S = 60.0


def everywhere(world, what):
    found = [None] * world
    dist.all_gather_object(found, what)
    return found


def leave_a_layer_out(run):
    if run.rank:
        run.model.blocks = torch.nn.ModuleList([run.model.blocks[0], run.model.blocks[2]])
    run.backward()
    run.forward()


def run_layers_in_another_order(run):
    if run.rank:
        run.model.blocks = torch.nn.ModuleList(reversed(run.model.blocks))
    run.forward()


def evaluate_alone(run):
    if run.rank:
        with torch.no_grad():
            run.forward()
    run.backward()


def skip_an_evaluation(run):
    for at in range(4):
        run.backward()
        if not (run.rank and at == 3):
            with torch.no_grad():
                run.forward()
    run.backward()


def run_one_micro_batch_more(run):
    run.model.set_requires_gradient_sync(False)
    for _ in range(2 + run.rank):
        run.backward()
    run.model.set_requires_gradient_sync(True)
    run.backward()


def try_again_alone(run):
    if run.rank:
        with pytest.raises(IndexError):
            run.model(torch.full((2, 8), 99))
    run.forward()


def skip_a_step(run):
    run.backward()
    if not run.rank:
        run.optimizer.zero_grad()  # as after a step that found no finite gradients
    else:
        run.optimizer.param_groups[0]["lr"] = 0.0  # so that weights do not change
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.forward()


def gather_alone(run):
    if run.rank:
        run.model.blocks[1].unshard()
    run.forward()


def set_reshard_alone(run):
    if run.rank:
        run.model.blocks[1].set_reshard_after_forward(False)
    run.forward()


def set_a_policy_alone(run):
    if run.rank:
        run.model.set_prefetch_policy(cs.PrefetchPolicy.depth(3))
    run.forward()


def divide_alone(run):
    if run.rank:
        run.model.blocks[1].set_gradient_divide_factor(3.0)
    run.backward()


def freeze_alone(run):
    if run.rank:
        run.model.blocks[1].attention.q.weight.requires_grad_(False)
    run.backward()


def convert_alone(run):
    if run.rank:
        run.model.blocks[1].to(torch.bfloat16)
    with torch.no_grad():
        run.forward()


def list_prefetches_alone(run):
    if run.rank:
        run.model.set_modules_to_forward_prefetch([run.model.blocks[1], run.model.blocks[0]])
    run.forward()


def run_two_models_in_another_order(run):
    other = Training(run.rank, run.world)
    other.forward()
    for each in (run, other) if run.rank else (other, run):
        each.forward()


def run_two_copies_in_another_order(run):
    copies = [copy.deepcopy(run.model) for _ in range(2)]
    for each in reversed(copies) if run.rank else copies:
        each(*token_batch(run.rank, 0))


def gather_the_full_state_alone(run):
    if run.rank:
        cs.checkpoint.full_state_dict(run.model)
    run.forward()


def gather_the_full_state_of_an_optimizer_alone(run):
    if run.rank:
        cs.checkpoint.full_optimizer_state_dict(run.model, run.optimizer)
    run.forward()


def show_full_parameters_alone(run):
    if run.rank:
        with cs.checkpoint.full_parameters(run.model.blocks[1]):
            pass
    run.forward()


def save_alone(run):
    if run.rank:
        cs.checkpoint.save(tempfile.mkdtemp(), {"model": run.model}, step=1)
    run.forward()


def save_in_the_background_alone(run):
    if run.rank:
        cs.checkpoint.async_save(tempfile.mkdtemp(), {"weight": torch.zeros(2)}, step=1)
    run.forward()


def load_where_the_other_saves(run):
    if run.rank:
        cs.checkpoint.load(tempfile.mkdtemp(), {"model": run.model})
    cs.checkpoint.save(tempfile.mkdtemp(), {"model": run.model}, step=1)
    run.forward()


def export_to_dcp_alone(run):
    if run.rank:
        cs.checkpoint.export_dcp(f"{tempfile.mkdtemp()}/out", {"model": run.model})
    run.forward()


def import_from_dcp_alone(run):
    if run.rank:
        cs.checkpoint.import_dcp(tempfile.mkdtemp(), {"model": run.model})
    run.forward()


def export_safetensors_alone(run):
    if run.rank:
        cs.checkpoint.export_safetensors(f"{tempfile.mkdtemp()}/out", run.model)
    run.forward()


def import_safetensors_alone(run):
    if run.rank:
        cs.checkpoint.import_safetensors(tempfile.mkdtemp(), run.model)
    run.forward()


def import_from_dcp_where_the_other_exports(run):
    if run.rank:
        cs.checkpoint.import_dcp(tempfile.mkdtemp(), {"model": run.model})
    cs.checkpoint.export_dcp(f"{tempfile.mkdtemp()}/out", {"model": run.model})


def export_safetensors_where_the_other_exports_to_dcp(run):
    if run.rank:
        cs.checkpoint.export_safetensors(f"{tempfile.mkdtemp()}/out", run.model)
    cs.checkpoint.export_dcp(f"{tempfile.mkdtemp()}/out", {"model": run.model})


def replay_where_the_other_runs_eagerly(run):
    call = cs.make_graphed_step(lambda tokens: run.model(tokens).sum().backward())
    with captures_on_cpu():
        for _ in range(3):
            call(*token_batch(run.rank, 0))
            run.model.zero_grad()
        call(*token_batch(run.rank, 0, length=8 - run.rank))


CASES = {
    replay_where_the_other_runs_eagerly: r"replay captured graph 1 of model \d+, and rank 1 is about to",
    export_to_dcp_alone: r"begin a forward of model \d+ .* rank 1 is about to export a DCP checkpoint \(",
    import_from_dcp_alone: r"begin a forward of model \d+ .* rank 1 is about to load a DCP checkpoint \(",
    export_safetensors_alone: r"begin a forward of model \d+ .* rank 1 is about to export weights",
    import_safetensors_alone: r"begin a forward of model \d+ .* rank 1 is about to import weights",
    import_from_dcp_where_the_other_exports: "export a DCP checkpoint, and rank 1 is about to load a DCP checkpoint",
    export_safetensors_where_the_other_exports_to_dcp: "export a DCP checkpoint, and rank 1 is about to export weights",
    save_alone: r"rank 0 is about to begin a forward of model \d+ .* rank 1 is about to save a checkpoint \(",
    save_in_the_background_alone: r"begin a forward of model \d+ .* rank 1 is about to save a checkpoint \(",
    load_where_the_other_saves: r"about to save a checkpoint, and rank 1 is about to load a checkpoint \(.*forward",
    gather_the_full_state_alone: r"a forward of model \d+ .* rank 1 is about to gather the full state of model \d+ \(",
    gather_the_full_state_of_an_optimizer_alone: "rank 1 is about to gather the full state of an optimizer of model",
    show_full_parameters_alone: "rank 1 is about to gather full parameters of model",
    leave_a_layer_out: "do different things: .*blocks.1",
    run_layers_in_another_order: "rank 0 is about to gather blocks.1 .* rank 1 is about to gather blocks.2",
    evaluate_alone: r"begin a forward of model \d+ \(train, .* begin a forward of model \d+ \(no_grad",
    skip_an_evaluation: r"begin a forward of model \d+ \(no_grad, .* begin a forward of model \d+ \(train",
    run_one_micro_batch_more: r"begin a forward of model \d+ \(train.* begin a forward of model \d+ \(train, no sync",
    try_again_alone: "have different plans|do different things|failed after action .*IndexError",
    skip_a_step: "rank 0 is about to begin a forward .* rank 1 has stepped an optimizer",
    gather_alone: "rank 1 is about to gather blocks.1",
    set_reshard_alone: "have different plans: group blocks.1: reshard after forward -> after backward",
    set_a_policy_alone: "have different plans: prefetch",
    divide_alone: r"rank 0 is about to reduce blocks.1 .* rank 1 is about to reduce blocks.1 .* divided by 3.0",
    freeze_alone: r"about to reduce blocks.1 of model \d+, 9 parameters.* rank 1 is about to reduce .*, 8 parameters",
    convert_alone: "have different plans|bytes of float32, and rank 1 is about to gather blocks.1 .* bytes of bfloat16",
    list_prefetches_alone: "rank 0 is about to gather blocks.0 .* rank 1 is about to gather blocks.1",
    run_two_copies_in_another_order: r"begin a forward of model \d+\.1 .* begin a forward of model \d+\.2",
    run_two_models_in_another_order: r"begin a forward of model \d+ .* rank 1 is about to begin a forward",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@distributed(world=2, limit_s=LIMIT_S)
def test_an_action_of_only_one_rank_is_an_error_on_all_ranks(rank, world, case):
    run = Training(rank, world)
    for _ in range(2):
        run.step()
    shards = [param.to_local() for param in run.model.parameters()]
    before = [shard.clone() for shard in shards]
    with pytest.raises((cs.errors.RankMismatchError, cs.errors.PeerLostError), match=CASES[case]) as caught:
        case(run)
    assert len({*everywhere(world, str(caught.value))}) == 1
    assert "forward" in str(caught.value)
    assert all(map(torch.equal, shards, before))
    again = Training(rank, world)  # the ranks may start again
    for _ in range(2):
        again.step()
    again.check()


@pytest.mark.parametrize("world", [2, more(3)])
@distributed(world=None, limit_s=LIMIT_S)
def test_actions_of_all_ranks_are_no_error_and_repeated_ones_ask_no_rank(rank, world):
    run = Training(rank, world)

    def turn(at):
        for layer in (0, 2) if at % 3 == 0 else (0, 1, 2):
            run.model.blocks[layer].set_reshard_after_backward(True)
        with torch.no_grad():
            run.forward()
        cs.checkpoint.full_state_dict(run.model)
        run.step()

    for at in range(4):
        turn(at)
    asked = [len(ledger._asked) for ledger in WATCHER.ledgers()]
    for at in range(4):
        turn(at)
    assert [len(ledger._asked) for ledger in WATCHER.ledgers()] == asked
    run.check()


@distributed(world=2, limit_s=LIMIT_S)
def test_compiling_on_only_one_rank_is_an_error_and_on_all_ranks_is_exact(rank, world):
    run = Training(rank, world, layers=2)
    run.step()
    run.model.compile(backend="aot_eager", fullgraph=True)
    for _ in range(3):
        run.step()
    run.check()
    alone = Training(rank, world, layers=2)
    alone.step()
    if rank:
        alone.model.compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(cs.errors.RankMismatchError, match="do different things: rank 0 is about to") as caught:
        alone.forward()
    assert len({*everywhere(world, str(caught.value))}) == 1
    torch._dynamo.reset()
