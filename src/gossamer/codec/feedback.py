"""Error feedback: what a payload could not hold is added to the next one."""

from __future__ import annotations

from torch import Tensor

from gossamer.codec.base import Codec


def encode_with_feedback(codec: Codec, values: Tensor, residual: Tensor) -> Tensor:
    """The payload of `values + residual`; what it lost is left in `residual`.

    Over any number of payloads, what was decoded and the last residual sum to what was given (to
    rounding), so nothing is lost for good.

    Args:
        values: flat [n]; kept.
        residual: [n], zero before the first payload; overwritten. Part of a method's state.

    Raises `EncodingError` as `Codec.encode` does; `residual` is then as it was.

    Source: F. Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014.
    """
    wanted = values + residual
    payload = codec.encode(wanted)
    if not values.is_meta:
        codec.decode(payload, residual)
        residual.neg_().add_(wanted)
    return payload
