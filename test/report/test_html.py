"""The page: its data, its safety, and what a real browser makes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amct_fx import analyze, prepare_qat_amct, summarize
from amct_fx.report import Analysis, TrainingRecorder, save_html
from amct_fx.report.html import page_data, render
from test.networks import Net, example
from test.report.chromium import Page, find_chromium

NASTY = "a</script><img src=x onerror=alert(1)>&amp;$"
PLAN = {
    "groups": [
        {"id": "0", "producers": ["stem"], "consumers": ["left"], "channels": 8, "kept": [0, 2, 5]}
    ],
    "pinned": [{"name": "head", "code": "graph_output", "text": "<b>outputs</b> of the model"}],
    "totals": "half of everything",
}


class Nasty(nn.Module):
    """A network with a layer whose name would break a careless page."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(NASTY, nn.Linear(4, 4))
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, NASTY)(self.net(x))


def analysis() -> tuple[Analysis, TrainingRecorder]:
    torch.manual_seed(0)
    model = Nasty().eval()
    prepared = prepare_qat_amct(model, 'quant_skip_layers: "net.right"').eval()
    recorder = TrainingRecorder(prepared)
    for _ in range(3):
        recorder.step(prepared(example(4)).mean(), accuracy=0.5)
    return analyze(prepared, model, example(4), progress=False), recorder


def embedded(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_page_holds_its_data_as_json_whatever_the_names_are() -> None:
    found, recorder = analysis()
    page = render(found, recorder=recorder, title="x</title><script>1</script>")
    assert embedded(page) == page_data(found, recorder=recorder)
    assert NASTY in {layer["layer"] for layer in embedded(page)["layers"]}
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    assert "<title>x&lt;/title&gt;" in page


def test_nothing_in_the_page_comes_from_elsewhere() -> None:
    page = render(analysis()[0])
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:|#)""", page)
    assert "import(" not in page
    assert "url(" not in page
    addresses = set(re.findall(r"https?://[^\"' ]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a language, not a place
    assert "default-src 'none'" in page


def test_names_that_look_like_placeholders_are_not_replaced() -> None:
    page = render(analysis()[0], title="@DATA@ and @SCRIPT@")
    assert "<h1>@DATA@ and @SCRIPT@</h1>" in page


def test_infinite_figures_do_not_break_the_json() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        model[0].weight.zero_()
    prepared = prepare_qat_amct(model)
    x = torch.randn(8, 4)
    prepared(x)
    layer = embedded(render(analyze(prepared, model, x, progress=False)))["layers"][0]
    assert layer["weight_sqnr"] == "exact"


def test_codes_of_sixteen_bits_are_drawn_together() -> None:
    torch.manual_seed(0)
    cfg = "retrain_data_quant_config { ulq_quantize { dst_type: INT16 } }"
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    prepared = prepare_qat_amct(model, cfg)
    x = torch.randn(8, 4)
    prepared(x)
    layer = page_data(analyze(prepared, model, x, progress=False))["layers"][0]
    assert len(layer["input_codes"]) == 256
    assert sum(layer["input_codes"]) == x.numel()


def test_the_plan_of_a_pruned_model_is_drawn_without_being_asked_for() -> None:
    cfg = """prune_config { filter_pruner {
        balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }"""
    prepared = prepare_qat_amct(Net(), cfg, example())
    prepared(example())
    plan = page_data(summarize(prepared))["prune_plan"]
    assert [group["producers"] for group in plan["groups"]] == [["stem"], ["left", "right"]]
    assert [(group["channels"], len(group["kept"])) for group in plan["groups"]] == [(8, 4)] * 2
    assert plan["pinned"][0]["code"] == "graph_output"
    assert plan["totals"] == "parameters 636 → 232, MACs 36,384 → 12,560"


def test_a_summary_alone_makes_a_page(tmp_path: Path) -> None:
    save_html(tmp_path / "page.html", summarize(prepare_qat_amct(Net())))
    data = embedded((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert [layer["layer"] for layer in data["layers"]] == ["stem", "left", "right", "head"]
    assert data["metric"] is None


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Yield the page in a browser."""
    browser = find_chromium()
    if browser is None:
        pytest.skip(
            "NO BROWSER: the HTML page is NOT tested; install Chromium (apt-get install chromium)"
        )
    folder = tmp_path_factory.mktemp("page")
    found, recorder = analysis()
    found.save_html(folder / "report.html", recorder=recorder, prune_plan=PLAN, title="Net")
    page = Page(browser, folder / "profile")
    page.resize(1280, 900)
    page.path = folder / "report.html"  # type: ignore[attr-defined]
    page.open(folder / "report.html")
    yield page
    page.close()
    assert page.problems == []


@pytest.fixture
def page(shown: Page) -> Page:
    """Return the page as it is after loading."""
    shown.resize(1280, 900)
    shown.prefer("light")
    shown.open(shown.path)  # type: ignore[attr-defined]
    return shown


def names(page: Page) -> list[str]:
    found: list[str] = page.run(
        "[...document.querySelectorAll('#layers tbody tr')].map((r) => r.dataset.layer)"
    )
    return found


def click(page: Page, selector: str) -> None:
    page.run(f"document.querySelector({json.dumps(selector)}).click()")


def fill(page: Page, selector: str, value: str) -> None:
    page.run(
        f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.value = "
        f"{json.dumps(value)}; e.dispatchEvent(new Event(e.tagName === 'SELECT' ? 'change' : "
        "'input')); })()"
    )


def column(page: Page, key: str) -> list[Any]:
    layers: dict[str, Any] = {
        layer["layer"]: layer
        for layer in json.loads(page.run("document.getElementById('data').textContent"))["layers"]
    }
    return [layers[name].get(key) for name in names(page)]


ALL = [NASTY, "net.stem", "net.left", "net.right", "net.head"]


def test_the_table_has_a_row_for_each_layer_with_its_name_as_text(page: Page) -> None:
    assert sorted(names(page)) == sorted(ALL)
    cell = "[...document.querySelectorAll('td.name')].map((c) => c.textContent)"
    assert NASTY in page.run(cell)
    assert page.run("document.images.length") == 0


def test_a_click_on_a_column_sorts_by_it_and_another_one_turns_it_round(page: Page) -> None:
    click(page, "th[data-key=output_sqnr] button")
    upwards = column(page, "output_sqnr")
    assert upwards[-1] is None  # float layers last
    assert upwards[:-1] == sorted(upwards[:-1])
    click(page, "th[data-key=output_sqnr] button")
    downwards = column(page, "output_sqnr")
    assert downwards[:-1] == upwards[-2::-1]
    assert page.run("document.querySelector('th[data-key=output_sqnr]').ariaSort") == "descending"
    click(page, "th[data-key=harm] button")
    harm = column(page, "harm")[:-1]
    assert harm == sorted(harm, reverse=True)


def test_the_filter_leaves_the_rows_that_hold_all_words(page: Page) -> None:
    fill(page, "#filter", "conv2d LEFT")
    assert names(page) == ["net.left"]
    assert page.run("document.getElementById('count').textContent") == "1 of 5"
    assert page.run("[...document.querySelectorAll('[data-figure]')].length") == 1
    fill(page, "#filter", "skip_layers")
    assert names(page) == ["net.right"]
    fill(page, "#filter", "")
    fill(page, "#type", "Linear")
    assert sorted(names(page)) == sorted([NASTY, "net.head"])
    fill(page, "#type", "")
    fill(page, "#state", "float")
    assert names(page) == ["net.right"]
    fill(page, "#state", "")
    assert len(names(page)) == 5


def test_the_bars_show_the_figure_that_was_chosen(page: Page) -> None:
    click(page, "[data-kind=weight_sqnr]")
    assert page.run("document.querySelectorAll('.bars .bar').length") == 4
    wide = page.run(
        "Math.max(...[...document.querySelectorAll('.bar')].map((b) => parseFloat(b.style.width)))"
    )
    assert wide == pytest.approx(100)
    assert page.run("document.querySelector('[data-kind=weight_sqnr]').ariaPressed") == "true"


def test_each_layer_has_histograms_with_two_clip_lines_each(page: Page) -> None:
    assert page.run("document.querySelectorAll('[data-figure]').length") == 4
    assert page.run("document.querySelectorAll('[data-figure] .clip').length") == 4 * 2 * 2


def test_a_layer_of_the_network_leads_to_its_row(page: Page) -> None:
    nodes = page.run("[...document.querySelectorAll('[data-node]')].map((n) => n.dataset.node)")
    assert set(ALL) == set(nodes)
    page.run("document.querySelector('[data-node=\"net.left\"]').dispatchEvent(new Event('click'))")
    assert page.run("document.querySelector('tr.marked').dataset.layer") == "net.left"


def test_each_part_that_scrolls_can_be_reached_by_the_keyboard_and_has_a_name(page: Page) -> None:
    script = """[...document.querySelectorAll('.scroll, .graph')]
        .map((e) => e.tabIndex === 0 && e.role === 'region' && e.ariaLabel !== '')"""
    assert page.run(script) == [True, True, True]
    key = "new KeyboardEvent('keydown', { key: ' ' })"
    page.run(f"document.querySelector('[data-node=\"net.stem\"]').dispatchEvent({key})")
    assert page.run("document.querySelector('tr.marked').dataset.layer") == "net.stem"


def test_layers_are_counted_as_the_line_of_totals_does(page: Page) -> None:
    tiles = page.run("[...document.querySelectorAll('.tile')].map((t) => t.textContent)")
    assert "4 of 5layers quantized" in tiles
    totals = page.run("JSON.parse(document.getElementById('data').textContent).totals")
    assert totals.startswith("4 of 5 layers quantized")


def test_a_clip_that_hardly_moves_is_drawn_flat(page: Page) -> None:
    flat = """(() => {
        const y = (id) => document.querySelector(id).getAttribute('points').split(' ')
            .map((point) => parseFloat(point.split(',')[1]));
        const points = y('#clip-lines polyline');
        return Math.max(...points) - Math.min(...points);
    })()"""
    fill(page, "#clips", "net.left")
    assert page.run(flat) == pytest.approx(0, abs=0.2)


def test_the_boxes_of_the_network_show_the_ends_of_long_names(page: Page) -> None:
    shown = page.run("[...document.querySelectorAll('#graph g text')].map((t) => t.textContent)")
    data = json.loads(page.run("document.getElementById('data').textContent"))
    assert shown == [node["label"] for node in data["graph"]["nodes"]]
    long = [label for label in shown if label.startswith("…")]
    assert long
    assert all(NASTY.endswith(label[1:]) and len(label) <= 20 for label in long)


def test_the_history_and_the_prune_plan_are_drawn(page: Page) -> None:
    titles = page.run("[...document.querySelectorAll('#history h3')].map((h) => h.textContent)")
    assert titles[:2] == ["loss", "accuracy"]
    fill(page, "#clips", "net.left")
    titles = page.run("[...document.querySelectorAll('#clip-lines h3')].map((h) => h.textContent)")
    assert titles == ["upper clip of net.left", "lower clip of net.left"]
    assert page.run("document.querySelectorAll('#pruning .kept').length") == 3
    assert page.run("document.querySelectorAll('#pruning .cut').length") == 5
    assert "<b>outputs</b>" in page.run("document.getElementById('pruning').textContent")


def background(page: Page) -> str:
    colour: str = page.run("getComputedStyle(document.body).backgroundColor")
    return colour


def test_it_is_light_or_dark_as_the_system_asks_and_as_the_button_says(page: Page) -> None:
    page.prefer("dark")
    dark = background(page)
    page.prefer("light")
    light = background(page)
    assert sum(map(int, re.findall(r"\d+", dark))) < 150
    assert sum(map(int, re.findall(r"\d+", light))) > 600
    click(page, "#theme")
    assert background(page) == dark


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(page: Page, scheme: str) -> None:
    page.prefer(scheme)
    script = """
      (() => {
        const style = getComputedStyle(document.documentElement);
        const parts = (name) => style.getPropertyValue(name).match(/[0-9a-f]{2}/gi);
        const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        const share = [0.2126, 0.7152, 0.0722];
        const light = (name) => parts(name)
          .map((hex, i) => share[i] * linear(parseInt(hex, 16) / 255)).reduce((a, b) => a + b);
        const contrast = (a, b) => {
          const [low, high] = [light(a), light(b)].sort((p, q) => p - q);
          return (high + 0.05) / (low + 0.05);
        };
        const pairs = [["--ink", "--card"], ["--faint", "--card"], ["--faint", "--back"]];
        pairs.push(["--accent", "--card"]);
        for (let level = 0; level < 6; level++) pairs.push([`--heatink${level}`, `--heat${level}`]);
        return pairs.map(([a, b]) => [a, b, contrast(a, b)]);
      })()
    """
    weak = [pair for pair in page.run(script) if pair[2] < 4.5]
    assert weak == []


def test_on_a_phone_nothing_is_wider_than_the_screen(page: Page) -> None:
    page.resize(390, 844, phone=True)
    page.open(page.path)  # type: ignore[attr-defined]
    assert page.run("document.documentElement.scrollWidth") == 390
    assert page.run("parseFloat(getComputedStyle(document.body).fontSize)") >= 14


def test_it_can_be_printed_with_all_its_parts_and_without_its_buttons(page: Page) -> None:
    page.resize(1046, 740)  # A4, landscape
    page.prefer("light", media="print")
    assert page.run("document.documentElement.scrollWidth") <= 1046
    hidden = "getComputedStyle(document.querySelector('.tools')).display"
    assert page.run(hidden) == "none"
    assert page.run("getComputedStyle(document.querySelector('.scroll')).maxHeight") == "none"
    assert page.pdf().startswith(b"%PDF")
    page.prefer("light")
    assert page.run(hidden) == "flex"


def test_a_screenshot_is_more_than_a_blank_page(page: Page, tmp_path: Path) -> None:
    assert len(page.screenshot(tmp_path / "page.png")) > 50_000


def test_the_browser_asked_for_nothing_but_the_page(page: Page) -> None:
    assert {url.split(":")[0] for url in page.requests} <= {"file", "data"}
    assert page.problems == []
