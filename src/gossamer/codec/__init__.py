"""Payload encodings by the names that recipes use, with exact byte counts.

| name | bits a value | largest error |
|---|---|---|
| `fp32` | 32 | none for fp32 values |
| `bf16`, `fp16` | 16 | 2^-8, 2^-11 of the value |
| `int8`, `int4` | 8, 4; 16 per block of 1024 | 1/254, 1/14 of the block's largest, and 1 % of it |
| `e3m0` | 4; 32 per block of 256 | a third of the value, or 1/128 of the block's largest |
| `int2`, `int1` | 2, 1; 16 per block of 1024 | 1/3, 1 of the block's largest: they fail |
| `topk:SHARE` | 64 per value kept | the values left out |

Blocks of another size are written "int4:256".
"""

from gossamer.codec.base import Codec
from gossamer.codec.feedback import encode_with_feedback
from gossamer.codec.payloads import PLAIN, check_codec, decoded, encoded, is_sparse
from gossamer.codec.registry import CODECS, codec_of

__all__ = [
    "CODECS",
    "PLAIN",
    "Codec",
    "check_codec",
    "codec_of",
    "decoded",
    "encode_with_feedback",
    "encoded",
    "is_sparse",
]
