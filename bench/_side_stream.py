"""Captures of steps with `torch.cuda.graph`, for engines without captures of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Step = Callable[..., Any]


class SideStreamGraph:
    """A step that is captured as in torchtitan: one eager call on a side stream, then a capture on the same stream.

    Without a GPU all calls are eager. A replay overwrites the results of the previous one.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._results: Any = None
        self.captures = self.replays = self.eager_calls = 0

    def __call__(self, *inputs: Tensor) -> Any:
        if not inputs[0].is_cuda:
            self.eager_calls += 1
            return self._step(*inputs)
        if not self.eager_calls:
            return self._warm_up(inputs)
        if self._graph is None:
            self._capture(inputs)
        for static, given in zip(self._inputs, inputs, strict=True):
            static.copy_(given)
        self._graph.replay()
        self.replays += 1
        return self._results

    def _warm_up(self, inputs: tuple[Tensor, ...]) -> Any:
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            results = self._step(*inputs)
        torch.cuda.current_stream().wait_stream(self._stream)
        self.eager_calls += 1
        return results

    def _capture(self, inputs: tuple[Tensor, ...]) -> None:
        self._inputs = [each.clone() for each in inputs]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            self._results = self._step(*self._inputs)
        self.captures += 1
