"""Sampling: what is drawn, from which context, and how bytes become text."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.training.generate import draw, generate, stream
from gossamer.training.llama import Llama, LlamaShape

SHAPE = LlamaShape(dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=16, max_length=12)


@pytest.fixture(scope="module")
def model() -> Llama:
    torch.manual_seed(0)
    return Llama(SHAPE)


class Script(Llama):
    """Foretells a fixed text: after n bytes, its n-th byte is certain. Notes what it was shown."""

    def __init__(self, text: bytes) -> None:
        super().__init__(SHAPE)
        self.text, self.seen = text, list[list[int]]()

    def forward(self, tokens: Tensor) -> Tensor:
        logits = torch.zeros(1, tokens.shape[1], 256)
        logits[0, -1, self.text[len(self.seen)]] = 100.0
        self.seen.append(tokens[0].tolist())
        return logits


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_seed_decides_and_the_global_generator_does_not(model: Llama) -> None:
    first = generate(model, "To be", length=40, seed=1)
    torch.manual_seed(77)
    state = torch.random.get_rng_state()
    assert generate(model, "To be", length=40, seed=1) == first
    assert torch.equal(state, torch.random.get_rng_state())
    assert generate(model, "To be", length=40, seed=2) != first


def test_pieces_join_to_the_whole(model: Llama) -> None:
    pieces = list(stream(model, "O", length=30, seed=3))
    assert "".join(pieces) == generate(model, "O", length=30, seed=3)
    assert len(pieces) > 5


def test_characters_of_several_bytes_come_out_whole() -> None:
    text = "né 漢 🙂!"
    pieces = list(stream(Script(text.encode()), "x", length=len(text.encode()), seed=0))
    assert pieces == list(text)


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert generate(Script(b"a\xff\xe2\x82"), "x", length=4, seed=0) == "a��"


def test_the_model_sees_the_last_window_of_the_text() -> None:
    script = Script(b"abcdefgh")
    assert "".join(stream(script, "xyz", length=8, seed=0, window=4)) == "abcdefgh"
    assert script.seen[0] == list(b"xyz")
    assert script.seen[1] == list(b"xyza")
    assert script.seen[2] == list(b"yzab")
    assert script.seen[7] == list(b"defg")


def test_the_window_is_the_models_length_at_most() -> None:
    script = Script(b"a" * 30)
    generate(script, "", length=30, seed=0)
    assert script.seen[0] == list(b"\n")  # an empty prompt starts after a line break
    assert max(len(seen) for seen in script.seen) == 12


def test_temperature_zero_takes_the_likeliest(model: Llama) -> None:
    logits = torch.randn(256, generator=rng())
    for temperature in (0.0, 1e-9, 5e-324):
        assert draw(logits, temperature, None, rng()) == int(logits.argmax())
    greedy = generate(model, "a", length=10, temperature=0.0, seed=0)
    assert greedy == generate(model, "a", length=10, temperature=0.0, seed=1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits = torch.full((256,), -1e9)
    logits[:3] = torch.tensor([0.0, 1.0, 2.0])
    source, counts, total = rng(5), [0, 0, 0], 4000
    for _ in range(total):
        counts[draw(logits, temperature, None, source)] += 1
    weights = [math.exp(value / temperature) for value in (0, 1, 2)]
    for count, weight in zip(counts, weights, strict=True):
        share = weight / sum(weights)
        assert abs(count / total - share) < 4 * math.sqrt(share * (1 - share) / total)


def test_top_k_draws_from_the_k_likeliest_only() -> None:
    logits = torch.randn(256, generator=rng(1))
    source = rng(2)
    drawn = {draw(logits, 5.0, 3, source) for _ in range(300)}
    assert drawn == set(logits.topk(3).indices.tolist())
    assert {draw(logits, 5.0, 1, source) for _ in range(20)} == {int(logits.argmax())}
    assert len({draw(logits, 5.0, 256, source) for _ in range(300)}) > 50


def test_ids_beyond_bytes_are_never_drawn() -> None:
    logits = torch.zeros(1000)
    logits[600] = 50.0
    source = rng(3)
    assert all(draw(logits, 1.0, None, source) < 256 for _ in range(50))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": -1}, "length must not be negative, got -1"),
        ({"temperature": -0.1}, "temperature must be finite and not negative, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"window": 13}, r"window must be between 1 and 12 \(the model's\), got 13"),
        ({"seed": -1}, r"seed must be from 0 to 2\^63 - 1, got -1"),
        ({"seed": 2**63}, "seed must be from 0"),
        ({"window": 0}, "window must be between 1 and 12"),
    ],
)
def test_arguments_out_of_range_are_refused_at_once(
    model: Llama, arguments: dict[str, float], message: str
) -> None:
    settings = {"length": 1, "seed": 0} | arguments
    with pytest.raises(ConfigError, match=message):
        stream(model, "x", **settings)  # type: ignore[arg-type]
