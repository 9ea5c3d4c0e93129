"""Codecs by the names that recipes use."""

from __future__ import annotations

import functools

import torch

from gossamer.codec.base import Codec
from gossamer.codec.blocks import E3M0Codec, IntegerCodec
from gossamer.codec.floats import FloatCodec
from gossamer.codec.sparse import TopKCodec
from gossamer.errors import ConfigError, nearest

_FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_INTEGERS = {"int8": 8, "int4": 4, "int2": 2, "int1": 1}
_BLOCK, _BLOCK_E3M0 = 1024, 256

CODECS = (*_FLOATS, *_INTEGERS, "e3m0", "topk")


@functools.lru_cache(maxsize=64)
def codec_of(text: str) -> Codec:
    """The codec that a recipe calls `text`: a name, or NAME:NUMBER.

    Raises `ConfigError` naming what is allowed.
    """
    name, colon, argument = text.partition(":")
    if name not in CODECS:
        raise ConfigError(f"unknown codec {text!r}; {nearest(name, CODECS)}")
    if name in _FLOATS:
        if colon:
            raise ConfigError(f"codec {text!r}: {name} takes no argument")
        return FloatCodec(name, _FLOATS[name])
    if name == "topk":
        return TopKCodec(text, _share(text, argument))
    block = _block(text, argument) if colon else (_BLOCK_E3M0 if name == "e3m0" else _BLOCK)
    if name == "e3m0":
        return E3M0Codec(text, 4, block, torch.float32)
    return IntegerCodec(text, _INTEGERS[name], block, torch.bfloat16)


def _share(text: str, argument: str) -> float:
    try:
        share = float(argument)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(
            f"codec {text!r}: the share of values to keep is missing or wrong; above 0, up to 1, "
            'as in "topk:0.01"'
        )
    return share


def _block(text: str, argument: str) -> int:
    block = int(argument) if argument.isascii() and argument.isdigit() else 0
    if block < 8 or block % 8:
        raise ConfigError(
            f"codec {text!r}: values per block are a positive multiple of 8, as in "
            f'"{text.partition(":")[0]}:256"'
        )
    return block
