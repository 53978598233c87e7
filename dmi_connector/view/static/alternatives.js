// Alternatives to a token: in a popup next to the token under the pointer, and in the panel of the chosen token.

import { ask } from "./api.js";
import { inLine } from "./text.js";

const $ = (id) => document.getElementById(id);
const LINGER = 120;

function share(p) { return p < 1e-4 ? "< 0.01 %" : `${(100 * p).toFixed(p < 0.1 ? 2 : 1)} %`; }

function lines(found, token) {
  const came = found.came === null ? [] : [{ ...token, p: found.came, mine: true }];
  const others = found.tokens.filter((other) => other.id !== token.id);
  const all = [...came, ...others].sort((a, b) => b.p - a.p);
  return all.map((one) => {
    const [line, text, p] = ["li", "span", "small"].map((tag) => document.createElement(tag));
    line.classList.toggle("came", Boolean(one.mine));
    text.textContent = inLine(one.text, one.id);
    p.textContent = ` ${share(one.p)}`;
    line.append(text, p);
    return line;
  });
}

/** The title of the list of alternatives. */
function said(found) {
  return found.rank === null ? "Predicted here" : `Predicted here (this token is number ${found.rank.toLocaleString("en")})`;
}

/** Shows alternatives in the panel. token: {row, id, text}. isShown(): whether the panel still shows this token. */
export async function inPanel(store, token, lost, isShown) {
  $("alternatives-box").hidden = true;
  if (store.predictions !== null || token.row === 0 || lost) return;
  const found = await ask("alternatives", "alternatives", store.name, { token: token.row }).catch(() => null);
  if (!found?.tokens.length || !isShown()) return; // some rows have no logits
  $("alternatives-name").textContent = said(found);
  $("alternatives").replaceChildren(...lines(found, token));
  $("alternatives-box").hidden = false;
}

/** The popup next to the token under the pointer. of(row): {store, token}, or null if there is nothing to show. */
export class Popup {
  constructor(box, of) {
    Object.assign(this, { of, row: null, waiting: 0 });
    box.addEventListener("pointerover", (event) => {
      const token = event.target.closest(".token");
      if (token) this.wait(Number(token.dataset.at), token);
    });
    box.addEventListener("pointerleave", () => this.hide());
    box.addEventListener("scroll", () => this.hide());
  }

  wait(row, element) {
    this.hide();
    this.row = row;
    this.waiting = setTimeout(() => this.show(row, element), LINGER);
  }

  async show(row, element) {
    const about = this.of(row);
    if (!about) return;
    const found = await ask("popup", "alternatives", about.store.name, { token: row }).catch(() => null);
    if (!found?.tokens.length || this.row !== row || !element.isConnected) return;
    const box = $("popup"), title = document.createElement("p"), list = document.createElement("ol");
    title.textContent = said(found);
    list.append(...lines(found, about.token));
    box.replaceChildren(title, list);
    box.hidden = false;
    const at = element.getClientRects()[0], width = box.offsetWidth, height = box.offsetHeight;
    const below = at.bottom + 6 + height <= window.innerHeight;
    box.style.left = `${Math.max(4, Math.min(at.left, window.innerWidth - width - 4))}px`;
    box.style.top = `${Math.max(4, below ? at.bottom + 6 : at.top - height - 6)}px`;
  }

  hide() {
    clearTimeout(this.waiting);
    this.row = null;
    $("popup").hidden = true;
  }
}
