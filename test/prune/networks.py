"""The test networks of spec/pruning.md section 14, with the weights of appendix A."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Forward = Callable[..., Tensor]


def hashed(count: int, salt: int) -> Tensor:
    """Return ``count`` numbers in [-0.5, 0.5), the same everywhere (appendix A)."""
    k = torch.arange(count, dtype=torch.int64)
    h = (k * 2654435761 + salt * 40503) % 2**32
    h = h ^ (h >> 16)
    h = (h * 2246822519) % 2**32
    h = h ^ (h >> 13)
    return ((h % 65536).to(torch.float64) / 65536 - 0.5).float()


def golden_weights(model: nn.Module) -> nn.Module:
    """Fill a model with the weights of appendix A; returns it in eval mode."""
    norms = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm)
    owner = {id(p): m for m in model.modules() for p in m.parameters(recurse=False)}
    with torch.no_grad():
        for salt, (name, parameter) in enumerate(model.named_parameters()):
            values = hashed(parameter.numel(), salt).reshape(parameter.shape)
            if isinstance(owner[id(parameter)], norms):
                values = values + 1 if name.endswith("weight") else values
            elif name.endswith("weight"):
                i = torch.arange(parameter.shape[0])
                factor = 1 + ((7 * i + 3 * salt) % 16) / 16
                values = values * factor.reshape(-1, *[1] * (parameter.dim() - 1))
            parameter.copy_(values)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.copy_(hashed(module.num_features, 101))
                module.running_var.copy_(1 + hashed(module.num_features, 102))
    return model.eval()


def golden_input(*shape: int) -> Tensor:
    """Return the input of appendix A."""
    return 4 * hashed(int(torch.tensor(shape).prod()), 999).reshape(shape)


def conv(inputs: int, outputs: int, kernel: int = 3, **settings: object) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **settings)  # type: ignore[arg-type]


class Net(nn.Module):
    """A network of named layers and a forward function."""

    def __init__(self, forward: Forward, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self, x)


def bn(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels)


def residual() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        y = m.b2(m.c2(F.relu(m.b1(m.c1(x)))))
        return m.out(F.relu(y + m.bp(m.p(x))))

    return Net(
        forward,
        stem=conv(3, 16),
        c1=conv(16, 32),
        b1=bn(32),
        c2=conv(32, 32),
        b2=bn(32),
        p=conv(16, 32, 1),
        bp=bn(32),
        out=conv(32, 4),
    )


def identity_blocks() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = x + m.c2(F.relu(m.c1(x)))
        x = x + m.c4(F.relu(m.c3(x)))
        return m.out(x)

    return Net(
        forward,
        stem=conv(3, 16),
        c1=conv(16, 32),
        c2=conv(32, 16),
        c3=conv(16, 24),
        c4=conv(24, 16),
        out=conv(16, 4),
    )


def dense() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.c0(x)
        x = torch.cat([x, m.c1(F.relu(m.b1(x)))], 1)
        x = torch.cat([x, m.c2(F.relu(m.b2(x)))], 1)
        return m.out(F.relu(m.b3(x)))

    return Net(
        forward,
        c0=conv(3, 16),
        b1=bn(16),
        c1=conv(16, 8),
        b2=bn(24),
        c2=conv(24, 8),
        b3=bn(32),
        out=conv(32, 4),
    )


def concat() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.out(F.relu(torch.cat([m.a(x), m.b(x)], 1)))

    return Net(forward, a=conv(3, 8), b=conv(3, 16), out=conv(24, 4))


def shuffle(x: Tensor, groups: int) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, groups, c // groups, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


def shufflenet() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        left, right = m.c0(x).chunk(2, 1)
        right = m.c2(m.dw(F.relu(m.c1(right))))
        return m.out(shuffle(torch.cat([left, right], 1), 2))

    return Net(
        forward,
        c0=conv(3, 32),
        c1=conv(16, 32, 1),
        dw=conv(32, 32, groups=32),
        c2=conv(32, 16, 1),
        out=conv(32, 4),
    )


def inverted() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.c0(x)
        y = F.relu6(m.be(m.e(x)))
        y = m.bp(m.p(F.relu6(m.bd(m.dw(y)))))
        return m.out(x + y)

    return Net(
        forward,
        c0=conv(3, 16),
        e=conv(16, 64, 1),
        be=bn(64),
        dw=conv(64, 64, groups=64),
        bd=bn(64),
        p=conv(64, 16, 1),
        bp=bn(16),
        out=conv(16, 4),
    )


def depthwise2() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.out(F.relu(m.dw(F.relu(m.c0(x)))))

    return Net(forward, c0=conv(3, 16), dw=conv(16, 32, groups=16), out=conv(32, 4))


def squeeze_excite() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.c0(x)
        gate = torch.sigmoid(m.e(F.relu(m.r(F.adaptive_avg_pool2d(x, 1)))))
        return m.out(x * gate)

    return Net(forward, c0=conv(3, 32), r=conv(32, 16, 1), e=conv(16, 32, 1), out=conv(32, 4))


def grouped() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.out(F.relu(m.g(F.relu(m.c0(x)))))

    return Net(forward, c0=conv(3, 32), g=conv(32, 64, groups=4), out=conv(64, 4))


def grouped_add() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.out(F.relu(m.g1(x) + m.g2(x)))

    return Net(forward, g1=conv(6, 24, groups=2), g2=conv(6, 24, groups=3), out=conv(24, 4))


def grouped_series() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.out(F.relu(m.g2(F.relu(m.g1(x)))))

    return Net(forward, g1=conv(6, 24, groups=2), g2=conv(24, 24, groups=3), out=conv(24, 4))


def grouped_concat() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.out(m.g(torch.cat([m.a(x), m.b(x)], 1)))

    return Net(forward, a=conv(3, 16), b=conv(3, 16), g=conv(32, 32, groups=4), out=conv(32, 4))


def unet(groups: int = 1) -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        skip = m.c1(x)
        y = m.up(F.relu(m.c2(F.max_pool2d(skip, 2))))
        return m.out(F.relu(m.c3(torch.cat([y, skip], 1))))

    outputs = 16 if groups < 32 else 32
    return Net(
        forward,
        c1=conv(3, 16),
        c2=conv(16, 32),
        up=nn.ConvTranspose2d(32, outputs, 2, stride=2, groups=groups),
        c3=conv(16 + outputs, 16),
        out=conv(16, 4, 1),
    )


def flattened(bias: bool = True) -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(m.c1(x)), 4)
        return m.f2(F.relu(m.n(m.f1(torch.flatten(x, 1)))))

    return Net(
        forward,
        c1=conv(3, 16),
        f1=nn.Linear(256, 32, bias=bias),
        n=nn.BatchNorm1d(32),
        f2=nn.Linear(32, 4),
    )


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.b = conv(3, 16), bn(16)
        self.h1, self.h2 = nn.Linear(16, 5), conv(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.b(self.c1(x)))
        return self.h1(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)), self.h2(x)


def shared() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu(m.sh(F.relu(m.c0(x))))
        return m.out(F.relu(m.sh(x)))

    return Net(forward, c0=conv(3, 16), sh=conv(16, 16), out=conv(16, 4))


def tied() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu(m.s1(F.relu(m.c0(x))))
        return m.out(F.relu(m.s2(x)))

    model = Net(forward, c0=conv(3, 16), s1=conv(16, 16), s2=conv(16, 16), out=conv(16, 4))
    model.s2.weight = model.s1.weight
    return model


def transformer(heads: int = 1, fused: bool = False) -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.n1(x)
        q, k, v = m.q(y), m.k(y), m.v(y)
        if heads > 1:
            n, t, _ = x.shape
            q, k, v = (z.view(n, t, heads, -1).transpose(1, 2) for z in (q, k, v))
        if fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = torch.softmax(q @ k.transpose(-2, -1), -1) @ v
        if heads > 1:
            y = y.transpose(1, 2).flatten(2)
        x = x + m.o(y)
        return m.head(x + m.f2(F.gelu(m.f1(m.n2(x)))))

    return Net(
        forward,
        n1=nn.LayerNorm(16),
        q=nn.Linear(16, 16),
        k=nn.Linear(16, 16),
        v=nn.Linear(16, 16),
        o=nn.Linear(16, 16),
        n2=nn.LayerNorm(16),
        f1=nn.Linear(16, 32),
        f2=nn.Linear(32, 16),
        head=nn.Linear(16, 4),
    )


def feed_forward() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(x + m.f2(F.relu(m.f1(m.n2(x)))))

    return Net(
        forward,
        n2=nn.LayerNorm(16),
        f1=nn.Linear(16, 32),
        f2=nn.Linear(32, 16),
        head=nn.Linear(16, 4),
    )


class WithOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2, self.c3 = conv(3, 16), conv(16, 16), conv(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.c1(x)
        return x, self.c3(F.relu(self.c2(F.relu(x))))


def chain40() -> Net:
    return Net(lambda m, x: m.b(F.relu(m.a(x))), a=conv(3, 40), b=conv(40, 4))
