// Asks the server. Addresses are relative, so they begin with the token.

const MOST_KEPT = 64;
const kept = new Map(); // address -> answer; the oldest goes first
const growing = new Set(); // names of captures whose requests are under way: what is true of them changes
const running = new Map(); // slot -> AbortController of its newest question

function address(action, name, query) {
  const path = name === undefined ? action : `${action}/${encodeURIComponent(name)}`;
  return `api/${path}?${new URLSearchParams(query)}`;
}

async function answer(url, signal) {
  const response = await fetch(url, { signal });
  if (!response.ok) {
    const text = await response.text();
    let message = text;
    try { message = JSON.parse(text).error; } catch { /* not every refusal is JSON */ }
    throw Object.assign(new Error(message), { status: response.status });
  }
  if (response.headers.get("content-type").startsWith("application/json")) return response.json();
  const shape = response.headers.get("x-shape").split(",").map(Number);
  return { shape, values: new Float32Array(await response.arrayBuffer()) };
}

/**
 * One question. slot: a newer question of the same slot takes the place of an older one, which then gives null.
 * Answers of finished stores stay true, so the newest are kept.
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
    if (keep && !grew && !growing.has(name)) {
      kept.set(url, found);
      if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value);
    }
    return running.get(slot) === mine ? found : null;
  } catch (error) {
    if (error.name === "AbortError") return null;
    throw error;
  }
}
