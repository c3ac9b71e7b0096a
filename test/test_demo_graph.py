# ruff: noqa: E501  the printed graphs stand as they are
"""The printed graphs of the demo's model after prepare and after convert.

After a wanted change, ``EXPECTTEST_ACCEPT=1 python -m pytest test/test_demo_graph.py`` rewrites them.
"""

from __future__ import annotations

import expecttest
import torch
from amct_fx_demo import DigitsNet
from amct_fx_demo.run import CONFIG
from torch import nn

from amct_fx import convert_amct, prepare_qat_amct
from amct_fx.graph import fx_graph_of


def printed(model: nn.Module) -> str:
    """Return the code of the graph, without the statements that only free memory."""
    source = fx_graph_of(model).python_code("self").src
    lines = (line.split(";")[0].rstrip() for line in source.splitlines())
    return "\n".join(line for line in lines if line)


class TestDemoGraph(expecttest.TestCase):
    """One string for each verb."""

    def prepared(self) -> nn.Module:
        model = prepare_qat_amct(DigitsNet(), CONFIG)
        for _ in range(2):
            model(torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
        return model

    def test_prepared(self) -> None:
        self.assertExpectedInline(
            printed(self.prepared()),
            """\
def forward(self, x):
    stem_conv = self.stem.conv(x)
    stem_bn = self.stem.bn(stem_conv)
    stem_relu = self.stem.relu(stem_bn)
    depthwise_conv_input_fake_quant = self.depthwise.conv.input_fake_quant(stem_relu)
    depthwise_conv = self.depthwise.conv(depthwise_conv_input_fake_quant, quantized = True)
    depthwise_bn = self.depthwise.bn(depthwise_conv)
    depthwise_relu = self.depthwise.relu(depthwise_bn)
    down1_conv_input_fake_quant = self.down1.conv.input_fake_quant(depthwise_relu)
    down1_conv = self.down1.conv(down1_conv_input_fake_quant, quantized = True)
    down1_bn = self.down1.bn(down1_conv)
    down1_relu = self.down1.relu(down1_bn)
    residual_conv1_input_fake_quant = self.residual.conv1.input_fake_quant(down1_relu)
    residual_conv1 = self.residual.conv1(residual_conv1_input_fake_quant, quantized = True)
    residual_bn1 = self.residual.bn1(residual_conv1)
    residual_relu = self.residual.relu(residual_bn1)
    residual_conv2_input_fake_quant = self.residual.conv2.input_fake_quant(residual_relu)
    residual_conv2 = self.residual.conv2(residual_conv2_input_fake_quant, quantized = True)
    residual_bn2 = self.residual.bn2(residual_conv2)
    add = down1_relu + residual_bn2
    residual_relu_1 = self.residual.relu(add)
    down2_conv_input_fake_quant = self.down2.conv.input_fake_quant(residual_relu_1)
    down2_conv = self.down2.conv(down2_conv_input_fake_quant, quantized = True)
    down2_bn = self.down2.bn(down2_conv)
    down2_relu = self.down2.relu(down2_bn)
    flatten = self.flatten(down2_relu)
    hidden_input_fake_quant = self.hidden.input_fake_quant(flatten)
    hidden = self.hidden(hidden_input_fake_quant, quantized = True)
    relu = self.relu(hidden)
    dropout = self.dropout(relu)
    classifier_input_fake_quant = self.classifier.input_fake_quant(dropout)
    classifier = self.classifier(classifier_input_fake_quant, quantized = True)
    return classifier""",
        )

    def test_converted(self) -> None:
        self.assertExpectedInline(
            printed(convert_amct(self.prepared())),
            """\
def forward(self, x):
    stem_conv = self.stem.conv(x)
    stem_bn = self.stem.bn(stem_conv)
    stem_relu = self.stem.relu(stem_bn)
    depthwise_conv_input_quantize = self.depthwise.conv.input_quantize(stem_relu)
    depthwise_conv_input_dequantize = self.depthwise.conv.input_dequantize(depthwise_conv_input_quantize)
    depthwise_conv = self.depthwise.conv(depthwise_conv_input_dequantize, quantized = True)
    depthwise_relu = self.depthwise.relu(depthwise_conv)
    down1_conv_input_quantize = self.down1.conv.input_quantize(depthwise_relu)
    down1_conv_input_dequantize = self.down1.conv.input_dequantize(down1_conv_input_quantize)
    down1_conv = self.down1.conv(down1_conv_input_dequantize, quantized = True)
    down1_relu = self.down1.relu(down1_conv)
    residual_conv1_input_quantize = self.residual.conv1.input_quantize(down1_relu)
    residual_conv1_input_dequantize = self.residual.conv1.input_dequantize(residual_conv1_input_quantize)
    residual_conv1 = self.residual.conv1(residual_conv1_input_dequantize, quantized = True)
    residual_relu = self.residual.relu(residual_conv1)
    residual_conv2_input_quantize = self.residual.conv2.input_quantize(residual_relu)
    residual_conv2_input_dequantize = self.residual.conv2.input_dequantize(residual_conv2_input_quantize)
    residual_conv2 = self.residual.conv2(residual_conv2_input_dequantize, quantized = True)
    add = down1_relu + residual_conv2
    residual_relu_1 = self.residual.relu(add)
    down2_conv_input_quantize = self.down2.conv.input_quantize(residual_relu_1)
    down2_conv_input_dequantize = self.down2.conv.input_dequantize(down2_conv_input_quantize)
    down2_conv = self.down2.conv(down2_conv_input_dequantize, quantized = True)
    down2_relu = self.down2.relu(down2_conv)
    flatten = self.flatten(down2_relu)
    hidden_input_quantize = self.hidden.input_quantize(flatten)
    hidden_input_dequantize = self.hidden.input_dequantize(hidden_input_quantize)
    hidden = self.hidden(hidden_input_dequantize, quantized = True)
    relu = self.relu(hidden)
    dropout = self.dropout(relu)
    classifier_input_quantize = self.classifier.input_quantize(dropout)
    classifier_input_dequantize = self.classifier.input_dequantize(classifier_input_quantize)
    classifier = self.classifier(classifier_input_dequantize, quantized = True)
    return classifier""",
        )
