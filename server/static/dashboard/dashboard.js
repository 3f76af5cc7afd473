"use strict";
/* The dashboard: draws what GET graphs tells, every two seconds. Advice and sums come from the
   server; here they only get a shape. Data reaches the page as text nodes and numbers. */

const PERIOD_MS = 2000;
const PHASES = [
  { name: "decode", unit: "rows" },
  { name: "prefill", unit: "tokens" },
];
const HISTORY = 150; // polls: five minutes
const SVG = "http://www.w3.org/2000/svg";
const REASONS = {
  too_large: "above the largest size",
  disabled: "graphs are off",
  not_captured: "size not captured",
  unsupported: "not supported",
  prompt_logprobs: "prompt logprobs wanted",
};

let apiKey = "";
let timer = 0;
const history = [];
const drawn = new Map(); // id of an element -> what it shows

// Elements

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children.filter((child) => child !== null));
  return node;
}

const h = (tag, attributes = {}, ...children) =>
  build(document.createElement(tag), attributes, children);

const s = (tag, attributes = {}, ...children) =>
  build(document.createElementNS(SVG, tag), attributes, children);

const byId = (id) => document.getElementById(id);

/** Redraws an element if its figures have changed: focus and scroll position stay. */
function draw(id, figures, make) {
  const text = JSON.stringify(figures);
  if (drawn.get(id) === text) return;
  drawn.set(id, text);
  byId(id).replaceChildren(...make());
}

const swatch = (kind) =>
  s("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, s("rect", { width: 12, height: 12, rx: 2, class: kind }));

const legend = (entries) =>
  h("ul", { class: "legend" }, ...entries.map(([kind, text]) => h("li", {}, swatch(kind), h("span", {}, text))));

function table(heads, rows) {
  return h("table", {},
    h("thead", {}, h("tr", {}, ...heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, ...rows));
}

// Numbers

const count = (value) => Math.round(value).toLocaleString("en");

/** Never 100 or 0 by rounding alone: one step beside thousands still shows. */
function percent(part, whole) {
  if (!whole) return "–";
  if (part === whole || part === 0) return part ? "100 %" : "0 %";
  const share = (100 * part) / whole;
  if (share > 99.9) return "> 99.9 %";
  return share < 0.1 ? "< 0.1 %" : `${share.toFixed(1)} %`;
}

function bytes(value) {
  if (value >= 2 ** 30) return `${(value / 2 ** 30).toFixed(2)} GiB`;
  return `${(value / 2 ** 20).toFixed(value >= 100 * 2 ** 20 ? 0 : 1)} MiB`;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10) return `${value.toFixed(1)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  return `${(1000 * value).toFixed(value >= 0.1 ? 0 : 1)} ms`;
}

function ago(time) {
  const passed = Math.max(0, Date.now() / 1000 - time);
  if (passed < 5) return "now";
  if (passed < 120) return `${Math.round(passed)} s ago`;
  if (passed < 7200) return `${Math.round(passed / 60)} min ago`;
  return `${Math.round(passed / 3600)} h ago`;
}

// Sections

function card(kind, title, value, ...lines) {
  return h("div", { class: `card ${kind}` }, h("h2", {}, title), h("strong", {}, value),
    ...lines.map((line) => h("p", {}, line)));
}

function drawSummary(page) {
  const totals = PHASES.map(({ name }) => page[name].totals);
  const sum = (field) => totals.reduce((all, one) => all + one[field], 0);
  const kvToken = page.memory.kv_token || 0;
  const inKv = (size) => (kvToken ? `, as much as ${count(size / kvToken)} tokens of KV` : "");
  const steps = sum("replays") + sum("eager_steps");
  const advice = PHASES.map(({ name }) => page[name].advice);
  const changes = advice.flatMap((one) => (one ? one.changes : []));
  const added = changes.filter((one) => one.action === "add").length;
  const figures = [totals, kvToken, changes.length, page.backend];
  draw("summary", figures, () => [
    card("cost", "Costs", `${seconds(sum("capture_seconds"))} · ${bytes(sum("nbytes"))}`,
      `to capture ${count(sum("sizes"))} sizes at the start`,
      `memory of their graphs${inKv(sum("nbytes"))}`),
    card("save", "Saves", percent(sum("replays"), steps),
      `of ${count(steps)} steps were replays`,
      `${count(sum("eager_steps"))} steps ran op by op`,
      ...(page.backend === "recorded" ? ["on the CPU a replay saves no time"] : [])),
    card("waste", "Wastes", totals.map((one) => percent(one.padded, one.padded + one.real)).join(" · "),
      "of decode rows · prefill tokens in replays were padding",
      `${count(sum("unused_sizes"))} sizes never hit: ${seconds(sum("unused_seconds"))}, ${bytes(sum("unused_nbytes"))}`),
    card("advice", "Advice", changes.length ? `${changes.length} ${changes.length === 1 ? "change" : "changes"}` : "none",
      changes.length ? `${added} to add, ${changes.length - added} to drop` : "see below for the reasons"),
  ]);
}

function drawHits(page, name) {
  const totals = page[name].totals;
  const eager = Object.entries((page.eager_steps || {})[name] || {}).sort((a, b) => b[1] - a[1]);
  draw(`hits-${name}`, [totals, eager], () => {
    const all = totals.replays + totals.eager_steps;
    const parts = [["saved", totals.replays, "replays of a graph"]];
    eager.forEach(([reason, steps], index) =>
      parts.push([`eager${Math.min(index, 3)}`, steps, `eager: ${REASONS[reason] || reason}`]));
    const label = all ? `${percent(totals.replays, all)} of ${all} steps replayed` : "no steps yet";
    const ring = s("svg", { viewBox: "0 0 120 120", role: "img", "aria-label": label });
    ring.append(s("path", { d: arc(0, 1), class: "empty" }));
    let begin = 0;
    for (const [kind, steps] of parts) {
      if (!steps) continue;
      ring.append(s("path", { d: arc(begin / all, (begin + steps) / all), class: kind }));
      begin += steps;
    }
    ring.append(s("text", { x: 60, y: 67, "text-anchor": "middle", class: "big" },
      totals.hit_rate === null ? "–" : percent(totals.replays, all)));
    return [ring, legend(parts.map(([kind, steps, text]) => [kind, `${text}: ${count(steps)}`]))];
  });
}

/** A ring segment between two shares of the circle. */
function arc(from, to) {
  const end = Math.min(to, from + 0.99999); // a whole circle has no arc
  const point = (share, radius) => {
    const angle = 2 * Math.PI * share - Math.PI / 2;
    return `${(60 + radius * Math.cos(angle)).toFixed(3)} ${(60 + radius * Math.sin(angle)).toFixed(3)}`;
  };
  const large = end - from > 0.5 ? 1 : 0;
  return `M ${point(from, 56)} A 56 56 0 ${large} 1 ${point(end, 56)} L ${point(end, 40)} A 40 40 0 ${large} 0 ${point(from, 40)} Z`;
}

function drawHistogram(page, name, unit) {
  const sizes = Object.keys(page[name].sizes).map(Number).sort((a, b) => a - b);
  const rows = page[name].steps_by_size;
  draw(`histogram-${name}`, [sizes, rows.map((row) => [row.size, row.steps])], () => {
    if (!rows.length) return [h("p", { class: "note" }, "No steps yet.")];
    const width = 1280, base = 150, left = 56, right = 16;
    const last = Math.max(...sizes, ...rows.map((row) => row.size), 2);
    const first = Math.min(...sizes, ...rows.map((row) => row.size));
    const low = Math.log2(first), span = Math.max(Math.log2(last) - low, 1);
    const x = (size) => left + ((width - left - right) * (Math.log2(size) - low)) / span;
    const most = Math.max(...rows.map((row) => row.steps));
    const y = (steps) => base - Math.max(2, (130 * steps) / most);
    const chart = s("svg", { viewBox: `0 0 ${width} 190`, role: "img",
      "aria-label": `Steps by their number of ${unit}; ${sizes.length} captured sizes` });
    chart.append(s("line", { x1: left, y1: base, x2: width - right, y2: base, class: "axis" }),
      s("text", { x: left - 8, y: 24, "text-anchor": "end" }, count(most)),
      s("text", { x: left - 8, y: base, "text-anchor": "end" }, "0 steps"));
    const shades = s("g"), bars = s("g");
    for (const row of rows) {
      const holds = sizes.find((size) => size >= row.size);
      const top = y(row.steps), height = base - top;
      const title = s("title", {}, `${row.steps} steps of up to ${row.size} ${unit}` +
        (holds === undefined ? ", above the largest size: eager" : `, in the graph of ${holds}`) +
        (row.ms === null ? "" : `; ${row.ms.toFixed(2)} ms a step`));
      if (holds !== undefined && holds > row.size) {
        shades.append(s("rect", { x: x(row.size), y: top, width: x(holds) - x(row.size), height, class: "pad" }));
      }
      bars.append(s("rect", { x: x(row.size) - 2, y: top, width: 4, height, class: holds === undefined ? "eager0" : "real" }, title));
    }
    chart.append(shades, bars);
    let labelled = -100;
    for (const size of sizes) {
      chart.append(s("line", { x1: x(size), y1: base, x2: x(size), y2: base + 7, class: "tick" }));
      if (x(size) - labelled < 34) continue;
      labelled = x(size);
      chart.append(s("text", { x: x(size), y: base + 22, "text-anchor": "middle" }, String(size)));
    }
    return [chart, legend([["real", "steps of one actual size"], ["pad", "padded up to the captured size (ticks)"],
      ["eager0", "above the largest size: eager"]])];
  });
}

function meter(part, whole) {
  return s("svg", { viewBox: "0 0 54 10", "aria-hidden": "true" },
    s("rect", { width: 54, height: 10, rx: 2, class: "empty" }),
    s("rect", { width: whole ? (54 * part) / whole : 0, height: 10, rx: 2, class: "padded" }));
}

function drawTable(page, name, unit) {
  const entries = Object.entries(page[name].sizes)
    .map(([size, one]) => [Number(size), one]).sort((a, b) => a[0] - b[0]);
  const dropped = page[name].dropped || [];
  const shown = entries.map(([size, one]) => [size, one, one.last_used ? ago(one.last_used) : ""]);
  const told = "weights" in page.memory;
  draw(`table-${name}`, [shown, dropped, told], () => {
    if (!entries.length && !dropped.length) {
      return [h("p", { class: "note" }, told ? "No graphs in this phase." : "Not captured yet.")];
    }
    const row = ([size, one, used]) => {
      const padding = h("td", {}, percent(one.padded || 0, (one.padded || 0) + (one.real || 0)));
      if (one.replays) padding.append(meter(one.padded, one.padded + one.real));
      return h("tr", { class: used ? "used" : "unused" },
        h("td", {}, count(size)), h("td", {}, count(one.replays || 0)), padding,
        h("td", {}, one.step_ms === undefined ? "–" : `${one.step_ms.toFixed(2)} ms`),
        h("td", {}, one.seconds === undefined ? "–" : `${(1000 * one.seconds).toFixed(0)} ms`),
        h("td", {}, one.nbytes === undefined ? "–" : (one.nbytes / 2 ** 20).toFixed(1)),
        h("td", { class: used ? "" : "never" }, used || "never hit"));
    };
    const lost = dropped.map((size) => h("tr", { class: "unused" }, h("td", {}, count(size)),
      h("td", { class: "never", colspan: 6 }, "not captured for want of memory")));
    return [table([unit, "replays", "padding", "step", "capture", "MiB", "last used"], [...shown.map(row), ...lost])];
  });
}

function drawAdvice(page, name, unit) {
  const advice = page[name].advice;
  draw(`advice-${name}`, [advice, page.memory.kv_token], () => {
    if (!advice) return [h("p", { class: "note" }, "The engine has not told its limits yet.")];
    if (!advice.changes.length) return [h("p", {}, `No change: ${advice.reason}.`)];
    const before = percent(advice.padding, advice.computed);
    const after = percent(advice.padding_advised, advice.computed_advised);
    const rows = advice.changes.map((change) => h("tr", {},
      h("td", { class: change.action }, `${change.action} ${change.size}`),
      h("td", {}, gain(change, unit)),
      h("td", {}, `${change.action === "add" ? "about +" : "−"}${seconds(change.cost.seconds)}`),
      h("td", {}, `${change.action === "add" ? "about +" : "−"}${bytes(change.cost.nbytes)}`)));
    return [
      h("p", {}, `${count(advice.steps)} steps seen. Padding now ${before}, as advised ${after}; ` +
        `start ${signed(advice.seconds_added, seconds)}, memory ${signed(advice.nbytes_added, bytes)}.`),
      table(["change", `${unit} of padding, steps`, "start", "memory"], rows),
    ];
  });
  const box = byId(`flag-${name}`), flag = advice ? advice.flag : "";
  box.hidden = !flag;
  const field = box.querySelector("input");
  if (field.value !== flag) field.value = flag;
}

const signed = (value, format) => `${value < 0 ? "−" : "+"}${format(Math.abs(value))}`;

function gain(change, unit) {
  if (change.steps_gained) return `${count(change.steps_gained)} eager steps become replays`;
  const saved = change.padding_saved;
  if (!saved) return "none";
  return saved > 0 ? `−${count(saved)} ${unit}` : `+${count(-saved)} ${unit}`;
}

function drawMemory(page) {
  const memory = page.memory;
  const parts = [["m-weights", "weights", "weights"], ["m-kv", "KV cache", "kv_cache"],
    ["m-decode", "decode graphs", "decode_graphs"], ["m-prefill", "prefill graphs", "prefill_graphs"],
    ["m-other", "other use of the device", "other"], ["m-free", "free", "free"]]
    .filter(([, , field]) => field in memory);
  draw("memory", memory, () => {
    const total = parts.reduce((all, [, , field]) => all + memory[field], 0);
    if (!total) return [h("p", { class: "note" }, "Not told yet.")];
    const bar = s("svg", { viewBox: "0 0 640 40", role: "img", "aria-label":
      parts.map(([, text, field]) => `${text} ${bytes(memory[field])}`).join(", ") });
    let from = 0;
    for (const [kind, text, field] of parts) {
      const width = (640 * memory[field]) / total;
      bar.append(s("rect", { x: from, y: 4, width, height: 32, class: kind }, s("title", {}, `${text} ${bytes(memory[field])}`)));
      from += width;
    }
    return [bar, legend(parts.map(([kind, text, field]) => [kind, `${text} ${bytes(memory[field])}`])),
      h("p", { class: "note" }, `After the start, on ${memory.device || "the device"}` +
        ("total" in memory ? ` of ${bytes(memory.total)}.` : "."))];
  });
}

function drawStart(page) {
  const stages = Object.entries(page.start_seconds || {});
  draw("start", stages, () => {
    const total = stages.reduce((all, [, taken]) => all + taken, 0);
    if (!total) return [h("p", { class: "note" }, "Not told yet.")];
    const chart = s("svg", { viewBox: `0 0 640 ${20 * stages.length + 24}`, role: "img", "aria-label":
      stages.map(([stage, taken]) => `${stage} ${seconds(taken)}`).join(", ") });
    let from = 0;
    stages.forEach(([stage, taken], row) => {
      const x = 140 + (420 * from) / total, width = Math.max(1, (420 * taken) / total), y = 20 * row;
      chart.append(
        s("text", { x: 132, y: y + 14, "text-anchor": "end" }, stage.replaceAll("_", " ")),
        s("rect", { x, y: y + 3, width, height: 14, class: stage.startsWith("capture") ? "padded" : "real" }),
        s("text", { x: 568, y: y + 14 }, seconds(taken)));
      from += taken;
    });
    const y = 20 * stages.length;
    chart.append(s("line", { x1: 140, y1: y + 1, x2: 560, y2: y + 1, class: "axis" }),
      s("text", { x: 132, y: y + 17, "text-anchor": "end" }, "in all"),
      s("text", { x: 568, y: y + 17 }, seconds(total)));
    return [chart];
  });
}

function drawLoad(load) {
  history.push(load);
  if (history.length > HISTORY) history.shift();
  const kv = (one) => (one.kv_total_tokens ? one.kv_used_tokens / one.kv_total_tokens : 0);
  const lines = [
    ["running requests", (one) => one.running || 0, count],
    ["queued requests", (one) => one.queued || 0, count],
    ["tokens a second", (one) => one.tokens_per_second || 0, count],
    ["KV in use", kv, (value) => percent(value, 1)],
  ];
  byId("load").replaceChildren(...lines.map(([title, value, format]) => {
    const values = history.map(value), most = Math.max(...values, 1e-9);
    const points = values.map((one, index) =>
      `${(200 * index) / Math.max(1, HISTORY - 1)},${(38 - (34 * one) / most).toFixed(1)}`);
    return h("div", {}, h("strong", {}, format(values[values.length - 1])), " ", h("span", {}, title),
      s("svg", { viewBox: "0 0 200 40", role: "img", "aria-label": `${title}, at most ${format(most)} since the page was opened` },
        s("line", { x1: 0, y1: 39, x2: 200, y2: 39, class: "axis" }),
        s("polyline", { points: points.join(" "), class: "spark" })));
  }));
}

function drawLatency(page) {
  const names = [["time_to_first_token", "time to first token"],
    ["inter_token_latency", "inter-token latency"], ["queue_time", "time in the queue"]];
  draw("latency", [page.latency, page.load.prefix_cache_hit_rate], () => {
    const rows = names.filter(([name]) => name in page.latency).map(([name, text]) => {
      const one = page.latency[name];
      return h("tr", {}, h("td", {}, text), ...["mean", "p50", "p95", "p99"].map((field) => h("td", {}, seconds(one[field]))),
        h("td", {}, count(one.count)));
    });
    if (!rows.length) return [h("p", { class: "note" }, "Nothing measured yet.")];
    return [table(["", "mean", "p50", "p95", "p99", "number"], rows),
      h("p", { class: "note" }, "In the engine, without the network; quantiles are read off histogram buckets. " +
        `Prefix cache: ${percent(page.load.prefix_cache_hit_rate || 0, 1)} of prompt tokens.`)];
  });
}

function show(page) {
  byId("board").hidden = false;
  byId("model").textContent = page.model;
  drawSummary(page);
  for (const { name, unit } of PHASES) {
    drawHits(page, name);
    drawHistogram(page, name, unit);
    drawAdvice(page, name, unit);
    drawTable(page, name, unit);
  }
  drawMemory(page);
  drawStart(page);
  drawLoad(page.load);
  drawLatency(page);
}

// Polling

function tell(text, bad) {
  const status = byId("status");
  if (status.textContent !== text) status.textContent = text;
  status.classList.toggle("bad", bad);
}

function askForKey(message) {
  byId("board").hidden = true;
  byId("key-form").hidden = false;
  byId("key-error").textContent = message;
  tell("locked", false);
  byId("pages").hidden = true; // links carry no key
  byId("key").focus();
}

async function poll() {
  try {
    const headers = apiKey ? { authorization: `Bearer ${apiKey}` } : {};
    const answer = await fetch("graphs", { headers, cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (answer.status === 401) {
      askForKey(apiKey ? "The server does not know this key." : "");
      apiKey = "";
      return; // the form goes on
    }
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    const page = await answer.json();
    const { done, total } = page.progress;
    tell(page.status.replaceAll("_", " ") + (total && page.status !== "ready" ? ` ${done}/${total}` : ""), false);
    show(page);
  } catch (error) {
    tell(`no answer from the server (${error.message}); trying again`, true);
  }
  window.clearTimeout(timer); // of a poll that began while this one waited
  timer = window.setTimeout(poll, PERIOD_MS);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey = byId("key").value;
  byId("key").value = "";
  byId("key-form").hidden = true;
  poll();
});

for (const { name } of PHASES) {
  const box = byId(`flag-${name}`), field = box.querySelector("input"), note = box.querySelector("span");
  field.addEventListener("focus", () => field.select());
  box.querySelector("button").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(field.value);
      note.textContent = "copied";
    } catch { // only pages from this machine or over TLS may write to the clipboard
      field.select();
      note.textContent = "selected: press Ctrl+C";
    }
    window.setTimeout(() => { note.textContent = ""; }, 3000);
  });
}

document.addEventListener("visibilitychange", () => { // a hidden page asks for nothing
  window.clearTimeout(timer);
  if (!document.hidden && byId("key-form").hidden) poll();
});

poll();
