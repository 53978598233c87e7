// The tokens of the window as text, each with the colour of its value.

import { css, inkOn } from "./colour.js";

/** The text of a token: [text, whether it replaces characters that cannot be printed]. */
export function shown(text, id) {
  if (text === null || text === undefined) return [String(id), false];
  if (text === "" || text.includes("\ufffd") || /[\u0000-\u0008\u000b-\u001f\u007f]/.test(text)) return [`⟨${id}⟩`, true];
  return [text, false];
}

/** The text of a token on one line, with visible spaces. */
export function inLine(text, id) {
  const [plain] = shown(text, id);
  return plain.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "→");
}

export class Text {
  /** name: prefix of the ids of the token elements. */
  constructor(box, pick, name = "token") {
    Object.assign(this, { box, name, marked: null });
    box.addEventListener("click", (event) => {
      const token = event.target.closest(".token");
      if (token) pick(Number(token.dataset.at));
    });
  }

  /** tokens: {first, ids, texts}. made: the first row that was generated. */
  fill(tokens, made) {
    const more = this.first === tokens.first && this.box.children.length > 0; // more tokens of the same window
    if (!more) this.marked = null;
    const scrolled = more ? this.box.scrollTop : 0;
    this.first = tokens.first;
    this.box.classList.toggle("ids", tokens.texts === null);
    this.box.replaceChildren(...tokens.ids.map((id, i) => {
      const [text, odd] = shown(tokens.texts?.[i], id);
      const token = document.createElement("span");
      token.className = "token";
      token.classList.toggle("odd", odd);
      token.classList.toggle("made", tokens.first + i >= made);
      token.id = `${this.name}-${tokens.first + i}`;
      token.dataset.at = tokens.first + i;
      token.setAttribute("role", "option");
      token.textContent = text.replaceAll("\n", "↵\n");
      return token;
    }));
    this.box.scrollTop = scrolled;
  }

  /** values: of all tokens, or of the first ones; NaN for none. why(row): tip that says why a token has no colour. */
  paint(values, scale, why) {
    [...this.box.children].slice(0, values.length).forEach((token, i) => {
      const rgb = scale.colour(values[i]);
      token.style.background = rgb ? css(rgb) : "";
      token.style.color = rgb ? inkOn(rgb) : "";
      token.classList.toggle("lost", rgb === null);
      token.title = rgb ? "" : why(this.first + i);
    });
  }

  /** Removes the colours. */
  unpaint() {
    for (const token of this.box.children) {
      Object.assign(token.style, { background: "", color: "" });
      token.classList.remove("lost");
      token.title = "";
    }
  }

  /** Marks the tokens of the cell under the pointer in another part of the page. */
  point(rows) {
    for (const token of this.box.querySelectorAll(".pointed")) token.classList.remove("pointed");
    for (const row of rows) this.box.querySelector(`[data-at="${row}"]`)?.classList.add("pointed");
  }

  clear() { this.box.replaceChildren(); }

  mark(row) {
    this.box.querySelector('[aria-selected="true"]')?.removeAttribute("aria-selected");
    const token = row === null ? null : document.getElementById(`${this.name}-${row}`);
    this.box.setAttribute("aria-activedescendant", token?.id ?? "");
    if (!token) { this.marked = null; return; }
    token.setAttribute("aria-selected", "true");
    if (row === this.marked) return; // do not undo scrolling by the user
    this.marked = row;
    const [box, line] = [this.box.getBoundingClientRect(), token.getBoundingClientRect()];
    if (line.top < box.top) this.box.scrollTop -= box.top - line.top + 8;
    if (line.bottom > box.bottom) this.box.scrollTop += line.bottom - box.bottom + 8;
  }
}
