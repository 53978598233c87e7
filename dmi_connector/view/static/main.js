// Assembles the page: keeps the user's choices, sends requests, and draws the answers.

import { inPanel, Popup } from "./alternatives.js";
import { ask } from "./api.js";
import { Attention } from "./attention.js";
import { showAttribution } from "./attribution.js";
import { Choices } from "./choices.js";
import { drawLegend, scaleOf, short, whenThemeChanges } from "./colour.js";
import { Experts } from "./experts.js";
import { verify } from "./header.js";
import { listen } from "./keys.js";
import { Latents } from "./latents.js";
import { LensMap } from "./lensmap.js";
import { List } from "./list.js";
import { Live, rangeOf } from "./live.js";
import { Matrix } from "./matrix.js";
import { Panel } from "./panel.js";
import { isWritten, placeOf, write } from "./place.js";
import { save } from "./save.js";
import { Side } from "./side.js";
import { Tabs } from "./tabs.js";
import { inLine, Text } from "./text.js";

const $ = (id) => document.getElementById(id);
// heat: {shape, values}, and the meaning of the values: {what, signed, flipped, hook}. chosen: the token that the panel
// shows. All drawings and texts about values use only `heat`, because the controls may already name other values.
const now = { store: null, first: 0, count: 128, token: null, chosen: null, tokens: null, heat: null };
const choices = new Choices();
/** The state of the page, for the panels. */
const page = {
  get store() { return now.store; },
  get first() { return now.first; },
  get count() { return range().count; },
  get token() { return now.token; },
  get edge() { return now.store.prompt - now.store.start - now.first; },
  get query() { return choices.query(); },
  get layer() { return choices.hook.layers[choices.row]; },
  label: (column) => label(column),
  fault, short,
  moved: () => moved(),
  repaint: () => paint(),
};

function fault(error) {
  $("fault").textContent = error.message;
  $("fault").hidden = false;
  return null;
}

// ---- parts ----------------------------------------------------------------------------------------------------------

const list = new List($("list"), $("spacer"), $("total"), listed, fault);
const text = new Text($("text"), (row) => { choose(row); lens(); });
const panel = new Panel((row) => choose(row), fault);
const heat = new Matrix($("heat"), {
  height: (rows) => Math.min(Math.max(rows * 16, 24), 340),
  pick: (row, column) => { setLayer(row); choose(now.first + column); lens(); },
  tip: (row, column) => { $("heat-tip").textContent = row === null || !now.heat ? "\u00a0" : heatTip(row, column); },
});
const attention = new Attention(page, {
  pick: (row) => { choose(row); lens(); },
  point: (rows) => text.point(rows),
  changed: () => { moved(); attention.show(); attention.showHeads(); attended(); },
});
const lensMap = new LensMap(page, (row) => { choose(row); lens(); });
const experts = new Experts(page, (row, layer) => {
  const at = choices.hook.layers.indexOf(layer);
  if (at >= 0) setLayer(at);
  choose(row);
});
const latents = new Latents(page, colourByLatent, goTo);
const side = new Side(page, (row, layer) => { if (layer !== undefined) setLayer(layer); choose(row); lens(); });
const live = new Live(now, { choices, fault, forgetHeat: () => forgetHeat(), show: () => show() });
const tabs = new Tabs(() => { showPanel(); moved(); });
new Popup($("text"), (row) => {
  const place = row - now.first, tokens = now.tokens;
  if (now.heat?.hook.name !== "prediction" || row === 0 || tokens?.first !== now.first) return null;
  return { store: now.store, token: { row, id: tokens.ids[place], text: tokens.texts?.[place] } };
});

// ---- one capture ----------------------------------------------------------------------------------------------------

/** Handles the choice of a capture in the list: shows it, or compares it with the current one. */
function listed(name) {
  if (!side.waits) { open(name); return; }
  list.name = now.store.name;
  list.draw();
  side.open(name);
}

/** Shows a capture. what: the choices of an address, see place.js. */
async function open(name, what = {}) {
  $("fault").hidden = true;
  const store = await ask("capture", "capture", name).catch((error) => { $("view").hidden = true; live.stop(); fault(error); }); // hide the previous capture
  if (!store) return;
  const another = now.store?.name !== store.name;
  Object.assign(now, { store, first: 0, token: null, chosen: null, tokens: null });
  document.title = `${name} · dmi view`;
  $("empty").hidden = true;
  $("view").hidden = false;
  document.querySelector("main").scrollTop = 0;
  choices.fill(store);
  live.watch();
  panel.show(store, null);
  text.clear();
  clearHeat();
  attention.clear();
  for (const part of [lensMap, experts, latents]) part.clear();
  take(what);
  moved(another);
  await show().finally(() => live.next(store)); // new rows are requested once these are drawn
  if (what.token !== undefined) await choose(Number(what.token));
}

/** Applies the choices of an address. */
function take(what) {
  choices.take(what);
  if ([...$("count").options].some((option) => option.value === what.count)) { $("count").value = what.count; now.count = Number(what.count); }
  const first = Math.floor(Number(what.token ?? what.first ?? 0) / now.count) * now.count;
  if (first > 0 && first < now.store.tokens) now.first = first;
  if (what.panel) tabs.choose(what.panel);
  if (what.with && what.with !== side.store?.name) side.open(what.with);
}

/** Writes the current choices to the address. another: whether the capture is another one. */
function moved(another = false) {
  if (!now.store) return;
  const where = { token: now.token, first: now.token === null && now.first ? now.first : null, count: now.count === 128 ? null : now.count };
  const att = { attlayer: attention.layer, head: attention.head };
  write(now.store.name, { ...choices.place(), ...where, panel: tabs.name, ...att, with: side.store?.name }, another);
}

/** Shows a token of any capture. */
async function goTo(name, row) {
  if (name !== now.store.name) { list.name = name; list.draw(); await open(name); }
  await choose(row);
}

function colourByLatent(latent) {
  $("hook").value = "latents";
  choices.hookChosen();
  $("index").value = latent;
  newValues();
}

/** Handles the choice of another hook, statistic or index. */
function newValues() {
  choices.keepIndex();
  forgetHeat();
  moved();
  if (tabs.name === "latents") showPanel();
  return Promise.all([showHeat(), side.show()]);
}

/** Updates the current panel for the window and the token. */
function showPanel() {
  if (!now.store || $("view").hidden) return null;
  const { store, token } = now;
  for (const [name, part] of [["attention", attention.heads], ["lens", lensMap]]) if (tabs.name !== name) part.stop();
  if (tabs.name === "attribution") return showAttribution(page, () => now.store === store && now.token === token);
  return { attention: () => attention.showHeads(), lens: () => lensMap.show(), experts: () => experts.show(), latents: () => latents.show() }[tabs.name]();
}

/** Forgets the values. The heat map, which has its own title, stays until another one is drawn. */
function forgetHeat() {
  now.heat = null;
  heat.point();
  sayFacts();
}

/** Removes the heat map, if its values belong to another capture or the new values cannot be loaded. */
function clearHeat() {
  forgetHeat();
  heat.show(null);
  text.unpaint();
  for (const id of ["heat-title", "heat-legend", "text-legend"]) $(id).textContent = "";
}

// ---- the window -----------------------------------------------------------------------------------------------------

async function show() {
  const { store } = now;
  const last = Math.min(store.tokens, now.first + now.count);
  $("place").value = now.first;
  $("shown").textContent = `${now.first.toLocaleString("en")} to ${Math.max(now.first, last - 1).toLocaleString("en")} of ${store.tokens.toLocaleString("en")}`;
  $("back").disabled = now.first === 0;
  $("on").disabled = last >= store.tokens;
  moved();
  const asked = ask("tokens", "tokens", store.name, range()).catch((error) => { text.clear(); return fault(error); });
  await Promise.all([asked.then((tokens) => { if (tokens) fillText(tokens); }), showHeat(), attention.show(), side.show(), showPanel()]);
}

function range() { return rangeOf(now); }

function move(first) {
  const end = Math.max(0, now.store.tokens - 1);
  const place = Math.min(Math.max(first, 0), Math.floor(end / now.count) * now.count);
  if (place === now.first) return Promise.resolve();
  now.first = place;
  forgetHeat();
  return show();
}

function fillText(tokens) {
  now.tokens = tokens;
  text.fill(tokens, now.store.prompt - now.store.start);
  paint();
}

async function showHeat() {
  const query = { ...choices.query(), ...range() }, { signed, flipped = false } = choices.statistic();
  const about = { what: choices.words(), signed, flipped, hook: choices.hook };
  const found = await ask("heat", "heat", now.store.name, query).catch((error) => { clearHeat(); return fault(error); });
  if (!found) return;
  if (!$("view").hidden) $("fault").hidden = true;
  now.heat = { ...found, ...about };
  paint();
}

// ---- drawing --------------------------------------------------------------------------------------------------------

function within(row, ranges) { return ranges.some(([start, stop]) => row >= start && row < stop); }

function lost(row) { return within(row, now.store.missing); }

/** Why a row has no colour. */
function why(row) {
  if (lost(row)) return "the store lacks this row";
  return now.heat.hook.rows && !within(row, now.heat.hook.rows) ? `no ${now.heat.hook.name} of this token` : "not finite";
}

/** A value as text. at: index of the layer. column: token of the window. */
function said(at, column) {
  const value = now.heat.values[at * now.heat.shape[1] + column];
  return Number.isFinite(value) ? short(value) : `none (${why(now.first + column)})`;
}

function layerName(row, { layers } = now.heat.hook) { return layers.length ? String(layers[row]) : ""; }

function row(values, at, width) { return values.subarray(at * width, (at + 1) * width); }

function paint() {
  if (!now.heat) return;
  const { values, shape: [layers, columns], what, signed, flipped, hook } = now.heat, kind = $("scale").value;
  const how = { signed, flipped }, scale = scaleOf([...values, ...side.values], { ...how, logarithmic: kind === "log" });
  const own = kind === "each" ? Array.from({ length: layers }, (_, at) => scaleOf(row(values, at, columns), how)) : null;
  const mine = row(values, choices.row, columns), layer = hook.layers[choices.row];
  const textScale = scaleOf([...mine, ...side.ofLayer(layer)], { ...how, logarithmic: kind === "log" });
  if (now.tokens?.first === now.first && now.tokens.ids.length >= columns) {
    text.paint(mine, textScale, why);
    text.mark(now.token);
  }
  drawLegend($("text-legend"), textScale);
  $("text-legend").prepend(`${what}${layerName(choices.row) && `, layer ${layerName(choices.row)}`}: `);
  $("heat-title").textContent = `${what} by ${hook.layers.length ? "layer and " : ""}token`;
  drawLegend($("heat-legend"), own ? own[choices.row] : scale);
  $("heat").setAttribute("aria-label", `${$("heat-title").textContent}: ${layers} layers, ${columns} tokens`);
  heat.show({
    values, rows: layers, columns, rowNames: (at) => layerName(at, hook), // the map stays when its values are forgotten
    colour: (value, at) => (own ? own[at] : scale).colour(value),
    columnName: (column) => (now.first + column).toLocaleString("en"),
    mark: { row: layers > 1 ? choices.row : -1, column: now.token === null ? -1 : now.token - now.first },
    edge: now.store.prompt - now.store.start - now.first,
  });
  side.paint({ text: textScale, heat: scale, layer, what: $("heat-title").textContent });
  sayFacts();
}

function label(at) {
  return now.tokens?.first === now.first ? inLine(now.tokens.texts?.[at], now.tokens.ids[at]) : "";
}

function heatTip(at, column) {
  const layer = layerName(at) && `layer ${layerName(at)}, `;
  return `${layer}token ${now.first + column} ${label(column)}: ${said(at, column)}`;
}

// ---- one token ------------------------------------------------------------------------------------------------------

let waiting = 0;

async function choose(at) {
  if (!now.store || at < 0 || at >= now.store.tokens) return;
  now.token = at;
  if (at < now.first || at >= now.first + now.count) await move(Math.floor(at / now.count) * now.count);
  if (now.token !== at || !now.tokens || now.tokens.first !== now.first) return;
  const place = at - now.first, made = at >= now.store.prompt - now.store.start;
  now.chosen = { row: at, id: now.tokens.ids[place], text: now.tokens.texts?.[place], made };
  panel.show(now.store, now.chosen, lost(at));
  moved();
  inPanel(now.store, now.chosen, lost(at), () => panel.isShown(now.store, at));
  if (tabs.name !== "attention") showPanel();
  sayFacts();
  paint();
  attention.paint();
  clearTimeout(waiting);
  waiting = setTimeout(attended, 120);
}

/** Shows the facts about the chosen token. Its value is that of the drawn hook and layer. */
function sayFacts() {
  if (!now.chosen) return;
  const { row, id, made } = now.chosen, place = row - now.first;
  const facts = [`row ${row}`, `position ${now.store.start + row}`, `id ${id}`, lost(row) ? "missing" : made ? "generated" : "prompt"];
  if (now.heat && place >= 0 && place < now.heat.shape[1]) {
    const layer = layerName(choices.row) && `, layer ${layerName(choices.row)}`;
    facts.push(`${now.heat.what}${layer}: ${said(choices.row, place)}`);
  }
  panel.facts(facts.join(" · "));
}

function attended() {
  if (now.token === null || attention.lacks() || now.token >= now.store.attention.until) return;
  panel.attended(now.store, now.token, attention.layer, attention.head);
}

function lens() {
  if (now.token !== null && now.store.lens === null && !lost(now.token)) panel.lens(now.store, now.token);
}

function setLayer(at) {
  choices.setRow(at);
  paint();
  experts.follow();
  moved();
}

// ---- input of the user ----------------------------------------------------------------------------------------------

let typing = 0;
$("search").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => list.find($("search").value), 120);
});
$("search").addEventListener("keydown", (event) => {
  if (event.key === "Escape") { $("search").value = ""; list.find(""); $("list").focus(); }
  if (event.key === "Enter") { clearTimeout(typing); list.find($("search").value).then(() => list.choose(0)); $("list").focus(); }
});
$("hook").addEventListener("change", () => { choices.hookChosen(); newValues(); });
$("statistic").addEventListener("change", () => { choices.statisticChosen(); newValues(); });
$("index").addEventListener("change", newValues);
$("layer").addEventListener("change", () => setLayer(Number($("layer").value)));
$("scale").addEventListener("change", () => { paint(); moved(); });
for (const id of ["att-layer", "head"]) $(id).addEventListener("change", () => { moved(); attention.show(); showPanel(); attended(); });
$("count").addEventListener("change", () => {
  now.count = Number($("count").value);
  now.first = Math.floor((now.token ?? now.first) / now.count) * now.count;
  forgetHeat();
  show();
});
$("place").addEventListener("input", () => move(Math.floor(Number($("place").value) / now.count) * now.count));
$("back").addEventListener("click", () => move(now.first - now.count));
$("on").addEventListener("click", () => move(now.first + now.count));
$("verify").addEventListener("click", () => verify(fault));
$("lens-button").addEventListener("click", lens);
$("compare").addEventListener("click", () => side.wait(!side.waits));
$("save").addEventListener("click", savePicture);

function savePicture() { save(`${$("name").textContent}: ${$("heat-title").textContent}`, now.store.name.replace(/\.zarr$/, "")); }

listen({
  list: $("list"), ready: () => !$("view").hidden, always: ["/", "j", "k"],
  inList: { ArrowUp: () => list.step(-1), ArrowDown: () => list.step(1) },
  keys: {
    "/": () => $("search").focus(),
    j: () => list.step(1),
    k: () => list.step(-1),
    ArrowLeft: () => choose(now.token === null ? now.first : now.token - 1),
    ArrowRight: () => choose(now.token === null ? now.first : now.token + 1),
    ArrowUp: () => setLayer(Math.min(choices.row + 1, Math.max(0, choices.hook.layers.length - 1))),
    ArrowDown: () => setLayer(Math.max(choices.row - 1, 0)),
    "[": () => move(now.first - now.count),
    "]": () => move(now.first + now.count),
    Enter: lens,
    c: () => side.wait(!side.waits),
    s: savePicture,
    Escape: () => side.escape(),
    ...Object.fromEntries(["1", "2", "3", "4", "5"].map((key, at) => [key, () => tabs.number(at)])),
  },
});
whenThemeChanges(() => {
  paint();
  attention.repaint();
  lensMap.paint();
  experts.paint();
});
window.addEventListener("hashchange", () => {
  const { name, what } = placeOf(location.hash);
  if (isWritten() || !name) return;
  choices.forget();
  list.name = name;
  list.draw();
  open(name, what);
});

const { name: wanted, what } = placeOf(location.hash);
list.name = wanted;
await list.find("");
if (wanted) await open(wanted, what);
else if (list.count) await list.choose(0);
