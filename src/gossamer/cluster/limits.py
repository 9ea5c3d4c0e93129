"""What one worker may ask of another: sizes, counts and patience."""

from __future__ import annotations

from pydantic import Field

from gossamer.settings import Settings
from gossamer.units import Duration, Size

_UNTAKEN_LEAST = 64 * 2**20
_UNTAKEN_PAYLOADS = 4


class Limits(Settings):
    """Bounds that every message and connection keeps, so that memory is bounded as well."""

    payload_max: Size = Field(
        default=float(8 * 2**30), gt=0, description="bytes of the largest payload that is taken"
    )
    untaken_max: Size | None = Field(
        default=None, gt=0,
        description="bytes from one peer that may lie here without anybody waiting for them; more "
        "is left on the way. Left out: four largest payloads, or 64 MiB if that is more",
    )  # fmt: skip
    messages_max: int = Field(
        default=65536, ge=1, description="messages from one peer that are remembered in a round"
    )
    streams_max: int = Field(default=256, ge=1, description="messages from one peer at a time")
    connections_max: int = Field(default=512, ge=1, description="connections to this worker")
    header_timeout: Duration = Field(
        default=5.0,
        gt=0,
        description="within which a new connection or message must say what it is",
    )
    keepalive: Duration = Field(
        default=3.5, gt=0, description="a transfer that moves nothing for so long has failed"
    )

    @classmethod
    def for_payload(cls, num_bytes: int, *, keepalive_s: float = 3.5) -> Limits:
        """Limits for a run whose largest message has `num_bytes`."""
        return cls(payload_max=max(num_bytes, 1 << 16), keepalive=keepalive_s)

    @property
    def untaken_bytes(self) -> float:
        """`untaken_max`, or what it is when left out."""
        if self.untaken_max is not None:
            return self.untaken_max
        return max(_UNTAKEN_PAYLOADS * self.payload_max, _UNTAKEN_LEAST)
