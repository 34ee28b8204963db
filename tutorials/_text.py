"""Read training text from a folder, as bytes or as tokens of the model's tokenizer."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from _gpt import is_held_out, python_sources

SUFFIXES = "txt,md,rst,tex,html,py,c,h,cc,cpp,hpp,java,js,ts,go,rs,sh"
_MANY = 40  # with fewer files, the end of each file is held out instead of whole files
_SHARE = 20  # about 1 in 20 files or tokens is held out


@dataclass(frozen=True)
class Tokenizer:
    """Conversion between text and token ids.

    Attributes:
        unit: name of a token in messages, "byte" or "token".
        vocabulary: number of different tokens.
        encode: returns the tokens of a file and an end token, one-dimensional.
        decode: returns the text of tokens.
        prompt: returns the tokens of a prompt, without an end token.
    """

    unit: str
    vocabulary: int
    encode: Callable[[bytes], Tensor]
    decode: Callable[[Sequence[int]], str]
    prompt: Callable[[str], list[int]]


def _bytes_of(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text + b"\n"), dtype=torch.uint8)


def _text_of(numbers: Sequence[int]) -> str:
    return bytes(number for number in numbers if number < 256).decode(errors="replace")


BYTES = Tokenizer("byte", 256, _bytes_of, _text_of, lambda text: list(text.encode()))


def tokenizer_in(folder: Path | None) -> Tokenizer:
    """Return the Hugging Face tokenizer in a folder, or `BYTES` if there is none."""
    if folder is None or not (folder / "tokenizer.json").exists():
        return BYTES
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(text: bytes) -> Tensor:
        numbers = tokenizer(text.decode(errors="replace"), add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor(numbers + end, dtype=torch.int32)

    return Tokenizer("token", len(tokenizer), encode, tokenizer.decode, lambda text: tokenizer(text)["input_ids"])


@dataclass(frozen=True)
class Text:
    """Training and held-out text.

    Attributes:
        train: training tokens, one-dimensional.
        held_out: held-out tokens, one-dimensional.
        bytes_per_token: mean bytes per token of the held-out text.
    """

    train: Tensor
    held_out: Tensor
    bytes_per_token: float


def files_below(folder: Path, suffixes: str) -> list[Path]:
    """Return the sorted files below a folder that have one of the suffixes, without hidden ones. Exit if none."""
    if not folder.is_dir():
        raise SystemExit(f"--data {folder}: no such folder")
    endings = {f".{suffix.strip().lstrip('.')}" for suffix in suffixes.split(",")}
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in endings and path.is_file())
    files = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    if not any(path.stat().st_size for path in files):
        raise SystemExit(f"--data {folder}: no text in files with suffixes {suffixes}; choose others with --suffixes")
    return files


def texts_of(folder: Path | None, suffixes: str) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each file below a folder, or of Python's standard library."""
    if folder is None:
        yield from python_sources()
    else:
        for path in files_below(folder, suffixes):
            yield path.relative_to(folder).as_posix(), path.read_bytes()


def read_text(texts: Iterable[tuple[str, bytes]], tokenizer: Tokenizer) -> Text:
    """Tokenize named texts and split them. The split is the same on all ranks and in all runs.

    With many files, about one in twenty is held out, chosen by its name. With few files, or if no name is chosen, the
    last twentieth of each file is held out.
    """
    named = [(name, text) for name, text in texts if text]
    by_name = len(named) >= _MANY and any(is_held_out(name, _SHARE) for name, _ in named)
    train, held_out, held_out_bytes = [], [], 0.0
    for name, text in named:
        numbers = tokenizer.encode(text)
        tail = len(numbers) * is_held_out(name, _SHARE) if by_name else len(numbers) // _SHARE
        train.append(numbers[: len(numbers) - tail])
        held_out.append(numbers[len(numbers) - tail :])
        held_out_bytes += tail * len(text) / len(numbers)
    held = torch.cat(held_out)
    return Text(torch.cat(train), held, held_out_bytes / max(len(held), 1))
