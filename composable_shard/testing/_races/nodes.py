"""Streams of the nodes of a backward, and the waits that autograd adds on an accelerator.

- A node runs on the stream that was current when it was created. So do hooks on the node and on its output.
- A node waits for the nodes that produce its gradients. If it has several, they are added on the stream of the node.
- A gradient that is used on another stream stays allocated until that stream is done with it.
- At the end, the stream that called `backward` waits for the streams on which leaves were accumulated.

On a CPU, autograd does not use streams. So each node gets a note in its metadata, and a hook that runs when it begins.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..._torch.core import current_backward, current_node, queue_backward_callback
from .streams import Clock, Stream, Streams, join

_KEY = "composable_shard.races"  # key of the note in a node's `metadata`


class _Note:
    """Data of a node.

    Attributes:
        stream: stream on which it runs.
        takers: notes of the nodes that its gradients are passed to.
        clock: work that is ordered before the gradients that are passed to it.
    """

    __slots__ = ("clock", "stream", "takers")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.takers: list[_Note] = []
        self.clock: Clock = {}


class _Pass:
    """A backward pass that a thread runs.

    Attributes:
        task: autograd's number of the pass.
        stream: the current stream.
    """

    def __init__(self, task: int, caller: Stream) -> None:
        self.task, self.stream = task, caller
        self._caller = caller
        self._begun = dict(caller.clock)
        self._note: _Note | None = None
        self._given: dict[_Note, None] = {}  # nodes that have gradients but have not begun
        self._leaves: dict[Stream, None] = {}
        self._is_over = False  # whether the current node is done, except for its hooks
        queue_backward_callback(self._end)

    def enter(self, note: _Note) -> None:
        """Begin a node, unless it is the current one."""
        if note is self._note:
            return
        self._give()
        self._note, self.stream, self._is_over = note, note.stream, False
        self._given.pop(note, None)
        join(note.stream.clock, self._begun)
        join(note.stream.clock, note.clock)
        note.clock = {}

    def _give(self) -> None:
        """End the current node: pass its gradients to the next nodes."""
        note, self._note = self._note, None
        if note is None:
            return
        for taker in note.takers:
            join(taker.clock, note.stream.clock)
            self._given[taker] = None
        if not note.takers:
            self._leaves[note.stream] = None

    def node_over(self) -> None:
        """Record that the current node is done. Its gradients may now be added to others."""
        self._is_over = True

    def adder(self) -> Stream:
        """The stream on which autograd adds gradients of the current node to those of other nodes."""
        note = self._note
        if note is None or not self._is_over or not note.takers:
            return self.stream
        stream = note.takers[0].stream
        join(stream.clock, note.stream.clock)
        for taker in note.takers:
            join(stream.clock, taker.clock)
        return stream

    def added(self, stream: Stream) -> None:
        """Record that gradients were added on `stream`: the nodes that take them wait for it."""
        note = self._note
        for taker in () if note is None else note.takers:
            join(taker.clock, stream.clock)

    def _end(self) -> None:
        self._give()
        for stream in self._leaves:
            join(self._caller.clock, stream.clock)
        for note in self._given:  # gradients that `torch.autograd.grad` returns
            join(self._caller.clock, note.clock)
            note.clock = {}
        self.stream = self._caller


class Nodes:
    """The streams of all autograd nodes of a program.

    Args:
        streams: streams of the program.
        record: `Tensor.record_stream`, called with the storage.
    """

    def __init__(self, streams: Streams, record: Callable[[torch.UntypedStorage, Stream], None]) -> None:
        self._streams, self._record = streams, record
        self._threads = threading.local()
        self._made: tuple[Stream, list[weakref.ref[torch.Tensor]]] = (streams.compute, [])
        streams.ask_first(self)

    def note_made(self, tensors: Iterable[torch.Tensor], stream: Stream) -> None:
        """Record that an operator on `stream` created these tensors. Autograd creates their nodes after this call."""
        self._made = stream, [weakref.ref(tensor) for tensor in tensors]

    def note_given(self, tensors: Iterable[torch.Tensor], stream: Stream) -> None:
        """Add notes for the nodes of an operator's inputs. Nodes without a note get the stream of the operator."""
        for tensor in tensors:
            if tensor.requires_grad and tensor.grad_fn is not None:
                self._note(tensor.grad_fn, stream)

    def look(self) -> None:
        """Add notes for the nodes of the last operator's outputs."""
        stream, made = self._made
        if made:
            self._made = stream, []
            living = [tensor for each in made if (tensor := each()) is not None]
            self.note_given(living, stream)

    def _note(self, node: Any, stream: Stream) -> _Note:
        """The note of a node. If it has none, it and the nodes that it leads to get notes with this stream."""
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
        """The backward pass that this thread runs; None if it runs none."""
        task = current_backward()
        passes: list[_Pass] = self._threads.__dict__.setdefault("passes", [])
        while passes and passes[-1].task > task:  # these passes have ended or failed
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
        """The stream on which autograd adds gradients now; None outside of backward."""
        passed = self._pass()
        return None if passed is None else passed.adder()

    def added(self, gradients: Iterable[torch.Tensor], stream: Stream) -> None:
        """Record that autograd has added gradients on `stream`."""
        self._keep(gradients, stream)
        passed = self._pass()
        if passed is not None:
            passed.added(stream)
