// Numbers as text, and elements from text. Text is never parsed as HTML: it comes from another server.

export const NOT_EXPORTED = "not exported by this engine";

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function number(value, digits = 0) {
  if (value === null || value === undefined) return "-";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export const percent = (value) => (value === null || value === undefined ? "-" : `${(100 * value).toFixed(1)} %`);

export function short(value) {
  if (value === null || value === undefined) return "-";
  if (value === 0) return "0";
  return Math.abs(value) >= 100 ? number(value) : String(Number(value.toPrecision(3)));
}

// For axes: 20k
export const compact = (value) => new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(value).replace("K", "k");

export function size(value) {
  if (value === null || value === undefined) return "-";
  let power = 0;
  while (value >= 1024 && power < UNITS.length - 1) [value, power] = [value / 1024, power + 1];
  return `${value.toFixed(power ? 1 : 0)} ${UNITS[power]}`;
}

export const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");

export function span(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const [amount, unit] = seconds < 5400 ? [seconds / 60, "min"] : [seconds / 3600, "h"];
  return `${Number(amount.toFixed(amount < 10 ? 1 : 0))} ${unit}`;
}

// A round number at or above all values and not below `least`: a scale that jumps cannot be read.
export function topOfScale(values, least) {
  const largest = Math.max(0, ...values.filter((value) => value !== null && value !== undefined));
  let top = least;
  for (let step = 0; top < largest; step++) top *= [2, 2.5, 2][step % 3];
  return Number(top.toPrecision(6));
}

// element("td", {class: "good", title: "..."}, "text", child, ...)
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export const absent = () => element("p", { class: "absent" }, NOT_EXPORTED);
