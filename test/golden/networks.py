"""The networks of the golden files, with the seeds that give their start weights."""

import torch
import torch.nn.functional as F
from torch import nn


class PlainChain(nn.Module):
    SHAPE = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(3, 32, 3, padding=1)
        self.b1 = nn.BatchNorm2d(32)
        self.r1 = nn.ReLU()
        self.c2 = nn.Conv2d(32, 48, 3, padding=1)
        self.b2 = nn.BatchNorm2d(48)
        self.r2 = nn.ReLU()
        self.mp = nn.MaxPool2d(2)
        self.c3 = nn.Conv2d(48, 20, 3, padding=1)
        self.r3 = nn.ReLU()
        self.gap = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(20, 10)

    def forward(self, x):
        x = self.r1(self.b1(self.c1(x)))
        x = self.mp(self.r2(self.b2(self.c2(x))))
        x = self.r3(self.c3(x))
        return self.fc(torch.flatten(self.gap(x), 1))


class ResidualAdd(nn.Module):
    SHAPE = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1, bias=False)
        self.bs = nn.BatchNorm2d(32)
        self.c1 = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.b1 = nn.BatchNorm2d(32)
        self.c2 = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.b2 = nn.BatchNorm2d(32)
        self.c3 = nn.Conv2d(32, 24, 1)
        self.relu = nn.ReLU()
        self.r1 = nn.ReLU()
        self.r2 = nn.ReLU()
        self.r3 = nn.ReLU()
        self.gap = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(24, 5)

    def forward(self, x):
        s = self.relu(self.bs(self.stem(x)))
        y = self.b2(self.c2(self.r1(self.b1(self.c1(s)))))
        y = self.r2(y + s)
        y = self.r3(self.c3(y))
        return self.fc(torch.flatten(self.gap(y), 1))


class ResidualDown(nn.Module):
    SHAPE = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bs = nn.BatchNorm2d(16)
        self.rs = nn.ReLU()
        self.a1 = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False)
        self.ab1 = nn.BatchNorm2d(32)
        self.ar1 = nn.ReLU()
        self.a2 = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.ab2 = nn.BatchNorm2d(32)
        self.sc = nn.Conv2d(16, 32, 1, stride=2, bias=False)
        self.sb = nn.BatchNorm2d(32)
        self.ar2 = nn.ReLU()
        self.d1 = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.db1 = nn.BatchNorm2d(32)
        self.dr1 = nn.ReLU()
        self.d2 = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.db2 = nn.BatchNorm2d(32)
        self.dr2 = nn.ReLU()
        self.gap = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(32, 4)

    def forward(self, x):
        x = self.rs(self.bs(self.stem(x)))
        x = self.ar2(self.ab2(self.a2(self.ar1(self.ab1(self.a1(x))))) + self.sb(self.sc(x)))
        x = self.dr2(self.db2(self.d2(self.dr1(self.db1(self.d1(x))))) + x)
        return self.fc(torch.flatten(self.gap(x), 1))


class ConcatNet(nn.Module):
    SHAPE = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.rs = nn.ReLU()
        self.a = nn.Conv2d(16, 32, 1)
        self.ra = nn.ReLU()
        self.b = nn.Conv2d(16, 16, 3, padding=1)
        self.rb = nn.ReLU()
        self.out = nn.Conv2d(48, 8, 3, padding=1)

    def forward(self, x):
        s = self.rs(self.stem(x))
        return self.out(torch.cat([self.ra(self.a(s)), self.rb(self.b(s))], 1))


class DepthwiseNet(nn.Module):
    SHAPE = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()

        def cbr(i, o, k, s, g, act=True):
            m = [nn.Conv2d(i, o, k, s, k // 2, groups=g, bias=False), nn.BatchNorm2d(o)]
            return nn.Sequential(*(m + ([nn.ReLU6()] if act else [])))

        self.f = nn.Sequential(
            cbr(3, 32, 3, 1, 1),
            cbr(32, 32, 3, 1, 32),
            cbr(32, 48, 1, 1, 1),
            cbr(48, 48, 3, 2, 48),
            cbr(48, 16, 1, 1, 1, False),
        )
        self.gap = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 6)

    def forward(self, x):
        return self.fc(torch.flatten(self.gap(self.f(x)), 1))


class SplitNet(nn.Module):
    SHAPE = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(3, 32, 3, padding=1)
        self.r = nn.ReLU()
        self.a = nn.Conv2d(16, 8, 3, padding=1)
        self.b = nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x):
        p, q = torch.split(self.r(self.c(x)), 16, 1)
        return self.a(p) + self.b(q)


class ConvFlattenLinear(nn.Module):
    SHAPE = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(3, 16, 3, padding=1)
        self.r1 = nn.ReLU()
        self.p1 = nn.MaxPool2d(2)
        self.c2 = nn.Conv2d(16, 32, 3, padding=1)
        self.r2 = nn.ReLU()
        self.p2 = nn.MaxPool2d(2)
        self.f1 = nn.Linear(128, 40)
        self.r3 = nn.ReLU()
        self.f2 = nn.Linear(40, 10)

    def forward(self, x):
        x = self.p2(self.r2(self.c2(self.p1(self.r1(self.c1(x))))))
        return self.f2(self.r3(self.f1(torch.flatten(x, 1))))


class ConvViewLinear(nn.Module):
    SHAPE = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(3, 16, 3, padding=1)
        self.r1 = nn.ReLU()
        self.c2 = nn.Conv2d(16, 32, 3, padding=1)
        self.r2 = nn.ReLU()
        self.ap = nn.AvgPool2d(4)
        self.f1 = nn.Linear(128, 10)

    def forward(self, x):
        x = self.ap(self.r2(self.c2(self.r1(self.c1(x)))))
        return self.f1(x.view(x.size(0), -1))


class DeconvNet(nn.Module):
    SHAPE = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.b1 = nn.BatchNorm2d(32)
        self.r1 = nn.ReLU()
        self.up = nn.ConvTranspose2d(32, 24, 2, stride=2)
        self.b2 = nn.BatchNorm2d(24)
        self.r2 = nn.ReLU()
        self.c2 = nn.Conv2d(24, 4, 3, padding=1)

    def forward(self, x):
        return self.c2(self.r2(self.b2(self.up(self.r1(self.b1(self.c1(x)))))))


class DeconvLast(nn.Module):
    SHAPE = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.b1 = nn.BatchNorm2d(32)
        self.r1 = nn.ReLU()
        self.up = nn.ConvTranspose2d(32, 8, 2, stride=2)

    def forward(self, x):
        return self.up(self.r1(self.b1(self.c1(x))))


class TwoBranch(nn.Module):
    SHAPE = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.bn = nn.BatchNorm2d(32)
        self.r = nn.ReLU()
        self.a1 = nn.Conv2d(32, 16, 3, padding=1)
        self.ra = nn.ReLU()
        self.a2 = nn.Conv2d(16, 4, 1)
        self.b1 = nn.Conv2d(32, 20, 1)
        self.rb = nn.ReLU()
        self.gap = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(20, 3)

    def forward(self, x):
        s = self.r(self.bn(self.stem(x)))
        return self.a2(self.ra(self.a1(s))), self.fc(
            torch.flatten(self.gap(self.rb(self.b1(s))), 1)
        )


class GroupedNet(nn.Module):
    SHAPE = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(3, 32, 3, padding=1, bias=False)
        self.b1 = nn.BatchNorm2d(32)
        self.r1 = nn.ReLU()
        self.g = nn.Conv2d(32, 32, 3, padding=1, groups=4, bias=False)
        self.b2 = nn.BatchNorm2d(32)
        self.r2 = nn.ReLU()
        self.c2 = nn.Conv2d(32, 16, 1)
        self.r3 = nn.ReLU()
        self.gap = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 5)

    def forward(self, x):
        x = self.r1(self.b1(self.c1(x)))
        x = self.r2(self.b2(self.g(x)))
        x = self.r3(self.c2(x))
        return self.fc(torch.flatten(self.gap(x), 1))


class MLP(nn.Module):
    SHAPE = (4, 20)

    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(20, 64)
        self.r1 = nn.ReLU()
        self.l2 = nn.Linear(64, 40)
        self.r2 = nn.ReLU()
        self.l3 = nn.Linear(40, 8, bias=False)

    def forward(self, x):
        return self.l3(self.r2(self.l2(self.r1(self.l1(x)))))


class AvgPoolNet(nn.Module):
    SHAPE = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(3, 8, 3, padding=1)
        self.r1 = nn.ReLU()
        self.p1 = nn.AvgPool2d(2)
        self.c2 = nn.Conv2d(8, 16, 3, padding=1)
        self.r2 = nn.ReLU()
        self.p2 = nn.AvgPool2d(2)
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        return self.fc(torch.flatten(self.p2(self.r2(self.c2(self.p1(self.r1(self.c1(x)))))), 1))


class ReusedModule(nn.Module):
    SHAPE = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(3, 8, 3, padding=1)
        self.r = nn.ReLU()
        self.twice = nn.Conv2d(8, 8, 3, padding=1)
        self.c2 = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.r(self.c1(x))
        x = self.r(self.twice(x))
        x = self.r(self.twice(x))
        return self.c2(x)


class SharedWeight(nn.Module):
    SHAPE = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.b = nn.Conv2d(8, 8, 3, padding=1)
        self.c = nn.Conv2d(8, 8, 3, padding=1)
        self.c.weight = self.b.weight
        self.d = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.d(torch.relu(self.c(torch.relu(self.b(torch.relu(self.a(x)))))))


class SharedWeight1d(nn.Module):
    SHAPE = (2, 3, 12)

    def __init__(self):
        super().__init__()
        self.a = nn.Conv1d(3, 8, 3, padding=1)
        self.b = nn.Conv1d(8, 8, 3, padding=1)
        self.c = nn.Conv1d(8, 8, 3, padding=1)
        self.c.weight = self.b.weight
        self.d = nn.Conv1d(8, 4, 1)

    def forward(self, x):
        return self.d(torch.relu(self.c(torch.relu(self.b(torch.relu(self.a(x)))))))


class PaddingModes(nn.Module):
    SHAPE = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.z = nn.Conv2d(3, 8, 3, padding=1)
        self.refl = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        self.circ = nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular")
        self.repl = nn.Conv2d(8, 8, 3, padding=1, padding_mode="replicate")
        self.z2 = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        for m in (self.z, self.refl, self.circ, self.repl):
            x = torch.relu(m(x))
        return self.z2(x)


class Dims(nn.Module):
    SHAPE = (2, 2, 64)

    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv1d(2, 4, 3, padding=1)
        self.t1 = nn.ConvTranspose1d(4, 4, 3, padding=1)
        self.c2 = nn.Conv2d(4, 4, 3, padding=2, dilation=2)
        self.t2 = nn.ConvTranspose2d(4, 4, 3, padding=1)
        self.c3 = nn.Conv3d(4, 4, 3, padding=1)
        self.c3d = nn.Conv3d(4, 4, 3, padding=(2, 1, 1), dilation=(2, 1, 1))
        self.t3 = nn.ConvTranspose3d(4, 2, 3, padding=1)

    def forward(self, x):
        x = torch.relu(self.t1(torch.relu(self.c1(x))))
        x = x.reshape(2, 4, 8, 8)
        x = torch.relu(self.t2(torch.relu(self.c2(x))))
        x = x.reshape(2, 4, 4, 4, 4)
        return self.t3(torch.relu(self.c3d(torch.relu(self.c3(x)))))


class FunctionalAndUnused(nn.Module):
    SHAPE = (2, 4, 8, 8)

    def __init__(self):
        super().__init__()
        self.used = nn.Conv2d(4, 8, 3, padding=1)
        self.func = nn.Conv2d(8, 8, 3, padding=1)
        self.never = nn.Conv2d(8, 8, 3)
        self.lin = nn.Linear(8, 6)
        self.w = nn.Parameter(torch.randn(6, 5) * 0.1)

    def forward(self, x):
        x = torch.relu(self.used(x))
        x = torch.relu(F.conv2d(x, self.func.weight, self.func.bias, padding=1))
        x = x.flatten(2).transpose(1, 2)
        return torch.matmul(self.lin(x), self.w)


class UnusedAnd3d(nn.Module):
    SHAPE = (2, 4, 8, 8)

    def __init__(self):
        super().__init__()
        self.used = nn.Conv2d(4, 8, 3, padding=1)
        self.never = nn.Conv2d(8, 8, 3)
        self.lin = nn.Linear(8, 6)
        self.lin2 = nn.Linear(6, 6, bias=False)
        self.w = nn.Parameter(torch.randn(6, 5) * 0.1)

    def forward(self, x):
        x = torch.relu(self.used(x)).flatten(2).transpose(1, 2)
        return torch.matmul(self.lin2(torch.relu(self.lin(x))), self.w)


class SharedInput(nn.Module):
    SHAPE = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.r = nn.ReLU()
        self.q = nn.Conv2d(8, 8, 1)
        self.k = nn.Conv2d(8, 8, 1)
        self.v = nn.Conv2d(8, 8, 3, padding=1)
        self.o = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.r(self.stem(x))
        return self.o(self.q(x) + self.k(x) + self.v(x))


class NoLayers(nn.Module):
    SHAPE = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(3)
        self.p = nn.MaxPool2d(2)

    def forward(self, x):
        return self.p(torch.relu(self.bn(x)))


class TinyCNN(nn.Module):
    SHAPE = (1, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.b1 = nn.BatchNorm2d(8)
        self.r1 = nn.ReLU()
        self.c2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.r2 = nn.ReLU()
        self.c3 = nn.Conv2d(16, 16, 1)
        self.b3 = nn.BatchNorm2d(16)
        self.r3 = nn.ReLU()
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        x = self.r1(self.b1(self.c1(x)))
        x = self.r2(self.c2(x))
        x = self.r3(self.b3(self.c3(x)))
        return self.fc(x.mean((2, 3)))


class BasicBlock(nn.Module):
    def __init__(self, i, o, s):
        super().__init__()
        self.c1 = nn.Conv2d(i, o, 3, s, 1, bias=False)
        self.b1 = nn.BatchNorm2d(o)
        self.r1 = nn.ReLU()
        self.c2 = nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.b2 = nn.BatchNorm2d(o)
        self.r2 = nn.ReLU()
        self.down = (
            nn.Sequential(nn.Conv2d(i, o, 1, s, bias=False), nn.BatchNorm2d(o))
            if (s != 1 or i != o)
            else None
        )

    def forward(self, x):
        y = self.b2(self.c2(self.r1(self.b1(self.c1(x)))))
        return self.r2(y + (x if self.down is None else self.down(x)))


class SmallResNet(nn.Module):
    SHAPE = (2, 3, 32, 32)

    def __init__(self, w=(40, 80, 152), n=2):
        super().__init__()
        self.stem = nn.Conv2d(3, w[0], 3, 1, 1, bias=False)
        self.bs = nn.BatchNorm2d(w[0])
        self.rs = nn.ReLU()
        layers, i = [], w[0]
        for k, o in enumerate(w):
            for j in range(n):
                layers.append(BasicBlock(i, o, 2 if (k and j == 0) else 1))
                i = o
        self.body = nn.Sequential(*layers)
        self.gap = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(i, 10)

    def forward(self, x):
        return self.fc(torch.flatten(self.gap(self.body(self.rs(self.bs(self.stem(x))))), 1))


PRUNE = [
    "PlainChain",
    "ResidualAdd",
    "ResidualDown",
    "ConcatNet",
    "DepthwiseNet",
    "SplitNet",
    "ConvFlattenLinear",
    "ConvViewLinear",
    "DeconvNet",
    "DeconvLast",
    "TwoBranch",
    "GroupedNet",
    "MLP",
]


def build(name, seed=0):
    torch.manual_seed(seed)
    m = globals()[name]()
    g = torch.Generator().manual_seed(seed + 1000)
    # give the channels clearly different norms and the batch norms non-trivial statistics
    with torch.no_grad():
        for mod in m.modules():
            if isinstance(mod, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)):
                mod.weight.mul_(
                    (0.5 + torch.rand(mod.weight.shape[0], generator=g)).reshape(
                        [-1] + [1] * (mod.weight.dim() - 1)
                    )
                )
            elif isinstance(mod, (nn.BatchNorm1d, nn.BatchNorm2d)):
                mod.weight.uniform_(0.5, 1.5, generator=g)
                mod.bias.uniform_(-0.3, 0.3, generator=g)
                mod.running_mean.uniform_(-0.2, 0.2, generator=g)
                mod.running_var.uniform_(0.5, 1.5, generator=g)
    return m


def example_input(name, seed=0):
    g = torch.Generator().manual_seed(seed + 77)
    return torch.randn(globals()[name].SHAPE, generator=g)
