"""Random networks out of the operations that channels can pass, for the column-mask oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

Draw = Callable[..., int]
SIDE = 4


@dataclass
class Value:
    """A tensor of the network: its number and its channels (``[2, channels, SIDE, SIDE]``)."""

    number: int
    channels: int


Operation = Callable[["RandomNet", list[Tensor]], Tensor]


class RandomNet(nn.Module):
    """Runs a list of operations; each appends one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.scales = nn.ParameterList()
        self.operations: list[tuple[str, Operation]] = []
        self.outputs: list[int] = []

    def parameter(self, *shape: int) -> int:
        self.scales.append(nn.Parameter(torch.empty(shape)))
        return len(self.scales) - 1

    def layer(self, module: nn.Module) -> int:
        self.layers.append(module)
        return len(self.layers) - 1

    def forward(self, x: Tensor) -> list[Tensor]:
        values = [x]
        for _, operation in self.operations:
            values.append(operation(self, values))
        return [values[number] for number in self.outputs]

    def __repr__(self) -> str:
        """Return the operations in order, for the report of a failing example."""
        return "; ".join(f"{i + 1}={name}" for i, (name, _) in enumerate(self.operations))


class Builder:
    """Adds one random operation after the other."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self.net = RandomNet()
        self.values = [Value(0, 4)]

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def pick(self) -> Value:
        return self.values[self.integer(max(0, len(self.values) - 6), len(self.values) - 1)]

    def add(self, name: str, operation: Operation, channels: int) -> Value:
        self.net.operations.append((name, operation))
        self.values.append(Value(len(self.values), channels))
        return self.values[-1]

    def module(self, name: str, module: nn.Module, source: Value, channels: int) -> Value:
        index = self.net.layer(module)
        number = source.number
        text = f"{name}[{index}]({number})->{channels}"
        return self.add(text, lambda net, v: net.layers[index](v[number]), channels)

    def function(
        self, name: str, function: Callable[..., Tensor], *sources: Value, channels: int
    ) -> Value:
        numbers = [source.number for source in sources]
        text = f"{name}{tuple(numbers)}->{channels}"
        return self.add(text, lambda net, v: function(*[v[n] for n in numbers]), channels)

    def with_channels(self, channels: int) -> Value:
        """Return a tensor with so many channels, made by a convolution if there is none."""
        fitting = [v for v in self.values[1:] if v.channels == channels]
        if fitting and self.integer(0, 2):
            return fitting[self.integer(0, len(fitting) - 1)]
        source = self.pick()
        return self.module("conv", nn.Conv2d(source.channels, channels, 1), source, channels)

    # Operations

    def conv(self) -> None:
        source = self.pick()
        groups = [g for g in (1, 1, 2, 3, 4) if source.channels % g == 0]
        g = groups[self.integer(0, len(groups) - 1)]
        channels = g * self.integer(2, 12 // g)
        kernel = (1, 3)[self.integer(0, 1)]
        layer = nn.Conv2d(source.channels, channels, kernel, padding=kernel // 2, groups=g)
        self.module(f"conv{kernel}g{g}", layer, source, channels)

    def depthwise(self) -> None:
        source = self.pick()
        times = self.integer(1, 2)
        channels = source.channels * times
        layer = nn.Conv2d(source.channels, channels, 3, padding=1, groups=source.channels)
        self.module("depthwise", layer, source, channels)

    def deconv(self) -> None:
        source = self.pick()
        g = 2 if source.channels % 2 == 0 and self.integer(0, 1) else 1
        channels = g * self.integer(2, 4)
        layer = nn.ConvTranspose2d(source.channels, channels, 3, padding=1, groups=g)
        self.module(f"deconv g{g}", layer, source, channels)

    def norm(self) -> None:
        source = self.pick()
        c = source.channels
        kinds = [nn.BatchNorm2d(c), nn.InstanceNorm2d(c, affine=True), nn.GroupNorm(c, c)]
        kinds += [nn.PReLU(c), nn.BatchNorm2d(c, affine=False), nn.LayerNorm(SIDE)]
        if c % 2 == 0:
            kinds += [nn.GroupNorm(c // 2, c), nn.GroupNorm(2, c)]
        if self.integer(0, 3) == 0:
            self.channel_norm(source)
            return
        self.module("norm", kinds[self.integer(0, len(kinds) - 1)], source, c)

    def channel_norm(self, source: Value) -> None:
        """Normalise over the channels."""
        c, number = source.channels, source.number
        kinds = [nn.LayerNorm(c), nn.RMSNorm(c), nn.LayerNorm(c, elementwise_affine=False)]
        index = self.net.layer(kinds[self.integer(0, len(kinds) - 1)])

        def run(net: RandomNet, values: list[Tensor]) -> Tensor:
            return net.layers[index](values[number].permute(0, 2, 3, 1)).movedim(-1, 1)

        self.add(f"channel_norm[{index}]({number})->{c}", run, c)

    def unary(self) -> None:
        source = self.pick()
        functions = [F.relu, torch.sigmoid, F.gelu, torch.cos, F.softplus, torch.exp]
        functions += [lambda x: 2 * x + 1, lambda x: F.avg_pool2d(x, 3, 1, 1), lambda x: x.flip(2)]
        functions += [lambda x: F.softmax(x, 3), lambda x: x.permute(0, 2, 3, 1).movedim(3, 1)]
        index = self.integer(0, len(functions) - 1)
        self.function(f"unary{index}", functions[index], source, channels=source.channels)

    def binary(self) -> None:
        left = self.pick()
        right = self.with_channels(left.channels)
        functions = [torch.add, torch.sub, torch.mul, torch.maximum, lambda a, b: a + b * b]
        index = self.integer(0, len(functions) - 1)
        self.function(f"binary{index}", functions[index], left, right, channels=left.channels)

    def gate(self) -> None:
        source = self.pick()
        gate = self.with_channels(source.channels)

        def run(x: Tensor, y: Tensor) -> Tensor:
            return x * torch.sigmoid(y.mean((2, 3), keepdim=True))

        self.function("gate", run, source, gate, channels=source.channels)

    def affine(self) -> None:
        """Let parameters meet a map, in the forms in which networks write it."""
        source = self.pick()
        c, number = source.channels, source.number
        forms: list[tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = [
            ((c,), lambda x, p: x * p[None, :, None, None]),
            ((c,), lambda x, p: x + p.view(1, -1, 1, 1)),
            ((c,), lambda x, p: x - p.reshape(c, 1, 1).exp()),
            ((c,), lambda x, p: (x.permute(0, 2, 3, 1) * p).permute(0, 3, 1, 2)),
            ((1, c, SIDE, SIDE), lambda x, p: torch.sigmoid(x + p)),
            ((1, SIDE * SIDE, c), lambda x, p: x + p.transpose(1, 2).unflatten(2, (SIDE, SIDE))),
            ((c, 1, 1), lambda x, p: torch.cat([x, p.expand(2, -1, 1, SIDE)], 2)[:, :, 1:]),
            ((c,), lambda x, p: x * p.softmax(0)[:, None, None]),
        ]
        index = self.integer(0, len(forms) - 1)
        shape, run = forms[index]
        old = [i for i, scale in enumerate(self.net.scales) if tuple(scale.shape) == shape]
        place = old[0] if old and self.integer(0, 3) == 0 else self.net.parameter(*shape)
        text = f"affine{index}[{place}]({number})->{c}"
        self.add(text, lambda net, v: run(v[number], net.scales[place]), c)

    def functional(self) -> None:
        """Call a function on parameters of the network itself."""
        source = self.pick()
        c, number = source.channels, source.number
        out = self.integer(2, 6)
        forms: list[tuple[tuple[int, ...], int, Callable[[Tensor, Tensor], Tensor]]] = [
            ((out, c, 1, 1), out, F.conv2d),
            ((c, 1, 3, 3), c, lambda x, p: F.conv2d(x, p, padding=1, groups=c)),
            ((c, out, 1, 1), out, F.conv_transpose2d),
            ((out, c), out, lambda x, p: torch.einsum("nchw,oc->nohw", x, p)),
            ((c, out), out, lambda x, p: (x.permute(0, 2, 3, 1) @ p.relu()).permute(0, 3, 1, 2)),
            ((out, c), out, lambda x, p: F.linear(x.movedim(1, 3), p).movedim(3, 1)),
            ((SIDE, SIDE), c, lambda x, p: p @ x),
            ((c,), c, lambda x, p: torch.einsum("nchw,c->nchw", x, p)),
            ((c,), c, lambda x, p: F.group_norm(x, c, p)),
            ((c,), c, F.prelu),
        ]
        index = self.integer(0, len(forms) - 1)
        shape, channels, run = forms[index]
        old = [i for i, scale in enumerate(self.net.scales) if tuple(scale.shape) == shape]
        place = old[0] if old and self.integer(0, 3) == 0 else self.net.parameter(*shape)
        text = f"functional{index}[{place}]({number})->{channels}"
        self.add(text, lambda net, v: run(v[number], net.scales[place]), channels)

    def parts(self) -> None:
        """Take parts of the channels, or of the other axes."""
        source = self.pick()
        c = source.channels
        last = self.integer(min(2, c), c)
        forms: list[tuple[int, Callable[[Tensor], Tensor]]] = [
            (last, lambda x: x.narrow(1, c - last, last)),
            (last, lambda x: torch.narrow(x, -3, 0, last)),
            (c, lambda x: torch.cat([x.tensor_split((last,), 1)[i] for i in (1, 0)], 1)),
            (c, lambda x: x[:, :, [3, 1, 0, 2]]),
            (c, lambda x: x.index_select(3, torch.tensor([3, 1, 0, 2]))),
            (c, lambda x: x.select(2, 1).unsqueeze(2).expand(-1, -1, SIDE, -1)),
        ]
        if c > 4:
            forms += [(-(-c // 3), lambda x: x.chunk(3, 1)[0])]
        index = self.integer(0, len(forms) - 1)
        channels, run = forms[index]
        self.function(f"parts{index}", run, source, channels=channels)

    def concat(self) -> None:
        sources = [self.pick() for _ in range(self.integer(2, 3))]
        total = sum(source.channels for source in sources)
        if total <= 24:
            self.function("cat", lambda *v: torch.cat(v, -3), *sources, channels=total)

    def halves(self) -> None:
        source = self.pick()
        if source.channels % 2:
            return
        half = source.channels // 2
        if self.integer(0, 1):
            self.function("chunk", lambda x: x.chunk(2, 1)[1], source, channels=half)
            self.function("chunk", lambda x: x.chunk(2, 1)[0], source, channels=half)
        else:
            self.function("slice", lambda x: x[:, half:], source, channels=half)

    def split(self) -> None:
        source = self.pick()
        if source.channels < 2:
            return
        first = self.integer(1, source.channels - 1)
        sizes = [first, source.channels - first]
        swapped = self.integer(0, 1)

        def run(x: Tensor) -> Tensor:
            a, b = torch.split(x, sizes, 1)
            return torch.cat([b, a] if swapped else [a, b], 1)

        self.function(f"split{sizes}", run, source, channels=source.channels)

    def shuffle(self) -> None:
        source = self.pick()
        if source.channels % 2:
            return
        half = source.channels // 2

        def run(x: Tensor) -> Tensor:
            n, c, h, w = x.shape
            return x.reshape(n, 2, half, h, w).transpose(1, 2).reshape(n, c, h, w)

        self.function("shuffle", run, source, channels=source.channels)

    def linear(self) -> None:
        source = self.pick()
        channels = self.integer(2, 8)
        index = self.net.layer(nn.Linear(source.channels, channels))
        number = source.number

        def run(net: RandomNet, values: list[Tensor]) -> Tensor:
            tokens = values[number].flatten(2).transpose(1, 2)
            return net.layers[index](tokens).transpose(1, 2).unflatten(2, (SIDE, SIDE))

        self.add(f"linear[{index}]({number})->{channels}", run, channels)

    def attention(self) -> None:
        source = self.pick()
        heads, width = self.integer(1, 2), self.integer(2, 4)
        inner = heads * width
        layers = [self.net.layer(nn.Linear(source.channels, inner)) for _ in range(3)]
        number = source.number

        def run(net: RandomNet, values: list[Tensor]) -> Tensor:
            tokens = values[number].flatten(2).transpose(1, 2)
            n, t, _ = tokens.shape
            q, k, v = (
                net.layers[i](tokens).reshape(n, t, heads, width).transpose(1, 2) for i in layers
            )
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, inner)
            return y.transpose(1, 2).unflatten(2, (SIDE, SIDE))

        self.add(f"attention{layers}({number})->{inner}", run, inner)

    def again(self) -> None:
        """Call a convolution a second time."""
        convs = [
            (i, layer)
            for i, layer in enumerate(self.net.layers)
            if isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1) and layer.groups == 1
        ]
        if convs:
            index, layer = convs[self.integer(0, len(convs) - 1)]
            source = self.with_channels(layer.in_channels)
            number = source.number
            text = f"again[{index}]({number})"
            self.add(text, lambda net, v: net.layers[index](v[number]), layer.out_channels)

    def flat_head(self) -> None:
        source = self.pick()
        size = source.channels * SIDE * SIDE
        index = self.net.layer(nn.Linear(size, 8 * SIDE * SIDE))
        number = source.number

        def run(net: RandomNet, values: list[Tensor]) -> Tensor:
            x = values[number]
            return net.layers[index](x.reshape(x.size(0), -1)).view(-1, 8, SIDE, SIDE)

        self.add(f"flat[{index}]({number})->8", run, 8)

    def generator(self) -> None:
        """Make a map of the outputs of a Linear, and let a transposed convolution read it."""
        source = self.pick()
        channels = self.integer(2, 6)
        index = self.net.layer(nn.Linear(source.channels, channels * 4))
        up = self.net.layer(nn.ConvTranspose2d(channels, channels, 2, stride=2))
        number = source.number

        def run(net: RandomNet, values: list[Tensor]) -> Tensor:
            flat = net.layers[index](values[number].mean((2, 3)))
            return net.layers[up](F.relu(flat).view(-1, channels, SIDE // 2, SIDE // 2))

        self.add(f"generator[{index}]({number})->{channels}", run, channels)

    def blocks(self) -> None:
        """Mix, gate, repeat or pad blocks of the channels."""
        source = self.pick()
        c, half = source.channels, source.channels // 2
        if c % 2:
            return

        def apart(x: Tensor) -> Tensor:
            return x.unflatten(1, (2, half))

        def weighed(x: Tensor, y: Tensor) -> Tensor:
            gate = apart(y.mean((2, 3))).softmax(1)[..., None, None]
            return (apart(x) * gate).sum(1)

        other = self.with_channels(c)
        forms: list[tuple[int, Callable[..., Tensor]]] = [
            (half, lambda x, y: apart(x).amax(1)),
            (half, lambda x, y: apart(x).mean(1) + apart(y).sum(1)),
            (half, weighed),
            (c, lambda x, y: apart(x).softmax(1).flatten(1, 2)),
            (half, lambda x, y: F.glu(x, 1)),
            (c + 2, lambda x, y: F.pad(x, (0, 0, 0, 0, 1, 1))),
            (c, lambda x, y: y + F.pad(x[:, 1:-1], (0, 0, 0, 0, 1, 1), value=0.5)),
            (c, lambda x, y: y + torch.cat([torch.zeros_like(x[:, :half]), x[:, half:]], 1)),
            (2 * half, lambda x, y: x[:, :half].repeat_interleave(2, 1)),
            (2 * c, lambda x, y: apart(x).repeat_interleave(2, dim=1).flatten(1, 2)),
            (c, lambda x, y: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)),
        ]
        index = self.integer(0, len(forms) - 1)
        channels, run = forms[index]
        if 0 < channels <= 24:
            self.function(f"blocks{index}", run, source, other, channels=channels)


STEPS = (
    *(Builder.conv, Builder.conv, Builder.conv, Builder.depthwise, Builder.deconv, Builder.norm),
    *(Builder.unary, Builder.binary, Builder.binary, Builder.gate, Builder.concat, Builder.halves),
    *(Builder.split, Builder.shuffle, Builder.linear, Builder.attention, Builder.again),
    *(Builder.flat_head, Builder.affine, Builder.functional, Builder.parts),
    *(Builder.generator, Builder.blocks, Builder.blocks),
)


@st.composite
def random_nets(draw: Draw) -> RandomNet:
    """Draw a network of 3 to 12 operations; convolutions make its outputs."""
    builder = Builder(draw)
    builder.conv()
    for _ in range(draw(st.integers(3, 12))):
        STEPS[draw(st.integers(0, len(STEPS) - 1))](builder)
    used = {0}
    for value in (builder.values[-1], builder.pick(), builder.pick()):
        if value.number not in used:
            used.add(value.number)
            head = builder.module("head", nn.Conv2d(value.channels, 2, 1), value, 2)
            builder.net.outputs.append(head.number)
    return builder.net
