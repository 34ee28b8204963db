"""On which stream the nodes of a backward run, and what autograd has them wait for, as on an accelerator.

- A node runs on the stream that was current when it was made, hooks on it and on its output included.
- It waits for the nodes whose gradients it takes. Gradients that meet are added on the stream of who takes them.
- A gradient that is taken on another stream than its own stays allocated until that stream is done with it.
- At the end, the stream on which `backward` was called waits for those on which leaves were accumulated.

On a CPU autograd knows no streams. So each node gets a hook that tells when it begins, and a note of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..._torch.core import current_backward, current_node, queue_backward_callback
from .streams import Clock, Stream, Streams, join

_KEY = "composable_shard.races"  # of the note in a node's `metadata`


class _Note:
    """What is known of a node.

    Attributes:
        stream: on which it runs.
        takers: the notes of the nodes that take its gradients.
        clock: what comes before its gradients.
    """

    __slots__ = ("clock", "stream", "takers")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.takers: list[_Note] = []
        self.clock: Clock = {}


class _Pass:
    """A backward pass that a thread runs.

    Attributes:
        task: autograd's number of it.
        stream: the current one.
    """

    def __init__(self, task: int, caller: Stream) -> None:
        self.task, self.stream = task, caller
        self._caller = caller
        self._begun = dict(caller.clock)
        self._note: _Note | None = None
        self._given: dict[_Note, None] = {}  # gradients that nobody has taken yet
        self._leaves: dict[Stream, None] = {}
        self._is_over = False  # whether the node at hand is done, but for its hooks
        queue_backward_callback(self._end)

    def enter(self, note: _Note) -> None:
        """A node begins, unless it has begun before."""
        if note is self._note:
            return
        self._give()
        self._note, self.stream, self._is_over = note, note.stream, False
        self._given.pop(note, None)
        join(note.stream.clock, self._begun)
        join(note.stream.clock, note.clock)
        note.clock = {}

    def _give(self) -> None:
        """The node at hand has ended: its gradients are there for who takes them."""
        note, self._note = self._note, None
        if note is None:
            return
        for taker in note.takers:
            join(taker.clock, note.stream.clock)
            self._given[taker] = None
        if not note.takers:
            self._leaves[note.stream] = None

    def node_over(self) -> None:
        """The node at hand is done; its gradients may be added to others."""
        self._is_over = True

    def adder(self) -> Stream:
        """The stream on which autograd adds gradients of the node at hand to those of others."""
        note = self._note
        if note is None or not self._is_over or not note.takers:
            return self.stream
        stream = note.takers[0].stream
        join(stream.clock, note.stream.clock)
        for taker in note.takers:
            join(stream.clock, taker.clock)
        return stream

    def added(self, stream: Stream) -> None:
        """Gradients were added on that stream: who takes them waits for it."""
        note = self._note
        for taker in () if note is None else note.takers:
            join(taker.clock, stream.clock)

    def _end(self) -> None:
        self._give()
        for stream in self._leaves:
            join(self._caller.clock, stream.clock)
        for note in self._given:  # gradients of inputs that `torch.autograd.grad` was asked for
            join(self._caller.clock, note.clock)
            note.clock = {}
        self.stream = self._caller


class Nodes:
    """The streams of all nodes of a program.

    Args:
        streams: of the program.
        record: is called as `Tensor.record_stream`, with the storage.
    """

    def __init__(self, streams: Streams, record: Callable[[torch.UntypedStorage, Stream], None]) -> None:
        self._streams, self._record = streams, record
        self._threads = threading.local()
        self._made: tuple[Stream, list[weakref.ref[torch.Tensor]]] = (streams.compute, [])
        streams.ask_first(self)

    def note_made(self, tensors: Iterable[torch.Tensor], stream: Stream) -> None:
        """An operator has made these tensors, whose nodes autograd will make now."""
        self._made = stream, [weakref.ref(tensor) for tensor in tensors]

    def note_given(self, tensors: Iterable[torch.Tensor], stream: Stream) -> None:
        """An operator is given these tensors: those whose nodes are not known were made on the same stream, surely."""
        for tensor in tensors:
            if tensor.requires_grad and tensor.grad_fn is not None:
                self._note(tensor.grad_fn, stream)

    def look(self) -> None:
        """Find the nodes of what the last operator has made."""
        stream, made = self._made
        if made:
            self._made = stream, []
            living = [tensor for each in made if (tensor := each()) is not None]
            self.note_given(living, stream)

    def _note(self, node: Any, stream: Stream) -> _Note:
        """The note of a node; it and all nodes behind it that have none get one with this stream."""
        known: _Note | None = node.metadata.get(_KEY)
        if known is not None:
            return known
        first = node.metadata[_KEY] = _Note(stream)
        waiting = [node]
        while waiting:
            node = waiting.pop()
            note = node.metadata[_KEY]
            node.register_prehook(self._begins)
            node.register_hook(self._ends)
            for taker in [each for each, _ in node.next_functions if each is not None]:
                if _KEY not in taker.metadata:
                    taker.metadata[_KEY] = _Note(stream)
                    waiting.append(taker)
                note.takers.append(taker.metadata[_KEY])
        return first

    def _begins(self, gradients: Sequence[torch.Tensor | None]) -> None:
        if (stream := self.current()) is not None:
            self._keep([gradient for gradient in gradients if gradient is not None], stream)

    def _keep(self, gradients: Iterable[torch.Tensor], stream: Stream) -> None:
        for gradient in gradients:
            if type(gradient) is torch.Tensor:
                self._record(gradient.untyped_storage(), stream)

    def _ends(self, *_gradients: object) -> None:
        passed = self._pass()
        if passed is not None:
            passed.node_over()

    def _pass(self) -> _Pass | None:
        """The pass that this thread runs; None if it runs none."""
        task = current_backward()
        passes: list[_Pass] = self._threads.__dict__.setdefault("passes", [])
        while passes and passes[-1].task > task:  # over, or failed
            passes.pop()
        if task < 0:
            return None
        if not passes or passes[-1].task < task:
            passes.append(_Pass(task, passes[-1].stream if passes else self._streams.outside()))
        return passes[-1]

    def current(self) -> Stream | None:
        """The stream of the node that autograd runs now; None if it runs none."""
        passed = self._pass()
        if passed is None:
            return None
        self.look()
        if (node := current_node()) is not None:
            passed.enter(self._note(node, passed.stream))
        return passed.stream

    def use(self, stream: Stream) -> bool:
        """Change the current stream of the node that autograd runs; False if it runs none."""
        passed = self._pass()
        if passed is None:
            return False
        passed.stream = stream
        return True

    def adder(self) -> Stream | None:
        """The stream on which autograd adds gradients now; None if it runs nothing."""
        passed = self._pass()
        return None if passed is None else passed.adder()

    def added(self, gradients: Iterable[torch.Tensor], stream: Stream) -> None:
        """Autograd has added gradients on that stream."""
        self._keep(gradients, stream)
        passed = self._pass()
        if passed is not None:
            passed.added(stream)
