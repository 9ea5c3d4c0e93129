"""Llama-style decoders: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Source: Touvron et al., "LLaMA", arXiv 2302.13971 (blocks); Su et al., arXiv 2104.09864 (rotary
positions); Ainslie et al., arXiv 2305.13245 (grouped queries); Shazeer, arXiv 2002.05202 (SwiGLU);
Zhang and Sennrich, arXiv 1910.07467 (RMSNorm).

Shapes in the comments: B sequences, T positions, D model width, N query heads, K key/value heads,
E width of a head, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """The sizes of a decoder. Raises `ConfigError` where they do not fit together.

    Args:
        vocab_size: number of token ids; 256 where bytes are the tokens.
        dim: width of the residual stream.
        num_layers: number of blocks.
        num_heads: query heads; divides `dim` into heads of even width.
        num_kv_heads: key/value heads; divides `num_heads`.
        ffn_dim: inner width of the feed-forward network.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square inside RMSNorm.
        tie_embeddings: the head uses the embedding's weights.
        max_length: positions that the model may be given at once.
    """

    vocab_size: int = 256
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    max_length: int = 1024

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_length < 1:
            raise ConfigError(f"max_length must be at least 1, got {self.max_length}")
        if self.dim % (2 * self.num_heads):
            raise ConfigError(
                f"dim must be a multiple of 2 x num_heads (rotary positions turn pairs), got "
                f"dim {self.dim} with {self.num_heads} heads"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_kv_heads must divide num_heads, got {self.num_kv_heads} and {self.num_heads}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads


# The small ones are shallow, with heads of 64: what trains fastest on a few cores.
SHAPES: dict[str, LlamaShape] = {
    "llama-nano": LlamaShape(
        dim=64, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=128, max_length=512
    ),
    "llama-tiny": LlamaShape(
        dim=128, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=384, max_length=1024
    ),
    "llama-small": LlamaShape(
        dim=192, num_layers=3, num_heads=3, num_kv_heads=1, ffn_dim=512, max_length=1024
    ),
    "llama-15m": LlamaShape(
        dim=384, num_layers=8, num_heads=6, num_kv_heads=2, ffn_dim=1280, max_length=2048
    ),
    "llama-110m": LlamaShape(
        dim=768, num_layers=16, num_heads=12, num_kv_heads=4, ffn_dim=2304, max_length=4096
    ),
    # Llama-3.2-1B with an untied head: the model of arXiv 2606.22768, 1 498 482 688 parameters.
    "llama-1.5b": LlamaShape(
        vocab_size=128_256,
        dim=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        ffn_dim=8192,
        rope_theta=500_000.0,
        max_length=8192,
    ),
}


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis; the mean in fp32 for halves."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotation(length: int, width: int, theta: float) -> Tensor:
    """Cosines and signed sines of the rotary angles, fp64 on the CPU, [2, length, 1, width].

    Position t turns the pair (i, i + width / 2) by the angle t * theta^(-2i / width).
    """
    pairs = torch.arange(0, width, 2, dtype=torch.float64, device="cpu")
    positions = torch.arange(length, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, theta ** (-pairs / width))
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
    return table.unsqueeze(-2)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn the pairs (i, i + E/2) of each head, x [B, T, heads, E], by `table` [2, T, 1, E]."""
    cos, sin = table[0], table[1]
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = shape.num_heads, shape.num_kv_heads
        self.head_dim = shape.head_dim
        kv_dim = self.num_kv_heads * self.head_dim
        self.query = nn.Linear(shape.dim, shape.dim, bias=False)
        self.key = nn.Linear(shape.dim, kv_dim, bias=False)
        self.value = nn.Linear(shape.dim, kv_dim, bias=False)
        self.output = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        B, T, D = x.shape
        heads = (B, T, -1, self.head_dim)
        query = rotate(self.query(x).view(heads), table).transpose(1, 2)  # [B, N, T, E]
        key = rotate(self.key(x).view(heads), table).transpose(1, 2)  # [B, K, T, E]
        value = self.value(x).view(heads).transpose(1, 2)  # [B, K, T, E]
        # Query head n reads key/value head n // (N / K).
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.num_kv_heads < self.num_heads
        )
        return self.output(mixed.transpose(1, 2).reshape(B, T, D))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, ffn_dim, bias=False)
        self.up = nn.Linear(dim, ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.dim, shape.norm_eps)
        self.attention = Attention(shape)
        self.feed_forward_norm = RMSNorm(shape.dim, shape.norm_eps)
        self.feed_forward = FeedForward(shape.dim, shape.ffn_dim)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """A decoder of the given shape: tokens int64 [B, T] to logits [B, T, V].

    Weights are normal with standard deviation 0.02; the two projections of a block that write to
    the residual stream are divided by sqrt(2 x layers), so that its variance does not grow with
    depth (Radford et al., GPT-2).
    """

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.dim, shape.norm_eps)
        self.head = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        if shape.tie_embeddings:
            self.head.weight = self.embedding.weight
        # Not a buffer: it is derived from the shape, so it must not be averaged, sent or saved.
        self._table: Tensor | None = None
        self._initialise()

    def _initialise(self) -> None:
        residual_std = 0.02 / math.sqrt(2 * self.shape.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                continue  # norm weights start at one
            into_residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
            nn.init.normal_(parameter, std=residual_std if into_residual else 0.02)

    def _rotation(self, length: int, like: Tensor) -> Tensor:
        """The rotary table for the first `length` positions, made again where it does not fit."""
        table = self._table
        if table is None or table.device != like.device or table.dtype != like.dtype:
            with torch.inference_mode(False), torch.no_grad():  # usable by later training
                shape = self.shape
                table = rotation(shape.max_length, shape.head_dim, shape.rope_theta)
                self._table = table = table.to(like.device, like.dtype)
        return table[:, :length]

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] for tokens int64 [B, T]; position t sees the tokens up to t only.

        Raises `ConfigError` where T exceeds the shape's `max_length`.
        """
        length = tokens.shape[1]
        if length > self.shape.max_length:
            raise ConfigError(
                f"{length} positions given to a model of at most {self.shape.max_length}; "
                f"shorten the sequences"
            )
        x = self.embedding(tokens)  # [B, T, D]
        table = self._rotation(length, x)
        for layer in self.layers:
            x = layer(x, table)
        return self.head(self.norm(x))  # type: ignore[no-any-return]
