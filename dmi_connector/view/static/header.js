// The header of the page: facts about the chosen capture, and the result of Verify.

import { ask } from "./api.js";

const $ = (id) => document.getElementById(id);
let shown = null;

export function about(store) {
  const { attrs } = store;
  shown = store;
  $("name").textContent = attrs.key ?? store.name;
  const facts = [attrs.key && store.name, attrs.model?.split("/").pop(), attrs.dtype, attrs.codec && `codec ${attrs.codec}`,
    `${store.prompt.toLocaleString("en")} prompt tokens`, `${store.tokens.toLocaleString("en")} rows`, attrs.created?.slice(0, 19).replace("T", " ")];
  $("facts").textContent = facts.filter(Boolean).join(" · ");
  $("facts").title = attrs.model ?? "";
  $("incomplete").hidden = store.complete;
  const rows = store.missing.map(([start, stop]) => `${start} to ${stop - 1}`).join(", ");
  $("incomplete").textContent = store.complete ? "" : `Incomplete: ${store.reason}. Missing rows: ${rows || "unknown"}.`;
  $("verdict").textContent = "";
  $("verify").disabled = store.running;
}

/** Verifies the store. fault(error): shows an error. */
export async function verify(fault) {
  const store = shown, verdict = $("verdict");
  $("verify").disabled = true;
  [verdict.className, verdict.textContent] = ["", "Checking every byte …"];
  const found = await ask("verify", "verify", store.name, {}, false).catch(fault);
  if (shown !== store) return;
  $("verify").disabled = false;
  verdict.textContent = "";
  if (!found) return;
  const all = [...found.problems, ...found.not_finite], sound = all.length === 0;
  verdict.className = sound ? "good" : "bad";
  const more = all.length > 8 ? [`and ${all.length - 8} more: dmi verify lists them`] : [];
  const head = found.problems.length ? [] : ["No damage, but values are not finite."];
  const said = sound ? [store.complete ? "Sound: no damage." : "Sound, but incomplete."] : [...head, ...all.slice(0, 8)];
  verdict.textContent = [...said, ...more, found.unseen].filter(Boolean).join("\n");
}
