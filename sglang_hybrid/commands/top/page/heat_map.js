// A heat map: layers from top to bottom, time from left to right.

import { clock, element, span, topOfScale } from "./format.js";

const STOPS = 5;
const LATE = 3; // columns
const STYLE = getComputedStyle(document.documentElement);

function stops() {
  return Array.from({ length: STOPS }, (_, index) => {
    const hex = STYLE.getPropertyValue(`--heat-${index}`).trim();
    return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  });
}

function colourOf(share, scale) {
  const at = Math.min(Math.max(share, 0), 1) * (STOPS - 1);
  const first = Math.min(Math.floor(at), STOPS - 2);
  return scale[first].map((low, index) => low + (at - first) * (scale[first + 1][index] - low));
}

// One per section; draws again and again into the same canvas, so that a tooltip stays where the mouse is.
export class HeatMap {
  constructor(body, { unit, least, text, unknown }) {
    Object.assign(this, { unit, least, text, unknown, points: [], layers: 0, mouse: null });
    this.canvas = element("canvas", { role: "img" });
    this.names = element("div", { class: "layers" });
    this.from = element("span");
    this.top = element("span");
    this.under = element("span", { class: "under" });
    body.replaceChildren(
      element("div", { class: "map" }, this.names, this.canvas,
        element("div", { class: "times" }, this.from, element("span", {}, "now"))),
      element("div", { class: "scale" }, "0", element("span", { class: "bar" }), this.top, this.under),
    );
    this.canvas.addEventListener("mousemove", (event) => { this.mouse = event; this.tell(); });
    this.canvas.addEventListener("mouseleave", () => { this.mouse = null; this.tell(); });
  }

  // `columns`: how many readings are as wide as the picture, if none is late
  draw(points, columns, seconds, value) {
    const now = points[points.length - 1].time;
    points = points.filter((point) => point.time >= now - seconds); // late readings reach further back
    Object.assign(this, { points, columns, value });
    this.layers = Math.max(1, ...points.map((point) => value(point).length));
    const top = topOfScale(points.flatMap(value), this.least), scale = stops();
    this.columnOf = (time) => Math.floor(columns * (1 - (now - time) / seconds) - 0.5);
    [this.canvas.width, this.canvas.height] = [columns, this.layers];
    const context = this.canvas.getContext("2d");
    const image = context.createImageData(columns, this.layers);
    points.forEach((point, index) => {
      const last = this.columnOf(point.time), before = index ? this.columnOf(points[index - 1].time) : last - 1;
      // a reading that came a little late fills the column before; a longer gap stays
      const first = last - before <= LATE ? Math.min(before + 1, last) : last;
      value(point).forEach((number, layer) => {
        if (number === null) return;
        const colour = [...colourOf(number / top, scale), 255];
        for (let x = Math.max(0, first); x <= last; x++) image.data.set(colour, 4 * (layer * columns + x));
      });
    });
    context.putImageData(image, 0, 0);
    this.canvas.style.height = `${Math.min(360, Math.max(120, 6 * this.layers))}px`;
    const middle = Math.floor(this.layers / 2);
    this.names.replaceChildren(...["layer 0", middle, this.layers - 1].map((name) => element("span", {}, String(name))));
    this.from.textContent = `${span(seconds)} ago`;
    this.top.textContent = `${this.text(top)} ${this.unit}`;
    this.tell();
  }

  // What is under the mouse; without a mouse the layer with the largest value now.
  tell() {
    const last = this.points.findLast((point) => point.answered);
    if (this.mouse) {
      const box = this.canvas.getBoundingClientRect();
      const column = Math.floor((this.mouse.clientX - box.left) / box.width * this.columns);
      const near = (each) => Math.abs(this.columnOf(each.time) - column);
      const layer = Math.min(this.layers - 1, Math.max(0, Math.floor((this.mouse.clientY - box.top) / box.height * this.layers)));
      const point = this.points.reduce((best, each) => (near(each) < near(best) ? each : best));
      const shown = near(point) <= LATE;
      this.under.textContent = shown ? `layer ${layer} at ${clock(point.time)}: ${this.of(this.value(point)[layer])}` : "";
    } else if (last) {
      const values = this.value(last);
      const largest = values.reduce((best, number, layer) => ((number ?? -1) > (values[best] ?? -1) ? layer : best), 0);
      this.under.textContent = `largest now: layer ${largest}, ${this.of(values[largest])}`;
    }
  }

  of(number) {
    return number === null || number === undefined ? this.unknown : `${this.text(number)} ${this.unit}`;
  }
}
