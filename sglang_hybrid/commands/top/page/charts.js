// Charts over time and bars over layers, as SVG.

import { element, short, span, topOfScale } from "./format.js";

const WIDTH = 400, HEIGHT = 132, LEFT = 34, BOTTOM = 16, TOP = 6;
const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// series: [{name, title, unit, value(point)}]. Time ends now and reaches back as far as points are kept.
export function lines(points, seconds, series, least) {
  const now = points.length ? points[points.length - 1].time : 0;
  const values = series.map((each) => points.map(each.value));
  const top = topOfScale(values.flat(), least);
  const x = (time) => LEFT + (WIDTH - LEFT) * Math.max(0, 1 - (now - time) / seconds);
  const y = (value) => HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (value / top);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  for (const share of [0, 0.5, 1]) {
    picture.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH, y1: y(share * top), y2: y(share * top) }));
  }
  values.forEach((row, index) => {
    const path = svg("path", { class: "series", d: pathOf(row, points, x, y) });
    path.style.stroke = `var(--series-${index % 6})`;
    picture.append(path);
  });
  const chart = element("div", { class: "chart" }, picture);
  fitText(picture, [
    [0, y(top) + 4, short(top)], [0, y(top / 2) + 4, short(top / 2)], [0, y(0), "0"],
    [LEFT, HEIGHT, `${span(seconds)} ago`], [WIDTH, HEIGHT, "now", "end"],
  ]);
  picture.append(svg("title", {}, series.map((each) => each.name).join(", ")));
  chart.append(legend(series, points));
  return chart;
}

// The picture is stretched to its box, and text must not be: it is drawn at the box's scale.
function fitText(picture, texts) {
  requestAnimationFrame(() => {
    const stretch = WIDTH / (picture.getBoundingClientRect().width || WIDTH);
    for (const [x, y, text, anchor = "start"] of texts) {
      picture.append(svg("text", { "text-anchor": anchor, transform: `translate(${x} ${y}) scale(${stretch} 1)` }, text));
    }
  });
}

function pathOf(row, points, x, y) {
  let path = "", drawing = false;
  row.forEach((value, index) => {
    const known = value !== null && value !== undefined;
    if (known) path += `${drawing ? "L" : "M"}${x(points[index].time).toFixed(1)} ${y(value).toFixed(1)}`;
    drawing = known; // a gap where the server did not answer
  });
  return path;
}

function legend(series, points) {
  const last = points.findLast((point) => point.answered);
  return element("div", { class: "legend" }, ...series.map((each, index) => {
    const value = last ? each.value(last) : null;
    const item = element("span", { title: each.title }, `${each.name} `,
      element("b", {}, `${short(value)}${each.unit ? ` ${each.unit}` : ""}`));
    item.style.setProperty("--colour", `var(--series-${index % 6})`);
    return item;
  }));
}

export function bars(values, least, digits) {
  const picture = svg("svg", { class: "bars", viewBox: `0 0 ${values.length} 100`, preserveAspectRatio: "none", role: "img" });
  values.forEach((value, layer) => {
    if (value === null) return;
    const height = Math.max(2, 100 * (value - least) / (1 - least));
    const bar = svg("rect", { x: layer + 0.1, y: 100 - height, width: 0.8, height });
    bar.style.fill = "var(--series-0)";
    bar.append(svg("title", {}, `layer ${layer}: ${value.toFixed(digits)}`));
    picture.append(bar);
  });
  return picture;
}
