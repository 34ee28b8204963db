"""What the bytes are that torch's CPU allocator has given out, read from a profile of memory.

The profiler sees every allocation, also those behind `resize_`, and with stacks it knows which Python function asked.
What the stack cannot tell, the program notes in the profile itself: that an address holds a gradient that is about to
be reduced, that a slot of a pool is used again for something else, that a step begins.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.profiler import profile, record_function

UNSHARDED, GATHER = "unsharded parameters", "gather buffers"
GRADIENTS, REDUCE = "unsharded gradients", "reduce buffers"
FREE, OTHER = "pool, free", "other of the runtime"
RUNTIME = (UNSHARDED, GATHER, GRADIENTS, REDUCE, FREE, OTHER)
OWN, OWN_GRADIENTS, REST = "own parameters", "own gradients", "activations and others"
KINDS = (*RUNTIME, OWN, OWN_GRADIENTS, REST)

BEGINS, ENDS, MOMENT = "step begins", "step ends", "moment "
_NOTE = "memory note: "

# From the innermost Python function outwards, the first that is listed tells the kind. No name: any function there.
_WHO = (
    ("/_fully_shard/_fsdp_param.py", "", UNSHARDED),
    ("/_fully_shard/_fsdp_collectives.py", "foreach_all_gather", GATHER),
    ("/_fully_shard/_fsdp_collectives.py", "foreach_all_gather_copy_out", GATHER),
    ("/_fully_shard/_fsdp_collectives.py", "foreach_reduce", REDUCE),
    ("/_fully_shard/_fsdp_param_group.py", "", OTHER),
    ("/_fully_shard/_fsdp_state.py", "", OTHER),
    ("/composable_shard/_memory/pool.py", "", FREE),
    ("/composable_shard/_group/reduction.py", "", REDUCE),
    ("/composable_shard/_group/group.py", "start_reduce", REDUCE),
    ("/composable_shard/_group/group.py", "finish_reduce", REDUCE),
    ("/composable_shard/_group/group.py", "start_gather", GATHER),
    ("/composable_shard/", "", OTHER),
    ("/nn/parallel/distributed.py", "_ddp_init_helper", REDUCE),
    ("/nn/parallel/distributed.py", "_pre_forward", REDUCE),
    ("/nn/modules/", "", REST),
    ("/autograd/graph.py", "", REST),
    ("/utils/checkpoint.py", "", REST),
    ("/_gpt.py", "", REST),
)


@dataclass(frozen=True)
class Allocation:
    """`nbytes` are negative where memory goes back; `total` is what the profiler counts itself."""

    address: int
    nbytes: int
    kind: str
    total: int


@dataclass(frozen=True)
class Note:
    """Something the program said at that moment, perhaps of memory at some addresses."""

    label: str
    addresses: list[int]


@dataclass
class Block:
    """Memory from the event `begin` up to the event `end`, and from which event on it was of which kind."""

    nbytes: int
    begin: int
    kinds: list[tuple[int, str]]
    end: int

    def note(self, at: int, kind: str) -> None:
        """What lies in a pool is of a kind from now on; all else was made for it."""
        if self.kinds[0][1] == FREE:
            self.kinds.append((at, kind))
        else:
            self.kinds = [(self.begin, kind)]


@dataclass(frozen=True)
class Peak:
    """The bytes of each kind at the moment when a sum was highest."""

    nbytes: int
    moment: str
    by_kind: dict[str, int]


def note(label: str, addresses: Iterable[int] = ()) -> None:
    """Leaves a note in the profile that is being taken."""
    with record_function(f"{_NOTE}{label}|{','.join(map(str, addresses))}"):
        pass


def read(watched: profile) -> list[Allocation | Note]:
    """The allocations and notes of a profile, in order."""
    found: list[tuple[int, Allocation | Note]] = []
    waiting: list[Any] = [*watched.profiler.kineto_results.experimental_event_tree()]  # type: ignore[union-attr]
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag.name == "Allocation" and event.extra_fields.alloc_size:
            fields = event.extra_fields
            kind = _kind(event) if fields.alloc_size > 0 else ""
            found.append((event.start_time_ns, Allocation(fields.ptr, fields.alloc_size, kind, fields.total_allocated)))
        elif event.tag.name == "TorchOp" and event.name.startswith(_NOTE):
            label, addresses = event.name.removeprefix(_NOTE).split("|")
            found.append((event.start_time_ns, Note(label, [int(a) for a in addresses.split(",") if a])))
    return [event for _, event in sorted(found, key=lambda pair: pair[0])]


def _kind(event: Any) -> str:
    for file, function in _callers(event):
        for part, name, kind in _WHO:
            if part in file and name in ("", function):
                return kind
    return REST


def _callers(event: Any) -> Iterator[tuple[str, str]]:
    while (event := event.parent) is not None:
        if event.tag.name == "PyCall":
            site = event.extra_fields.callsite
            yield site.file_name, site.function_name


def _blocks(events: Sequence[Allocation | Note]) -> list[Block]:
    found: list[Block] = []
    live: dict[int, Block] = {}
    for at, event in enumerate(events):
        if isinstance(event, Note):
            for address in event.addresses:
                if address in live:
                    live[address].note(at, event.label)
        elif event.nbytes > 0:
            live[event.address] = Block(event.nbytes, at, [(at, event.kind)], len(events))
            found.append(live[event.address])
        elif event.address in live:
            live.pop(event.address).end = at
    return found


def _changes(blocks: Sequence[Block]) -> dict[int, Counter[str]]:
    """By how much each kind changes at which event."""
    changes: dict[int, Counter[str]] = {}
    for block in blocks:
        before = None
        for at, kind in [*block.kinds, (block.end, None)]:
            change = changes.setdefault(at, Counter())
            if before is not None:
                change[before] -= block.nbytes
            if kind is not None:
                change[kind] += block.nbytes
            before = kind
    return changes


def peaks(events: Sequence[Allocation | Note]) -> tuple[Peak, Peak, float]:
    """Within the step that was noted: the peak of the runtime's bytes and that of all.

    The third figure is the largest difference between all bytes and what the profiler counts, relative to the peak.
    """
    changes = _changes(_blocks(events))
    held = dict.fromkeys(KINDS, 0)
    runtime = total = Peak(-1, "", {})
    moment, inside, apart = "", False, 0
    for at, event in enumerate(events):
        for kind, change in changes.get(at, {}).items():
            held[kind] += change
        if isinstance(event, Note):
            inside = (inside or event.label == BEGINS) and event.label != ENDS
            moment = event.label.removeprefix(MOMENT) if event.label.startswith(MOMENT) else moment
        if not inside:
            continue
        everything = sum(held.values())
        of_runtime = sum(held[kind] for kind in RUNTIME)
        if of_runtime > runtime.nbytes:
            runtime = Peak(of_runtime, moment, dict(held))
        if everything > total.nbytes:
            total = Peak(everything, moment, dict(held))
        if isinstance(event, Allocation):
            apart = max(apart, abs(event.total - everything))
    return runtime, total, apart / total.nbytes
