"""Worked numbers of the quantization page: printed there with nine digits, checked here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from amct_fx.observers import functional

X = [-1.6, -1.0, -0.5, -0.25, 0.0, 0.03, 0.3, 0.77, 1.2, 2.5]
G = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
PREVIOUS = (1.1, -0.8)
# bits, fixed_min, M, m -> scale, offset, grad M, grad m, y, clipped positions, clips afterwards
ULQ_ROWS = [
    (
        (8, False, 1.5, -0.9),
        (0.00941176526, -32, 0.999803901, 0.300195992),
        "-.903529465 -.903529465 -.498823553 -.254117668 0 .0282352958 .301176488 .771764755 "
        "1.20470595 1.49647069",
        [0, 1, 9],
        (1.5, -0.9),
    ),
    (
        (8, True, 1.5, -0.9),
        (0.00588235306, -128, 1.00007844, 0.99992156),
        "0 0 0 0 0 .0294117648 .300000012 .770588279 1.20000005 1.5",
        [0, 1, 2, 3, 9],
        (1.5, 0.0),
    ),
    (
        (4, False, 1.5, -0.9),
        (0.160000011, -2, 0.996666729, 0.303333253),
        "-.960000038 -.960000038 -.480000019 -.320000023 0 0 .320000023 .800000072 1.28000009 "
        "1.44000006",
        [0, 1, 9],
        (1.5, -0.9),
    ),
    (
        (16, False, 1.5, -0.9),
        (3.66216555e-5, -8192, 0.999985576, 0.300014406),
        "-.900013804 -.900013804 -.49999547 -.250016034 0 .0299931355 .300004601 .770006955 "
        "1.19998181 1.49998641",
        [0, 1, 9],
        (1.5, -0.9),
    ),
    (
        (8, False, -0.2, -0.9),
        (0.00784313772, -13, 1.89652956, 0.303470582),
        "-.90196085 -.90196085 -.501960814 -.250980407 0 .0313725509 .298039228 .768627524 "
        "1.09803927 1.09803927",
        [0, 1, 8, 9],
        (1.1, -0.9),
    ),
    (
        (8, False, 0.7, 0.7),
        (0.0074509806, -21, 1.90074313, 0.299256951),
        "-.79725492 -.79725492 -.499215692 -.25333333 0 .0298039224 .298039228 .767450988 "
        "1.10274518 1.10274518",
        [0, 1, 8, 9],
        (1.1, -0.8),
    ),
]
W = [[0.5, -1, 0.25, 0.1], [1, -1, 0.3, 0.7], [0, 0, 0, 0], [2, -0.5, 0.013, -1.999]]


def scalar(value: float) -> Tensor:
    return torch.tensor([value])


@pytest.mark.parametrize(("inputs", "numbers", "y", "clipped", "clips"), ULQ_ROWS)
def test_ulq(
    inputs: tuple[int, bool, float, float],
    numbers: tuple[float, int, float, float],
    y: str,
    clipped: list[int],
    clips: tuple[float, float],
) -> None:
    bits, fixed_min, upper, lower = inputs
    scale, offset, grad_max, grad_min = numbers
    x, clip_max, clip_min = torch.tensor(X), scalar(upper), scalar(lower)
    for tensor in (x, clip_max, clip_min):
        tensor.requires_grad_()
    settings = {"fixed_min": fixed_min, "previous": tuple(scalar(v) for v in PREVIOUS)}
    output = functional.ulq_fake_quantize(x, clip_max, clip_min, num_bits=bits, **settings)
    output.backward(torch.tensor(G))
    effective = functional.ulq_effective_clips(clip_max, clip_min, **settings)
    qparams = functional.ulq_qparams(*effective, num_bits=bits)

    assert tuple(t.item() for t in effective) == pytest.approx(clips)
    assert qparams[0].item() == pytest.approx(scale, rel=1e-8)
    assert qparams[1].item() == offset
    assert output.tolist() == pytest.approx([float(v) for v in y.split()], rel=1e-8)
    expected = [0.0 if i in clipped else g for i, g in enumerate(G)]
    assert x.grad.tolist() == pytest.approx(expected)
    assert clip_max.grad.item() == pytest.approx(grad_max, rel=1e-6)
    assert clip_min.grad.item() == pytest.approx(grad_min, rel=1e-6)


@pytest.mark.parametrize(
    ("clip", "offset", "scale"),
    [
        (0.5, -1, 0.00392156886),
        (1, -1, 0.00784313772),
        (1.5, 0, 0.0117647061),
        (2, -1, 0.0156862754),
        (2.5, -1, 0.0196078438),
        (3, 0, 0.0235294122),
        (4, -1, 0.0313725509),
        (6, 0, 0.0470588244),
        (8, -1, 0.0627451017),
    ],
)
def test_clips_symmetric_about_zero(clip: float, offset: int, scale: float) -> None:
    actual = functional.ulq_qparams(scalar(clip), scalar(-clip))
    assert actual[1].item() == offset
    assert actual[0].item() == pytest.approx(scale, rel=1e-8)


@pytest.mark.parametrize(
    ("bits", "axis", "scales"),
    [
        (8, 0, [0.0078125, 0.00787401572, 1, 0.0157480314]),
        (8, None, [0.0157480314]),
        (4, 0, [0.125, 0.142857149, 1, 0.285714298]),
    ],
)
def test_arq(bits: int, axis: int | None, scales: list[float]) -> None:
    actual = functional.arq_qparams(torch.tensor(W), num_bits=bits, ch_axis=axis)
    assert actual.tolist() == pytest.approx(scales, rel=1e-8)


@pytest.mark.parametrize(
    ("scales", "grads"),
    [
        ([0.006, 0.0075, 1, 0.02], [-11.2694283, -0.578260839, 0, -0.0377121046]),
        ([0.0075], [5.0505352]),
    ],
)
def test_weight_ulq(scales: list[float], grads: list[float]) -> None:
    scale = torch.tensor(scales, requires_grad=True)
    g = torch.tensor([[1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4], [1, 1, 1, 1], [-1, -2, -3, -4]])
    functional.ulq_weight_fake_quantize(torch.tensor(W), scale, ch_axis=0).backward(g)
    assert scale.grad.tolist() == pytest.approx(grads, rel=1e-6)


SAMPLE = [0.1, 0.5, -0.3, 0.9, 2, -1.5, 0.7, 0.05, -0.01, 1.1]


@pytest.mark.parametrize(
    ("data", "bits", "scale", "index", "clip_max", "clip_min"),
    [
        (SAMPLE, 8, 0.0166929122, 36, 2.11999989, -2.13669276),
        (SAMPLE, 4, 0.288571417, 31, 2.01999998, -2.30857134),
        ([3.3] * 5, 8, 0.0259842519, 30, 3.3, -3.32598424),
        ([-3.3] * 5, 8, 0.0257812496, 30, 3.2742188, -3.3),
        ([0.0] * 5, 8, 1, 0, 127, -128),
    ],
)
def test_ifmr(
    data: list[float], bits: int, scale: float, index: int, clip_max: float, clip_min: float
) -> None:
    found = functional.ifmr_search(torch.tensor(data), num_bits=bits)
    assert found.index == index
    assert found.scale.item() == pytest.approx(scale, rel=1e-8)
    assert found.clip_max.item() == pytest.approx(clip_max, rel=1e-7)
    assert found.clip_min.item() == pytest.approx(clip_min, rel=1e-7)


def test_ifmr_clips_give_offset_zero() -> None:
    for seed in range(50):
        torch.manual_seed(seed)
        scale, offset = functional.ulq_qparams(*functional.ifmr_range(torch.randn(50)))
        assert offset.item() == 0
        assert scale.item() > 0
