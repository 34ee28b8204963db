"""Attribute the bytes of torch's CPU allocator to types, from a memory profile.

The profiler records every allocation, including those by `resize_`, with its Python stack. The program adds notes to
the profile for facts that are not in the stack: an address contains a gradient that will be reduced, a slot of the pool
is reused for another purpose, a step begins.
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

# The type of an allocation is that of its innermost Python function in this list. An empty name matches all functions
# of the file.
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
    """An allocation, or a free with negative `nbytes`. `total` is the profiler's own count of allocated bytes."""

    address: int
    nbytes: int
    kind: str
    total: int


@dataclass(frozen=True)
class Note:
    """A note of the program, optionally about memory at some addresses."""

    label: str
    addresses: list[int]


@dataclass
class Block:
    """Memory that is allocated from event `begin` to event `end`, and its types, each with its first event."""

    nbytes: int
    begin: int
    kinds: list[tuple[int, str]]
    end: int

    def note(self, at: int, kind: str) -> None:
        """Set the type of the memory: from event `at` for a slot of the pool, else from the allocation."""
        if self.kinds[0][1] == FREE:
            self.kinds.append((at, kind))
        else:
            self.kinds = [(self.begin, kind)]


@dataclass(frozen=True)
class Peak:
    """The bytes of each type at the peak of their sum."""

    nbytes: int
    moment: str
    by_kind: dict[str, int]


def note(label: str, addresses: Iterable[int] = ()) -> None:
    """Add a note to the current profile."""
    with record_function(f"{_NOTE}{label}|{','.join(map(str, addresses))}"):
        pass


def read(watched: profile) -> list[Allocation | Note]:
    """Return the allocations and notes of a profile, in order."""
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
    """Return by how many bytes each type changes, by event."""
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
    """Return the peak of the runtime's bytes and the peak of all bytes within the noted step.

    The third value is the largest difference between all bytes and the profiler's own count, relative to the peak.
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
