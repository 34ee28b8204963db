"""Plans as data: JSON, differences, digests, predictions and drift."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from _plans import block_plan, costs_of, group_plan, param_plan
from composable_shard import PoolPolicy, PrefetchPolicy, Record, ShardPlan
from composable_shard._plan.costs import Times
from composable_shard._plan.drift import drift
from composable_shard._plan.layout import Route
from composable_shard._plan.plan import replan
from composable_shard._plan.record import Span
from composable_shard._plan.schedule import Action, Kind
from composable_shard.errors import ShardConfigValueError

AUTO = PrefetchPolicy.auto()


def auto_plan(**kwargs):
    plan = block_plan(**kwargs)
    return plan.with_policies(AUTO, costs=costs_of(plan))


def with_group(plan, at, **changes):
    groups = list(plan.groups)
    groups[at] = dataclasses.replace(groups[at], **changes)
    return dataclasses.replace(plan, groups=tuple(groups))


def random_plan(seed):
    rng = random.Random(seed)
    plan = block_plan([rng.randint(1, 900) for _ in range(rng.randint(0, 4))], small_size=rng.choice([0, 2]))
    if rng.random() < 0.5:
        plan = with_group(plan, 0, route=rng.choice([None, Route("p2p", 4096, True)]), mesh="replicate over 2")
    params = (param_plan("a", (3, 5), torch.bfloat16), param_plan("b", (4,), torch.float8_e4m3fn, trains=False))
    plan = with_group(plan, 0, params=params)
    policy = rng.choice([PrefetchPolicy.depth(2), PrefetchPolicy.bytes(10**6), AUTO])
    pool = PoolPolicy(rng.choice([None, 3 * plan.peak_bytes]))
    return plan.with_policies(policy, pool, rng.choice([None, costs_of(plan, forward=1 / 3)]))


# ---- JSON


@settings(deadline=None, derandomize=True, max_examples=12)
@given(st.integers(0, 10**6))
def test_plans_can_be_read_from_their_json(seed):
    plan = random_plan(seed)
    read = ShardPlan.from_json(plan.to_json())
    assert read == plan
    assert (str(read), read.digest, read.to_json()) == (str(plan), plan.digest, plan.to_json())
    assert plan.diff(read) == ""


def spoiled(path, value):
    """The JSON of a plan with one changed field. None removes the field."""
    data = json.loads(auto_plan().to_json())
    *way, last = path
    inner = data
    for key in way:
        inner = inner[key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "has no version"),
        ("{}", "has no version"),
        (spoiled(["version"], 99), r"version 99.*reads version \d+"),
        (spoiled(["more"], 7), "unknown fields: more"),
        (spoiled(["plan"], None), "plan: expected an object, got None"),
        (spoiled(["plan", "speed"], 7), "plan: unknown fields: speed"),
        (spoiled(["plan", "order"], None), "plan: missing fields: order"),
        (spoiled(["plan", "order"], "blocks"), "plan.order: expected a list, got 'blocks'"),
        (spoiled(["plan", "order", 1], "blocks.9"), "plan.order: names 'blocks.9', which is not a group of the plan"),
        (spoiled(["plan", "groups", 1, "shard_size"], "2"), r"plan.groups\[1\].shard_size: expected int, got '2'"),
        (spoiled(["plan", "groups", 1, "is_root"], 1), r"plan.groups\[1\].is_root: expected bool, got 1"),
        (spoiled(["plan", "groups", 0, "params", 0, "stored"], "float31"), "params.0..stored: expected the name of"),
        (spoiled(["plan", "schedule", "forward", 0], ["a"]), r"schedule.forward\[0\]: expected a list of 2"),
        (spoiled(["plan", "schedule", "kept"], ["x"]), "plan.schedule.kept: names 'x'"),
        (spoiled(["plan", "schedule", "backward"], [["", ["y"]]]), "plan.schedule.backward: names 'y'"),
        (spoiled(["plan", "pool", "budget"], -3), "PoolPolicy.budget=-3"),
    ],
)
def test_an_invalid_plan_raises_with_the_path_of_the_error(text, message):
    with pytest.raises(ShardConfigValueError, match=message):
        ShardPlan.from_json(text)


def test_a_plan_of_the_same_model_passes_the_check_in_any_order():
    plan = block_plan()
    plan.check(replan(auto_plan(), Record((), (), plan.order[::-1])))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (block_plan((256, 512)), "group blocks.2 exists only in the plan"),
        (block_plan((256, 512, 768, 1)), "group blocks.3 exists only in the model"),
        (
            block_plan((256, 513, 768)),
            r"parameter blocks.1.weight: shape is \(512, 256\) in the plan, \(513, 256\) in the model",
        ),
        (with_group(block_plan(), 2, fqn="layers.1"), "the plan has group blocks.1, the model has group layers.1"),
        (
            with_group(block_plan(), 2, shard_size=4),
            "blocks.1 is sharded over 2 ranks in the plan, over 4 in the model",
        ),
        (with_group(block_plan(), 0, params=()), r"group \(root\) has 2 parameters in the plan, 0 in the model"),
    ],
)
def test_a_plan_of_another_model_raises_with_the_first_difference(other, message):
    with pytest.raises(ShardConfigValueError, match=f"plan of another model: .*{message}"):
        block_plan().check(other)


# ---- differences


def test_equal_plans_have_no_difference():
    assert block_plan().diff(block_plan()) == ""


def test_diff_describes_the_differences_of_two_plans():
    old = block_plan()
    new = with_group(block_plan((256, 600, 768, 64)), 1, route=Route("p2p"), reshard_after_forward=False)
    new = dataclasses.replace(
        new, groups=new.groups[:3] + new.groups[4:], order=("", "blocks.1", "blocks.0", "blocks.3")
    )
    assert_expected_inline(
        old.diff(new),
        """\
group blocks.2: removed
group blocks.3: added
group blocks.0: reshard after forward -> after backward; transport packed: packed -> p2p: packed
group blocks.1: unsharded bytes 526848 -> 616960; reduction bytes 526848 -> 616960; shape of blocks.1.weight (512, 256) -> (600, 256); shape of blocks.1.bias (512,) -> (600,)
order: forward 2 is blocks.0 -> blocks.1
prefetch: FORWARD (root) gathers blocks.0 -> blocks.1
prefetch: FORWARD blocks.0 gathers blocks.1 -> blocks.3
prefetch: FORWARD blocks.1 gathers blocks.2 -> blocks.0
prefetch: BACKWARD (root) gathers blocks.2 -> blocks.3
prefetch: BACKWARD blocks.2 gathers blocks.1 -> nothing
prefetch: BACKWARD blocks.1 gathers blocks.0 -> nothing
prefetch: BACKWARD blocks.0 gathers nothing -> blocks.1
kept after forward: blocks.0 added
peak: 2172416 -> 1629696 bytes""",  # noqa: E501
    )


@settings(deadline=None, derandomize=True, max_examples=12)
@given(st.integers(0, 60), st.integers(0, 60))
def test_diff_is_empty_exactly_if_plans_are_equal(one, two):
    old, new = random_plan(one), random_plan(two)
    assert (old.diff(new) == "") == (old == new)


# ---- the digest


def test_the_digest_is_the_same_in_every_process():
    assert_expected_inline(block_plan().digest, """d7de85b5bb86cb96d152a11a018a9a067eb7493e8d617c81d4b57fca6a72e266""")


def test_the_digest_depends_only_on_what_ranks_must_agree_on():
    plan = block_plan()
    digests = {
        plan.digest,
        auto_plan().digest,
        plan.with_policies(PrefetchPolicy.depth(2)).digest,
        with_group(plan, 1, reshard_after_forward=False).digest,
        with_group(plan, 1, route=Route("p2p")).digest,
        replan(plan, Record((), (), plan.order[::-1])).digest,
    }
    assert len(digests) == 6
    assert dataclasses.replace(plan, costs=costs_of(plan)).digest == plan.digest


# ---- predictions


def test_a_plan_with_costs_and_a_schedule_shows_both():
    assert_expected_inline(
        str(auto_plan().with_policies(pool=PoolPolicy(3 * 2**20))),
        """\
plan: 4 groups, 411,200 parameters, shard over 2
group     parameters     shard  unsharded  dtype    reshard         transport  gather ms  compute ms  reduce ms  exposed ms
(root)        16,448  0.03 MiB   0.06 MiB  float32  after backward  packed         0.026       0.600      0.026       0.053
blocks.0      65,792  0.13 MiB   0.25 MiB  float32  after forward   packed         0.152       0.600      0.076       0.076
blocks.1     131,584  0.25 MiB   0.50 MiB  float32  after forward   packed         0.283       0.600      0.142       0.000
blocks.2     197,376  0.38 MiB   0.75 MiB  float32  after forward   packed         0.415       0.600      0.207       0.000
peak of unsharded parameters and communication in a training step: 2.83 MiB
peak by type: weights 1.57 MiB, landing 1.25 MiB, reductions 0.75 MiB
kept between forward and backward: 0.06 MiB
exposed: 0.129 of 2.529 ms per step
prefetch: auto, budget 3.00 MiB
  FORWARD (root) gathers blocks.0
  FORWARD blocks.0 gathers blocks.1, blocks.2
  BACKWARD (root) gathers blocks.2
  BACKWARD blocks.2 gathers blocks.1
  BACKWARD blocks.1 gathers blocks.0
  reductions in flight: 1""",  # noqa: E501
    )


def test_without_costs_no_times_are_predicted_or_shown():
    plan = block_plan().with_policies(PrefetchPolicy.depth(2))
    assert (plan.predicted().groups, plan.predicted().seconds, plan.predicted().exposed) == (None, None, None)
    assert " ms" not in str(plan)


def test_predicted_bytes_match_the_actions():
    plan = auto_plan()
    assert plan.predicted().peak == plan.peak_bytes == max(plan.live_bytes())
    assert plan.arena().bound == plan.peak_bytes
    assert plan.predicted().kept == sum(plan.group(fqn).unsharded_bytes for fqn in plan.effective_schedule().kept)


def test_costs_without_a_group_raise_with_its_name():
    plan = block_plan()
    costs = costs_of(block_plan((256, 512)))
    with pytest.raises(ShardConfigValueError, match=r"Costs.forward: has no seconds for group blocks.2"):
        plan.with_policies(AUTO, costs=costs)


# ---- drift and the next plan


def record_of(plan, **changes):
    return dataclasses.replace(Record(plan.actions(), plan.live_bytes(), plan.order), **changes)


def test_a_step_that_follows_its_plan_has_no_drift():
    plan = auto_plan()
    assert drift(plan, record_of(plan, times=tuple(plan.times().items()))) == ()


def test_drift_describes_deviations_from_the_plan():
    plan = auto_plan()
    other, actions = plan.order[::-1], plan.actions()
    live = list(plan.live_bytes())
    live[4] += 512
    slow = dataclasses.replace(plan.times()["blocks.1"], backward=1.0)
    records = [
        record_of(plan, order=other),
        record_of(plan, order=plan.order[:-1]),
        record_of(plan, order=(*plan.order, "blocks.0")),
        record_of(plan, around=(("blocks.1", "blocks.0"),)),
        record_of(plan, actions=actions[::-1]),
        record_of(plan, actions=actions[:-1]),
        record_of(plan, live_bytes=tuple(live)),
        record_of(plan, times=(("blocks.1", slow), ("blocks.7", Times(1, 1, 1, 1)))),
    ]
    assert_expected_inline(
        "\n".join(line for record in records for line in drift(plan, record)),
        """\
blocks.2: ran as forward 1, but (root) is planned
blocks.2: planned, but did not run
blocks.0: was the last of 5 forwards, but 4 are planned
blocks.1: ran inside blocks.0, which is not planned
(root): action 1 was REDUCED (root), but UNSHARD (root) is planned
(root): REDUCED (root) was planned, but not done
blocks.1: 1383424 bytes were live after UNSHARD blocks.1, but 1382912 are planned
blocks.1: its backward took 1000.000 ms, but 0.400 ms are planned""",
    )


def test_a_new_order_gets_a_new_schedule_under_the_same_policies():
    plan = auto_plan().with_policies(pool=PoolPolicy(3 * 2**20))
    other = replan(plan, Record((), (), ("", "blocks.2", "blocks.0", "blocks.1")))
    assert (other.prefetch, other.pool, other.costs) == (plan.prefetch, plan.pool, plan.costs)
    assert dict(other.effective_schedule().forward)[""][0] == "blocks.2"
    assert other.peak_bytes <= 3 * 2**20
    assert group_plan("", 64) == other.groups[0]


# ---- records


def test_records_can_be_read_from_their_json():
    times = (("", Times(1.0, 2.0, 0.25, 0.5)),)
    spans = (Span(Kind.FORWARD, "", 0.0, 0.1), Span(Kind.WAIT, "blocks.0", 1e-9, 0.3))
    record = Record((Action(Kind.UNSHARD, ""),), (512,), ("", "blocks.0"), times, spans, (("blocks.0", "a"),))
    assert Record.from_json(record.to_json()) == record
    assert json.loads(record.to_json())["record"]["spans"][1]["kind"] == "WAIT"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "record: is not valid JSON"),
        ("{}", "record: has no version"),
        ('{"version": 9, "record": {}}', "version 9.*reads version 1. Re-create the record"),
        (block_plan().to_json(), "record: missing; the JSON contains plan. Pass a record file"),
        (Record((Action(Kind.WAIT, ""),), (), ()).to_json().replace("WAIT", "WEIGHT"), "kind: expected one of REFRESH"),
        (Record((), (), ()).to_json().replace("times", "time"), "unknown fields: time"),
    ],
)
def test_an_invalid_record_raises_with_the_path_of_the_error(text, message):
    with pytest.raises(ShardConfigValueError, match=message):
        Record.from_json(text)


def test_with_streams_a_reduction_frees_its_memory_before_the_next_gather():
    host, streams = (
        block_plan((256, 256, 256), frees_queued=queued).with_policies(PrefetchPolicy.depth(1))
        for queued in (False, True)
    )
    assert host.actions() == streams.actions()
    assert host.peak_bytes - streams.peak_bytes >= host.group("blocks.0").sizes.weights
    queued = [life for life in streams.lifetimes() if life.queued]
    assert sorted(life.name for life in queued) == [f"reduction blocks.{i}" for i in range(3)]
    assert {life.closed - life.opened for life in queued} == {1}
    assert not any(life.queued for life in host.lifetimes())
