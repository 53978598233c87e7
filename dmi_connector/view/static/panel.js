// The panel of the chosen token: its facts, the tokens that it attends to, and the logit lens.

import { ask } from "./api.js";
import { css, inkOn, scaleOf } from "./colour.js";
import { inLine } from "./text.js";

const $ = (id) => document.getElementById(id);
const SHARES = { from: 0, root: true };

export class Panel {
  /** go(row): shows another token. */
  constructor(go, fault) { Object.assign(this, { go, fault, store: null, row: null }); }

  /** token: {row, id, text, made}, or null. lost: whether the store lacks its row. */
  show(store, token, lost) {
    const row = token?.row ?? null;
    if (!this.isShown(store, row)) this.working(false);
    Object.assign(this, { store, row });
    $("token-name").textContent = token ? `“${inLine(token.text, token.id)}”` : "";
    this.facts("Click a token, or move with the arrow keys.");
    $("attended-box").hidden = true;
    $("lens").hidden = true;
    const lacks = store.lens ?? (lost ? "The store lacks this row." : null);
    $("lens-lacks").textContent = lacks ?? "";
    $("lens-lacks").hidden = lacks === null;
    $("lens-button").hidden = !token || lacks !== null;
  }

  /** Sets the line below the token's name, which changes with the hook. */
  facts(text) { $("token-facts").textContent = text; }

  /** Whether the panel still shows this token. Answers about other tokens must not be shown. */
  isShown(store, row) { return this.store === store && this.row === row; }

  working(yes) {
    $("lens-button").disabled = yes;
    $("lens-button").textContent = yes ? "Working …" : "Show top tokens";
  }

  async attended(store, row, layer, head) {
    $("attended-box").hidden = true; // the box may show another token, layer or head
    const found = await ask("attended", "attended", store.name, { token: row, layer, head }).catch(this.fault);
    if (!found || !this.isShown(store, row)) return;
    $("attended-box").hidden = false;
    $("attended-name").textContent = `Attends to (layer ${layer}, head ${head})`;
    if (!found.keys.length) $("attended").replaceChildren("no key: the weights are not finite");
    else $("attended").replaceChildren(...found.keys.map((key) => {
      const [line, button, share] = ["li", "button", "small"].map((name) => document.createElement(name));
      button.type = "button";
      button.textContent = inLine(key.text, key.id);
      button.title = `token ${key.row}`;
      button.addEventListener("click", () => this.go(key.row));
      share.textContent = ` ${(100 * key.weight).toFixed(1)} %`;
      line.append(button, share);
      return line;
    }));
  }

  async lens(store, row) {
    this.working(this.isShown(store, row));
    const found = await ask("lens", "lens", store.name, { token: row }).catch(this.fault);
    if (!this.isShown(store, row)) return;
    this.working(false);
    if (!found) return;
    $("lens-button").hidden = true;
    $("lens").hidden = false;
    const scale = scaleOf([0, 1], SHARES);
    $("lens").tBodies[0].replaceChildren(...found.places.toReversed().map((place) => this.line(place, scale)));
  }

  line(place, scale) {
    const row = document.createElement("tr"), name = document.createElement("th");
    name.scope = "row";
    name.textContent = place.place;
    row.append(name, ...place.tokens.map((token) => {
      const cell = document.createElement("td"), rgb = scale.colour(token.p ?? 0);
      if (token.p === null) {
        cell.textContent = "none";
        cell.className = "lost";
        cell.title = "The row has values that are not finite.";
        return cell;
      }
      cell.textContent = inLine(token.text, token.id);
      cell.title = `${inLine(token.text, token.id)} (id ${token.id}): ${(100 * token.p).toFixed(1)} %`;
      cell.style.background = css(rgb);
      cell.style.color = inkOn(rgb);
      return cell;
    }));
    return row;
  }
}
