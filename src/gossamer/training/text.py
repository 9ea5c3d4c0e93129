"""Language modelling on the bytes of a text, cut into one shard per worker."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from gossamer.errors import ConfigError, nearest
from gossamer.seeding import stream
from gossamer.training.llama import SHAPES, Llama, LlamaShape

HELD_OUT_SHARE = 0.05  # of the text, and more where the evaluation set needs more
HELD_OUT_SHARE_MAX = 0.25
HELD_OUT_BLOCKS = 20
EVAL_BATCH_MAX = 32  # sequences in one evaluation batch


class TextTask:
    """Predict the next byte of a text with a Llama-style decoder.

    Args:
        model: a name from `SHAPES` or a shape of your own, vocabulary 256 or more.
        data: "shakespeare" (shipped) or the path of a text; .xz and .gz are unpacked.
        batch_size: sequences in a worker's batch.
        sequence_length: T, the number of predicted bytes in a sequence.
        eval_sequences: held-out sequences on which a model is evaluated.
        probe_sequences: those of them on which workers' predictions are compared.

    A batch is int64 [B, T + 1]: inputs are its first T columns, targets its last T. Losses are
    nats per byte, so perplexity is exp(loss).

    *Held out* are 20 blocks in the middle of 20 equal stretches of the text, 5 % of it (more, up to
    25 %, where a short text needs it for `eval_sequences`). A collection such as Shakespeare's is
    ordered by title: its tail would be a single play, while blocks spread evenly see all of them.
    What lies between the blocks is joined and cut into `num_workers` contiguous shards.

    Nothing is read before it is needed, so runs without numerics never touch the text; a path that
    does not exist is refused at once. Raises `ConfigError` for all mistakes in the arguments.
    """

    unit = "tokens"

    def __init__(
        self,
        *,
        model: str | LlamaShape = "llama-tiny",
        data: str | Path = "shakespeare",
        batch_size: int = 8,
        sequence_length: int = 128,
        eval_sequences: int = 64,
        probe_sequences: int = 2,
    ) -> None:
        self.shape = _find_shape(model)
        self.path = _find_data(data)
        self.batch_size = _positive("batch_size", batch_size)
        self.sequence_length = _positive("sequence_length", sequence_length)
        self.eval_sequences = _positive("eval_sequences", eval_sequences)
        self.probe_sequences = _positive("probe_sequences", probe_sequences)
        if sequence_length > self.shape.max_length:
            raise ConfigError(
                f"sequence_length {sequence_length} is beyond the model's {self.shape.max_length} "
                f"positions; shorten it or choose another model"
            )
        if probe_sequences > eval_sequences:
            raise ConfigError(
                f"probe_sequences ({probe_sequences}) are taken from eval_sequences "
                f"({eval_sequences}) and cannot be more"
            )
        self._split: Split | None = None
        self._eval_batches: list[Tensor] | None = None
        self.shards: list[Shard] = []

    @property
    def units_per_batch(self) -> int:
        """Bytes predicted in one training batch."""
        return self.batch_size * self.sequence_length

    def build(self) -> Llama:
        """A new model on the current default device."""
        return Llama(self.shape)

    def prepare(self, *, num_workers: int, seed: int, num_steps: int) -> None:
        """Cut the training text into `num_workers` shards. `num_steps` may exceed an epoch.

        Raises `ConfigError` where a shard would not hold a single sequence.
        """
        _positive("num_workers", num_workers)
        text = self.split.training
        shard_bytes, needed = len(text) // num_workers, self.sequence_length + 1
        if shard_bytes < needed:
            fitting = f"sequence_length at most {shard_bytes - 1}"
            raise ConfigError(
                f"{num_workers} workers share {len(text)} bytes of training text, {shard_bytes} "
                f"each, but one sequence takes {needed}; use at most {len(text) // needed} workers"
                + (f" or {fitting}" if shard_bytes > 1 else "")
            )
        cuts = [len(text) * index // num_workers for index in range(num_workers + 1)]
        self.shards = [
            Shard(text[start:stop], start, self.sequence_length, (seed, index))
            for index, (start, stop) in enumerate(pairwise(cuts))
        ]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte, for `batch` int64 [B, T + 1]."""
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def train_batch(self, worker: int, step: int) -> Tensor:
        """Batch int64 [B, T + 1] of a shard's `step`; depends on seed, shard and step only."""
        if not self.shards:
            raise ConfigError("call prepare() with the number of workers before train_batch()")
        first = step * self.batch_size
        return self.shards[worker].sequences(first, first + self.batch_size)

    def eval_batches(self) -> list[Tensor]:
        """The held-out sequences, in batches int64 [b, T + 1] of equal size; always the same."""
        if self._eval_batches is None:
            windows = _windows(self.split.text, self.split.eval_starts, self.sequence_length + 1)
            size = max(
                b for b in range(1, EVAL_BATCH_MAX + 1) if self.eval_sequences % b == 0
            )  # equal sizes give batches equal weight
            self._eval_batches = list(torch.split(windows, size))
        return self._eval_batches

    def probe_batch(self) -> Tensor:
        """`probe_sequences` of the held-out sequences, evenly spread: int64 [b, T + 1]."""
        chosen = [
            i * self.eval_sequences // self.probe_sequences for i in range(self.probe_sequences)
        ]
        starts = self.split.eval_starts[chosen]
        return _windows(self.split.text, starts, self.sequence_length + 1)

    def predict(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Logits fp32 [B, T, V] of the next byte at each position of `batch` int64 [B, T + 1]."""
        logits: Tensor = model(batch[:, :-1])
        return logits.float()

    @property
    def split(self) -> Split:
        """The text and how it is divided; read on first use."""
        if self._split is None:
            status = self.path.stat()
            text = _read(self.path, status.st_mtime_ns, status.st_size)
            self._split = split_text(text, self.eval_sequences, self.sequence_length)
        return self._split


@dataclass(frozen=True)
class Split:
    """A text divided into training and held-out parts.

    Args:
        text: all bytes, uint8.
        held_out: (start, stop) of each held-out block in `text`, ascending.
        eval_starts: first byte in `text` of each evaluation sequence, int64.
        training: the bytes outside the blocks, joined.
    """

    text: NDArray[np.uint8]
    held_out: tuple[tuple[int, int], ...]
    eval_starts: NDArray[np.int64]
    training: NDArray[np.uint8]


def split_text(text: NDArray[np.uint8], eval_sequences: int, sequence_length: int) -> Split:
    """Hold out evenly spread blocks of `text` and place the evaluation sequences in them.

    No two evaluation sequences overlap. Raises `ConfigError` where more than a quarter of the text
    would be needed for them.
    """
    window = sequence_length + 1
    needed = eval_sequences * window
    if needed > HELD_OUT_SHARE_MAX * len(text) or len(text) < 2 * window:
        raise ConfigError(
            f"the text has {len(text)} bytes, too few for {eval_sequences} evaluation sequences of "
            f"{window}; use a text of at least {int(needed / HELD_OUT_SHARE_MAX)} bytes, shorter "
            f"sequences or fewer evaluation sequences"
        )
    num_blocks = min(HELD_OUT_BLOCKS, eval_sequences)
    counts = [
        eval_sequences * (k + 1) // num_blocks - eval_sequences * k // num_blocks
        for k in range(num_blocks)
    ]
    share = int(HELD_OUT_SHARE * len(text)) // num_blocks
    held_out: list[tuple[int, int]] = []
    starts: list[int] = []
    for k, count in enumerate(counts):
        left, right = (len(text) * j // num_blocks for j in (k, k + 1))
        size = min(max(share, count * window), right - left)
        begin = left + (right - left - size) // 2
        held_out.append((begin, begin + size))
        starts.extend(begin + size * i // count for i in range(count))
    inside = np.zeros(len(text), dtype=bool)
    for begin, end in held_out:
        inside[begin:end] = True
    return Split(text, tuple(held_out), np.array(starts, dtype=np.int64), text[~inside])


class Shard:
    """One worker's part of the training text, read in seeded epochs.

    An epoch cuts the shard into windows of T + 1 bytes, T apart, so that no byte is predicted
    twice, and orders them at random. Where the first begins changes with the epoch.

    Args:
        text: the shard, uint8, T + 1 bytes or more.
        start: its first byte's position in the training text.
        sequence_length: T.
        key: what the order depends on besides the epoch: (seed, shard index).
    """

    def __init__(
        self, text: NDArray[np.uint8], start: int, sequence_length: int, key: tuple[int, int]
    ) -> None:
        self.text, self.start, self.stop = text, start, start + len(text)
        self.sequence_length, self.key = sequence_length, key
        # One window fewer than would fit, where there is more than one, leaves room for the shift.
        self.num_windows = max(1, (len(text) - sequence_length) // sequence_length)
        self._epoch, self._starts = -1, np.empty(0, dtype=np.int64)

    def epoch_starts(self, epoch: int) -> NDArray[np.int64]:
        """First byte (in the shard) of each window of an epoch, in the order of reading."""
        if epoch != self._epoch:
            spare = len(self.text) - self.num_windows * self.sequence_length
            # Raw bits and a stable sort: unlike numpy's distributions, the same in every version.
            source = stream(*self.key, "windows", epoch).bit_generator
            shift = int(source.random_raw()) % min(spare, self.sequence_length)
            order = np.argsort(source.random_raw(self.num_windows), kind="stable")
            self._epoch, self._starts = epoch, shift + order * self.sequence_length
        return self._starts

    def sequences(self, first: int, stop: int) -> Tensor:
        """Sequences `first` .. `stop` - 1 of the endless stream of epochs, int64 [n, T + 1]."""
        epoch, position = divmod(first, self.num_windows)
        chosen = self.epoch_starts(epoch)[position : position + stop - first]
        while len(chosen) < stop - first:  # the batch runs over the end of an epoch
            epoch += 1
            more = self.epoch_starts(epoch)[: stop - first - len(chosen)]
            chosen = np.concatenate((chosen, more))
        return _windows(self.text, chosen, self.sequence_length + 1)


def unigram_entropy(text: NDArray[np.uint8]) -> float:
    """Entropy in nats of the byte frequencies: the loss of the best model without context."""
    counts = np.bincount(text, minlength=256)
    shares = counts[counts > 0] / len(text)
    return float(-(shares * np.log(shares)).sum())


def _windows(text: NDArray[np.uint8], starts: NDArray[np.int64], width: int) -> Tensor:
    """The stretches of `width` bytes from each start, int64 [len(starts), width]."""
    return torch.from_numpy(text[starts[:, None] + np.arange(width)].astype(np.int64))


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}")
    return value


def _find_shape(model: str | LlamaShape) -> LlamaShape:
    if isinstance(model, LlamaShape):
        shape = model
    elif model in SHAPES:
        shape = SHAPES[model]
    else:
        raise ConfigError(f"unknown model {model!r}; {nearest(model, SHAPES)}")
    if shape.vocab_size < 256:
        raise ConfigError(f"bytes need a vocabulary of at least 256, got {shape.vocab_size}")
    return shape


def _find_data(data: str | Path) -> Path:
    if data == "shakespeare":
        return Path(str(resources.files("gossamer"))) / "data" / "shakespeare.txt.xz"
    path = Path(data)
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise ConfigError(
            f"data {str(data)!r}: {found}; give 'shakespeare' or the path of a text file"
        )
    if path.stat().st_size == 0:
        raise ConfigError(f"data {str(data)!r} is empty")
    return path


@lru_cache(maxsize=2)  # tasks of one comparison share the text
def _read(path: Path, modified_ns: int, num_bytes: int) -> NDArray[np.uint8]:
    """The unpacked bytes, read-only; time and size of the file are there to notice a change."""
    raw = path.read_bytes()
    try:
        if path.suffix == ".xz":
            raw = lzma.decompress(raw)
        elif path.suffix == ".gz":
            raw = gzip.decompress(raw)
    except (lzma.LZMAError, gzip.BadGzipFile, EOFError) as error:
        raise ConfigError(f"data {str(path)!r} cannot be unpacked: {error}") from None
    return np.frombuffer(raw, dtype=np.uint8)


def decode(tokens: Sequence[int]) -> str:
    """Text of byte tokens; what is not UTF-8 becomes the replacement character."""
    return bytes(tokens).decode("utf-8", errors="replace")
