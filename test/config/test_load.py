"""Paths, texts and other sources of a configuration."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from amct_fx.config import CompressionConfig, load_config
from amct_fx.config.files import MAX_BYTES, write_text
from amct_fx.errors import AmctError, ConfigError, ConfigFileNotFoundError, ConfigTypeError


def test_none_means_the_defaults() -> None:
    assert load_config(None) == CompressionConfig()


def test_a_configuration_is_returned_as_it_is() -> None:
    config = CompressionConfig(batch_num=3)
    assert load_config(config) is config


@pytest.mark.parametrize(
    "text",
    ["batch_num: 2", "batch_num:2", "  batch_num : 2", "batch_num: 2 # words", "\nbatch_num: 2"],
)
def test_a_string_that_looks_like_a_cfg_is_text(text: str) -> None:
    assert load_config(text).batch_num == 2


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_path_is_read(tmp_path: Path, as_path: type) -> None:
    path = tmp_path / "batch_num: 2.cfg" if as_path is Path else tmp_path / "quant.cfg"
    path.write_text("batch_num: 2")
    config = load_config(as_path(path))
    assert (config.batch_num, config.file) == (2, str(path))


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "empty.cfg"
    path.touch()
    assert load_config(path) == CompressionConfig()


@pytest.mark.parametrize("source", ["", "  ", "\n", "\t\n "])
def test_an_empty_string_is_an_error(source: str) -> None:
    with pytest.raises(ConfigError, match="pass None for the defaults"):
        load_config(source)


def test_a_missing_file_is_a_file_not_found_error_with_close_matches(tmp_path: Path) -> None:
    (tmp_path / "quant.cfg").touch()
    with pytest.raises(ConfigFileNotFoundError, match=r"did you mean 'quant.cfg'") as caught:
        load_config(tmp_path / "qaunt.cfg")
    assert isinstance(caught.value, (FileNotFoundError, AmctError))
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename == str(tmp_path / "qaunt.cfg")


def test_a_file_in_a_missing_folder_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileNotFoundError):
        load_config(tmp_path / "nowhere" / "quant.cfg")


def test_a_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is a folder"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"batch_num: 1\n\xff\xfe", "not UTF-8"),
        (b"\xef\xbb\xbfbatch_num: 1", "byte-order mark"),
        (b"batch_num: 1\0", "binary"),
        (bytes(range(256)), "binary|UTF-8"),
    ],
)
def test_what_is_no_text_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "quant.cfg"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_very_large_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "large.cfg"
    with path.open("wb") as file:
        file.truncate(100 * 1024 * 1024)
    with pytest.raises(ConfigError, match="too many for a configuration"):
        load_config(path)
    with pytest.raises(ConfigError, match="too many for a configuration"):
        load_config("#" * (MAX_BYTES + 1))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        load_config(tmp_path / "pipe")


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
def test_an_impossible_path_is_an_error(path: str) -> None:
    with pytest.raises(ConfigError):
        load_config(path)


@pytest.mark.parametrize("source", [3, b"batch_num: 2", object()])
def test_other_objects_are_a_type_error(source: object) -> None:
    with pytest.raises(ConfigTypeError, match="a configuration is a path"):
        load_config(source)  # type: ignore[arg-type]


def test_an_unknown_dialect_is_an_error() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mindspore'"):
        load_config(None, dialect="Mindspore")


def test_errors_in_a_file_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "quant.cfg"
    path.write_text("batch_num: 1\nskip_layer: 'a'\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    error = caught.value
    assert (error.file, error.line, error.column) == (str(path), 2, 1)
    assert "did you mean 'skip_layers'" in str(error)


def test_importing_and_resolving_needs_neither_protobuf_nor_torch() -> None:
    code = """
import sys
from amct_fx.config import *
resolve(CompressionConfig(), ModelFacts((LayerFacts("fc", "Linear"),)))
loaded = [name for name in ("google.protobuf", "torch") if name in sys.modules]
package_needs_torch = "torch" in loaded and "amct_fx.prepare" in sys.modules
assert "google.protobuf" not in loaded, loaded
assert "torch" not in loaded or package_needs_torch, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_writing_makes_folders_and_replaces_the_file(tmp_path: Path) -> None:
    target = tmp_path / "new" / "deep" / "config.json"
    for text in ("first", "second"):
        write_text(target, text)
        assert target.read_text() == text
    assert target.stat().st_mode & 0o777 == 0o640
    assert [item.name for item in target.parent.iterdir()] == ["config.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "config.json"
    target.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_text(target, "new \ud800")
    assert target.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["config.json"]


def test_a_misspelt_first_field_in_a_one_line_text_is_not_taken_for_a_path():
    with pytest.raises(ConfigError, match=r"1:1.*skip_layers"):
        load_config("skip_layer: 'conv1'")


@pytest.mark.parametrize("name", ["run#2.cfg", "a{b}.cfg"])
def test_a_file_whose_name_looks_like_a_text_is_still_a_path(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("batch_num: 7")
    assert load_config(name).batch_num == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_nun: 2", "'batch_nun'; did you mean 'batch_num'"),
        ("skip_layer:'x'", "'skip_layer'; did you mean 'skip_layers'"),
        ("prune_cnfig{}", "'prune_cnfig'; did you mean 'prune_config'"),
        ("Batch_num: 2", "'Batch_num'; did you mean 'batch_num'"),
        ("batch_num = 2", "expected ':' after batch_num, found '='"),
        ("batch_num 2", "expected ':' after batch_num, found '2'"),
    ],
)
def test_one_line_with_a_mistake_is_a_text_and_no_path(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(text)


@pytest.mark.parametrize(
    "path", ["batch_num", "batch_num.cfg", "batch_num/a.cfg", "C:\\batch.cfg", "s3://a/b.cfg"]
)
def test_what_looks_like_a_path_is_a_path(path: str) -> None:
    with pytest.raises(ConfigFileNotFoundError):
        load_config(path)


@pytest.mark.parametrize("name", ["batch_nun: 2", "batch_num = 2", "a#1"])
def test_a_file_with_such_a_name_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("batch_num: 3")
    assert load_config(name).batch_num == 3
