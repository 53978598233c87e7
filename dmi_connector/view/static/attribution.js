// Direct logit attribution: the contribution of each part of the model to the logit of the token after the chosen one.

import { ask } from "./api.js";
import { bars } from "./bars.js";
import { short } from "./colour.js";
import { inLine } from "./text.js";

const $ = (id) => document.getElementById(id);

export async function showAttribution({ store, token, fault }, isShown) {
  const lacks = store.attribution ?? (token === null ? "Choose a token." : null);
  $("attribution").replaceChildren();
  $("attribution-title").textContent = lacks ?? "Working …";
  if (lacks) return;
  const found = await ask("attribution", "attribution", store.name, { token }).catch((error) => { $("attribution-title").textContent = ""; return fault(error); });
  if (!found || !isShown()) return;
  const name = inLine(found.target.text, found.target.id);
  $("attribution-title").textContent = `Logit of the next token “${name}”: ${short(found.logit)}, the sum of`;
  bars($("attribution"), found.parts.map((part, i) => ({ label: part, value: found.values[i] })));
}
