"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const main = document.querySelector("main");
  const nav = document.querySelector("nav");
  const SVG = "http://www.w3.org/2000/svg";

  /* Elements. Text is always set as text, never as HTML. */
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    return filled(made, attributes, children);
  }
  function shape(tag, attributes = {}, ...children) {
    return filled(document.createElementNS(SVG, tag), attributes, children);
  }
  function filled(made, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined) made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== null));
    return made;
  }
  function section(id, title, text) {
    nav.append(element("a", { href: "#" + id }, title));
    const made = element("section", { id }, element("h2", {}, title));
    if (text) made.append(element("p", {}, text));
    main.append(made);
    return made;
  }
  function number(value, digits = 4) {
    if (value === null || value === undefined) return "";
    if (typeof value === "string") return value;
    if (Number.isInteger(value)) return String(value);
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(Math.max(2, digits - 2)) : String(+value.toPrecision(digits));
  }
  /* A name that may be broken behind its dots and underscores. */
  function breakable(name) {
    return name.split(/(?<=[._])/).flatMap((piece, index) => (index ? [element("wbr"), piece] : [piece]));
  }
  /* A part that scrolls by itself, also with the arrow keys. */
  function scroller(kind, label, ...children) {
    return element("div", { class: kind, tabindex: 0, role: "region", "aria-label": label }, ...children);
  }
  const percent = (value) => (value === null || value === undefined ? "" : (100 * value).toFixed(value > 0 && value < 0.0005 ? 4 : 2) + " %");
  const decibel = (value) => (typeof value === "number" ? value.toFixed(1) : value || "");
  const metric = data.metric ? data.metric.name : "";

  /* Light and dark. */
  const themeButton = document.getElementById("theme");
  function setTheme(dark) {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    themeButton.textContent = dark ? "Light" : "Dark";
  }
  const system = matchMedia("(prefers-color-scheme: dark)");
  setTheme(system.matches);
  system.addEventListener("change", (event) => setTheme(event.matches));
  themeButton.addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
  addEventListener("beforeprint", () => { document.documentElement.dataset.theme = "light"; });
  addEventListener("afterprint", () => setTheme(themeButton.textContent === "Light"));

  /* How bad a layer is, from 0 to 5: by the harm it does, or else by the noise in its output. */
  const harms = data.layers.map((layer) => layer.harm).filter((harm) => typeof harm === "number" && harm > 0);
  const worst = Math.max(...harms, 0);
  function heat(layer) {
    if (typeof layer.harm === "number") {
      if (layer.harm <= 0 || worst <= 0) return 0;
      return Math.max(0, Math.min(5, Math.round(5 + 2 * Math.log10(layer.harm / worst))));
    }
    if (typeof layer.output_sqnr !== "number") return null;
    return Math.max(0, Math.min(5, Math.round((45 - layer.output_sqnr) / 7)));
  }

  overview();
  table();
  bars();
  graph();
  histograms();
  history();
  pruning();

  function overview() {
    const part = section("overview", "Overview");
    const tiles = element("div", { class: "tiles" });
    const add = (value, label) => tiles.append(element("div", { class: "tile" }, element("b", {}, value), element("span", {}, label)));
    if (data.metric) {
      add(number(data.metric.float, 5), metric + ", float");
      add(number(data.metric.quantized, 5), metric + ", quantized");
      if (data.metric.unquantized !== data.metric.float) add(number(data.metric.unquantized, 5), metric + ", quantizers off");
      if (data.metric.output) add(decibel(data.metric.output.sqnr) + " dB", "SQNR of the output");
      add(number(data.metric.samples), "samples in " + data.metric.batches + (data.metric.batches === 1 ? " batch" : " batches"));
    }
    add(data.quantized.join(" of "), "layers quantized");
    part.append(tiles);
    if (data.totals.includes(",")) part.append(element("p", {}, data.totals));
    for (const note of data.notes) part.append(element("p", {}, "Note: " + note));
    for (const island of data.islands) part.append(element("p", {}, "Not traced: " + island));
    if (!data.suggestions.length) return;
    part.append(element("h3", {}, "What to leave float"));
    for (const item of data.suggestions) part.append(element("pre", {}, item.text));
  }

  /* The table: sortable, can be filtered; the bars follow it. */
  function table() {
    const part = section("layers", "Layers", "Choose a column to sort by. Errors are against the float model; " +
      "harm is what the metric loses if only this layer is quantized, gain what it wins back if only this layer stays float.");
    const columns = [
      ["layer", "Layer", "name"], ["type", "Type"], ["state", "State"],
      ["harm", "Harm", "number", number], ["gain", "Gain", "number", number],
      ["input_sqnr", "Input dB", "number", decibel], ["weight_sqnr", "Weight dB", "number", decibel],
      ["output_sqnr", "Output dB", "number", decibel], ["output_alone_sqnr", "Alone dB", "number", decibel],
      ["output_cosine", "Cosine", "number", (value) => (typeof value === "number" ? value.toFixed(5) : "")],
      ["input_saturated", "Saturated", "number", percent], ["input_unused_codes", "Unused codes", "number", number],
      ["dead", "Dead channels", "text"], ["input_text", "Input quantizer", "text"], ["weight_text", "Weight", "short"],
      ["pruning_text", "Pruning", "text"], ["reason", "Why float", "text"],
    ].filter(([key], index) => index === 0 || data.layers.some((layer) => layer[key] !== null && layer[key] !== undefined && layer[key] !== ""));
    const hints = {
      harm: "what the metric loses if only this layer is quantized", gain: "what the metric wins back if only this layer stays float",
      input_sqnr: "quantized input against the float model", weight_sqnr: "quantized weight against its own float values",
      output_sqnr: "output in the quantized model against the float model", output_alone_sqnr: "output if only this layer is quantized",
      output_cosine: "angle between the outputs, 1 if they are equal", input_saturated: "share of the input that is clipped",
      input_unused_codes: "integer codes of the input that never occur", dead: "channels whose codes are all 0",
    };
    const filter = element("input", { type: "search", id: "filter", placeholder: "Filter by name, type, reason …", "aria-label": "Filter layers" });
    const types = [...new Set(data.layers.map((layer) => layer.type))].sort();
    const choice = element("select", { id: "type", "aria-label": "Type" }, element("option", { value: "" }, "all types"), ...types.map((type) => element("option", { value: type }, type)));
    const states = element("select", { id: "state", "aria-label": "State" }, element("option", { value: "" }, "all states"), ...[...new Set(data.layers.map((layer) => layer.state))].sort().map((state) => element("option", { value: state }, state)));
    const count = element("span", { id: "count", role: "status" });
    part.append(element("div", { class: "tools" }, filter, choice, states, count));
    const head = element("tr");
    const body = element("tbody");
    const rows = data.layers.map((layer, index) => row(layer, index, columns));
    let sorted = { key: null, down: true };
    for (const [key, title, kind] of columns) {
      const button = element("button", { type: "button", title: hints[key] }, title);
      const cell = element("th", { scope: "col", "data-key": key, class: kind === "number" ? "number" : null, "aria-sort": "none" }, button);
      button.addEventListener("click", () => {
        sorted = { key, down: sorted.key === key ? !sorted.down : kind === "number" && !key.endsWith("sqnr") && key !== "output_cosine" };
        draw();
      });
      head.append(cell);
    }
    function value(layer, key) {
      const found = layer[key];
      if (found === "exact") return Infinity;
      return found === undefined || found === "" ? null : found;
    }
    function draw() {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      const order = rows.slice();
      if (sorted.key) {
        order.sort((a, b) => {
          const [x, y] = [value(a.layer, sorted.key), value(b.layer, sorted.key)];
          if (x === null || y === null) return (x === null) - (y === null) || a.index - b.index;
          const found = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true });
          return (sorted.down ? -found : found) || a.index - b.index;
        });
      }
      for (const cell of head.children) {
        cell.setAttribute("aria-sort", cell.dataset.key !== sorted.key ? "none" : sorted.down ? "descending" : "ascending");
      }
      const shown = order.filter(({ layer }) =>
        (!choice.value || layer.type === choice.value) && (!states.value || layer.state === states.value) &&
        words.every((word) => [layer.layer, layer.type, layer.state, layer.reason].join(" ").toLowerCase().includes(word)));
      body.replaceChildren(...shown.map((item) => item.element));
      count.textContent = shown.length + " of " + rows.length;
      dispatchEvent(new CustomEvent("layers", { detail: shown.map((item) => item.layer) }));
    }
    filter.addEventListener("input", draw);
    choice.addEventListener("change", draw);
    states.addEventListener("change", draw);
    part.append(scroller("scroll", "Table of the layers", element("table", { "aria-label": "Layers" }, element("thead", {}, head), body)));
    setTimeout(draw);
  }
  function row(layer, index, columns) {
    const cells = columns.map(([key, , kind, form]) => {
      const text = form ? form(layer[key]) : layer[key] ?? "";
      const cell = element("td", { class: kind ?? null });
      if (key === "harm" && text !== "") {
        const level = heat(layer);
        cell.append(element("span", { class: "level", style: `background:var(--heat${level});color:var(--heatink${level})` }, text));
      } else cell.append(...(kind === "name" ? breakable(text) : [text]));
      return cell;
    });
    const made = element("tr", { class: layer.state === "float" ? "float" : null, "data-layer": layer.layer }, ...cells);
    return { layer, index, element: made };
  }
  function mark(name) {
    for (const made of document.querySelectorAll("tr.marked")) made.classList.remove("marked");
    const found = [...document.querySelectorAll("tr[data-layer]")].find((made) => made.dataset.layer === name);
    if (!found) return;
    found.classList.add("marked");
    found.scrollIntoView({ block: "center" });
  }

  function bars() {
    const kinds = [
      ["harm", "Harm alone", "What the metric loses when only this layer is quantized.", number],
      ["harm_input", "… by its input", "What the metric loses when only the input of this layer is quantized.", number],
      ["harm_weight", "… by its weight", "What the metric loses when only the weight of this layer is quantized.", number],
      ["gain", "Gain if float", "What the metric wins back when only this layer stays float.", number],
      ["output_sqnr", "Output SQNR", "In dB, in the quantized model; more is better, 6 dB are one bit.", decibel],
      ["output_alone_sqnr", "Output SQNR alone", "In dB, when only this layer is quantized.", decibel],
      ["by_input_sqnr", "… alone, by its input", "In dB, when only the input of this layer is quantized.", decibel],
      ["by_weight_sqnr", "… alone, by its weight", "In dB, when only the weight of this layer is quantized.", decibel],
      ["weight_sqnr", "Weight SQNR", "In dB.", decibel],
      ["input_saturated", "Saturation", "Share of the input values outside of the clips.", percent],
    ].filter(([key]) => data.layers.some((layer) => typeof layer[key] === "number"));
    if (!kinds.length) return;
    const part = section("bars", "Accuracy by layer", "The layers of the table, in its order.");
    const tools = element("div", { class: "tools", role: "group", "aria-label": "Figure to show" });
    const text = element("p");
    const chart = element("div", { class: "bars" });
    let current = kinds[0];
    let shown = data.layers;
    for (const kind of kinds) {
      const button = element("button", { type: "button", "data-kind": kind[0] }, kind[1]);
      button.addEventListener("click", () => { current = kind; draw(); });
      tools.append(button);
    }
    addEventListener("layers", (event) => { shown = event.detail; draw(); });
    function draw() {
      const [key, , explanation, form] = current;
      for (const button of tools.children) button.setAttribute("aria-pressed", String(button.dataset.kind === key));
      text.textContent = explanation;
      const values = shown.filter((layer) => typeof layer[key] === "number");
      const most = Math.max(...values.map((layer) => Math.abs(layer[key])), 1e-300);
      chart.replaceChildren(...values.flatMap((layer) => {
        const share = (100 * Math.abs(layer[key])) / most;
        const bar = element("div", { class: "bar" + (layer[key] < 0 ? " negative" : ""), style: `width:${share}%` });
        return [
          element("div", { class: "label", title: layer.layer }, element("bdi", {}, layer.layer)),
          element("div", { class: "track", title: layer.layer + ": " + form(layer[key]) }, bar),
          element("div", { class: "value" }, form(layer[key])),
        ];
      }));
    }
    part.append(tools, text, chart);
  }

  function histograms() {
    const layers = data.layers.filter((layer) => layer.input_histogram || layer.weight_histogram);
    if (!layers.length) return;
    const part = section("histograms", "Values and clips", "Values of the inputs and weights in float; the dashed lines are the clips. " +
      "Counts are drawn as logarithms, so that the tails are seen. Below them, how often each integer code occurs.");
    part.append(element("div", { class: "legend" },
      element("span", {}, element("i", { style: "background:var(--input)" }), "input"),
      element("span", {}, element("i", { style: "background:var(--weight)" }), "weight"),
      element("span", {}, element("i", { style: "border-top:2px dashed var(--clip);height:0;vertical-align:4px" }), "clips")));
    const many = element("div", { class: "many" });
    const made = new Map(layers.map((layer) => [layer.layer, figure(layer)]));
    addEventListener("layers", (event) => {
      many.replaceChildren(...event.detail.map((layer) => made.get(layer.layer)).filter(Boolean));
    });
    part.append(many);
  }
  function figure(layer) {
    const made = element("figure", { "data-figure": layer.layer }, element("h3", {}, ...breakable(layer.layer)));
    for (const kind of ["input", "weight"]) {
      if (!layer[kind + "_histogram"]) continue;
      const unused = layer[kind + "_unused_codes"];
      made.append(histogram(layer[kind + "_histogram"], kind), codes(layer[kind + "_codes"], kind),
        element("figcaption", {}, `${kind}: ${percent(layer[kind + "_saturated"])} saturated` + (unused === null ? "" : `, ${unused} codes unused`)));
    }
    return made;
  }
  function histogram(found, kind) {
    const [width, height, foot] = [300, 84, 14];
    let [low, high] = [found.low, found.high];
    if (found.clip_min !== null) [low, high] = [Math.min(low, found.clip_min), Math.max(high, found.clip_max)];
    const margin = (high - low) * 0.02 || 1;
    low -= margin; high += margin;
    const x = (value) => ((value - low) / (high - low)) * width;
    const most = Math.log1p(Math.max(...found.counts));
    const step = (found.high - found.low) / found.counts.length;
    let path = "";
    found.counts.forEach((count, index) => {
      if (!count) return;
      const [left, right] = [x(found.low + index * step), x(found.low + (index + 1) * step)];
      const top = height - Math.max(1, (Math.log1p(count) / most) * (height - 6));
      path += `M${left.toFixed(1)} ${height}V${top.toFixed(1)}H${Math.max(right, left + 0.8).toFixed(1)}V${height}Z`;
    });
    const made = shape("svg", { viewBox: `0 0 ${width} ${height + foot}`, role: "img", "aria-label": kind + " values" },
      shape("line", { class: "axis", x1: 0, x2: width, y1: height, y2: height }), shape("path", { class: kind, d: path }));
    if (found.clip_min === null) return made;
    const [first, last] = [x(found.clip_min), x(found.clip_max)];
    for (const at of [first, last]) made.append(shape("line", { class: "clip", x1: at, x2: at, y1: 0, y2: height }));
    const label = (at, anchor, text) => made.append(shape("text", { x: Math.min(Math.max(at, 2), width - 2), y: height + 11, "text-anchor": anchor }, text));
    if (last - first > 110) {
      label(first, "start", number(found.clip_min, 3));
      label(last, "end", number(found.clip_max, 3));
    } else {  /* values far outside of the clips leave no room for two labels */
      const middle = (first + last) / 2;
      label(middle, middle < 60 ? "start" : middle > width - 60 ? "end" : "middle", number(found.clip_min, 3) + " … " + number(found.clip_max, 3));
    }
    return made;
  }
  function codes(counts, kind) {
    if (!counts) return null;
    const [width, height] = [300, 26];
    const most = Math.log1p(Math.max(...counts));
    const wide = width / counts.length;
    let path = "";
    counts.forEach((count, index) => {
      if (count) path += `M${(index * wide).toFixed(2)} ${height}v${(-Math.max(1, (Math.log1p(count) / most) * height)).toFixed(1)}h${Math.max(wide, 0.5).toFixed(2)}V${height}Z`;
    });
    return shape("svg", { viewBox: `0 0 ${width} ${height + 2}`, role: "img", "aria-label": kind + " codes" },
      shape("path", { class: kind, d: path, opacity: 0.65 }), shape("line", { class: "axis", x1: 0, x2: width, y1: height, y2: height }));
  }

  /* Lines over the steps of a training; what varies by less than `least` is drawn flat. */
  function lines(series, label, least = 0) {
    const [width, height, left, foot] = [420, 150, 56, 18];
    const points = series.flatMap(({ x, y }) => x.map((at, index) => [at, y[index]])).filter(([, y]) => Number.isFinite(y));
    if (!points.length) return element("p", { class: "empty" }, "nothing recorded");
    const bounds = (values) => [Math.min(...values), Math.max(...values)];
    const [first, last] = bounds(points.map(([x]) => x));
    let [low, high] = bounds(points.map(([, y]) => y));
    const room = Math.max(least, 1e-6 * Math.max(Math.abs(low), Math.abs(high))) || 1;
    if (high - low < room) {
      const middle = (low + high) / 2;
      [low, high] = [middle - room / 2, middle + room / 2];
    }
    const digits = Math.ceil(Math.log10(Math.max(Math.abs(low), Math.abs(high)) / (high - low))) + 2;
    const px = (x) => left + ((x - first) / (last - first || 1)) * (width - left - 6);
    const py = (y) => 6 + (1 - (y - low) / (high - low)) * (height - 12);
    const made = shape("svg", { viewBox: `0 0 ${width} ${height + foot}`, role: "img", "aria-label": label });
    for (const share of [0, 0.5, 1]) {
      const y = low + share * (high - low);
      made.append(shape("line", { class: "grid", x1: left, x2: width, y1: py(y), y2: py(y) }),
        shape("text", { class: "faint", x: left - 6, y: py(y) + 4, "text-anchor": "end" }, number(y, Math.max(3, digits))));
    }
    made.append(shape("text", { class: "faint", x: left, y: height + 12 }, "step " + first),
      shape("text", { class: "faint", x: width, y: height + 12, "text-anchor": "end" }, String(last)));
    series.forEach(({ x, y }) => {
      const path = x.map((at, i) => (Number.isFinite(y[i]) ? `${px(at).toFixed(1)},${py(y[i]).toFixed(1)}` : null)).filter(Boolean).join(" ");
      made.append(shape("polyline", { class: "line", points: path }));
    });
    return made;
  }
  function history() {
    const found = data.history;
    if (!found) return;
    const part = section("history", "Training", "Loss, and the clips of each quantizer, over the steps of the training.");
    const scalars = element("div", { class: "many wide" });
    for (const [name, [x, y]] of Object.entries(found.scalars)) {
      scalars.append(element("figure", {}, element("h3", {}, name), lines([{ x, y }], name)));
    }
    const choice = element("select", { id: "clips", "aria-label": "Quantizer" }, ...Object.keys(found.clip_max).map((name) => element("option", { value: name }, name)));
    const place = element("div", { class: "many wide", id: "clip-lines" });
    const draw = () => {
      const name = choice.value;
      const most = Math.max(...[...found.clip_max[name], ...found.clip_min[name]].map((clip) => Math.abs(clip ?? 0)));
      place.replaceChildren(...[["upper clip", found.clip_max], ["lower clip", found.clip_min]].map(([title, clips]) =>
        element("figure", {}, element("h3", {}, `${title} of ${name}`), lines([{ x: found.steps, y: clips[name] }], `${title} of ${name}`, 1e-3 * most))));
    };
    choice.addEventListener("change", draw);
    part.append(scalars, element("div", { class: "tools" }, choice), place);
    if (choice.value) draw();
  }

  function pruning() {
    const plan = data.prune_plan;
    if (!plan) return;
    const part = section("pruning", "Prune plan", "Each strip is one group of channels that are cut together: filled channels stay, empty ones go.");
    if (plan.totals) part.append(element("p", {}, plan.totals));
    for (const group of plan.groups) {
      const cell = Math.max(2, Math.min(12, 1000 / group.channels));
      const per = Math.max(1, Math.floor(1000 / cell));
      const kept = new Set(group.kept);
      const rows = Math.ceil(group.channels / per);
      const made = shape("svg", { viewBox: `0 0 1000 ${rows * 14}`, role: "img", "aria-label": `${kept.size} of ${group.channels} channels kept` });
      for (let index = 0; index < group.channels; index++) {
        made.append(shape("rect", { class: kept.has(index) ? "kept" : "cut", x: (index % per) * cell + 0.5, y: Math.floor(index / per) * 14 + 1, width: Math.max(cell - 1, 1), height: 11 }));
      }
      const title = `${group.producers.join(", ")}: ${kept.size} of ${group.channels} channels stay`;
      part.append(element("figure", { "data-group": group.id }, element("h3", {}, title), made,
        element("figcaption", {}, [group.consumers.length ? "read by " + group.consumers.join(", ") : "", group.note].filter(Boolean).join("; "))));
    }
    if (!plan.pinned.length) return;
    part.append(element("h3", {}, "Not pruned"), scroller("scroll", "Layers that are not pruned", element("table", {},
      element("thead", {}, element("tr", {}, ...["Layer", "Code", "Why"].map((title) => element("th", { scope: "col" }, title)))),
      element("tbody", {}, ...plan.pinned.map((item) => element("tr", {}, ...[item.name, item.code, item.text].map((text) => element("td", {}, text))))))));
  }

  function graph() {
    const view = data.graph;
    if (!view || !view.nodes.length) return;
    const part = section("graph", "Network", "Layers coloured by the accuracy that they cost; activations and batch norms are part of the lines. Choose a layer to find it in the table.");
    const [wide, high, box] = [150, 52, [134, 28]];
    const width = Math.max(view.width, 1) * wide + 20;
    const height = view.height * high + 20;
    const x = (value) => 10 + (value + 0.5) * wide;
    const y = (value) => 10 + (value + 0.5) * high;
    const layers = new Map(data.layers.map((layer) => [layer.layer, layer]));
    const made = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Network" });
    for (const line of view.edges) {
      let path = `M${x(line[0][0])} ${y(line[0][1])}`;
      for (let index = 1; index < line.length; index++) {
        const [from, to] = [line[index - 1], line[index]];
        const middle = (y(from[1]) + y(to[1])) / 2;
        path += `C${x(from[0])} ${middle} ${x(to[0])} ${middle} ${x(to[0])} ${y(to[1])}`;
      }
      made.append(shape("path", { class: "edge", d: path }));
    }
    for (const [title, row] of view.titles) made.append(shape("text", { class: "faint", x: 12, y: y(row) + 4 }, title));
    for (const node of view.nodes) {
      const layer = layers.get(node.layer);
      const level = layer && layer.state !== "float" ? heat(layer) : null;
      const style = level === null ? null : `fill:var(--heat${level})`;
      const ink = level === null ? null : `fill:var(--heatink${level})`;
      const round = node.kind === "join" ? 14 : 5;
      const hint = layer ? `${layer.layer} (${layer.type})` + (layer.reason ? ": " + layer.reason : "") + (typeof layer.harm === "number" ? `, harm ${number(layer.harm)}` : "") : node.label;
      const group = shape("g", { transform: `translate(${x(node.x)} ${y(node.y)})`, class: layer ? "pick" : null, tabindex: layer ? 0 : null, role: layer ? "button" : null, "data-node": node.layer || null },
        shape("title", {}, hint),
        shape("rect", { class: "node " + node.kind, style, x: -box[0] / 2, y: -box[1] / 2, width: box[0], height: box[1], rx: round }),
        shape("text", { style: ink, "text-anchor": "middle", y: 4 }, node.label));
      if (layer) {
        group.addEventListener("click", () => mark(node.layer));
        group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); mark(node.layer); } });
      }
      made.append(group);
    }
    const scale = element("span", {}, "costs least ");
    for (let level = 0; level <= 5; level++) scale.append(element("i", { style: `background:var(--heat${level})` }));
    scale.append(" most");
    const legend = element("div", { class: "legend" }, scale, element("span", {}, "dashed: stays float"));
    const frame = scroller("graph", "Picture of the network", made);
    part.append(legend, frame);
    frame.scrollLeft = (frame.scrollWidth - frame.clientWidth) / 2;
  }
})();
