// Asks for what is new, keeps the last points, and draws them.

import { bars, LineChart } from "./charts.js";
import { absent, clock, element, NOT_EXPORTED, number, percent, short, size, span } from "./format.js";
import { HeatMap } from "./heat_map.js";

const PATHS = {
  worker: "Read from host memory by the CPU worker, which computes the attention there",
  gather: "Missing blocks that were copied to the GPU for this step",
  device: "Read from host memory by the GPU itself, in the worker's place",
  process: "Read by the server's own process, in the worker's place",
  recall: "Copied to the GPU to be resident for later steps",
};
const REASONS = {
  worker: "By the CPU worker, as intended",
  "no-worker": "there was no worker",
  late: "the worker missed its deadline",
  behind: "the worker had not caught up after it was late",
  damaged: "the worker's reply did not match what was asked",
  overwritten: "the policy had more than two layers posted at a time",
};
const INFO = {
  policy: "What decides which blocks are attended, and where", engine: "What executes attention in the server",
  prediction: "How the query of the next layer is predicted", version: "Version of sglang-hybrid", sglang: "Version of SGLang",
};
const body = (id) => document.querySelector(`#${id} .body`);
const maps = {}, charts = {};
let run = null, points = [];

function set(id, metric, text, latest) {
  const place = document.getElementById(id);
  const missing = metric !== null && latest.not_exported.includes(metric);
  place.textContent = missing ? "not exported" : text;
  place.classList.toggle("absent", missing);
  if (missing) place.title = NOT_EXPORTED;
  else place.removeAttribute("title"); // an empty one would hide the tooltip of the whole tile
}

function heatMap(id, columns, seconds, value, options) {
  if (!points.some((point) => value(point).length)) {
    delete maps[id];
    body(id).replaceChildren(absent());
    return;
  }
  maps[id] ??= new HeatMap(body(id), options);
  maps[id].draw(points, columns, seconds, value);
}

function chart(id, seconds, series, least) {
  if (!series.length) {
    delete charts[id];
    body(id).replaceChildren(absent());
    return;
  }
  const names = series.map((each) => each.name).join();
  if (charts[id]?.names !== names) charts[id] = { names, chart: new LineChart(body(id), series, least) };
  charts[id].chart.draw(points, seconds);
}

function table(heads, rows) {
  const cell = (name, { text, kind, title }) => element(name, { class: kind, title }, text);
  return element("table", {}, element("tr", {}, ...heads.map((head) => cell("th", head))),
    ...rows.map((row) => element("tr", {}, ...row.map((each) => cell("td", each)))));
}

const yesNo = (share) => (share === 0 ? "no" : share === 1 ? "yes" : percent(share)); // of ranks

function reason(by) {
  if (by in REASONS) return REASONS[by];
  const [who, ...why] = by.split("-");
  const whom = { process: "By the server's process", device: "By the GPU in host memory" }[who] ?? by;
  return `${whom}: ${REASONS[why.join("-")] ?? why.join("-")}`;
}

function drawMisses(state, now, has) {
  // a worker that has not served a row yet has not counted one
  if (!has("sglang_hybrid_miss_rows_total", "sglang_hybrid_worker_up")) return body("misses").replaceChildren(absent());
  if (!Object.keys(state.latest.miss_rows).length) return body("misses").replaceChildren(element("p", { class: "absent" }, "none yet"));
  const rows = Object.entries(state.latest.miss_rows).map(([by, total]) => [
    { text: by, title: reason(by), kind: by === "worker" ? "" : "warn" },
    { text: `${short(now.miss_rows_per_s[by])}/s`, kind: "amount" }, { text: number(total), kind: "amount" },
  ]);
  body("misses").replaceChildren(table([{ text: "served by" }, { text: "rows", kind: "amount" }, { text: "since start", kind: "amount" }], rows));
}

function drawWorkers(state, has) {
  if (!has("sglang_hybrid_worker_up")) return body("worker").replaceChildren(absent());
  const rows = state.latest.workers.map((worker) => [
    { text: `rank ${worker.rank}` + (state.latest.workers.some((each) => each.replica !== "0") ? `, replica ${worker.replica}` : "") },
    { text: worker.up ? "up" : "down", kind: worker.up ? "good" : "bad" },
    { text: number(worker.starts === null ? null : Math.max(0, worker.starts - 1)), kind: "amount", title: "Workers that were started after the first" },
    worker.degraded === null ? { text: "-" } : worker.degraded
      ? { text: "degraded", kind: "bad", title: "The server computes in the worker's place: answers are right, and slower" }
      : { text: "no", kind: "good" },
  ]);
  body("worker").replaceChildren(table([{ text: "worker" }, { text: "state" }, { text: "restarts", kind: "amount" }, { text: "degraded" }], rows));
}

function meter(name, title, used, whole, text) {
  const share = whole ? Math.min(1, (used ?? 0) / whole) : 0;
  const bar = element("i", share > 0.9 ? { class: "full" } : {});
  bar.style.width = `${100 * share}%`;
  return element("div", { class: "meter", title: `${title} (${percent(share)} used)` },
    element("p", {}, element("span", {}, name), element("span", {}, `${text(used)} of ${text(whole)}`)),
    element("div", {}, bar));
}

function drawMemory(now, has) {
  const meters = [
    ["sglang_hybrid_host_pool_bytes", "Host pool", "KV cache of all requests, in host memory", now.pool_used_bytes, now.pool_bytes, size],
    ["sglang_hybrid_slots", "GPU slots", "Blocks of each layer and KV head: what fits in GPU memory, and what the rows of the last step can fill", now.slots_used, now.slots, number],
  ].map(([metric, name, ...rest]) => (has(metric) ? meter(name, ...rest) : element("p", { class: "absent" }, `${name}: ${NOT_EXPORTED}`)));
  body("memory").replaceChildren(...meters);
}

function drawCosine(latest) {
  const values = latest.calibration_cosine;
  const known = values.filter((value) => value !== null);
  if (!known.length) return body("cosine").replaceChildren(absent());
  const least = Math.floor(10 * Math.min(...known)) / 10 - 0.1;
  body("cosine").replaceChildren(bars(values, least), element("div", { class: "legend" },
    `layers 0 to ${values.length - 1}: cosine ${Math.min(...known).toFixed(3)} to ${Math.max(...known).toFixed(3)}, bars from ${least.toFixed(1)} to 1`));
}

function drawSettings(state) {
  const rows = (settings) => Object.entries(settings).map(([key, value]) => element("div", {}, element("span", {}, key), element("b", {}, value)));
  const parts = state.settings ? rows(state.settings) : [element("p", { class: "absent" }, "the server does not tell")];
  for (const [title, group] of [["In use", state.facts], ["SGLang", state.arguments]]) {
    if (Object.keys(group).length) parts.push(element("h3", {}, title), ...rows(group));
  }
  body("settings").replaceChildren(element("div", { class: "settings" }, ...parts));
}

function drawHead(state) {
  const problem = state.problem, place = document.getElementById("problem"), status = document.getElementById("status");
  place.hidden = !problem;
  if (problem) {
    const stock = problem.kind === "stock";
    const since = `since ${clock(problem.since)} (${span(state.time - problem.since)})`;
    place.className = stock ? "warn" : "";
    place.textContent = stock ? problem.text : `${problem.kind === "no-answer" ? "No answer" : "Nothing to show"} ${since}; still asking. ${problem.text}`;
    status.className = `status ${stock ? "warn" : "bad"}`;
    status.textContent = stock ? "stock SGLang" : `${problem.kind === "no-answer" ? "no answer" : "nothing to show"} ${since}`;
  } else {
    const degraded = state.latest.workers.some((worker) => worker.degraded);
    status.className = `status ${!points.length ? "waiting" : degraded ? "warn" : "good"}`;
    status.textContent = !points.length ? "waiting for the first answer" : degraded ? "degraded" : "serving";
  }
  document.getElementById("server").replaceChildren(element("b", {}, state.model ?? ""), ` ${state.url}`);
  document.getElementById("info").replaceChildren(...Object.entries(state.latest.info).map(([key, value]) =>
    element("li", { title: INFO[key] }, `${key} `, element("b", {}, value))));
}

function draw(state) {
  const latest = state.latest, seconds = state.interval * state.capacity;
  const now = points.findLast((point) => point.answered);
  const has = (...metrics) => metrics.some((metric) => !latest.not_exported.includes(metric));
  drawHead(state);
  if (!now) return;
  set("running", "sglang:num_running_reqs", number(now.running), latest);
  set("queued", "sglang:num_queue_reqs", number(now.queued), latest);
  set("rows", "sglang_hybrid_decode_rows", number(now.rows), latest);
  set("tokens", null, number(now.tokens_per_s, now.tokens_per_s < 100 ? 1 : 0), latest);
  set("cpu-ratio", "sglang_hybrid_cpu_compute_ratio", percent(now.cpu_ratio), latest);
  set("hit-ratio", "sglang_hybrid_resident_hit_ratio", percent(now.hit_ratio), latest);
  set("whole", "sglang_hybrid_whole_requests", yesNo(now.whole_requests), latest);
  heatMap("ratio-map", state.capacity, seconds, (point) => point.layer_cpu_ratio,
    { unit: "%", least: 0.1, unknown: "not known", text: (value) => (100 * value).toFixed(value < 0.1 ? 1 : 0) });
  heatMap("interval-map", state.capacity, seconds, (point) => point.layer_recall_interval.map((steps) => steps || null),
    { unit: "steps", least: 10, text: short, unknown: "never recalls" });
  const where = (metric, ...series) => (has(metric) ? series : []);
  chart("throughput", seconds, [{ name: "decoded", unit: "tokens/s", title: "Over all requests", value: (point) => point.tokens_per_s }], 1);
  chart("traffic", seconds, [
    { name: "running", title: "Requests that are being answered", value: (point) => point.running },
    { name: "queued", title: "Requests that wait", value: (point) => point.queued },
    ...where("sglang_hybrid_decode_rows", { name: "decode rows", dashed: true, title: "Requests in the last decode step", value: (point) => point.rows }),
  ], 4);
  chart("bandwidth", seconds, Object.keys(PATHS).filter((path) => points.some((point) => path in point.gb_per_s)).map((path) =>
    ({ name: path, unit: "GB/s", title: PATHS[path], value: (point) => point.gb_per_s[path] ?? null })), 0.01);
  const ms = (histogram, field) => (point) => point[histogram]?.[field] ?? null;
  chart("wait", seconds, where("sglang_hybrid_worker_wait_seconds",
    { name: "mean", unit: "ms", title: "Mean of the waits", value: ms("worker_wait", "mean_ms") },
    { name: "99 %", unit: "ms", title: "99 of 100 waits were shorter", value: ms("worker_wait", "p99_ms") }), 0.1);
  chart("step", seconds, where("sglang_hybrid_decode_step_seconds",
    { name: "mean", unit: "ms", title: "Mean time of a decode step", value: ms("decode_step", "mean_ms") },
    { name: "99 %", unit: "ms", title: "99 of 100 steps were shorter", value: ms("decode_step", "p99_ms") }), 1);
  drawMisses(state, now, has);
  drawWorkers(state, has);
  drawMemory(now, has);
  drawCosine(latest);
  drawSettings(state);
}

async function refresh() {
  let wait = 2;
  try {
    const after = points.length ? points[points.length - 1].number : 0;
    const answer = await fetch(`api/state?after=${after}`);
    let state = await answer.json();
    if (run !== null && run !== state.run) { // the page's own server was restarted
      points = [];
      state = await (await fetch("api/state")).json();
    }
    run = state.run;
    points = [...points, ...state.points].slice(-state.capacity);
    wait = state.interval;
    draw(state);
  } catch (error) {
    const status = document.getElementById("status");
    status.className = "status bad";
    status.textContent = "sglang-hybrid top does not answer: start it again";
    console.error(error);
  }
  setTimeout(refresh, 1000 * wait);
}

refresh();
