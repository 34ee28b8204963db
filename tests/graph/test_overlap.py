"""Where launches and waits of a graph are moved to, and which ones must stay."""

from __future__ import annotations

import operator

import torch
from expecttest import assert_expected_inline
from torch import fx

from composable_shard._graph.graphs import sequence
from composable_shard._graph.overlap import place
from composable_shard._plan.graph_schedule import GraphSchedule

cs, c10d, aten = torch.ops.composable_shard, torch.ops._c10d_functional, torch.ops.aten


class Builder:
    """Builds a graph of groups in the order in which AOTAutograd issues nodes."""

    def __init__(self, backward=False):
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("tangents" if backward else "x")
        self.ends = []
        self.module = ""  # the module of new nodes

    def shard(self, name):
        return self.graph.placeholder(name)

    def call(self, op, *args):
        node = self.graph.call_function(op.default, args)
        if self.module:
            node.meta["nn_module_stack"] = {"": (f"L['self'].{self.module}", None)}
        return node

    def gather(self, shard):
        token = self.call(cs.all_gather_into_tensor, [shard], shard, "key")
        weights = self.call(cs.wait_weights, token, [shard], shard, "key")
        return self.graph.call_function(operator.getitem, (weights, 0))

    def multiply(self, weight):
        self.x = self.call(aten.mm, self.x, weight)
        return self.x

    def reduce(self, gradient, *after):
        how = [0], [0], False, None, False
        token = self.call(cs.reduce_scatter_tensor, [gradient], self.x, "key", *how)
        pieces = self.call(cs.wait_gradients, token, self.x, "key", [0], [], "float32")
        waited = self.graph.call_function(operator.getitem, (pieces, 0))
        for op in after:
            waited = self.call(op, waited)
        self.ends.append(waited)
        return waited

    def tell_sizes(self):
        """Give weights and gradients a size of 64 bytes each."""
        for node in self.graph.nodes:
            if node.target is cs.wait_weights.default:
                node.meta["val"] = [torch.empty(16, device="meta")]
            elif node.target is cs.reduce_scatter_tensor.default:
                node.args[0][0].meta["val"] = torch.empty(16, device="meta")

    def placed(self, *schedule):
        before = {node.name: [each.name for each in node.all_input_nodes] for node in self.graph.nodes}
        self.graph.output([self.x, *self.ends])
        place(self.graph, *schedule)
        self.graph.lint()  # every node follows its inputs
        after = {n.name: [each.name for each in n.all_input_nodes] for n in self.graph.nodes if n.op != "output"}
        assert before == after, "nodes are moved, but not changed"
        return sequence(self.graph)


def test_gathers_are_launched_one_ahead():
    made = Builder()
    shards = [made.shard(f"shard{i}") for i in range(4)]
    for shard in shards:
        made.multiply(made.gather(shard))
    assert sequence(made.graph) == "GwmGwmGwmGwm"
    assert_expected_inline(made.placed(), """GwGmwGmwGmwm""")


def test_the_first_gather_is_launched_before_compute_that_does_not_need_it():
    made = Builder()
    shard = made.shard("shard")
    made.multiply(made.x)
    made.multiply(made.gather(shard))
    assert_expected_inline(made.placed(), """Gmwm""")


def test_views_of_inputs_move_with_their_gather():
    made = Builder()
    shards = [made.shard(f"shard{i}") for i in range(2)]
    for shard in shards:
        made.multiply(made.gather(made.call(aten.view, made.call(aten.detach, shard), [2, 2])))
    assert_expected_inline(made.placed(), """GwGmwm""")


def test_a_gather_of_computed_tensors_is_not_moved():
    made = Builder()
    shard = made.shard("shard")
    made.multiply(made.gather(shard))
    made.multiply(made.gather(made.call(aten.mm, shard, made.x)))
    assert_expected_inline(made.placed(), """GwmmGwm""")


def test_a_reduction_is_waited_for_after_the_launch_of_the_next_one():
    made = Builder()
    for _ in range(3):
        made.multiply(made.x)
        made.reduce(made.x, aten.neg, aten.abs)
    assert sequence(made.graph) == "mRwmRwmRw"
    assert_expected_inline(made.placed(), """mRmRwmRww""")


def test_a_reduction_whose_result_is_used_in_compute_is_waited_for_immediately():
    made = Builder()
    made.x = made.reduce(made.multiply(made.x))
    made.reduce(made.multiply(made.x))
    assert_expected_inline(made.placed(), """mRwmRw""")


def test_gathers_and_reductions_are_moved_in_the_same_graph():
    made = Builder()
    shards = [made.shard(f"shard{i}") for i in range(3)]
    for shard in shards:
        made.multiply(made.gather(shard))
        made.reduce(made.x)
    assert_expected_inline(made.placed(), """GwGmRwGmRwwmRww""")


def test_gathers_of_other_tensors_than_shards_are_not_moved():
    made = Builder()
    shard = made.shard("shard")
    for _ in range(2):
        waited = made.call(c10d.wait_tensor, made.call(c10d.all_gather_into_tensor, shard, 2, "group"))
        made.multiply(waited)
    assert_expected_inline(made.placed(), """GwmGwm""")


def test_a_graph_without_communication_is_not_changed():
    made = Builder()
    made.multiply(made.x)
    assert made.placed() == "m"
    made = Builder()
    made.multiply(made.x)
    assert made.placed(GraphSchedule({"a": ("b",)})) == "m", "even with prefetch lists"


def chain(budget=None, **lists):
    """A forward of modules a to e, each with a gather and a product, placed by a schedule with these lists."""
    made = Builder()
    shards = {module: made.shard(f"shard_{module}") for module in "abcde"}
    for made.module, shard in shards.items():
        made.multiply(made.gather(shard))
    gathers = [node for node in made.graph.nodes if node.target is c10d.all_gather_into_tensor.default]
    made.tell_sizes()
    placed = made.placed(GraphSchedule(lists, budget=budget))
    assert [node for node in made.graph.nodes if node in gathers] == gathers, "collectives stay in order"
    return placed


def test_gathers_are_launched_as_listed_in_the_schedule():
    schedules = {
        "on demand": dict.fromkeys("abcde", ""),
        "one ahead": {"a": "b", "b": "c", "c": "d", "d": "e"},
        "two ahead": {"(root)": "ab", "a": "c", "b": "d", "c": "e"},
        "all at the beginning": {"(root)": "abcde"},
        "some": {"a": "bc", "c": "", "d": "e"},
        "the first one that begins gathers": {"a": "bc", "b": "c", "c": "de", "d": "e"},
    }
    assert_expected_inline(
        "\n".join(f"{name}: {chain(**lists)}" for name, lists in schedules.items()),
        """\
on demand: GwmGwmGwmGwmGwm
one ahead: GwGmwGmwGmwGmwm
two ahead: GGwGmwGmwGmwmwm
all at the beginning: GGGGGwmwmwmwmwm
some: GwGGmwmwmGwGmwm
the first one that begins gathers: GwGGmwmwGGmwmwm""",
    )


def test_modules_without_a_usable_list_entry_are_gathered_one_ahead():
    schedules = {
        "c is unknown": {"a": "b", "b": "", "d": "e"},
        "another order": {"e": "d", "d": "c", "c": "b", "b": "a"},
        "of a larger model": {"x": "a", "a": "b", "b": "", "c": "", "d": "e"},
    }
    assert_expected_inline(
        "\n".join(f"{name}: {chain(**lists)}" for name, lists in schedules.items()),
        """\
c is unknown: GwGmwGmwmGwGmwm
another order: GwGmwGmwGmwmGwm
of a larger model: GwGmwmGwmGwGmwm""",
    )


def backward(schedule, kept=""):
    """A backward of modules c, b and a, of four products each."""
    made = Builder(backward=True)
    shards = {module: made.shard(f"shard_{module}") for module in "cba"}
    for made.module, shard in shards.items():
        weight = shard if made.module in kept else made.gather(shard)
        for _ in range(4):
            made.multiply(weight)
        made.reduce(made.x)
    made.tell_sizes()
    return made.placed(schedule)


AHEAD = {"(root)": (), "c": ("b",), "b": ("a",), "a": ()}


def flying(number, **others):
    return dict.fromkeys("cba", number) | others


def test_a_plan_sets_the_reductions_in_flight_and_whether_gathers_wait_for_them():
    schedules = {
        "three": GraphSchedule({}, AHEAD, flying(3)),
        "two": GraphSchedule({}, AHEAD, flying(2)),
        "one": GraphSchedule({}, AHEAD, flying(1)),
        "two, one for b": GraphSchedule({}, AHEAD, flying(2, b=1)),
        "before gathers": GraphSchedule({}, AHEAD, flying(2), "cba"),
        "before those of b": GraphSchedule({}, AHEAD, flying(3), "b"),
    }
    assert_expected_inline(
        "\n".join(f"{name}: {backward(each)}" for name, each in schedules.items()),
        """\
three: GwGmmmmRwGmmmmRwmmmmRwww
two: GwGmmmmRwGmmmmRwmmmmwRww
one: GwGmmmmRwGmmmmwRwmmmmwRw
two, one for b: GwGmmmmRwGmmmmwRwmmmmRww
before gathers: GwGmmmmRwmmwGmmRwmmmmRww
before those of b: GwGmmmmRwmmwGmmRwmmmmRww""",
    )


def test_a_module_with_kept_weights_begins_with_its_first_compute():
    cases = {
        "c": ("c", {**AHEAD, "(root)": (), "c": ("b",)}),
        "b": ("b", {**AHEAD, "c": (), "b": ("a",)}),
        "b, and the root gathers all": ("b", {"(root)": ("c", "a")}),
    }
    assert_expected_inline(
        "\n".join(f"{name}: {backward(GraphSchedule({}, lists, flying(2)), k)}" for name, (k, lists) in cases.items()),
        """\
c: GmmmmRwGmmmmRwmmmmwRww
b: GwmmmmRGmmmmRwmmmmwRww
b, and the root gathers all: GGwmmmmRmmmmRwmmmmwRww""",
    )


def test_a_prefetch_that_would_exceed_the_budget_is_launched_where_it_is_needed():
    lists = {"(root)": "ab", "a": "c", "b": "d", "c": "e"}
    assert_expected_inline(
        "\n".join(f"{b}: {chain(budget=b, **lists)}" for b in (64, 128, 192)),
        """\
64: GwmGwmGwmGwmGwm
128: GGwmwmGGwmwmGwm
192: GGwGmwGmwGmwmwm""",
    )
    ahead = {"(root)": ("c", "b"), "c": ("a",)}
    cases = {"128": (128, {}), "192": (192, {}), "192, and another is kept": (192, {"(root)": 64})}
    schedules = {name: GraphSchedule({}, ahead, flying(2), (), *each) for name, each in cases.items()}
    assert_expected_inline(
        "\n".join(f"{name}: {backward(each)}" for name, each in schedules.items()),
        """\
128: GGwmmmmRwmmmmRGwmmmmwRww
192: GGwGmmmmRwmmmmRwmmmmwRww
192, and another is kept: GGwmmmmRwmmmmRGwmmmmwRww""",
    )
