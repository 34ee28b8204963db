"""Where a benchmark runs: the CPU with gloo, or a CUDA device with NCCL.

On a card a step is timed between two waits for the device and none within, so that what the host has queued runs as it
would in training.
"""

import argparse

import torch

CPU, CUDA = "cpu", "cuda"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def chosen(text: str) -> str:
    """The device of an option: `auto` is a card where there is one."""
    if text not in ("auto", CPU, CUDA):
        raise argparse.ArgumentTypeError(f"{text}: must be auto, cpu or cuda")
    if text == CUDA and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(
            f"torch {torch.__version__} finds no CUDA device on this machine; --device cpu runs on the CPU"
        )
    if text == "auto":
        return CUDA if torch.cuda.is_available() else CPU
    return text


def add_option(parser: argparse.ArgumentParser) -> None:
    """The option `--device`."""
    parser.add_argument(
        "--device", type=chosen, default="auto", help="auto, cpu or cuda (default: cuda where there is a card)"
    )


def select(device: str, card: int = 0) -> None:
    """Makes that card the current one, before anything asks which it is."""
    if device == CUDA:
        torch.cuda.set_device(card)


def synchronize(device: str) -> None:
    """Waits until the device has done what it was given."""
    if device == CUDA:
        torch.cuda.synchronize()


class Span:
    """What the device does from here to `seconds`; it has nothing else to do when that begins."""

    def __init__(self, device: str) -> None:
        synchronize(device)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2 if device == CUDA else 0)]
        if self._events:
            self._events[0].record()

    def seconds(self) -> list[float]:
        """How long that was, after a wait for its end; nothing on the CPU, whose clocks tell it."""
        if not self._events:
            return []
        begin, end = self._events
        end.record()
        end.synchronize()
        return [1e-3 * begin.elapsed_time(end)]


def cards() -> int:
    """CUDA devices of this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def too_few(device: str, world: int) -> bool:
    """Whether ranks would have to share a card, which NCCL refuses."""
    return device == CUDA and world > cards()


def forget_peak() -> int:
    """Bytes that torch has given out on the card; its highest figure starts anew from there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak() -> int:
    """The most bytes that torch has given out on the card since `forget_peak`."""
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
