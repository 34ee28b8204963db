"""Explanations of plans: their text, and whether each change has the predicted effect."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import composable_shard as cs
from _plans import block_plan, costs_of
from composable_shard import report
from composable_shard._plan.record import Span
from composable_shard._plan.schedule import Kind
from composable_shard.cli.main import main
from composable_shard.planner import KNOWN
from composable_shard.planner.timing import on_links
from composable_shard.testing import Busy, fabric


def uneven_plan(prefetch=None, budget=None, bandwidth=1e9, latency=1e-5, **settings):
    plan = block_plan((256, 512, 64, 768, 64), **settings)
    prefetch = prefetch or cs.PrefetchPolicy.depth(1)
    return plan.with_policies(
        prefetch, cs.PoolPolicy(budget=budget), costs_of(plan, bandwidth=bandwidth, latency=latency)
    )


# ---------------------------------------------------------------------- words


def test_an_explanation_as_text():
    assert_expected_inline(
        str(report.explain(uneven_plan())),
        """\
6 groups over 2 ranks, prefetch depth(1), no budget; times from the plan's costs
step    4.388 ms: 3.600 compute, 0.604 exposed gathers, 0.185 exposed reductions
bound   at least 3.600 ms: compute 3.600, communication 2.802, or 1.896 if all weights are kept
memory  peak 1.95 MiB of unsharded parameters and communication
advice  the first change below reduces the step to 3.890 ms, 11% less

Where the time goes, in ms
  group     compute  exposed gathers  exposed reductions  total
  blocks.1    0.600            0.351               0.000  0.951
  blocks.3    0.600            0.210               0.000  0.810
  blocks.0    0.600            0.000               0.142  0.742
  (root)      0.600            0.043               0.043  0.686
  blocks.2    0.600            0.000               0.000  0.600
  blocks.4    0.600            0.000               0.000  0.600
  all         3.600            0.604               0.185  4.388

Exposed communication
  0.283 ms in backward for 2 gathers: blocks.1, blocks.3
    blocks.1 0.278 ms: depth(1) issues it too late, when blocks.2 begins: 0.400 ms of compute for 0.678 ms on
    the link. Before that, the link was idle for 0.671 ms
  0.278 ms in forward for 2 gathers: blocks.3, blocks.1
    blocks.3 0.205 ms: depth(1) issues it too late, when blocks.2 begins: 0.200 ms of compute for 0.405 ms on
    the link. Before that, the link was idle for 0.216 ms
  0.185 ms in backward for 2 reductions: blocks.0, (root)
    blocks.0 0.142 ms: no compute follows it, so the rest of it is exposed; it takes 0.142 ms
  0.043 ms in forward for the gather of (root)
    no compute precedes it in the step, so it is fully exposed; it takes 0.043 ms on the link

What to change
     change                                                          step ms  saved  peak MiB  added
  1  prefetch 2 groups                                                 3.890  11.4%      2.45  +0.50
  2  prefetch early and keep weights, within the memory of depth(1)    4.047   7.8%      1.95  +0.00

What to change: how
  1  model.set_prefetch_policy(cs.PrefetchPolicy.depth(2))
  2  model.set_prefetch_policy(cs.PrefetchPolicy.auto())

Changes that also affect training
     change                                                          step ms  saved  peak MiB  added
  1  double the batch (times are for the current batch)                3.716  15.3%      1.95  +0.00
  2  gather and compute in bfloat16 (faster compute is not counted)    3.965   9.6%      1.38  -0.56

Changes that also affect training: how
  1  twice the samples on each rank
  2  mp_policy=cs.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)""",
    )


def test_an_explanation_of_a_plan_within_a_budget_on_a_cpu():
    text = str(report.explain(uneven_plan(cs.PrefetchPolicy.depth(2), 1_700_000, reduces_first=True)))
    assert_expected_inline(
        text.partition("What to change")[0],
        """\
6 groups over 2 ranks, prefetch depth(2), budget 1.62 MiB; times from the plan's costs
step    4.973 ms: 3.600 compute, 0.940 exposed gathers, 0.432 exposed reductions
bound   at least 3.600 ms: compute 3.600, communication 2.802, or 1.896 if all weights are kept
memory  peak 1.57 MiB of unsharded parameters and communication
advice  the first change below reduces the step to 3.890 ms, 22% less

Where the time goes, in ms
  group     compute  exposed gathers  exposed reductions  total
  blocks.3    0.600            0.810               0.205  1.614
  blocks.0    0.600            0.000               0.142  0.742
  blocks.1    0.600            0.088               0.000  0.688
  (root)      0.600            0.043               0.043  0.686
  blocks.4    0.600            0.000               0.043  0.643
  blocks.2    0.600            0.000               0.000  0.600
  all         3.600            0.940               0.432  4.973

Exposed communication
  0.478 ms in backward for 2 gathers: blocks.3, blocks.1
    blocks.3 0.405 ms: the budget of 1.62 MiB delays it: it is issued in blocks.3, only 0.000 ms of compute
    before its use, and takes 0.405 ms. Before that, the link was idle for 0.757 ms
  0.405 ms in forward for the gather of blocks.3
    the budget of 1.62 MiB delays it: it is issued in blocks.3, only 0.000 ms of compute before its use, and
    takes 0.405 ms. Before that, the link was idle for 0.357 ms
  0.248 ms in backward for 2 reductions: blocks.3, blocks.4
    blocks.3 0.205 ms: backward gathers blocks.1 only after this reduction, the default on a CPU; it takes
    0.405 ms, partly hidden by 0.200 ms of compute
  0.185 ms in backward for 2 reductions: blocks.0, (root)
    blocks.0 0.142 ms: no compute follows it, so the rest of it is exposed; it takes 0.142 ms
  0.043 ms in forward for the gather of (root)
    no compute precedes it in the step, so it is fully exposed; it takes 0.043 ms on the link
  0.015 ms for the others

""",
    )


def test_many_similar_groups_are_summarized():
    plan = block_plan((256,) * 40)
    step = report.explain(plan.with_policies(cs.PrefetchPolicy.depth(0), costs=costs_of(plan, bandwidth=1e9)))
    lines = str(step).splitlines()
    assert "  32 more     19.200           13.069               0.043  32.312" in lines
    assert any(re.fullmatch(r"  .* ms in forward for 40 gathers: .* and 36 more", line) for line in lines)
    assert len(lines) < 60


def test_if_compute_hides_everything_there_is_nothing_to_change():
    step = report.explain(uneven_plan(bandwidth=1e12, latency=1e-7))
    assert step.changes == ()
    assert "advice  almost no communication is exposed, so no other schedule can save more than that" in str(step)


# ---------------------------------------------------------------------- figures


def test_times_are_those_of_the_simulation():
    plan = uneven_plan()
    step, predicted = report.explain(plan), plan.predicted()
    assert step.seconds == predicted.seconds
    assert sum(wait.waited for wait in step.waits) == pytest.approx(predicted.exposed)
    assert step.compute == pytest.approx(6 * 6e-4)
    assert sum(group.all for group in step.groups) == pytest.approx(predicted.seconds)
    times = plan.times()
    assert step.least_link == pytest.approx(sum(each.gather + each.reduce for each in times.values()))
    waited = [wait.waited for wait in step.waits]
    assert waited == sorted(waited, reverse=True)


def test_communication_that_takes_longer_than_compute_is_reported():
    step = report.explain(uneven_plan(bandwidth=2e8))
    assert step.least == step.least_link > step.compute
    assert "every schedule exposes some of it" in " ".join(str(step).split())
    assert all(change.seconds >= step.least for change in step.changes if change.keeps_results)


def test_changes_stay_within_the_given_budget():
    plan = uneven_plan()
    budget = plan.peak_bytes + (1 << 18)
    step = report.explain(plan, budget=budget)
    assert step.changes
    assert all(change.peak <= budget for change in step.changes)
    asked = plan.with_policies(cs.PrefetchPolicy.auto(), cs.PoolPolicy(budget=budget)).predicted()
    [change] = [change for change in step.changes if f"budget={budget}" in change.how]
    assert (change.seconds, change.peak) == (asked.seconds, asked.peak)
    with pytest.raises(cs.errors.PoolBudgetError, match="The least budget that works"):
        report.explain(plan, budget=1000)


def test_two_groups_together_pay_latency_once():
    plan = block_plan((64,) * 8)
    costs = costs_of(plan, forward=1e-5, backward=2e-5, latency=1e-4, bandwidth=1e10)
    step = report.explain(plan.with_policies(costs=costs))
    [change] = [change for change in step.changes if change.what.startswith("shard two blocks together")]
    assert change.how.startswith("cs.fully_shard([model.get_submodule('blocks.0'), model.get_submodule('blocks.1')])")
    assert change.saved > 0.3 * step.seconds
    measured = replace(costs, latency=0.0, gather=tuple(sorted(dict.fromkeys(plan.order, 1.1e-4).items())))
    seen = report.explain(plan.with_policies(costs=measured))  # the latency is unknown
    together = [change.saved for change in seen.changes if change.what.startswith("shard two blocks together")]
    assert max(together, default=0.0) < 0.1 * seen.seconds


def test_more_reductions_in_flight_are_tried_if_their_limit_delays_compute():
    plan = block_plan((256,) * 5, reshard_after_forward=False)
    slow = {fqn: 3e-3 if fqn == "blocks.4" else 1e-5 for fqn in plan.order}
    plan = plan.with_policies(costs=costs_of(plan, reduce=slow))
    [change] = [change for change in report.explain(plan).changes if "reductions in flight" in change.what]
    names = {"plan": plan, "replace": replace, "model": Following()}
    exec(change.how, names)
    assert names["model"].plan.predicted().seconds == pytest.approx(change.seconds)


class Following:
    """The part of a model on which a plan is set."""

    def set_plan(self, plan):
        self.plan = plan


# ---------------------------------------------------------------------- models


def network():
    return fabric(4, latency_s=12e-6, bandwidth_Bps=64e6, clock="virtual")


class Block(nn.Module):
    """A matrix with 20 us of compute in forward and 40 us in backward."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(16, width, bias=False), nn.Linear(width, 16, bias=False)
        self.busy = Busy(20e-6)

    def forward(self, x):
        return self.busy(self.down(self.up(x)))


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for width in (16, 48, 16, 16)))


def shard(model):
    for each in model:
        cs.fully_shard(each, mesh=init_device_mesh("cpu", (4,)))
    return cs.fully_shard(model, mesh=init_device_mesh("cpu", (4,)))


def watched_step(net, model, steps=5):
    """The last plan that a model has followed, and the record of its last step."""
    cs.watch(model)
    for _ in range(steps):
        net.reset()
        model(torch.ones(2, 16, requires_grad=True)).sum().backward()
    return cs.make_plan(model), cs.last_record(model)


def test_a_plan_without_costs_uses_the_times_of_a_record():
    with network() as net:
        plan, record = watched_step(net, shard(build()))
        assert plan.costs is None
        step = report.explain(plan, record)
        assert step.seconds == pytest.approx(step.measured.seconds, rel=0.02)
        assert step.seconds - step.compute == pytest.approx(net.exposed_s, rel=0.05)
    assert step.drift == ()
    assert step.slower == ()
    assert "times from the record" in str(step)


def test_each_change_has_the_predicted_effect_on_a_network():
    with network() as net:
        plan, record = watched_step(net, shard(build()))
        changes = [change for change in report.explain(plan, record).changes if change.keeps_results]
        ways = {re.findall(r"set_\w+", change.how)[-1] for change in changes}
        assert {"set_pool_policy", "set_prefetch_policy"} <= ways
        for change in changes:
            if "fully_shard" in change.how:
                continue
            model = shard(build())
            exec(change.how, {"cs": cs, "model": model})
            changed, seen = watched_step(net, model)
            took = report.explain(changed, seen).measured.seconds
            assert took == pytest.approx(change.seconds, rel=0.03), change
            assert seen.peak_bytes <= change.peak * 1.001, change


def test_measured_times_are_shown_next_to_the_predicted_ones():
    with network() as net:
        plan, record = watched_step(net, shard(build()))
    planned = report.explain(plan, record).plan
    step = report.explain(replace(planned, costs=planned.costs.scaled({"1": 0.5})), record)
    assert step.slower == ("1",)
    text = str(step)
    assert "more than a quarter slower than planned: 1" in text
    assert re.search(r"^  1 +0\.030 +0\.060 .* slower$", text, flags=re.MULTILINE)


def test_a_record_that_differs_from_the_plan_is_reported():
    with network() as net:
        plan, record = watched_step(net, shard(build()))
    step = report.explain(plan, replace(record, actions=record.actions[1:], live_bytes=record.live_bytes[1:]))
    assert len(step.drift) == 1
    assert str(step).endswith(f"Differences from the plan\n  {step.drift[0]}")


@pytest.mark.parametrize("name", ["h100", "rtx4090"])
def test_the_same_plan_on_other_links(name):
    plan = uneven_plan()
    other = on_links(plan, KNOWN[name])
    group, link = plan.group("blocks.1"), KNOWN[name].intra_node
    expected = link.latency + sum(group.moved.gather) / 2 / link.bandwidth
    assert other.times()["blocks.1"].gather == pytest.approx(expected)
    assert other.times()["blocks.1"].forward == plan.times()["blocks.1"].forward
    assert other.costs.streams


# ---------------------------------------------------------------------- errors


def test_missing_times_and_records_of_other_models_are_errors():
    plan = block_plan()
    with pytest.raises(
        cs.errors.ShardConfigValueError, match=r"plan: has no times\. Use a plan that PrefetchPolicy\.auto"
    ):
        report.explain(plan)
    record = cs.Record((), (), plan.order)
    with pytest.raises(cs.errors.ShardConfigValueError, match=r"record: has no times; call cs\.watch"):
        report.explain(plan, record)
    part = replace(record, spans=(Span(Kind.FORWARD, "", 0.0, 1.0),))
    with pytest.raises(cs.errors.ShardConfigValueError, match=r"record: has no times of blocks\.0; call cs\.watch"):
        report.explain(plan, part)
    with pytest.raises(cs.errors.ShardConfigValueError, match=r"names 'blocks\.9', which is not a group"):
        report.explain(plan, replace(record, order=("blocks.9",)))


def test_a_record_without_times_still_shows_differences_from_the_plan():
    plan = uneven_plan()
    step = report.explain(plan, cs.Record((), (), plan.order[::-1]))
    assert step.measured is None
    assert "Differences from the plan" in str(step)


# ---------------------------------------------------------------------- the command


@pytest.fixture
def files(tmp_path):
    """The plan and the record of a step, written to files."""
    with network() as net:
        plan, record = watched_step(net, shard(build()))
    (tmp_path / "plan.json").write_text(plan.to_json())
    (tmp_path / "record.json").write_text(record.to_json())
    return tmp_path


def test_the_command_prints_the_explanation(files, capsys):
    plan, record = (str(files / name) for name in ("plan.json", "record.json"))
    step = report.explain(cs.ShardPlan.from_json((files / "plan.json").read_text()), record_in(files))
    assert main(["explain", plan, "--record", record]) == 0
    assert capsys.readouterr().out == f"{step}\n"
    assert main(["explain", plan, "--record", record, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["seconds"] == step.seconds
    assert [wait["cause"] for wait in answer["waits"]] == [wait.cause.value for wait in step.waits]
    assert answer["waits"][0]["why"] in " ".join(str(step).split())
    assert [change["peak"] for change in answer["changes"]] == [change.peak for change in step.changes]
    assert "plan" not in answer


def record_in(folder):
    return cs.Record.from_json((folder / "record.json").read_text())


def test_the_command_accepts_links_of_a_machine_and_a_budget_and_draws(files, capsys):
    arguments = ["explain", str(files / "plan.json"), "--record", str(files / "record.json"), "--budget", "1GiB"]
    assert main([*arguments, "--machine", "h100", "--plot", str(files / "time.png")]) == 0
    text = capsys.readouterr().out
    assert "links of H100 SXM 80 GB" in text
    assert "Measured and predicted" not in text
    assert "budget=1073741824" in text
    assert (files / "time.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_reports_errors_in_one_line(files, capsys):
    plan, record = (str(files / name) for name in ("plan.json", "record.json"))
    (files / "broken.json").write_text("{")
    for arguments, message in (
        ([plan], "plan: has no times"),
        ([record], "record.json: plan: missing; the JSON contains record. Pass a plan file"),
        ([plan, "--record", plan], "plan.json: record: missing; the JSON contains plan"),
        ([str(files / "none.json")], "none.json: cannot be read (No such file or directory); --help shows how"),
        ([str(files / "broken.json")], "broken.json: plan: is not valid JSON"),
        ([plan, "--record", record, "--budget", "1KiB"], "The least budget that works"),
        ([plan, "--record", record, "--machine", "abacus"], "'abacus' is neither a file nor one of h100"),
    ):
        assert main(["explain", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert main(["explain", *arguments, "--json"]) == 2
        assert message in json.loads(capsys.readouterr().out)["message"]


def test_a_terminal_shows_tables_with_right_aligned_numbers(files, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["explain", str(files / "plan.json"), "--record", str(files / "record.json")]) == 0
    text = capsys.readouterr().out
    assert not re.search(r"\x1b\[(3|4|9)\d", text), "nothing has a colour"
    lines = [line.rstrip() for line in re.sub(r"\x1b\[\d*m", "", text).splitlines()]
    head = lines.index("  group   compute   exposed gathers   exposed reductions   total")
    rows = lines[head + 2 : head + 7]
    assert rows[-1].startswith("  all ")
    assert {len(row) for row in rows} == {len(lines[head])}
