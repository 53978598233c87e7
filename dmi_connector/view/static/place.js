// Keeps the current choices in the address of the page: #NAME?hook=…&layer=…&token=…&panel=…

/** Parses the address: {name, what: {key: text}}. */
export function placeOf(hash) {
  const [name, query] = hash.slice(1).split("?");
  return { name: decodeURIComponent(name) || null, what: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

let written = "";

/** Whether the address is the one that `write` wrote last, so the user has not changed it. */
export function isWritten() { return location.hash === written; }

/** Writes the address. what: {key: value}; null and "" are left out. another: whether the capture is another one. */
export function write(name, what, another) {
  const query = new URLSearchParams(Object.entries(what).filter(([, value]) => value !== null && value !== "" && value !== undefined));
  const hash = `#${encodeURIComponent(name)}${query.size ? `?${query}` : ""}`;
  if (hash !== location.hash) history[another ? "pushState" : "replaceState"](null, "", hash);
  written = location.hash;
}
