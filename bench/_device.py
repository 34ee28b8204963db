"""Select the device of a benchmark: the CPU with gloo, or a CUDA device with NCCL.

On a GPU, a benchmark synchronizes with the device before and after a timed step, but not within it, as in training.
"""

import argparse

import torch

CPU, CUDA = "cpu", "cuda"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def chosen(text: str) -> str:
    """Parse the option `--device`: `auto` means a GPU if there is one."""
    if text not in ("auto", CPU, CUDA):
        raise argparse.ArgumentTypeError(f"{text}: must be auto, cpu or cuda")
    if text == CUDA and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(
            f"torch {torch.__version__} finds no CUDA device on this machine; use --device cpu"
        )
    if text == "auto":
        return CUDA if torch.cuda.is_available() else CPU
    return text


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--device`."""
    parser.add_argument(
        "--device", type=chosen, default="auto", help="auto, cpu or cuda (default: cuda if there is a GPU)"
    )


def select(device: str, card: int = 0) -> None:
    """Set the current CUDA device. Call this before anything uses the default device."""
    if device == CUDA:
        torch.cuda.set_device(card)


def synchronize(device: str) -> None:
    """Wait until all queued work of the device is finished."""
    if device == CUDA:
        torch.cuda.synchronize()


class Span:
    """Device time from the constructor, which waits until the device is idle, to the call of `seconds`."""

    def __init__(self, device: str) -> None:
        synchronize(device)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2 if device == CUDA else 0)]
        if self._events:
            self._events[0].record()

    def seconds(self) -> list[float]:
        """Wait for the device and return the device time in seconds, or an empty list on the CPU."""
        if not self._events:
            return []
        begin, end = self._events
        end.record()
        end.synchronize()
        return [1e-3 * begin.elapsed_time(end)]


def cards() -> int:
    """Return the number of CUDA devices of this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def too_few(device: str, world: int) -> bool:
    """Return whether ranks would have to share a GPU, which NCCL rejects."""
    return device == CUDA and world > cards()


def forget_peak() -> int:
    """Reset the peak of torch's CUDA allocator. Return the allocated bytes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak() -> int:
    """Return the peak of allocated bytes on the GPU since `forget_peak`."""
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
