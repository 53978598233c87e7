// What is shown, in the address: #NAME?hook=…&layer=…&token=…&panel=…

/** {name, what: {key: text}} of the address. */
export function placeOf(hash) {
  const [name, query] = hash.slice(1).split("?");
  return { name: decodeURIComponent(name) || null, what: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

let written = "";

/** Whether the address is what `write` left there: nobody changed it since. */
export function isWritten() { return location.hash === written; }

/** Puts what is shown into the address. what: {key: value}; null and "" are left out. another: of another capture. */
export function write(name, what, another) {
  const query = new URLSearchParams(Object.entries(what).filter(([, value]) => value !== null && value !== "" && value !== undefined));
  const hash = `#${encodeURIComponent(name)}${query.size ? `?${query}` : ""}`;
  if (hash !== location.hash) history[another ? "pushState" : "replaceState"](null, "", hash);
  written = location.hash;
}
