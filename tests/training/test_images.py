"""Image classification as a task: batches, epochs, models, statistics, metrics, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from gossamer.config import build_recipe, dump_recipe, prepare
from gossamer.deployment import _about_task, job_of
from gossamer.errors import ConfigError
from gossamer.methods import DiLoCo, LocalSGD
from gossamer.seeding import torch_stream
from gossamer.sim.simulate import simulate
from gossamer.training import images as images_module
from gossamer.training.buffers import BufferLayout
from gossamer.training.engine import Engine
from gossamer.training.image_files import LabelledImages, find_images
from gossamer.training.image_models import RESNETS, ConvNet, build_model
from gossamer.training.images import ImageTask, PixelSource
from gossamer.training.settings import Training
from gossamer.training.task import Counts, Predicts, Prepares, Scores, Task

Pairs = list[tuple[Any, Any]]


def pictures(count: int = 60, size: int = 6, classes: int = 3, seed: int = 0) -> TensorDataset:
    """Noise, whose first pixel is its class and whose second is its index."""
    source = torch_stream(seed, "pictures")
    images = torch.randn(count, 1, size, size, generator=source)
    labels = torch.arange(count) % classes
    images[:, 0, 0, 0], images[:, 0, 0, 1] = labels.float(), torch.arange(count).float()
    return TensorDataset(images, labels)


def task_of(count: int = 60, **changes: Any) -> ImageTask:
    given: dict[str, Any] = {"batch_size": 4, "probe_samples": 5}
    return ImageTask(train=pictures(count), test=pictures(23, seed=1), **(given | changes))


def prepared(workers: int = 3, seed: int = 0, count: int = 60, **changes: Any) -> ImageTask:
    task = task_of(count, **changes)
    task.prepare(num_workers=workers, seed=seed, num_steps=10)
    return task


def indices(batch: Any) -> list[int]:
    """Which images are in a batch, read from the images themselves."""
    return [int(value) for value in batch.images[:, 0, 0, 1]]


# ------------------------------------------------------------------------------------------ batches


@given(
    count=st.integers(12, 90),
    workers=st.integers(1, 3),
    batch_size=st.integers(1, 4),
    seed=st.integers(0, 2**40),
    split=st.sampled_from(["iid", "dirichlet"]),
)
@settings(max_examples=25, deadline=None)
def test_an_epoch_reads_every_image_of_every_worker_once(
    count: int, workers: int, batch_size: int, seed: int, split: str
) -> None:
    task = prepared(workers, seed, count, batch_size=batch_size, split=split, concentration=5.0)
    seen: list[int] = []
    for worker in range(workers):
        size = len(task.shards[worker])
        steps = math.lcm(size, batch_size) // batch_size  # whole epochs
        read = [i for step in range(steps) for i in indices(task.train_batch(worker, step))]
        epochs = [read[first : first + size] for first in range(0, len(read), size)]
        for epoch in epochs:
            assert sorted(epoch) == sorted(task.shards[worker].tolist())
        seen += epochs[0]
    assert sorted(seen) == list(range(count))


def test_epochs_differ_in_order_and_batches_are_pure() -> None:
    task, again = prepared(), prepared()
    read = {s: indices(task.train_batch(1, s)) for s in range(15)}
    for step in (14, 3, 9, 0, 14):
        assert indices(again.train_batch(1, step)) == read[step]
    first, second = ([i for s in range(5 * e, 5 * e + 5) for i in read[s]] for e in (0, 1))
    assert sorted(first) == sorted(second) and first != second
    assert read[0] != indices(prepared(seed=1).train_batch(1, 0))


def test_workers_orders_have_nothing_in_common() -> None:
    task = prepared(workers=2, count=60)
    places = []
    for worker in range(2):
        shard = task.shards[worker].tolist()
        read = [i for step in range(7) for i in indices(task.train_batch(worker, step))]
        places.append([shard.index(i) for i in read])
    assert places[0] != places[1]


def test_a_task_that_is_prepared_again_forgets_the_earlier_run() -> None:
    task = prepared(seed=0)
    task.train_batch(1, 0)
    task.prepare(num_workers=3, seed=9, num_steps=10)
    assert indices(task.train_batch(1, 0)) == indices(prepared(seed=9).train_batch(1, 0))


def test_every_worker_can_fill_a_batch() -> None:
    for seed in range(20):
        task = prepared(workers=3, seed=seed, split="dirichlet", concentration=0.3)
        assert min(len(shard) for shard in task.shards) >= task.batch_size


def test_labels_belong_to_their_images() -> None:
    task = prepared(split="dirichlet")
    for batch in (task.train_batch(2, 7), task.probe_batch(), *task.eval_batches()):
        assert batch.images[:, 0, 0, 0].tolist() == batch.labels.tolist()
        assert batch.images.dtype == torch.float32 and batch.labels.dtype == torch.int64


def test_dirichlet_shards_differ_in_their_classes_and_iid_ones_do_not() -> None:
    def spread(split: str) -> float:
        task = ImageTask.from_files("digits", split=split, concentration=0.1)  # type: ignore[arg-type]
        task.prepare(num_workers=4, seed=0, num_steps=1)
        counts = [task.train.labels[torch.from_numpy(s)].bincount(minlength=10)
                  for s in task.shards]  # fmt: skip
        shares = torch.stack([c / c.sum() for c in counts])
        return float(shares.std(0).mean())

    assert spread("iid") < 0.02
    assert spread("dirichlet") > 0.1


# --------------------------------------------------------------------------- evaluation and metrics


def test_evaluation_is_the_mean_over_all_held_out_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_module, "EVAL_BATCH_MAX", 7)
    task = task_of()
    engine = Engine(task, Training(), seed=0, total_steps=1, real=True)
    rows, replicas = engine.new_replicas(1)
    report = engine.evaluate(rows[0], replicas[0].buffers, replicas[0].counters)
    sizes = [len(batch.labels) for batch in task.eval_batches()]
    assert (len(sizes), sum(sizes), len(set(sizes)) > 1) == (4, 23, True)
    held_out = pictures(23, seed=1)
    logits = engine.model(held_out.tensors[0]).detach()
    loss = F.cross_entropy(logits, held_out.tensors[1])
    right = logits.argmax(1) == held_out.tensors[1]
    assert report.loss == pytest.approx(float(loss), rel=1e-6)
    assert report.metrics == {"accuracy": pytest.approx(float(right.double().mean()), rel=1e-12)}


def test_probes_are_spread_over_the_held_out_images() -> None:
    assert len(task_of(probe_samples=None).probe_batch().labels) == 23
    assert indices(task_of(probe_samples=5).probe_batch()) == [0, 4, 9, 13, 18]


def test_pixels_are_standardised_by_the_training_images() -> None:
    rng = np.random.default_rng(0)
    pixels = torch.from_numpy(rng.integers(0, 256, (50, 3, 4, 5), dtype=np.uint8))
    pixels[:, 2] = 9  # of one colour
    source = PixelSource(LabelledImages(pixels, torch.zeros(50, dtype=torch.int64)), pixels)
    taken = source.take(torch.arange(50)).double()
    means, deviations = taken.mean((0, 2, 3)), taken.std((0, 2, 3), correction=0)
    torch.testing.assert_close(means, torch.zeros(3).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(deviations, torch.tensor([1.0, 1, 0]).double(), atol=1e-6, rtol=0)
    darker = PixelSource(LabelledImages(pixels // 2, torch.zeros(50)), pixels)
    assert darker.take(torch.arange(50))[:, :2].mean() < -0.5  # not by its own
    train, test = find_images("digits").load()
    expected = (test.pixels.double() - train.pixels.double().mean()) / train.pixels.double().std()
    got = ImageTask.from_files("digits").test.take(torch.arange(len(test.labels)))
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------------------- models


def test_resnet18_has_the_parameters_of_the_published_shape() -> None:
    """3x3 stem, stages of 64 to 512 with two blocks, projections, head: counted by hand."""
    with torch.device("meta"):
        model = build_model("resnet18", (3, 32, 32), 10, "batch")
    expected = 3 * 64 * 9 + 2 * 64
    previous = 64
    for width in (64, 128, 256, 512):
        expected += 9 * (previous * width + 3 * width * width) + 4 * 2 * width
        if width != previous:
            expected += previous * width + 2 * width
        previous = width
    expected += 512 * 10 + 10
    assert sum(p.numel() for p in model.parameters()) == expected == 11_173_962


@pytest.mark.parametrize(("name", "last"), [("resnet8", 8), ("resnet18", 4)])
def test_every_stage_but_the_first_halves_the_image(name: str, last: int) -> None:
    with torch.device("meta"):
        model = build_model(name, (3, 32, 32), 10, "group")
        shapes: list[torch.Size] = []
        model.stages.register_forward_hook(lambda m, i, o: shapes.append(o.shape))
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 10)
    assert shapes == [(2, RESNETS[name].widths[-1], last, last)]


@pytest.mark.parametrize("size", [(1, 1), (4, 4), (8, 8), (28, 28), (9, 13)])
def test_the_convolutional_network_fits_any_image(size: tuple[int, int]) -> None:
    model = ConvNet((2, *size), 5)
    assert model(torch.zeros(3, 2, *size)).shape == (3, 5)
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == 2


def test_group_normalisation_leaves_no_statistics_to_agree_on() -> None:
    for norm, floats in (("batch", True), ("group", False)):
        model = build_model("resnet8", (1, 8, 8), 10, norm)  # type: ignore[arg-type]
        assert (BufferLayout.of(model).num_floats > 0) is floats


def test_batch_statistics_are_averaged_and_never_reach_the_outer_optimizer() -> None:
    """One round: the averaged model's statistics are the mean of what each worker's would be."""
    task = task_of(model="resnet8")
    training = Training(optimizer="sgd", learning_rate=1e-6, weight_decay=0, workers=2, rounds=1)
    result = simulate(method=DiLoCo(inner_steps=3), task=task, training=training)
    task.prepare(num_workers=2, seed=0, num_steps=3)
    with torch.random.fork_rng():
        engine = Engine(task, training, seed=0, total_steps=3, real=True)
    name = "stem_norm.running_mean"
    expected = []
    for worker in range(2):
        running = torch.zeros(16)
        for step in range(3):
            hidden = engine.model.stem(task.train_batch(worker, step).images)
            running = 0.9 * running + 0.1 * hidden.mean((0, 2, 3)).detach()
        expected.append(running)
    torch.testing.assert_close(
        result.averaged[name], torch.stack(expected).mean(0), atol=1e-5, rtol=1e-4
    )
    assert result.averaged["stem_norm.num_batches_tracked"] == 3
    assert (result.averaged["stem_norm.running_var"] > 0).all()


# ---------------------------------------------------------------------------------- whole trainings


def test_the_digits_are_learned_and_the_summary_says_how_well() -> None:
    task = ImageTask.from_files("digits", batch_size=8)
    for protocol in (Task, Counts, Predicts, Prepares, Scores):
        assert isinstance(task, protocol)
    training = Training(
        optimizer="sgd", learning_rate=0.1, momentum=0.9, weight_decay=0, workers=2, rounds=3
    )
    summary = simulate(method=LocalSGD(inner_steps=80), task=task, training=training).summary
    assert summary["eval_accuracy"] > 0.9
    assert (summary["unit"], summary["samples"]) == ("samples", 2 * 3 * 80 * 8)
    assert summary["eval_perplexity"] is None and summary["tokens"] is None
    assert summary["eval_accuracy"] * 364 == pytest.approx(round(summary["eval_accuracy"] * 364))


def test_a_stopped_training_on_images_goes_on_bit_for_bit(tmp_path: Path) -> None:
    task = ImageTask.from_files("digits", batch_size=4, split="dirichlet")
    training = Training(workers=2, rounds=4)
    run = {"method": LocalSGD(inner_steps=5), "task": task, "training": training}
    whole = simulate(**run, checkpoint_every=2, checkpoint_dir=tmp_path)
    task.prepare(num_workers=2, seed=5, num_steps=1)  # it remembers nothing of the run
    resumed = simulate(**run, resume=sorted(tmp_path.iterdir())[0])
    assert torch.equal(resumed.parameters, whole.parameters)


def test_without_numerics_images_are_only_counted() -> None:
    task = task_of(model="resnet18")
    result = simulate(method=LocalSGD(inner_steps=2), task=task, workers=2, rounds=1,
                      numerics="none")  # fmt: skip
    assert result.parameters.is_meta


# ---------------------------------------------------------------------------------------- data sets


class Listed(Dataset[tuple[Any, Any]]):
    """Pairs by index; counts how often each is read."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs, self.reads = pairs, 0

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.reads += 1
        return self.pairs[index]


def alike(make: Any) -> Pairs:
    """The same three images of two classes, in some form."""
    raw = np.random.default_rng(3).integers(0, 256, (3, 2, 4, 5), dtype=np.uint8)
    return [(make(image), label) for image, label in zip(raw, (0, 1, 1), strict=True)]


@pytest.mark.parametrize(
    "make",
    [
        torch.from_numpy,
        lambda image: torch.from_numpy(image).float() / 255,
        lambda image: image.transpose(1, 2, 0),
        lambda image: (image.transpose(1, 2, 0) / 255.0).astype(np.float64),
    ],
    ids=["uint8 tensor", "float tensor", "uint8 array", "float64 array"],
)
def test_images_of_every_form_are_the_same_batches(make: Any) -> None:
    reference = Listed(alike(torch.from_numpy))
    data = Listed(alike(make))
    task, other = (
        ImageTask(train=d, test=d, batch_size=3, probe_samples=1) for d in (data, reference)
    )
    for each in (task, other):
        each.prepare(num_workers=1, seed=0, num_steps=1)
    assert task.train.shape == (2, 4, 5)
    torch.testing.assert_close(task.train_batch(0, 0).images, other.train_batch(0, 0).images)
    raw = alike(torch.from_numpy)
    chosen = task.batch_indices(0, 0)
    expected = torch.stack([raw[int(i)][0] for i in chosen]).float() / 255
    torch.testing.assert_close(task.train_batch(0, 0).images, expected)


def test_grey_pictures_and_labels_of_other_kinds_are_understood() -> None:
    image = np.zeros((4, 4), dtype=np.uint8)
    labels = (np.int64(1), torch.tensor(0), 2)
    task = ImageTask(
        train=Listed([(image, label) for label in labels]),
        test=Listed([(torch.zeros(4, 4), 0)]),
        batch_size=1,
        probe_samples=1,
    )
    assert task.train.shape == (1, 4, 4)
    assert (task.train.labels.tolist(), task.num_classes) == ([1, 0, 2], 3)


def test_targets_spare_reading_the_images() -> None:
    data = Listed(alike(torch.from_numpy))
    data.targets = [0, 1, 1]  # type: ignore[attr-defined]
    task = ImageTask(train=data, test=Listed(alike(torch.from_numpy)), probe_samples=1)
    assert data.reads == 1
    assert task.train.labels.tolist() == [0, 1, 1]


class Endless(IterableDataset[Any]):
    """Has no length."""

    def __iter__(self) -> Any:
        return iter(())


ZERO = torch.zeros(1, 4, 4)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "train: the data set is empty"),
        ([ZERO], "train: item 0 is Tensor, not"),
        ([("picture", 0)], "train: image 0 is str, and no array"),
        ([(torch.zeros(2, 1, 4, 4), 0)], "train: image 0 has 4 dimensions"),
        ([(ZERO, 0.5)], "train: classes must be whole numbers"),
        ([(ZERO, -1)], "train: classes must be whole numbers from 0"),
        ([(ZERO, 0), (ZERO, 0)], "all of one class"),
        ([(torch.zeros(1, 4, 5), 0), (ZERO, 1)], r"training images are \[1, 4, 5\], held-out"),
    ],
)
def test_data_sets_of_something_else_are_refused(pairs: Pairs, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ImageTask(train=Listed(pairs), test=Listed([(ZERO, 0)]), probe_samples=1)


def test_images_of_several_sizes_are_refused_where_they_are_read() -> None:
    pairs = [(ZERO, 0), (torch.zeros(1, 4, 5), 1)]
    task = ImageTask(train=Listed(pairs), test=Listed([(ZERO, 0)]), batch_size=1, probe_samples=1)
    task.prepare(num_workers=1, seed=0, num_steps=2)
    with pytest.raises(ConfigError, match=r"image 1 is \[1, 4, 5\] and the first \[1, 4, 4\]"):
        for step in range(2):
            task.train_batch(0, step)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": Endless()}, "train: a data set with a length"),
        ({"model": "cnnn"}, "unknown model 'cnnn'; did you mean 'cnn'"),
        ({"split": "random"}, 'split must be "iid" or "dirichlet"'),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 1, "model": "resnet8"}, 'norm = "batch" needs batch_size 2 or more'),
        ({"probe_samples": 24}, "probe_samples must be from 1 to 23"),
    ],
)
def test_impossible_tasks_are_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"train": pictures(), "test": pictures(23), "batch_size": 4}
    with pytest.raises(ConfigError, match=message):
        ImageTask(**(given | changes))


def test_too_many_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match="60 training images are too few for 16 workers with"):
        prepared(workers=16)
    with pytest.raises(ConfigError, match="call prepare"):
        task_of().train_batch(0, 0)


# ------------------------------------------------------------------------------------------ recipes


def recipe(**task: Any) -> Any:
    tables = {
        "task": {"name": "images", **task},
        "train": {"workers": 2, "batch_size": 6},
        "method": {"name": "local_sgd"},
    }
    return build_recipe(tables, base=Path.cwd())


def test_a_recipe_makes_the_task(tmp_path: Path) -> None:
    read = recipe(model="resnet8", norm="group", split="dirichlet", concentration=0.3)
    task = prepare(read).task
    assert isinstance(task, ImageTask)
    assert (task.model, task.norm, task.split, task.batch_size) == (
        "resnet8", "group", "dirichlet", 6)  # fmt: skip
    assert sum(len(shard) for shard in task.shards) == 1433
    assert 'data = "digits"' in dump_recipe(read)


def test_folders_are_looked_for_beside_the_recipe_and_known_by_their_content(
    tmp_path: Path,
) -> None:
    files = find_images("digits").paths
    folder = tmp_path / "mine"
    folder.mkdir()
    for path in files:
        (folder / path.name).write_bytes(path.read_bytes())
    tables = {"task": {"name": "images", "data": "mine"}, "method": {"name": "local_sgd"}}
    read = build_recipe(tables, base=tmp_path)
    assert read.task.data == str(folder)
    assert [path.name for path in read.task.files()["data"]] == [path.name for path in files]
    assert recipe().task.files() == {}
    known = job_of(read).about_task["data"]
    assert known.startswith("sha256:") and str(tmp_path) not in known
    (folder / files[1].name).write_bytes(files[3].read_bytes())
    assert job_of(recipe()).about_task["data"] == "digits"
    assert _about_task(read)["data"] != known


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"data": "nowhere"}, "task.data: no folder 'nowhere'"),
        ({"model": "resnet"}, "task: unknown model 'resnet'; did you mean 'resnet8'"),
        ({"norm": "layer"}, "task.norm: input should be 'batch' or 'group'"),
        ({"norm": "group"}, "task.norm: 'group' would be ignored, as the model cnn"),
        ({"concentration": 0.1}, "task.concentration: 0.1 would be ignored, as split is 'iid'"),
        ({"concentration": 0, "split": "dirichlet"}, "task.concentration: input should be greater"),
        ({"probe_samples": 1000}, "task: probe_samples must be from 1 to 364"),
        ({"eval_sequences": 4}, "task.eval_sequences: unknown setting"),
    ],
)
def test_impossible_recipes_are_refused(task: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(recipe(**task))
    assert message in str(caught.value)
