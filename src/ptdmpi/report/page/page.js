"use strict";
// Draws the data of a run, which is in the element `data`. Texts are inserted only as text, never
// as HTML.
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const main = document.querySelector("main");
  const MARGIN = { left: 66, right: 12, top: 8, bottom: 22 };
  const HEIGHT = 220, LANE = 18, GAP = 20;
  const UNITS = { s: seconds, bytes: bytes, fraction: percent, number: number, count: number };
  // the range of the horizontal axis that is shown: [low, high], or null for the full range
  const zoomed = { steps: null, experts: null, time: null };
  let shown = page.content, version = page.version, redraws = [];
  let reading = false;  // true if the mouse is over a picture; then the picture is not replaced, because a new picture would disturb the reader

  function html(tag, names, ...children) {
    const element = document.createElement(tag);
    if (names) element.className = names;
    element.append(...children);
    return element;
  }
  function svg(tag, values, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(values)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  // ---- formatting of numbers
  function grouped(value, digits) {
    return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  }
  function number(value) {
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size >= 1e9) return value.toExponential(2).replace("e+", "e");
    if (size >= 100) return grouped(value, Number.isInteger(value) || size >= 1000 ? 0 : 1);
    if (size < 1e-3) return value.toExponential(2);
    return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(5)));
  }
  function percent(value) { return `${(100 * value).toFixed(1)}%`; }
  function bytes(value) {
    if (value >= 2 ** 30) return `${(value / 2 ** 30).toFixed(2)} GiB`;
    return value >= 2 ** 20 ? `${grouped(value / 2 ** 20, 1)} MiB` : `${grouped(value / 1024, 1)} KiB`;
  }
  function seconds(value) {
    const size = Math.abs(value);
    if (size === 0) return "0 s";
    if (size < 1e-3) return `${Number((1e6 * value).toPrecision(3))} µs`;
    if (size < 1) return `${Number((1e3 * value).toPrecision(3))} ms`;
    if (size < 60) return `${Number(value.toPrecision(3))} s`;
    const whole = Math.round(value), two = (part) => String(part).padStart(2, "0");
    const minutes = `${Math.floor(whole / 60) % 60}:${two(whole % 60)}`;
    return whole < 3600 ? minutes : `${Math.floor(whole / 3600)}:${minutes.padStart(5, "0")}`;
  }
  // Returns round numbers between low and high, about `count` at most, each with its text.
  function ticks(low, high, count, unit) {
    const base = unit === "bytes" ? 2 ** (10 * Math.floor(Math.log2(Math.max(high, 1)) / 10)) : 1;
    const rough = (high - low) / base / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    let step = base * power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
    if (unit === "count") step = Math.max(step, 1);
    const values = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) values.push(i * step || 0);
    return values.map((value) => [value, tickText(value, step, high, unit)]);
  }
  function tickText(value, step, high, unit) {
    const digits = (scale) => Math.max(0, -Math.floor(Math.log10(step * scale * 1.0001)));
    if (unit === "fraction") return `${(100 * value).toFixed(digits(100))}%`;
    if (unit === "bytes") {
      const power = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(high, 1)) / 10)));
      const scale = 2 ** (10 * power);
      return `${grouped(value / scale, digits(1 / scale))} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
    }
    if (unit === "s") {
      const [scale, name] = [[1, "s"], [1e3, "ms"], [1e6, "µs"]].find(([s]) => high * s >= 1) || [1e6, "µs"];
      return `${grouped(value * scale, digits(scale))} ${name}`;
    }
    for (const [scale, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"]]) {
      if (high >= scale) return value ? `${grouped(value / scale, digits(1 / scale))}${name}` : "0";
    }
    if (high < 1e-3) return value ? value.toExponential().replace(/(\.\d\d)\d+/, "$1") : "0";
    return grouped(value, digits(1));
  }

  // ---- the text next to the pointer
  const tip = html("div", "tip");
  tip.hidden = true;
  tip.setAttribute("role", "status");
  function showTip(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    tip.style.left = tip.style.top = "0";  // give the text its full width before it is measured
    const box = tip.getBoundingClientRect();
    const left = x + 14 + box.width > innerWidth ? x - 14 - box.width : x + 14;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.min(Math.max(4, y - box.height - 8), innerHeight - box.height - 4)}px`;
  }

  // ---- a picture whose horizontal axis can be enlarged
  // `axis` is "steps" or "time", and `whole` is its full range. `paint(frame)` draws the picture.
  // `hover(frame, value, y)` returns the text for a position, and the position that the text
  // belongs to.
  function plot({ axis, label, whole, height, paint, hover }) {
    const picture = svg("svg", { class: "plot", height, tabindex: 0, role: "img", "aria-label": label });
    let frame = null, from = null, at = null;
    function redraw() {
      const width = Math.max(picture.clientWidth, 160);
      const [low, high] = zoomed[axis] || whole;
      const right = width - MARGIN.right;
      frame = {
        width, height, low, high, right,
        x: (value) => MARGIN.left + (value - low) / (high - low || 1) * (right - MARGIN.left),
        value: (x) => low + (Math.min(Math.max(x, MARGIN.left), right) - MARGIN.left) / (right - MARGIN.left) * (high - low),
      };
      picture.dataset.low = low;
      picture.dataset.high = high;
      picture.replaceChildren(...paint(frame));
    }
    function place(event) {
      const box = picture.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    }
    function mark(x, y) {
      picture.querySelector(".overlay")?.remove();
      const overlay = svg("g", { class: "overlay" });
      if (from !== null && Math.abs(x - from) > 3) {
        const left = Math.max(MARGIN.left, Math.min(from, x)), end = Math.min(frame.right, Math.max(from, x));
        overlay.append(svg("rect", { class: "selected", x: left, y: 0, width: Math.max(0, end - left), height: height - MARGIN.bottom }));
      }
      const found = hover(frame, frame.value(x), y);
      if (found) {
        at = found.value;
        const across = frame.x(found.value);
        overlay.append(svg("line", { class: "cross", x1: across, x2: across, y1: MARGIN.top, y2: height - MARGIN.bottom }), ...found.marks);
        const box = picture.getBoundingClientRect();
        showTip(found.text, box.left + across, box.top + Math.min(y, height / 2));
      } else tip.hidden = true;
      picture.append(overlay);
    }
    function leave(event) {
      // on a touch screen, the pointer always leaves after a tap; the text remains until the next
      // tap elsewhere
      if (event?.pointerType === "touch") return;
      reading = false;
      if (from !== null) return;
      picture.querySelector(".overlay")?.remove();
      tip.hidden = true;
    }
    picture.addEventListener("pointermove", (event) => {
      reading = event.pointerType === "mouse";
      mark(...place(event));
    });
    picture.addEventListener("pointerleave", leave);
    picture.addEventListener("blur", leave);
    picture.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      picture.setPointerCapture(event.pointerId);
      from = place(event)[0];
    });
    picture.addEventListener("pointercancel", () => { from = null; leave(); });
    picture.addEventListener("pointerup", (event) => {
      const [x, y] = place(event), start = from;
      from = null;
      if (start !== null && Math.abs(x - start) > 8) zoom(axis, [frame.value(Math.min(start, x)), frame.value(Math.max(start, x))], whole);
      else mark(x, y);
    });
    picture.addEventListener("dblclick", () => zoom(axis, null, whole));
    picture.addEventListener("keydown", (event) => {
      const span = frame.high - frame.low, centre = at ?? (frame.low + frame.high) / 2;
      const near = (factor) => [centre - span * factor / 2, centre + span * factor / 2];
      const actions = {
        ArrowLeft: () => mark(frame.x(Math.max(frame.low, centre - span / 50)), height / 3),
        ArrowRight: () => mark(frame.x(Math.min(frame.high, centre + span / 50)), height / 3),
        "+": () => zoom(axis, near(0.5), whole), "-": () => zoom(axis, near(2), whole),
        Escape: () => zoom(axis, null, whole),
      };
      if (!actions[event.key]) return;
      event.preventDefault();
      actions[event.key]();
    });
    redraws.push(redraw);
    return picture;
  }
  function zoom(axis, range, whole) {
    if (range) {
      const [low, high] = [Math.max(range[0], whole[0]), Math.min(range[1], whole[1])];
      range = high - low > 0 && (low > whole[0] || high < whole[1]) ? [low, high] : null;
    }
    zoomed[axis] = range;
    redraw();
  }
  function redraw() {
    tip.hidden = true;
    for (const one of redraws) one();
    for (const button of main.querySelectorAll("button[data-axis]")) button.disabled = !zoomed[button.dataset.axis];
  }
  function reset(axis) {
    const button = html("button", "", "Show all");
    button.dataset.axis = axis;
    button.addEventListener("click", () => zoom(axis, null, [0, 0]));
    return button;
  }
  function acrossAxis(frame, unit) {
    const count = Math.max(2, Math.floor((frame.right - MARGIN.left) / 90)), base = frame.height - MARGIN.bottom;
    return ticks(frame.low, frame.high, count, unit).flatMap(([value, text]) => [
      svg("line", { class: "axis", x1: frame.x(value), x2: frame.x(value), y1: base, y2: base + 4 }),
      svg("text", { x: frame.x(value), y: frame.height - 6, "text-anchor": frame.x(value) > frame.right - 20 ? "end" : "middle" }, text),
    ]);
  }

  // ---- curves
  function color(place) { return `var(--s${place % 8})`; }
  function stroke(series, place) { return series.kind === "faint" ? "var(--faint)" : color(place); }
  function chart(given, whole) {
    const places = given.series.map((series, i) => i - given.series.slice(0, i).filter((s) => s.kind === "faint").length);
    const write = UNITS[given.unit];
    function range({ low, high }) {
      let least = Infinity, most = -Infinity;
      for (const { x, y, kind } of given.series) {
        for (let i = 0; i < y.length; i++) {
          if (kind === "level" || (x[i] >= low && x[i] <= high)) { least = Math.min(least, y[i]); most = Math.max(most, y[i]); }
        }
      }
      if (least > most) return [0, 1];
      const room = (most - least) * 0.05 || Math.abs(most) * 0.05 || 1;
      return [least >= 0 && least < room * 4 ? 0 : least - room, most + room];
    }
    function paint(frame) {
      const [low, high] = range(frame), base = HEIGHT - MARGIN.bottom;
      frame.y = (value) => base - (value - low) / (high - low) * (base - MARGIN.top);
      const drawn = [];
      for (const [value, text] of ticks(low, high, 6, given.unit)) {
        drawn.push(svg("line", { class: "grid", x1: MARGIN.left, x2: frame.right, y1: frame.y(value), y2: frame.y(value) }));
        drawn.push(svg("text", { x: MARGIN.left - 6, y: frame.y(value) + 4, "text-anchor": "end" }, text));
      }
      drawn.push(...acrossAxis(frame, "count"));
      const inside = svg("svg", { x: MARGIN.left, y: 0, width: frame.right - MARGIN.left + 4, height: base, viewBox: `${MARGIN.left} 0 ${frame.right - MARGIN.left + 4} ${base}` });
      given.series.forEach((series, i) => inside.append(...shape(series, stroke(series, places[i]), frame)));
      return [...drawn, inside];
    }
    function hover(frame, value, y) {
      const nearest = given.series.filter((s) => s.kind !== "level").map((series) => near(series.x, value, frame)).filter((x) => x !== null);
      if (!nearest.length) return null;
      const step = nearest.reduce((best, x) => Math.abs(x - value) < Math.abs(best - value) ? x : best);
      const lines = [`step ${grouped(step, 0)}`], marks = [];
      given.series.forEach((series, i) => {
        const index = series.kind === "level" ? 0 : indexNear(series.x, step);
        const exact = series.kind === "level" || series.x[index] === step;
        if (!exact && series.kind !== "line" && series.kind !== "faint") return;
        if (!exact && Math.abs(frame.x(series.x[index]) - frame.x(step)) > 12) return;
        lines.push(`${series.name || given.title}: ${write(series.y[index])}`);
        if (series.kind !== "level") marks.push(svg("circle", { cx: frame.x(series.x[index]), cy: frame.y(series.y[index]), r: 3.5, fill: stroke(series, places[i]) }));
      });
      return { value: step, text: lines.join("\n"), marks };
    }
    const picture = plot({ axis: "steps", label: `${given.title}, by step`, whole, height: HEIGHT, paint, hover });
    const names = given.series.filter((series) => series.name).map((series) => {
      const ink = stroke(series, places[given.series.indexOf(series)]);
      return html("span", "", svg("svg", { viewBox: "0 0 16 10" }, series.kind === "dots"
        ? svg("circle", { cx: 8, cy: 5, r: 4, fill: ink })
        : svg("line", { x1: 0, x2: 16, y1: 5, y2: 5, stroke: ink, "stroke-width": 3, "stroke-dasharray": series.kind === "level" ? "4 2" : "none" })), series.name);
    });
    const box = html("figure", "chart", html("h3", "", given.title), html("div", "legend", ...names), picture);
    if (given.key === "loss") box.classList.add("wide");
    box.dataset.key = given.key;
    return box;
  }
  function shape(series, ink, frame) {
    if (series.kind === "level") {
      const y = frame.y(series.y[0]);
      return [svg("line", { x1: MARGIN.left, x2: frame.right, y1: y, y2: y, stroke: ink, "stroke-dasharray": "5 4" })];
    }
    // the points in the range, and their neighbours, so that the line reaches the edges of the
    // picture
    const first = Math.max(0, indexAfter(series.x, frame.low) - 1), end = Math.min(series.x.length, indexAfter(series.x, frame.high) + 1);
    const points = [];
    for (let i = first; i < end; i++) points.push([frame.x(series.x[i]).toFixed(1), frame.y(series.y[i]).toFixed(1)]);
    const thin = series.kind === "dots" || series.kind === "faint";
    const drawn = [svg("path", { d: `M${points.map((point) => point.join(",")).join("L")}`, fill: "none", stroke: ink, "stroke-width": thin ? 1 : 1.6, "stroke-linejoin": "round" })];
    if (series.kind === "dots" || points.length === 1) drawn.push(...points.map(([cx, cy]) => svg("circle", { cx, cy, r: 3, fill: ink })));
    return drawn;
  }
  function indexAfter(values, value) {
    let low = 0, high = values.length;
    while (low < high) { const middle = (low + high) >> 1; if (values[middle] < value) low = middle + 1; else high = middle; }
    return low;
  }
  function indexNear(values, value) {
    const after = indexAfter(values, value);
    if (after === values.length) return after - 1;
    return after > 0 && value - values[after - 1] <= values[after] - value ? after - 1 : after;
  }
  function near(values, value, frame) {
    const x = values[indexNear(values, value)];
    return x >= frame.low && x <= frame.high ? x : null;
  }

  // ---- the loads of all experts in a step: a row for each layer, a column for each expert
  // The colour of a load depends on its distance from the mean load, which is 1: the text of the
  // class is "low" or "high", and the opacity is 1 at a load of 0, and from 2 on.
  const ROW = 14;
  function loadColor(load) {
    return { class: load < 1 ? "low" : "high", "fill-opacity": Math.min(1, Math.abs(load - 1)).toFixed(3) };
  }
  function loads(given) {
    const count = given.relative[0].length, rows = given.layers.length;
    const height = MARGIN.top + rows * ROW + MARGIN.bottom;
    function paint(frame) {
      const drawn = given.layers.map((name, i) => svg("text", { x: MARGIN.left - 6, y: MARGIN.top + i * ROW + 11, "text-anchor": "end" }, name.split(" ").pop()));
      drawn.push(svg("rect", { class: "mean", x: MARGIN.left, y: MARGIN.top, width: frame.right - MARGIN.left, height: rows * ROW }));
      const from = Math.floor(frame.low), end = Math.min(count, Math.ceil(frame.high));
      for (let expert = from; expert < end; expert++) {
        const left = Math.max(frame.x(expert), MARGIN.left), right = Math.min(frame.x(expert + 1), frame.right);
        given.relative.forEach((row, i) => drawn.push(svg("rect", { ...loadColor(row[expert]), x: left.toFixed(2), y: MARGIN.top + i * ROW, width: Math.max(right - left, 0.2).toFixed(2), height: ROW - 1 })));
      }
      return [...drawn, ...acrossAxis(frame, "count")];
    }
    function hover(frame, value, y) {
      const row = Math.floor((y - MARGIN.top) / ROW), expert = Math.min(count - 1, Math.floor(value));
      if (row < 0 || row >= rows) return null;
      const load = given.relative[row][expert];
      return { value: expert + 0.5, text: `${given.layers[row]}, expert ${expert}\n${number(load)} of the mean load, ${percent(load / count)} of the layer's tokens`, marks: [] };
    }
    const picture = plot({ axis: "experts", label: "loads of all experts", whole: [0, count], height, paint, hover });
    const names = [[0, "no token"], [1, "mean load"], [2, "twice the mean load or more"]].map(([load, text]) =>
      html("span", "", svg("svg", { viewBox: "0 0 16 10" }, svg("rect", { class: "mean", width: 16, height: 10 }), svg("rect", { width: 16, height: 10, ...loadColor(load) })), text));
    const title = `Step ${grouped(given.step, 0)}: experts from left to right, layers from top to bottom`;
    const box = html("figure", "chart wide", html("h3", "", title), html("div", "legend", ...names), picture);
    box.dataset.key = "expert_tokens";
    return box;
  }

  // ---- timelines of a step
  function timeline(given, whole) {
    const lanes = new Map(given.ranks.map((rank, i) => [rank, i])), unit = given.unit === "s" ? "s" : "number";
    const write = unit === "s" ? seconds : (value) => `${number(value)} ${given.unit}`;
    const height = MARGIN.top + given.ranks.length * LANE + MARGIN.bottom;
    const rows = given.ranks.map(() => []);
    for (const span of given.spans) rows[lanes.get(span[0])].push(span);
    const waits = given.kinds.findIndex(([name, ink]) => !ink);
    function paint(frame) {
      const drawn = given.ranks.map((rank, i) => svg("text", { x: MARGIN.left - 6, y: MARGIN.top + i * LANE + 12, "text-anchor": "end" }, `rank ${rank}`));
      rows.forEach((row, lane) => {
        const y = MARGIN.top + lane * LANE;
        drawn.push(svg("rect", { class: "idle", x: MARGIN.left, y, width: frame.right - MARGIN.left, height: LANE - 2 }));
        let drawnTo = -1, last = -1;
        for (const [, kind, , start, end] of row) {
          const left = Math.max(frame.x(start), MARGIN.left), right = Math.min(frame.x(end), frame.right);
          // skip a span that extends less than half a pixel beyond a drawn span of the same kind
          if (right <= left || (kind === last && right < drawnTo + 0.5)) continue;
          const rim = right - left > 3 ? 0.6 : 0;
          drawn.push(svg("rect", { ...(kind === waits ? { class: "waiting" } : { fill: given.kinds[kind][1] }), x: left.toFixed(2), y, width: Math.max(right - left - rim, 0.4).toFixed(2), height: LANE - 2 }));
          drawnTo = right; last = kind;
        }
      });
      return [...drawn, ...acrossAxis(frame, unit)];
    }
    function hover(frame, value, y) {
      const lane = Math.floor((y - MARGIN.top) / LANE);
      if (lane < 0 || lane >= rows.length) return null;
      const span = rows[lane].find(([, , , start, end]) => start <= value && value <= end);
      const name = `rank ${given.ranks[lane]}, ${write(value)}`;
      if (!span) return { value, text: `${name}\nidle, or not measured`, marks: [] };
      const [, kind, op, start, end] = span;
      return { value, text: `${name}\n${given.kinds[kind][0]} ${op}\n${write(end - start)}, from ${write(start)} to ${write(end)}`, marks: [] };
    }
    const picture = plot({ axis: "time", label: `timeline: ${given.title}`, whole, height, paint, hover });
    const names = given.kinds.map(([name, ink]) => html("span", "", svg("svg", { viewBox: "0 0 16 10" }, svg("rect", { width: 16, height: 10, ...(ink ? { fill: ink } : { class: "waiting" }) })), name));
    const box = html("figure", "chart wide", html("h3", "", given.title), html("div", "legend", ...names), picture);
    box.dataset.key = "timeline";
    return box;
  }

  // ---- the page
  function body() {
    redraws = [];
    const parts = [];
    if (shown.charts.length) {
      let low = Infinity, high = -Infinity;
      for (const { x } of shown.charts.flatMap((one) => one.series)) { low = Math.min(low, x[0]); high = Math.max(high, x[x.length - 1]); }
      const whole = low < high ? [low, high] : [low - 1, high + 1];
      parts.push(html("h2", "", "Curves, by step"),
        html("div", "tools", reset("steps"), html("span", "soft", "Point at a curve to read it; drag across it to enlarge all curves; double-click to show all.")),
        html("div", "charts", ...shown.charts.map((one) => chart(one, whole))));
    }
    if (shown.loads) parts.push(html("h2", "", "Loads of the experts"), html("div", "tools", reset("experts")), html("div", "charts", loads(shown.loads)));
    if (shown.timelines.length) {
      const spans = shown.timelines.flatMap((one) => one.spans);
      const whole = [spans.reduce((least, span) => Math.min(least, span[3]), Infinity), spans.reduce((most, span) => Math.max(most, span[4]), -Infinity)];
      parts.push(html("h2", "", "A step of the pipeline, by time"), html("div", "tools", reset("time")),
        html("div", "charts", ...shown.timelines.map((one) => timeline(one, whole))));
    }
    if (shown.rows.length) {
      const rows = shown.rows.map(([name, text]) => html("div", "", html("dt", "", name), html("dd", "", text)));
      parts.push(html("h2", "", "Numbers"), html("dl", "rows", ...rows));
    }
    const open = new Set([...main.querySelectorAll("details[open]")].map((one) => one.dataset.name));
    if (shown.files.length) parts.push(html("h2", "", "Files"));
    for (const [name, text] of shown.files) {
      const details = html("details", "", html("summary", "", name), html("pre", "", text));
      details.dataset.name = name;
      details.open = open.has(name);
      parts.push(details);
    }
    return parts;
  }
  function top(head, lost) {
    const state = html("span", `state ${lost ? "lost" : head.state.split(" ")[0]}`, lost ? "no connection" : head.state);
    const bar = html("progress", "");
    bar.value = head.share;
    bar.setAttribute("aria-label", "steps that are done");
    const when = new Date(1000 * head.time).toLocaleString("sv-SE");
    const tiles = head.tiles.map(([name, text]) => html("div", "tile", html("span", "", name), html("b", "", text)));
    const parts = [html("div", "top", html("h1", "", head.name), state), html("p", "soft", head.under, head.under && ", ", when), bar, html("div", "tiles", ...tiles)];
    if (head.warnings.length) parts.push(html("ul", "warnings", ...head.warnings.map((line) => html("li", "", line))));
    return parts;
  }
  const header = html("header"), rest = html("div");
  let head = page.head;
  function update() {
    header.replaceChildren(...top(head, false));
    rest.replaceChildren(...(shown ? body() : []));
    redraw();
  }
  main.append(header, rest, tip);
  update();
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });

  // ---- updates while the run trains
  async function follow() {
    try {
      const answer = await fetch(`news?known=${version}`);
      if (!answer.ok) throw new Error(answer.statusText);
      const news = await answer.json();
      head = news.head;
      if (news.content && !reading) {
        ({ content: shown, version } = news);
        update();
      } else header.replaceChildren(...top(head, false));
    } catch {
      header.replaceChildren(...top(head, true));
    }
    setTimeout(follow, 1000 * page.every_s);
  }
  if (page.every_s) setTimeout(follow, 1000 * page.every_s);
})();
