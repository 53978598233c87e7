// Draws bar charts as lists: one line with a label, a bar and a value per item.

import { short } from "./colour.js";

/**
 * items: [{label, value, said, colour, title, pick, chosen}]. The bar of a value below 0 is on the left of the middle.
 * said: text after the bar, by default the value. pick(): called for a click; the label is then a button.
 */
export function bars(list, items) {
  const largest = Math.max(...items.map((item) => Math.abs(item.value ?? 0)), 1e-12);
  const signed = items.some((item) => item.value < 0);
  list.classList.toggle("signed", signed);
  list.replaceChildren(...items.map((item) => {
    const [line, name, track, bar, value] = ["li", item.pick ? "button" : "span", "span", "i", "small"].map((tag) => document.createElement(tag));
    const share = Math.abs(item.value ?? 0) / largest, half = signed ? 0.5 : 1;
    Object.assign(name, { className: "label", textContent: item.label });
    if (item.pick) {
      name.type = "button";
      name.addEventListener("click", item.pick);
      name.setAttribute("aria-pressed", String(Boolean(item.chosen)));
    }
    track.className = "track";
    bar.style.width = `${100 * half * share}%`;
    bar.style.marginLeft = signed ? `${item.value < 0 ? 50 * (1 - share) : 50}%` : "0";
    if (item.colour) bar.style.background = item.colour;
    bar.classList.toggle("below", item.value < 0);
    value.textContent = item.said ?? (item.value === null ? "none" : short(item.value));
    track.append(bar);
    line.append(name, track, value);
    if (item.title) line.title = item.title;
    return line;
  }));
}
