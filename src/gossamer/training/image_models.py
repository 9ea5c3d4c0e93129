"""Networks for small images: a two-layer convolutional network, and residual networks.

Batch normalisation and workers. A worker normalises its training batches by their own statistics,
and keeps running ones in float buffers. At each outer step these are averaged over the workers and
never reach an outer optimizer; the batch counter takes the maximum. Evaluation uses the averaged
running statistics. Between outer steps they drift apart with the workers' weights, and their
average leaves out how far the workers' means differ, so with many local steps or non-i.i.d. data
evaluation is pessimistic. `norm = "group"` (Y. Wu and K. He, arXiv:1803.08494) has no statistics
to agree on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.errors import ConfigError, nearest

Norm = Literal["batch", "group"]

_GROUPS = 8


@dataclass(frozen=True)
class ResNetShape:
    """A residual network of basic blocks with the stem for small images: 3 x 3, no pooling.

    Args:
        widths: channels of each stage; every stage but the first halves the image.
        blocks: basic blocks in each stage.
    """

    widths: tuple[int, ...]
    blocks: int


RESNETS = {
    "resnet8": ResNetShape((16, 32, 64), 1),
    "resnet18": ResNetShape((64, 128, 256, 512), 2),
}
MODELS = ("cnn", *RESNETS)


class ConvNet(nn.Module):
    """Two convolutions of 3 x 3 and stride 2, each with ReLU, and a linear layer.

    Args:
        shape: (channels, height, width) of the images.
        num_classes: outputs.
        widths: channels of the two convolutions.
    """

    def __init__(
        self, shape: tuple[int, int, int], num_classes: int, widths: tuple[int, int] = (16, 32)
    ) -> None:
        super().__init__()
        channels, height, width = shape
        self.first = nn.Conv2d(channels, widths[0], 3, stride=2, padding=1)
        self.second = nn.Conv2d(widths[0], widths[1], 3, stride=2, padding=1)
        self.head = nn.Linear(widths[1] * -(-height // 4) * -(-width // 4), num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, C, H, W]."""
        hidden = F.relu(self.second(F.relu(self.first(images))))
        logits: Tensor = self.head(hidden.flatten(1))
        return logits


class ResNet(nn.Module):
    """K. He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385.

    Args:
        shape: number and widths of stages.
        channels: of the images.
        num_classes: outputs.
        norm: how activations are normalised, see the module's docstring.
    """

    def __init__(self, shape: ResNetShape, channels: int, num_classes: int, norm: Norm) -> None:
        super().__init__()
        self.stem = _convolution(channels, shape.widths[0], 3, 1)
        self.stem_norm = _norm(norm, shape.widths[0])
        self.stages = nn.Sequential()
        previous = shape.widths[0]
        for index, width in enumerate(shape.widths):
            blocks = nn.Sequential()
            for block in range(shape.blocks):
                stride = 2 if index > 0 and block == 0 else 1
                blocks.append(BasicBlock(previous, width, stride, norm))
                previous = width
            self.stages.append(blocks)
        self.head = nn.Linear(previous, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, C, H, W]."""
        hidden = self.stages(F.relu(self.stem_norm(self.stem(images))))
        logits: Tensor = self.head(hidden.mean((2, 3)))
        return logits


class BasicBlock(nn.Module):
    """Two convolutions of 3 x 3 beside a shortcut, which is projected where the shape changes."""

    def __init__(self, num_inputs: int, num_outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.first = _convolution(num_inputs, num_outputs, 3, stride)
        self.first_norm = _norm(norm, num_outputs)
        self.second = _convolution(num_outputs, num_outputs, 3, 1)
        self.second_norm = _norm(norm, num_outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or num_inputs != num_outputs:
            self.shortcut = nn.Sequential(
                _convolution(num_inputs, num_outputs, 1, stride), _norm(norm, num_outputs)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, inputs, H, W] to [B, outputs, H / stride, W / stride]."""
        hidden = F.relu(self.first_norm(self.first(inputs)))
        hidden = self.second_norm(self.second(hidden))
        return F.relu(hidden + self.shortcut(inputs))


def build_model(
    name: str, shape: tuple[int, int, int], num_classes: int, norm: Norm
) -> ConvNet | ResNet:
    """A network by name, on the current default device.

    Raises `ConfigError` for an unknown name.
    """
    if name not in MODELS:
        raise ConfigError(f"unknown model {name!r}; {nearest(name, MODELS)}")
    if name == "cnn":
        return ConvNet(shape, num_classes)
    return ResNet(RESNETS[name], shape[0], num_classes, norm)


def _convolution(num_inputs: int, num_outputs: int, size: int, stride: int) -> nn.Conv2d:
    layer = nn.Conv2d(num_inputs, num_outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def _norm(norm: Norm, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(_GROUPS, channels)
