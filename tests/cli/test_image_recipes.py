"""Image recipes on the command line: training, comparing, planning and looking into what came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gossamer.config import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
SHORT = ("--set", "train.rounds=2", "--set", "method.inner_steps=4", "--set", "train.workers=2")


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return RECIPES / "digits.toml"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_here_is_understood(path: Path) -> None:
    assert load_recipe(path).train.rounds >= 1


def test_digits_are_trained_compared_and_reported(gossamer: Any, digits: Path) -> None:
    trained = gossamer("train", digits, *SHORT, "--set", "method.alpha=0.5", "--json")
    assert trained.code == 0, trained.err
    summary = trained.json
    assert 0 < summary["eval_accuracy"] <= 1
    assert summary["eval_perplexity"] is None
    assert summary["samples"] == 2 * 2 * 4 * 4
    compared = gossamer(
        "compare", digits, *SHORT, "--method", "local_sgd", "--method", "diloco", "--out", "both"
    )
    assert compared.code == 0, compared.err
    assert "accuracy" in compared.out and "perplexity" not in compared.out
    assert gossamer("report", "both", "--no-plots").code == 0
    refused = gossamer("sample", "both/local_sgd")
    assert refused.code == 2
    assert "holds a model for images; only text is sampled" in refused.error_line


def test_image_recipes_are_planned(gossamer: Any, digits: Path) -> None:
    planned = gossamer(
        "plan", "time", digits, *SHORT, "--method", "local_sgd", "--set", "task.model=resnet18",
        "--json",
    )  # fmt: skip
    assert planned.code == 0, planned.err
    (row,) = planned.json["rows"]
    assert row["parameters"] > 11_000_000
    assert row["bytes_sent"] > 2 * 4 * 11_000_000


def test_sensitivity_of_a_run_uses_the_statistics_that_it_has_left(
    gossamer: Any, digits: Path
) -> None:
    """With batch normalisation: the JS distance of the ranking is the one that the run measured."""
    Path("r.toml").write_text(digits.read_text().replace("alpha = 0.1", ""))
    changes = ("task.model=resnet8", "method.name=GlobalM1", "train.learning_rate=0.2")
    options = [word for change in changes for word in ("--set", change)]
    trained = gossamer("train", "r.toml", *SHORT, *options, "--out", "run", "--json")
    assert trained.code == 0, trained.err
    ranked = gossamer("sensitivity", "run", "--json")
    assert ranked.code == 0, ranked.err
    assert trained.json["js_distance"] > 0.05
    assert ranked.json["baseline_js"] == pytest.approx(trained.json["js_distance"], rel=1e-3)
