// Puts the parts together: what is chosen, what is asked for, what is drawn.

import { ask } from "./api.js";
import { drawLegend, scaleOf, short, whenThemeChanges } from "./colour.js";
import { about, verify } from "./header.js";
import { List } from "./list.js";
import { Matrix } from "./matrix.js";
import { Panel } from "./panel.js";
import { inLine, Text } from "./text.js";

const $ = (id) => document.getElementById(id);
// heat: {shape, values} and what these are: {what, signed, hook}. chosen: the token of the panel. What is drawn and said of
// values comes from `heat` alone, as the boxes above may ask for others already.
const now = { store: null, first: 0, count: 128, token: null, chosen: null, hook: null, layer: 0, tokens: null, heat: null, att: null };

function fault(error) {
  $("fault").textContent = error.message;
  $("fault").hidden = false;
  return null;
}

// ---- parts ----------------------------------------------------------------------------------------------------------

const list = new List($("list"), $("spacer"), $("total"), open, fault);
const text = new Text($("text"), (row) => { choose(row); lens(); });
const panel = new Panel((row) => choose(row), fault);
const heat = new Matrix($("heat"), {
  height: (rows) => Math.min(Math.max(rows * 16, 24), 340),
  pick: (row, column) => { setLayer(row); choose(now.first + column); lens(); },
  tip: (row, column) => { $("heat-tip").textContent = row === null || !now.heat ? "\u00a0" : heatTip(row, column); },
});
const att = new Matrix($("att"), {
  height: (rows, width) => Math.min(width, 460, Math.max(rows * 20, 120)),
  pick: (row) => { choose(now.first + row); lens(); },
  tip: (row, column) => { $("att-tip").textContent = row === null || !now.att ? "\u00a0" : attTip(row, column); },
  down: true,
});

// ---- one capture ----------------------------------------------------------------------------------------------------

async function open(name) {
  $("fault").hidden = true;
  const store = await ask("capture", "capture", name).catch(cannotOpen);
  if (!store) return;
  Object.assign(now, { store, first: 0, token: null, chosen: null, tokens: null });
  location.hash = encodeURIComponent(name);
  document.title = `${name} · dmi view`;
  $("empty").hidden = true;
  $("view").hidden = false;
  document.querySelector("main").scrollTop = 0;
  about(store);
  choices(store);
  $("place").max = Math.max(0, store.tokens - 1);
  panel.show(store, null);
  text.clear();
  clearHeat();
  clearAttention();
  await show();
}

/** Say why, and do not leave the capture before on the page. */
function cannotOpen(error) {
  $("view").hidden = true;
  fault(error);
}

function options(select, items) {
  const old = select.value;
  select.replaceChildren(...items.map(([value, label]) => new Option(label, value)));
  if (items.some(([value]) => String(value) === String(old))) select.value = old;
}

function choices(store) {
  options($("hook"), store.hooks.map((h) => [h.name, h.reduce ? `${h.name} (${h.reduce})` : h.name]));
  hookChosen();
  options($("att-layer"), store.attention.layers.map((layer) => [layer, layer]));
  options($("head"), Array.from({ length: store.heads }, (_, head) => [head, head]));
}

function hookChosen() {
  now.hook = now.store.hooks.find((hook) => hook.name === $("hook").value);
  options($("statistic"), now.hook.statistics.map((s) => [s.name, s.name]));
  const old = Number($("layer").value);
  options($("layer"), (now.hook.layers.length ? now.hook.layers : ["–"]).map((layer, row) => [row, layer]));
  now.layer = Math.min(old || 0, Math.max(0, now.hook.layers.length - 1));
  $("layer").value = now.layer;
  $("layer").disabled = now.hook.layers.length < 2;
  statisticChosen();
}

function statistic() { return now.hook.statistics.find((s) => s.name === $("statistic").value); }

/** The hook and its statistic, in words. */
function shownNow() {
  const { name, index } = statistic();
  return `${now.hook.name}, ${name}${index === null ? "" : ` ${$("index").value}`}`;
}

function statisticChosen() {
  const { index } = statistic();
  $("index-label").hidden = index === null;
  $("index-name").textContent = index ?? "";
  $("index").max = (index === "head" ? now.store.heads : now.hook.width) - 1;
  keepIndex();
}

/** The picture, which has its own title, stays until another is drawn. What else is said of values is of the boxes. */
function forgetHeat() {
  now.heat = null;
  heat.point();
  sayFacts();
}

/** No picture stays where its values are another capture's, or the new ones do not come. */
function clearHeat() {
  forgetHeat();
  heat.show(null);
  text.unpaint();
  for (const id of ["heat-title", "heat-legend", "text-legend"]) $(id).textContent = "";
}

function clearAttention() {
  now.att = null;
  att.show(null);
  $("att-legend").textContent = "";
}

/** Brings the index into its range: another hook may have fewer neurons. */
function keepIndex() {
  const wanted = Math.trunc(Number($("index").value)) || 0;
  $("index").value = Math.min(Math.max(wanted, 0), Math.max(0, Number($("index").max)));
}

// ---- the window -----------------------------------------------------------------------------------------------------

async function show() {
  const { store } = now;
  const last = Math.min(store.tokens, now.first + now.count);
  $("place").value = now.first;
  $("shown").textContent = `${now.first.toLocaleString("en")} to ${Math.max(now.first, last - 1).toLocaleString("en")} of ${store.tokens.toLocaleString("en")}`;
  $("back").disabled = now.first === 0;
  $("on").disabled = last >= store.tokens;
  const asked = ask("tokens", "tokens", store.name, range()).catch((error) => { text.clear(); return fault(error); });
  await Promise.all([asked.then((tokens) => { if (tokens) fillText(tokens); }), showHeat(), showAttention()]);
}

function range() { return { first: now.first, count: now.count }; }

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
  const query = { hook: now.hook.name, statistic: statistic().name, index: $("index").value, ...range() };
  const about = { what: shownNow(), signed: statistic().signed, hook: now.hook };
  const found = await ask("heat", "heat", now.store.name, query).catch((error) => { clearHeat(); return fault(error); });
  if (!found) return;
  if (!$("view").hidden) $("fault").hidden = true;
  now.heat = { ...found, ...about };
  paint();
}

/** Why there is no attention to draw, or "". */
function attentionLacks() {
  const { layers, until } = now.store.attention;
  if (!layers.length) return "The store has no queries and keys. Capture q_rot and k_rot (preset attention), or pattern.";
  return now.first < until ? "" : "Rows before this window are not in the store, and attention needs them as keys.";
}

async function showAttention() {
  const lacks = attentionLacks();
  [$("att").hidden, $("att-tip").hidden, $("att-lacks").hidden] = [lacks, lacks, !lacks].map(Boolean);
  $("att-lacks").textContent = lacks;
  now.att = null;
  att.point();
  if (lacks) return;
  const count = Math.min(now.count, now.store.attention.until - now.first);
  const query = { layer: $("att-layer").value, head: $("head").value || 0, first: now.first, count };
  const found = await ask("attention", "attention", now.store.name, query).catch((error) => { clearAttention(); return fault(error); });
  if (!found) return;
  now.att = { ...found, layer: query.layer, head: query.head };
  paintAttention();
}

// ---- drawing --------------------------------------------------------------------------------------------------------

function within(row, ranges) { return ranges.some(([start, stop]) => row >= start && row < stop); }

function lost(row) { return within(row, now.store.missing); }

/** Why a row has no colour. */
function why(row) {
  if (lost(row)) return "the store lacks this row";
  return now.heat.hook.rows && !within(row, now.heat.hook.rows) ? `no ${now.heat.hook.name} of this token` : "not finite";
}

/** A value in words, at a layer (by its place) and a token of the window. */
function said(at, column) {
  const value = now.heat.values[at * now.heat.shape[1] + column];
  return Number.isFinite(value) ? short(value) : `none (${why(now.first + column)})`;
}

function layerName(row) { return now.heat.hook.layers.length ? String(now.heat.hook.layers[row]) : ""; }

function row(values, at, width) { return values.subarray(at * width, (at + 1) * width); }

function paint() {
  if (!now.heat) return;
  const { values, shape: [layers, columns], what, signed, hook } = now.heat, kind = $("scale").value;
  const scale = scaleOf(values, { signed, logarithmic: kind === "log" });
  const own = kind === "each" ? Array.from({ length: layers }, (_, at) => scaleOf(row(values, at, columns), { signed })) : null;
  const mine = row(values, now.layer, columns);
  const textScale = scaleOf(mine, { signed, logarithmic: kind === "log" });
  if (now.tokens?.first === now.first && now.tokens.ids.length === columns) {
    text.paint(mine, textScale, why);
    text.mark(now.token);
  }
  drawLegend($("text-legend"), textScale);
  $("text-legend").prepend(`${what}${layerName(now.layer) && `, layer ${layerName(now.layer)}`}: `);
  $("heat-title").textContent = `${what} by ${hook.layers.length ? "layer and " : ""}token`;
  drawLegend($("heat-legend"), own ? own[now.layer] : scale);
  $("heat").setAttribute("aria-label", `${$("heat-title").textContent}: ${layers} layers, ${columns} tokens`);
  heat.show({
    values, rows: layers, columns, rowNames: layerName,
    colour: (value, at) => (own ? own[at] : scale).colour(value),
    columnName: (column) => (now.first + column).toLocaleString("en"),
    mark: { row: layers > 1 ? now.layer : -1, column: now.token === null ? -1 : now.token - now.first },
    edge: now.store.prompt - now.store.start - now.first,
  });
  sayFacts();
}

function paintAttention() {
  if (!now.att) return;
  const { values, shape: [rows, stride], layer, head } = now.att;
  const scale = { ...scaleOf([0, 1], { from: 0, root: true }), lacking: values.some(Number.isNaN) };
  drawLegend($("att-legend"), scale, " (square root)");
  $("att").setAttribute("aria-label", `Attention of head ${head} in layer ${layer}: ${rows} queries, ${stride - 1} keys`);
  const at = now.token === null ? -1 : now.token - now.first;
  att.show({
    values, rows, columns: stride - 1, offset: 1, stride,
    colour: (value, query, key) => scale.colour(key > query ? 0 : value),
    rowNames: (query) => (now.first + query).toLocaleString("en"),
    columnName: (key) => (now.first + key).toLocaleString("en"),
    mark: { row: at, column: -1 },
    edge: now.store.prompt - now.store.start - now.first,
  });
}

function label(at) {
  return now.tokens?.first === now.first ? inLine(now.tokens.texts?.[at], now.tokens.ids[at]) : "";
}

function heatTip(at, column) {
  const layer = layerName(at) && `layer ${layerName(at)}, `;
  return `${layer}token ${now.first + column} ${label(column)}: ${said(at, column)}`;
}

function attTip(query, key) {
  if (key > query) return "\u00a0";
  const line = row(now.att.values, query, now.att.shape[1]);
  const before = now.first ? `; before the window ${short(line[0])}` : "";
  return `token ${now.first + query} ${label(query)} to token ${now.first + key} ${label(key)}: ${short(line[1 + key])}${before}`;
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
  sayFacts();
  paint();
  paintAttention();
  clearTimeout(waiting);
  waiting = setTimeout(attended, 120);
}

/** What is known of the chosen token. Its value is that of the hook and layer that are drawn. */
function sayFacts() {
  if (!now.chosen) return;
  const { row, id, made } = now.chosen, place = row - now.first;
  const facts = [`row ${row}`, `position ${now.store.start + row}`, `id ${id}`, lost(row) ? "missing" : made ? "generated" : "prompt"];
  if (now.heat && place >= 0 && place < now.heat.shape[1]) {
    const layer = layerName(now.layer) && `, layer ${layerName(now.layer)}`;
    facts.push(`${now.heat.what}${layer}: ${said(now.layer, place)}`);
  }
  panel.facts(facts.join(" · "));
}

function attended() {
  if (now.token === null || attentionLacks() || now.token >= now.store.attention.until) return;
  panel.attended(now.store, now.token, $("att-layer").value, $("head").value || 0);
}

function lens() {
  if (now.token !== null && now.store.lens === null && !lost(now.token)) panel.lens(now.store, now.token);
}

function setLayer(at) {
  now.layer = at;
  $("layer").value = at;
  paint();
}

// ---- what the user does ---------------------------------------------------------------------------------------------

let typing = 0;
$("search").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => list.find($("search").value), 120);
});
$("search").addEventListener("keydown", (event) => {
  if (event.key === "Escape") { $("search").value = ""; list.find(""); $("list").focus(); }
  if (event.key === "Enter") { clearTimeout(typing); list.find($("search").value).then(() => list.choose(0)); $("list").focus(); }
});
$("hook").addEventListener("change", () => { hookChosen(); forgetHeat(); showHeat(); });
$("statistic").addEventListener("change", () => { statisticChosen(); forgetHeat(); showHeat(); });
$("index").addEventListener("change", () => { keepIndex(); forgetHeat(); showHeat(); });
$("layer").addEventListener("change", () => setLayer(Number($("layer").value)));
$("scale").addEventListener("change", paint);
for (const id of ["att-layer", "head"]) $(id).addEventListener("change", () => { showAttention(); attended(); });
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

const KEYS = {
  "/": () => $("search").focus(),
  j: () => list.step(1),
  k: () => list.step(-1),
  ArrowLeft: () => choose(now.token === null ? now.first : now.token - 1),
  ArrowRight: () => choose(now.token === null ? now.first : now.token + 1),
  ArrowUp: () => setLayer(Math.min(now.layer + 1, Math.max(0, now.hook.layers.length - 1))),
  ArrowDown: () => setLayer(Math.max(now.layer - 1, 0)),
  "[": () => move(now.first - now.count),
  "]": () => move(now.first + now.count),
  Enter: lens,
};
const IN_LIST = { ArrowUp: () => list.step(-1), ArrowDown: () => list.step(1) };

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
  if (event.key === "Enter" && event.target.matches("button")) return;
  const act = (document.activeElement === $("list") && IN_LIST[event.key]) || KEYS[event.key];
  const always = ["/", "j", "k"].includes(event.key) || act === IN_LIST[event.key];
  if (!act || ($("view").hidden && !always)) return;
  event.preventDefault();
  act();
});
whenThemeChanges(() => { paint(); paintAttention(); });

const wanted = decodeURIComponent(location.hash.slice(1));
list.name = wanted || null;
await list.find("");
if (wanted) await open(wanted);
else if (list.count === 1) await list.choose(0);
