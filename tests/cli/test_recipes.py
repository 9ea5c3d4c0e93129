"""Recipes: what is read is what was written, and what is wrong is named."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.config import (
    Recipe,
    RunSettings,
    TextSettings,
    apply_overrides,
    build_recipe,
    dump_recipe,
    first_difference,
    load_recipe,
    parse_value,
    prepare,
    variant,
)
from gossamer.errors import ConfigError
from gossamer.measure.settings import Measure
from gossamer.methods import METHODS, PRESETS, DiLoCo, FactoredGossip, Method
from gossamer.methods.base import training_of
from gossamer.settings import Settings
from gossamer.sim.compute import Timing
from gossamer.sim.faults import CrashAt, Faults, Outage, Partition
from gossamer.sim.network import Network, WorkerLink
from gossamer.training.settings import Training

HERE = Path.cwd()


def recipe(**sections: Any) -> Recipe:
    return build_recipe({"method": {"name": "diloco"}, **sections}, base=HERE)


# ----------------------------------------------------------------------------- reading and writing

positive = st.floats(1e-6, 1e6)
rates = st.floats(0.125, 1e6)
fractions = st.floats(0, 0.999)
trainings = st.builds(
    Training,
    workers=st.integers(1, 64),
    rounds=st.integers(1, 1000),
    learning_rate=st.floats(1e-6, 1.0),
    optimizer=st.sampled_from(["adamw", "sgd"]),
    schedule_steps=st.none() | st.integers(1, 10**6),
)
networks = st.builds(
    Network,
    bandwidth=rates,
    upload=st.none() | rates,
    latency=st.floats(0, 10),
    failure_probability=fractions,
    workers=st.lists(st.builds(WorkerLink, worker=st.integers(0, 7), bandwidth=rates), max_size=1),
)
faults = st.builds(
    Faults,
    outages=st.lists(
        st.builds(Outage, worker=st.integers(0, 7), start=positive, duration=positive), max_size=2
    ),
    crashes=st.lists(
        st.builds(
            CrashAt, worker=st.integers(0, 7), start=positive, return_after=st.none() | positive
        ),
        max_size=2,
    ),
    partitions=st.just(()) | st.just((Partition(groups=((0, 1), (2,)), start=1, duration=2),)),
    crash_rate=fractions,
)
methods = st.one_of(
    st.builds(DiLoCo, inner_steps=st.integers(1, 500), outer_momentum=fractions),
    st.builds(
        FactoredGossip,
        mix2=st.just("pair"),
        mix2_subset=st.none() | st.just(["embedding", "layers.*.norm"]),
    ),
    *(st.builds(kind) for kind in METHODS.values()),
)
recipes = st.builds(
    Recipe,
    seed=st.integers(0, 2**63 - 1),
    task=st.builds(TextSettings, eval_sequences=st.integers(1, 100)),
    train=trainings,
    method=methods,
    network=networks,
    timing=st.builds(Timing, parameters=st.none() | st.floats(1, 1e12), step_time=positive),
    faults=faults,
    measure=st.builds(Measure, every=st.integers(0, 100)),
    run=st.builds(RunSettings, checkpoint_every=st.integers(0, 9), threads=st.none() | st.just(2)),
).filter(lambda recipe: recipe.train.optimizer == "sgd" or not recipe.method.makes_own_steps)


@given(recipes)
def test_a_written_recipe_reads_back_equal(original: Recipe) -> None:
    """What is written is the [train] that is in force with the method."""
    train = training_of(original.method, original.train)
    original = original.model_copy(update={"train": train})
    again = build_recipe(tomllib.loads(dump_recipe(original)), base=HERE)
    assert again == original
    assert first_difference(original, again) is None


def test_no_setting_is_lost_in_toml_because_it_is_none() -> None:
    """TOML has no null: None is written by leaving out, so it must be what left out means."""

    def settings_below(kind: type[Settings]) -> list[type[Settings]]:
        return [kind, *(k for below in kind.__subclasses__() for k in settings_below(below))]

    for kind in settings_below(Settings):
        for name, field in kind.model_fields.items():
            if type(None) in getattr(field.annotation, "__args__", ()):
                assert field.default is None, f"{kind.__name__}.{name}"


def test_units_and_presets_are_understood() -> None:
    read = recipe(
        method={"name": "GlobalM1LocalM2", "inner_steps": 7},
        network={"bandwidth": "100Mbit/s", "latency": "30 ms"},
        timing={"parameters": "1.5B", "step_time": "2.355s", "payload_dtype": "bf16"},
    )
    assert read.network.bandwidth == 12.5e6
    assert read.network.latency == 0.03
    assert read.timing.parameters == 1.5e9
    assert read.method == FactoredGossip(mix1="global", mix2="pair", inner_steps=7)
    written = recipe(method={"name": "GlobalM1LocalM2", "mix1": "pair"})  # before the preset's
    assert written.method == FactoredGossip(mix1="pair", mix2="pair")


def test_data_is_looked_for_beside_the_recipe_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, elsewhere = tmp_path / "beside", tmp_path / "cwd"
    for place in (beside, elsewhere):
        place.mkdir()
        (place / "text.txt").write_text("x" * 100)
    (elsewhere / "only-here.txt").write_text("x" * 100)
    monkeypatch.chdir(elsewhere)
    text = '[task]\ndata = "{}"\n[method]\nname = "diloco"\n'
    (beside / "r.toml").write_text(text.format("text.txt"))
    (beside / "s.toml").write_text(text.format("only-here.txt"))
    assert load_recipe(beside / "r.toml").task.data == str(beside / "text.txt")
    assert load_recipe(beside / "s.toml").task.data == str(elsewhere / "only-here.txt")


# ------------------------------------------------------------------------------------------ --set


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("4e-3", 4e-3),
        ("true", True),
        ("2.355s", "2.355s"),
        ("100Mbit/s", "100Mbit/s"),
        ("adamw", "adamw"),
        ('"none"', "none"),
        ('["a", "b"]', ["a", "b"]),
        ("{ a = 1 }", {"a": 1}),
        ("2026-01-01", "2026-01-01"),
        ("a\nb = 1", "a\nb = 1"),
        ("1\nb = 1", "1\nb = 1"),
        ("", ""),
    ],
)
def test_override_values_are_toml_or_plain_text(text: str, value: object) -> None:
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_overrides_reach_into_tables_and_leave_the_original_alone() -> None:
    before = {"train": {"workers": 8}, "seed": 1}
    after = apply_overrides(before, ["train.workers=4", "network.latency=1s", "seed=2"])
    assert after == {"train": {"workers": 4}, "seed": 2, "network": {"latency": "1s"}}
    assert before == {"train": {"workers": 8}, "seed": 1}


@pytest.mark.parametrize("text", ["workers", "=3", ".a=3", "train..x=1", "seed.x=1"])
def test_bad_overrides_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        apply_overrides({"seed": 1}, [text])


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": {"nam": "text"}}, r"^task.nam: unknown setting; did you mean 'task.name'\?$"),
        ({"sed": 1}, r"^sed: unknown setting; did you mean 'seed'\?$"),
        ({"workers": 4}, r"^workers: unknown setting; did you mean 'train.workers'\?$"),
        ({"train": {"latency": 1}}, r"^train.latency: .* did you mean 'network.latency'\?$"),
        ({"train": {"qqq": 1}}, r"^train.qqq: unknown setting; allowed: batch_size, "),
        ({"train": {"workers": 0}}, r"^train.workers: .*greater than or equal to 1; got 0$"),
        ({"train": {"optimizer": "lion"}}, r"^train.optimizer: .*'adamw' or 'sgd'; got 'lion'$"),
        ({"train": 3}, r"^train: a table expected, \[train\]; got 3$"),
        ({"network": {"bandwidth": "fast"}}, r"^network.bandwidth: a data rate expected.*'fast'"),
        (
            {"network": {"workers": [{"worker": 1, "latancy": 1}]}},
            r"^network.workers.0: unknown setting 'latancy'; did you mean 'latency'\?$",
        ),
        ({"network": {"workers": [{}]}}, r"^network.workers.0.worker: field required$"),
        (
            {"network": {"workers": [{"worker": 1, "latency": "soon"}]}},
            r"^network.workers.0.latency: a duration expected.* got 'soon' \(units: [^;]*\)$",
        ),
        (
            {"network": {"workers": {"0": {"worker": 1}}}},
            r"^network.workers: a list expected, .*'0'",
        ),
        ({"network": {"workers": [1]}}, r"^network.workers.0: a table expected, .*; got 1$"),
        (
            {"network": {"workers": [{"worker": 1}] * 2}},
            r"^network.workers: worker 1 is given more than once$",
        ),
        ({"faults": {"slow": [{"worker": -1}]}}, r"^faults.slow.0.worker: .*; got -1$"),
        (
            {"faults": {"partitions": [{"groups": [0], "start": 0, "duration": 1}]}},
            r"^faults.partitions.0.groups.0: a list expected, .*; got 0$",
        ),
        ({"network": {"bandwidth": float("nan")}}, r"^network.bandwidth: [^;]*; got NaN$"),
        ({"train": {"learning_rate": 0}}, r"^train.learning_rate: .*greater than 0; got 0$"),
        ({"train": {"workers": {"a": 1}}}, r"^train.workers: .*integer; got \{'a': 1\}$"),
        ({"train": {"workers": True}}, r"^train.workers: a number expected; got True$"),
        (
            {"train": {"schedule_steps": True}},
            r"^train.schedule_steps: a number expected; got True$",
        ),
        ({"method": {"name": "diloco", "outer_momentum": False}}, r"^method.outer_mom.*got False$"),
        ({"train": {"workers": "x" * 999}}, r"^train.workers: .{1,200}$"),
        (
            {"train": {"momentum": 0.9}},
            r"^train.momentum: 0.9 would be ignored, as optimizer is 'adamw'; only 'sgd' uses it",
        ),
        ({"train": {"optimizer": "sgd", "beta2": 0.99}}, r"^train.beta2: .* only 'adamw'"),
        ({"train": {"schedule": "constant", "schedule_steps": 5}}, r"^train.schedule_steps: 5 "),
        ({"run": {"threads": 10**5}}, r"^run.threads: .*less than or equal to 1024; got 100000$"),
        ({"seed": True}, r"^seed: a number expected; got True$"),
        (
            {"task": {"name": ["text"]}},
            r"^task.name: unknown task \['text'\]; did you mean 'text'\?$",
        ),
        ({"seed": "abc"}, r"^seed: .*integer.*'abc'$"),
        ({"seed": -1}, r"^seed: .*got -1$"),
        ({"task": {"name": "txt"}}, r"^task.name: unknown task 'txt'; did you mean 'text'\?$"),
        ({"task": {"data": "nowhere.txt"}}, r"^task.data: no file 'nowhere.txt'"),
        ({"method": {"name": "dilocco"}}, r"^method.name: .*did you mean 'diloco'\?$"),
        ({"method": {}}, r"^method.name is missing; allowed: data_parallel, .*GlobalM1"),
        ({"method": {"name": "diloco", "mix1": "pair"}}, r"^method.mix1: unknown setting"),
        ({"method": {"name": "diloco", "inner_steps": 0}}, r"^method.inner_steps: .*got 0$"),
        ({"method": {"name": ["a"]}}, r"^method.name: unknown method"),
        ({"run": {"world": "simm"}}, r"^run.world: .*'sim' or 'cluster'; got 'simm'$"),
    ],
)
def test_each_mistake_is_named_with_its_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        recipe(**values)
    assert "\n" not in str(caught.value)


def test_a_recipe_without_method_says_which_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no \[method\].*factored_gossip"):
        build_recipe({}, base=HERE)


def test_toml_errors_name_file_and_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("seed = 1\n[train\n")
    with pytest.raises(ConfigError, match=r"broken.toml.*line 2"):
        load_recipe(broken)
    with pytest.raises(ConfigError, match=r"no recipe .*brken.toml'; did you mean 'broken.toml'"):
        load_recipe(tmp_path / "brken.toml")
    with pytest.raises(ConfigError, match="cannot read recipe"):
        load_recipe(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": {"model": "lama-tiny"}}, r"^task: unknown model.*did you mean 'llama-tiny'\?$"),
        ({"train": {"workers": 10**6}}, "use at most"),
        ({"method": {"name": "factored_gossip", "mix2_subset": ["nothing.*"]}}, "'nothing.*'"),
        ({"network": {"workers": [{"worker": 9}]}}, "network.workers: worker 9 is not in this run"),
        ({"timing": {"speeds": [1.0]}}, "timing.speeds: one per worker"),
        ({"faults": {"crashes": [{"worker": 99, "start": 1}]}}, "faults.crashes: worker 99"),
        (
            {
                "run": {"numerics": "none"},
                "method": {"name": "GlobalM1LocalM2", "js_threshold": 0.1},
            },
            r'run.numerics = "none" does not suit factored_gossip: ',
        ),
    ],
)
def test_what_needs_model_and_data_is_refused_before_a_run(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(recipe(**values))


def test_without_numerics_a_huge_model_is_prepared_at_once() -> None:
    big = recipe(task={"model": "llama-1.5b"}, run={"numerics": "none"})
    assert prepare(big).layout.numel == 1_498_482_688  # the paper's "1.5B", counted by hand


# ---------------------------------------------------------------------------------------- variants


def test_a_variant_carries_over_only_what_methods_share() -> None:
    base = recipe(
        method={"name": "GlobalM1", "inner_steps": 7, "outer_momentum": 0.5, "mix_momentum": True}
    )
    other = variant(base, "GlobalM1LocalM2").method
    assert other == FactoredGossip(
        inner_steps=7, outer_momentum=0.5, mix1="global", mix2="pair", mix_momentum=False
    )
    assert variant(base, "diloco").method == DiLoCo(inner_steps=7, outer_momentum=0.5)
    assert variant(base, "diloco:inner_steps=3").method.inner_steps == 3
    assert variant(base, "diloco").train == base.train


def test_a_variant_of_a_reread_recipe_is_the_same() -> None:
    base = recipe(method={"name": "diloco", "inner_steps": 3})
    again = build_recipe(tomllib.loads(dump_recipe(base)), base=HERE)
    for name in (*METHODS, *PRESETS):
        assert variant(base, name) == variant(again, name)


@pytest.mark.parametrize(
    "written",
    [
        "factored_gossip:mix2=pair,mix2_subset=embedding+layers.0",
        'factored_gossip:mix2=pair,mix2_subset=["embedding", "layers.0"]',
        "factored_gossip:mix2_subset=['embedding','layers.0'],mix2=pair",
    ],
)
def test_lists_in_variants(written: str) -> None:
    chosen = variant(recipe(), written).method
    assert isinstance(chosen, FactoredGossip)
    assert list(chosen.mix2_subset or ()) == ["embedding", "layers.0"]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("dilocco", r"--method 'dilocco': .*did you mean 'diloco'\?"),
        ("", "unknown method ''"),
        ("diloco:inner_step=3", r"unknown setting 'inner_step'; did you mean 'inner_steps'\?"),
        ("diloco:name=local_sgd", "unknown setting 'name'"),
        ("diloco:inner_steps", "NAME:key=value"),
        ("diloco:=3", "NAME:key=value"),
        ("diloco:inner_steps=0", "method.inner_steps"),
    ],
)
def test_bad_variants_are_refused(written: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        variant(recipe(), written)


def test_every_method_and_preset_can_be_a_variant() -> None:
    for name in (*METHODS, *PRESETS):
        assert isinstance(variant(recipe(), name).method, Method)


def test_the_first_difference_is_named() -> None:
    one, other = recipe(), recipe(train={"workers": 3}, run={"threads": 1})
    assert first_difference(one, other) == "train.workers was 8, now 3"
    assert first_difference(one, other, ignore=["train.workers"]) == "run.threads was None, now 1"
    assert first_difference(one, other, ignore=["train.workers", "run.threads"]) is None
