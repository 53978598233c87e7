// Colours of values. The low end of a scale is the colour of the page, in the light and the dark theme. No scale has
// grey: cells without a value are grey and hatched (--none of style.css).

const STOPS = {
  light: {
    one: ["#ffffff", "#fde3b5", "#f79d5c", "#c8426b", "#5a1f6e"],
    two: ["#1d5a9e", "#9cc3e6", "#ffffff", "#f3b590", "#b0361f"],
  },
  dark: {
    one: ["#17181c", "#3d2263", "#a3366e", "#f18d4f", "#fdeac0"],
    two: ["#8cc4f7", "#2c5a8c", "#17181c", "#8c4626", "#f7a874"],
  },
};
const dark = matchMedia("(prefers-color-scheme: dark)");

export function whenThemeChanges(draw) { dark.addEventListener("change", draw); }

function stops(kind) {
  return STOPS[dark.matches ? "dark" : "light"][kind].map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
}

function at(colours, share) {
  const place = Math.min(Math.max(share, 0), 1) * (colours.length - 1);
  const low = Math.min(Math.floor(place), colours.length - 2);
  return colours[low].map((c, i) => Math.round(c + (colours[low + 1][i] - c) * (place - low)));
}

function quantile(sorted, share) { return sorted[Math.round(share * (sorted.length - 1))]; }

/**
 * A colour scale from the 1st to the 99th percentile of values. signed: if values have both signs, the scale is
 * symmetric around 0. logarithmic: colours follow the logarithm, and percentiles are those of the positive values.
 * from: the low end, instead of a percentile. root: colours follow the square root. flipped: the low end has the strong
 * colour. Returns {colour(value): [r, g, b] or null, low, high, css, lacking: whether a value has no colour, empty:
 * whether no value has one}.
 */
export function scaleOf(values, { signed = false, logarithmic = false, from = null, root = false, flipped = false } = {}) {
  const sorted = Float32Array.from(values).filter((v) => Number.isFinite(v) && (!logarithmic || v > 0)).sort();
  let low = from ?? quantile(sorted, 0.01) ?? 0;
  let high = quantile(sorted, 0.99) ?? 1;
  const two = signed && low < 0 && high > 0;
  if (two) { high = Math.max(high, -low); low = -high; }
  const colours = flipped ? stops(two ? "two" : "one").toReversed() : stops(two ? "two" : "one");
  const bend = logarithmic ? Math.log : root ? Math.sqrt : (v) => v;
  const [begin, end] = [bend(low), bend(high)];
  const colour = (value) => {
    if (!Number.isFinite(value)) return null;
    return at(colours, end > begin ? (bend(Math.max(value, low)) - begin) / (end - begin) : 0);
  };
  const lacking = !Array.prototype.every.call(values, Number.isFinite), empty = sorted.length === 0;
  return { colour, low, high, lacking, empty, css: `linear-gradient(90deg, ${colours.map(css).join(", ")})` };
}

/** The colour of a category. Consecutive numbers have very different colours. */
export function category(number) {
  const hue = (number * 137.508) % 360, light = dark.matches ? [0.62, 0.5, 0.72] : [0.55, 0.42, 0.68], l = light[number % 3];
  const part = (n) => {
    const k = (n + hue / 30) % 12;
    return Math.round(255 * (l - 0.6 * Math.min(l, 1 - l) * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  };
  return [part(0), part(8), part(4)];
}

export function css(rgb) { return `rgb(${rgb.join(" ")})`; }

/** The text colour with more contrast on a colour: black or white. */
export function inkOn([r, g, b]) {
  const linear = [r, g, b].map((c) => (c / 255 <= 0.04045 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return luminance > 0.179 ? "#000000" : "#ffffff";
}

/** A value with four significant digits. */
export function short(value) {
  if (value === null || Number.isNaN(value)) return "none";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return Number(value.toPrecision(4)).toLocaleString("en");
}

export function drawLegend(element, scale, word = "") {
  const [bar, none] = ["i", "i"].map((name) => document.createElement(name));
  bar.style.background = scale.css;
  none.className = "lost";
  const ends = scale.empty ? [] : [short(scale.low), bar, `${short(scale.high)}${word}`];
  element.replaceChildren(...ends, ...(scale.lacking ? [none, "no value"] : []));
}
