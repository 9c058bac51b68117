// Lines over time and bars over layers, as SVG.

import { clock, compact, element, short, span, topOfScale } from "./format.js";

const HEIGHT = 132, LEFT = 38, BOTTOM = 18, TOP = 8;
const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// One per section. The legend stays when points are added, so that a tooltip can be read.
export class LineChart {
  // series: [{name, title, unit, dashed, value(point)}]; least: the smallest end of the scale, which begins at zero
  constructor(body, series, least) {
    Object.assign(this, { series, least, points: [], mouse: null });
    this.picture = svg("svg", { role: "img", "aria-label": series.map((each) => each.name).join(", ") });
    this.values = series.map(() => element("b"));
    this.when = element("span", { class: "when" });
    body.replaceChildren(this.picture, element("div", { class: "legend" }, ...series.map((each, index) => {
      const item = element("span", { class: each.dashed ? "key dashed" : "key", title: each.title }, `${each.name} `, this.values[index]);
      item.style.setProperty("--colour", `var(--series-${index % 6})`);
      return item;
    }), this.when));
    this.picture.addEventListener("mousemove", (event) => { this.mouse = event.clientX; this.tell(); });
    this.picture.addEventListener("mouseleave", () => { this.mouse = null; this.tell(); });
  }

  // Time ends now and reaches back by so many seconds.
  draw(points, seconds) {
    const width = this.picture.clientWidth || 300;
    const now = points[points.length - 1].time;
    points = points.filter((point) => point.time >= now - seconds); // late readings reach further back
    this.points = points;
    const rows = this.series.map((each) => points.map(each.value));
    const top = topOfScale(rows.flat(), this.least);
    this.x = (time) => LEFT + (width - LEFT) * (1 - (now - time) / seconds);
    const y = (value) => HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (value / top);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const parts = [0, top / 2, top].flatMap((value) => [
      svg("line", { class: "grid", x1: LEFT, x2: width, y1: y(value), y2: y(value) }),
      svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, compact(value)),
    ]);
    parts.push(svg("text", { x: LEFT, y: HEIGHT - 2 }, `${span(seconds)} ago`));
    parts.push(svg("text", { x: width, y: HEIGHT - 2, "text-anchor": "end" }, "now"));
    rows.forEach((row, index) => {
      const path = svg("path", { class: this.series[index].dashed ? "series dashed" : "series", d: pathOf(row, points, this.x, y) });
      path.style.stroke = `var(--series-${index % 6})`;
      parts.push(path);
    });
    this.cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.picture.replaceChildren(...parts, this.cursor);
    this.tell();
  }

  // The values under the mouse; without a mouse the last ones.
  tell() {
    let point = this.points.findLast((each) => each.answered);
    if (this.mouse !== null) {
      const at = this.mouse - this.picture.getBoundingClientRect().left;
      const distance = (each) => Math.abs(this.x(each.time) - at);
      point = this.points.reduce((best, each) => (distance(each) < distance(best) ? each : best));
      this.cursor.setAttribute("x1", this.x(point.time));
      this.cursor.setAttribute("x2", this.x(point.time));
    }
    this.cursor?.setAttribute("visibility", this.mouse === null ? "hidden" : "visible");
    this.when.textContent = this.mouse === null || !point ? "" : `at ${clock(point.time)}`;
    this.series.forEach((each, index) => {
      const value = point ? each.value(point) : null;
      this.values[index].textContent = short(value) + (each.unit && value !== null && value !== undefined ? ` ${each.unit}` : "");
    });
  }
}

function pathOf(row, points, x, y) {
  let path = "", drawing = false;
  row.forEach((value, index) => {
    const known = value !== null && value !== undefined;
    // h0: a value between two gaps is a dot
    if (known) path += `${drawing ? "L" : "M"}${x(points[index].time).toFixed(1)} ${y(value).toFixed(1)}${drawing ? "" : "h0"}`;
    drawing = known; // a gap where the server did not answer
  });
  return path;
}

// Bars from `least` to 1, one per layer.
export function bars(values, least) {
  const picture = svg("svg", { class: "bars", viewBox: `0 0 ${values.length} 100`, preserveAspectRatio: "none", role: "img" });
  values.forEach((value, layer) => {
    if (value === null) return;
    const height = Math.max(2, (100 * (value - least)) / (1 - least));
    const bar = svg("rect", { x: layer + 0.1, y: 100 - height, width: 0.8, height });
    bar.style.fill = "var(--series-0)";
    bar.append(svg("title", {}, `layer ${layer}: ${value.toFixed(3)}`));
    picture.append(bar);
  });
  return picture;
}
