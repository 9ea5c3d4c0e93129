"""How a text is divided, read and refused."""

from __future__ import annotations

import gzip
import lzma
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from gossamer.errors import ConfigError
from gossamer.training.llama import SHAPES, LlamaShape
from gossamer.training.task import Counts, Predicts, Prepares, Scores
from gossamer.training.text import Shard, TextTask, split_text, unigram_entropy

SHAPE = LlamaShape(dim=8, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=8, max_length=64)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20,000 bytes of a seeded text."""
    path = tmp_path_factory.mktemp("data") / "book.txt"
    path.write_bytes(np.random.default_rng(0).integers(32, 127, 20_000, dtype=np.uint8).tobytes())
    return path


def make(data: Path | str, **changes: int) -> TextTask:
    sizes = {"batch_size": 4, "sequence_length": 16, "eval_sequences": 12} | changes
    return TextTask(model=SHAPE, data=data, **sizes)


def prepared(data: Path | str, workers: int = 3, seed: int = 0, **changes: int) -> TextTask:
    task = make(data, **changes)
    task.prepare(num_workers=workers, seed=seed, num_steps=10)
    return task


# ------------------------------------------------------------------------------ the division


@settings(max_examples=60, deadline=None)
@given(size=st.integers(400, 6000), sequences=st.integers(1, 40), length=st.integers(1, 20))
def test_parts_of_a_text_are_disjoint_and_complete(size: int, sequences: int, length: int) -> None:
    text = np.arange(size, dtype=np.uint16)  # every byte is its own position
    if sequences * (length + 1) > size / 4:
        with pytest.raises(ConfigError, match="too few"):
            split_text(text, sequences, length)  # type: ignore[arg-type]
        return
    split = split_text(text, sequences, length)  # type: ignore[arg-type]
    held_out = np.concatenate([text[a:b] for a, b in split.held_out])
    both = np.concatenate((held_out, split.training))
    assert np.array_equal(np.sort(both), text)  # each byte in exactly one part
    assert len(split.eval_starts) == sequences
    windows = split.eval_starts[:, None] + np.arange(length + 1)
    assert len(np.unique(windows)) == windows.size  # no overlap among evaluation sequences
    assert np.isin(windows, held_out).all()
    # Spread: every fifth of the text holds some held-out bytes, where there are blocks enough.
    if sequences >= 20:
        assert len(np.unique(held_out // math.ceil(size / 5))) == 5


def test_share_held_out_of_the_shipped_text() -> None:
    task = prepared("shakespeare", workers=8, sequence_length=64, eval_sequences=64)
    split = task.split
    assert 1 - len(split.training) / len(split.text) == pytest.approx(0.05, abs=1e-4)
    assert len(split.held_out) == 20
    assert unigram_entropy(split.text) == pytest.approx(3.33, abs=0.005)


def test_shards_are_disjoint_and_complete(book: Path) -> None:
    task = prepared(book, workers=7)
    bounds = [(shard.start, shard.stop) for shard in task.shards]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == len(task.split.training)
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    sizes = {stop - start for start, stop in bounds}
    assert max(sizes) - min(sizes) <= 1
    for shard, (start, stop) in zip(task.shards, bounds, strict=True):
        assert np.array_equal(shard.text, task.split.training[start:stop])


def test_batches_come_from_the_own_shard_and_never_from_the_held_out_part(tmp_path: Path) -> None:
    """The text is a count in base 128, 4 bytes each: 8 bytes in a row tell where they are from."""
    counts = np.arange(6000)
    digits = np.stack([(counts >> 7) & 127, counts & 127, counts * 0 + 200, counts * 0 + 201], 1)
    path = tmp_path / "count.bin"
    path.write_bytes(digits.astype(np.uint8).tobytes())
    task = prepared(path, workers=3, batch_size=8)
    held_out = np.concatenate([np.arange(a, b) for a, b in task.split.held_out])
    training = np.setdiff1d(np.arange(24_000), held_out)  # positions of the training bytes
    for worker, shard in enumerate(task.shards):
        own = training[shard.start : shard.stop]
        for step in range(12):
            for row in task.train_batch(worker, step).numpy():
                mark = int(np.flatnonzero((row[:-5] == 200) & (row[1:-4] == 201))[0])
                position = 4 * (int(row[mark + 2]) << 7 | int(row[mark + 3])) - mark - 2
                seen = np.arange(position + mark, position + mark + 4)
                assert np.isin(seen, own).all() or _at_a_seam(seen, task.split.held_out)


def _at_a_seam(seen: NDArray[np.int64], blocks: tuple[tuple[int, int], ...]) -> bool:
    """Four bytes that straddle a joint of the training text are not one count."""
    return any(seen[0] - 8 <= edge <= seen[-1] + 8 for block in blocks for edge in block)


# -------------------------------------------------------------------------------- the order


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(3, 400),
    length=st.integers(1, 30),
    epoch=st.integers(0, 5),
    seed=st.integers(0, 2**64),
)
def test_an_epoch_reads_each_window_once(size: int, length: int, epoch: int, seed: int) -> None:
    if size < length + 1:
        return
    shard = Shard(np.zeros(size, dtype=np.uint8), 0, length, (seed, 0))
    starts = np.sort(shard.epoch_starts(epoch))
    assert len(starts) == shard.num_windows >= 1
    assert starts[0] >= 0
    assert starts[-1] + length + 1 <= size  # the last target is inside the shard
    assert (np.diff(starts) == length).all()  # each byte is predicted once at most
    predicted = shard.num_windows * length
    assert predicted > size - 1 - 2 * length  # and fewer than two windows are left out


def test_a_stream_is_its_epochs_one_after_another(book: Path) -> None:
    shard = prepared(book, workers=7, seed=3).shards[2]
    expected = np.concatenate([shard.epoch_starts(epoch).copy() for epoch in range(4)])
    got = torch.cat([shard.sequences(first, first + 5) for first in range(0, 3 * 161, 5)])
    windows = expected[: len(got), None] + np.arange(17)
    assert shard.num_windows > 5
    assert len(got) > 2 * shard.num_windows  # two ends of an epoch inside a batch
    assert np.array_equal(got.numpy(), shard.text[windows])


def test_a_batch_larger_than_the_shard_runs_over_several_epochs(tmp_path: Path) -> None:
    shard = Shard(np.arange(60, dtype=np.uint8), 0, 16, (0, 0))
    rows = shard.sequences(0, 11)
    assert shard.num_windows == 2
    assert rows.shape == (11, 17)
    for pair in torch.split(rows[:10], 2):
        assert abs(int(pair[0, 0] - pair[1, 0])) == 16  # both windows, in either order


def test_epochs_differ_in_order_and_in_offset(book: Path) -> None:
    shard = prepared(book, workers=2).shards[0]
    epochs = [shard.epoch_starts(epoch).copy() for epoch in range(6)]
    assert len({int(starts.min()) for starts in epochs}) > 1
    orders = {tuple(np.argsort(starts)) for starts in epochs}
    assert len(orders) == 6
    assert not np.array_equal(np.sort(epochs[0]), epochs[0])


def test_batches_are_a_pure_function_of_worker_and_step(book: Path) -> None:
    wanted = [(worker, step) for worker in range(3) for step in (0, 1, 90, 700)]
    first, second = prepared(book), prepared(book)
    forward = {key: first.train_batch(*key) for key in wanted}
    torch.manual_seed(123)
    np.random.seed(5)
    backward = {key: second.train_batch(*key) for key in reversed(wanted)}
    assert all(torch.equal(forward[key], backward[key]) for key in wanted)
    assert all(torch.equal(forward[key], first.train_batch(*key)) for key in wanted)


def test_seeds_and_workers_have_streams_of_their_own(book: Path) -> None:
    task, other = prepared(book, seed=0), prepared(book, seed=1)
    assert not torch.equal(task.train_batch(0, 0), other.train_batch(0, 0))
    assert not torch.equal(task.train_batch(0, 0), task.train_batch(1, 0))
    first, second = task.shards[0], task.shards[1]
    size = min(first.num_windows, second.num_windows)
    assert not np.array_equal(first.epoch_starts(0)[:size], second.epoch_starts(0)[:size])
    assert torch.equal(task.eval_batches()[0], other.eval_batches()[0])


def test_neither_reading_nor_drawing_touches_the_global_generators(book: Path) -> None:
    before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    task = prepared(book)
    task.train_batch(0, 0)
    task.eval_batches()
    assert torch.equal(before, torch.random.get_rng_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])  # type: ignore[index]


# -------------------------------------------------------------------------- the task protocol


class Bigram(nn.Module):
    """Logits by table, so that the loss is known in closed form."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids]


def test_loss_is_the_mean_cross_entropy_in_nats(book: Path) -> None:
    task = prepared(book)
    batch = task.train_batch(0, 0)
    uniform = task.loss(Bigram(torch.zeros(256, 256)), batch)
    assert uniform.item() == pytest.approx(math.log(256), rel=1e-6)
    table = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    rows = [
        torch.log_softmax(table[x], 0)[y].item()
        for sequence in batch.tolist()
        for x, y in pairwise(sequence)
    ]
    assert task.loss(Bigram(table), batch).item() == pytest.approx(-np.mean(rows), rel=1e-5)


def test_predictions_are_single_precision_logits_of_the_inputs(book: Path) -> None:
    task = prepared(book)
    model = Bigram(torch.randn(256, 256, dtype=torch.float64))
    probe = task.probe_batch()
    logits = task.predict(model, probe)
    assert probe.shape == (2, 17)
    assert logits.shape == (2, 16, 256)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, model.table[probe[:, :-1]].float())


def test_protocols_and_counts(book: Path) -> None:
    task = make(book)
    for protocol in (Prepares, Predicts, Counts):
        assert isinstance(task, protocol)
    assert not isinstance(task, Scores)
    assert (task.unit, task.units_per_batch) == ("tokens", 64)


@pytest.mark.parametrize("sequences", [1, 7, 12, 33, 64, 66])
def test_evaluation_batches_have_equal_weight(book: Path, sequences: int) -> None:
    batches = make(book, eval_sequences=sequences, probe_sequences=1).eval_batches()
    assert len({len(batch) for batch in batches}) == 1
    assert len(batches[0]) <= 32
    together = torch.cat(batches)
    assert together.shape == (sequences, 17)
    assert together.dtype == torch.int64


def test_probe_sequences_are_spread_over_the_evaluation_set(book: Path) -> None:
    task = make(book, probe_sequences=3)
    assert torch.equal(task.probe_batch(), torch.cat(task.eval_batches())[[0, 4, 8]])


def test_models_by_name() -> None:
    assert TextTask().shape == SHAPES["llama-tiny"]
    assert TextTask(model="llama-nano").build().shape == SHAPES["llama-nano"]
    with torch.device("meta"):
        model = TextTask(model="llama-1.5b").build()
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_498_482_688


def test_packed_texts_are_unpacked(book: Path, tmp_path: Path) -> None:
    plain = book.read_bytes()
    for name, content in (("a.xz", lzma.compress(plain)), ("a.gz", gzip.compress(plain))):
        (tmp_path / name).write_bytes(content)
        unpacked = prepared(tmp_path / name)
        assert torch.equal(unpacked.train_batch(1, 2), prepared(book).train_batch(1, 2))


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"a" * 4000)
    first = prepared(path).train_batch(0, 0)
    path.write_bytes(b"b" * 4001)
    assert not torch.equal(first, prepared(path).train_batch(0, 0))


# -------------------------------------------------------------------------- what is refused


def test_nothing_is_read_at_construction(tmp_path: Path) -> None:
    path = tmp_path / "broken.xz"
    path.write_bytes(b"not packed at all")
    task = make(path)
    with pytest.raises(ConfigError, match=r"broken\.xz' cannot be unpacked: "):
        task.eval_batches()


def test_truncated_archives_are_refused(book: Path, tmp_path: Path) -> None:
    for suffix, pack in ((".xz", lzma.compress), (".gz", gzip.compress)):
        path = tmp_path / f"short{suffix}"
        path.write_bytes(pack(book.read_bytes())[:-200])
        with pytest.raises(ConfigError, match="cannot be unpacked"):
            make(path).eval_batches()


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown model 'lama-tiny'; did you mean 'llama-tiny'"):
        TextTask(model="lama-tiny")


def test_paths_that_cannot_be_read_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'nowhere\.txt': no such file; give 'shakespeare' or"):
        TextTask(data="nowhere.txt")
    with pytest.raises(ConfigError, match="a folder"):
        TextTask(data=tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match=r"empty\.txt' is empty"):
        TextTask(data=tmp_path / "empty.txt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"sequence_length": 0}, "sequence_length must be at least 1, got 0"),
        ({"sequence_length": 65}, "sequence_length 65 is beyond the model's 64 positions"),
        ({"eval_sequences": 0}, "eval_sequences must be at least 1, got 0"),
        ({"probe_sequences": 13}, r"probe_sequences \(13\) are taken from eval_sequences \(12\)"),
    ],
)
def test_sizes_out_of_range_are_refused(book: Path, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(book, **changes)


def test_a_vocabulary_smaller_than_bytes_is_refused() -> None:
    small = LlamaShape(vocab_size=255, dim=8, num_layers=1, num_heads=1, num_kv_heads=1, ffn_dim=8)
    with pytest.raises(ConfigError, match="vocabulary of at least 256, got 255"):
        TextTask(model=small)


def test_more_workers_than_data_are_refused_with_what_would_fit(book: Path) -> None:
    task = make(book)
    bytes_left = len(task.split.training)
    fitting = bytes_left // 17
    with pytest.raises(ConfigError, match=f"use at most {fitting} workers or sequence_length"):
        task.prepare(num_workers=fitting + 1, seed=0, num_steps=1)
    task.prepare(num_workers=fitting, seed=0, num_steps=1)
    assert task.train_batch(fitting - 1, 5).shape == (4, 17)
    with pytest.raises(ConfigError, match="num_workers must be at least 1, got 0"):
        task.prepare(num_workers=0, seed=0, num_steps=1)


def test_too_short_a_text_is_refused_with_what_it_would_take(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"to be or not to be")
    with pytest.raises(ConfigError, match=r"has 18 bytes, too few for 12 .* at least 816 bytes"):
        make(path).prepare(num_workers=1, seed=0, num_steps=1)
    path.write_bytes(b"x" * 816)
    prepared(path, workers=1)


def test_batches_before_preparation_are_refused(book: Path) -> None:
    with pytest.raises(ConfigError, match=r"call prepare\(\)"):
        make(book).train_batch(0, 0)
