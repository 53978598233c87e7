// Sends requests to the server. Addresses are relative, so they contain the page's secret token.

const MOST_KEPT = 64;
const kept = new Map(); // cache: address -> answer; the oldest is removed first
const growing = new Set(); // names of captures of running requests, whose answers change
const running = new Map(); // slot -> AbortController of its newest request

function address(action, name, query) {
  const path = name === undefined ? action : `${action}/${encodeURIComponent(name)}`;
  return `api/${path}?${new URLSearchParams(query)}`;
}

async function sent(url, signal) {
  const response = await fetch(url, { signal });
  if (response.ok) return response;
  const text = await response.text();
  let message = text;
  try { message = JSON.parse(text).error; } catch { /* some errors are not JSON */ }
  throw Object.assign(new Error(message), { status: response.status });
}

async function answer(url, signal) {
  const response = await sent(url, signal);
  if (response.headers.get("content-type").startsWith("application/json")) return response.json();
  const shape = response.headers.get("x-shape").split(",").map(Number);
  return { shape, values: new Float32Array(await response.arrayBuffer()) };
}

/**
 * Sends one request, or returns the cached answer. slot: any name. A newer request of the same slot cancels the older
 * one, which then returns null. keep: whether to cache the answer. Answers about running requests are not cached,
 * because they change.
 */
export async function ask(slot, action, name, query = {}, keep = true) {
  running.get(slot)?.abort();
  const mine = new AbortController();
  running.set(slot, mine);
  const url = address(action, name, query), grew = growing.has(name);
  if (kept.has(url)) return kept.get(url);
  try {
    const found = await answer(url, mine.signal);
    if (action === "capture") growing[found.running ? "add" : "delete"](name);
    if (keep && !grew) remember(name, url, found);
    return running.get(slot) === mine ? found : null;
  } catch (error) {
    if (error.name === "AbortError") return null;
    throw error;
  }
}

function remember(name, url, found) {
  if (growing.has(name)) return;
  kept.set(url, found);
  if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value);
}

/**
 * Sends a request that is answered in pieces. slot: as in `ask`. each(piece): called for every piece when it arrives.
 * first: parameters of the query that only change which piece comes first. If the request is canceled, the server stops
 * too. Returns whether all pieces arrived.
 */
export async function pieces(slot, action, name, query, first, each) {
  running.get(slot)?.abort();
  const mine = new AbortController(), url = address(action, name, query), grew = growing.has(name), all = [];
  running.set(slot, mine);
  if (kept.has(url)) { kept.get(url).forEach(each); return true; }
  try {
    const response = await sent(address(action, name, { ...query, ...first }), mine.signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "", part = await reader.read(); !part.done; part = await reader.read()) {
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const piece = JSON.parse(line);
        if (running.get(slot) !== mine) return false;
        if (piece.error) throw new Error(piece.error);
        all.push(piece);
        each(piece);
      }
    }
    if (!grew) remember(name, url, all);
    return true;
  } catch (error) {
    if (error.name === "AbortError") return false;
    throw error;
  }
}

/** Cancels the request of a slot. */
export function forget(slot) {
  running.get(slot)?.abort();
  running.delete(slot);
}
