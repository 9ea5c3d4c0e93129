"""Text from a trained byte-level model."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.training.llama import Llama


def generate(
    model: Llama,
    prompt: str,
    *,
    length: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int,
) -> str:
    """The prompt's continuation, about `length` bytes; the arguments are those of `stream`."""
    return "".join(
        stream(model, prompt, length=length, temperature=temperature, top_k=top_k, seed=seed)
    )


def stream(
    model: Llama,
    prompt: str,
    *,
    length: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int,
    window: int | None = None,
) -> Iterator[str]:
    """Yield the prompt's continuation piece by piece, as it is drawn.

    Args:
        model: a byte-level decoder.
        prompt: what to continue; an empty one starts after a line break.
        length: number of bytes to draw.
        temperature: logits are divided by it; 0 always takes the likeliest byte.
        top_k: draw from the k likeliest bytes only; None for all.
        seed: of the draws. The global generator is left alone.
        window: bytes of context that the model sees, at most its `max_length`, which is the
            default. Beyond the length of its training sequences a model's text gets worse.

    Raises `ConfigError` where an argument is out of range, before anything is drawn.
    """
    limit = model.shape.max_length
    window = limit if window is None else window
    if length < 0:
        raise ConfigError(f"length must not be negative, got {length}")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature must be finite and not negative, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k must be at least 1, got {top_k}")
    if not 1 <= window <= limit:
        raise ConfigError(f"window must be between 1 and {limit} (the model's), got {window}")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be from 0 to 2^63 - 1, got {seed}")
    rng = torch.Generator().manual_seed(seed)
    context = list((prompt or "\n").encode())
    return _pieces(
        _tokens(
            model, context, length, window, lambda logits: draw(logits, temperature, top_k, rng)
        )
    )


def _tokens(
    model: Llama, context: list[int], length: int, window: int, pick: Callable[[Tensor], int]
) -> Iterator[int]:
    """`length` bytes after `context`; the last `window` bytes are read anew for each."""
    device = model.embedding.weight.device
    for _ in range(length):
        tokens = torch.tensor([context[-window:]], device=device)
        with torch.no_grad():
            logits = model(tokens)[0, -1]
        context.append(pick(logits.float().cpu()))
        yield context[-1]


def _pieces(tokens: Iterator[int]) -> Iterator[str]:
    """Bytes as text: a character of several bytes comes out when it is complete."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        piece = decoder.decode(bytes((token,)))
        if piece:
            yield piece
    rest = decoder.decode(b"", final=True)
    if rest:
        yield rest


def draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One byte from `logits` [V]; ids beyond 255 of a larger vocabulary are never drawn."""
    logits = logits[:256]
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    # From the likeliest down: however small the temperature is, that one's share stays a number.
    shares = torch.softmax((logits - logits.max()).double() / temperature, dim=-1)
    return int(torch.multinomial(shares, 1, generator=generator))
