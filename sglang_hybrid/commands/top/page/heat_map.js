// A heat map: layers from top to bottom, time from left to right.

import { clock, element, span, topOfScale } from "./format.js";

const STOPS = 5;
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

  // `columns`: how many moments are as wide as the picture
  draw(points, columns, seconds, value) {
    this.points = points.slice(-columns);
    this.value = value;
    this.columns = columns;
    this.layers = Math.max(...this.points.map((point) => value(point).length));
    const top = topOfScale(this.points.flatMap(value), this.least);
    const scale = stops();
    [this.canvas.width, this.canvas.height] = [columns, this.layers];
    const context = this.canvas.getContext("2d");
    const image = context.createImageData(columns, this.layers);
    this.points.forEach((point, index) => {
      const x = columns - this.points.length + index;
      value(point).forEach((number, layer) => {
        if (number !== null) image.data.set([...colourOf(number / top, scale), 255], 4 * (layer * columns + x));
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
      const layer = Math.min(this.layers - 1, Math.max(0, Math.floor((this.mouse.clientY - box.top) / box.height * this.layers)));
      const point = this.points[column - (this.columns - this.points.length)];
      const number = point ? this.value(point)[layer] : undefined;
      this.under.textContent = point ? `layer ${layer} at ${clock(point.time)}: ${this.of(number)}` : "";
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
