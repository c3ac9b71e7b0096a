"""From one kind of file to another."""

from __future__ import annotations

from pathlib import Path

import pytest

from amct_fx.config import load_config, resolve
from amct_fx.config.rewrite import rewrite_config
from amct_fx.errors import ConfigError
from test.config.test_samples import classifier

SAMPLES = Path(__file__).parent / "samples"
MODEL = classifier("", "conv1", "conv2", "fc")


def specs(source: object) -> list[tuple[object, ...]]:
    layers = resolve(load_config(source), MODEL).layers.values()  # type: ignore[arg-type]
    return [(spec.quantize, spec.activation, spec.weight) for spec in layers]


@pytest.mark.filterwarnings("ignore::amct_fx.errors.AmctWarning")
@pytest.mark.parametrize("name", ["quant.cfg", "mindspore_quant.cfg"])
def test_a_cfg_becomes_json_and_a_cfg_again(tmp_path: Path, name: str) -> None:
    first, back, again = (tmp_path / file for file in ("a.json", "b.cfg", "c.JSON"))
    rewrite_config(SAMPLES / name, first, facts=MODEL)
    rewrite_config(first, back)
    rewrite_config(back, again, facts=MODEL)
    expected = specs(SAMPLES / name)
    assert specs(first) == expected
    enabled = [spec for spec in expected if spec[0]]
    assert [spec for spec in specs(back) if spec[0]] == enabled
    assert [spec[0] for spec in specs(again)] == [spec[0] for spec in expected]


def test_json_stays_json_without_a_model(tmp_path: Path) -> None:
    text = '{"version": 1, "conv1": {}, "fc": {"retrain_enable": false}}'
    (tmp_path / "a.json").write_text(text)
    rewrite_config(tmp_path / "a.json", tmp_path / "b.json", name_map={"conv1": "stem"})
    assert load_config(tmp_path / "b.json").layer_overrides[0].name == "stem"


def test_a_mindspore_file_becomes_a_pytorch_file(tmp_path: Path) -> None:
    rewrite_config(SAMPLES / "mindspore_quant.cfg", tmp_path / "a.cfg", dialect="mindspore")
    assert 'layer_type: "Conv2d"' in (tmp_path / "a.cfg").read_text()


def test_nothing_is_written_on_failure(tmp_path: Path) -> None:
    target = tmp_path / "out" / "a.json"
    with pytest.raises(ConfigError, match=r"quant.cfg: .*say which model"):
        rewrite_config(SAMPLES / "quant.cfg", target)
    with pytest.raises(ConfigError, match="cannot hold pruning"):
        rewrite_config(SAMPLES / "prune.cfg", target, facts=MODEL)
    assert not target.parent.exists()
