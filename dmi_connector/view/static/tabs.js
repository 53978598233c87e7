// The tabs of the panels below the heat map. One panel is shown at a time.

const NAMES = ["attention", "lens", "attribution", "experts", "latents"];

export class Tabs {
  /** shown(name): called when another panel is shown. */
  constructor(shown) {
    this.shown = shown;
    this.name = NAMES[0];
    for (const name of NAMES) this.tab(name).addEventListener("click", () => this.choose(name));
    this.draw();
  }

  tab(name) { return document.getElementById(`tab-${name}`); }

  number(at) { this.choose(NAMES[at]); }

  /** Shows a panel: the first one for an unknown name. */
  choose(name) {
    this.name = NAMES.includes(name) ? name : NAMES[0];
    this.draw();
    this.shown(this.name);
  }

  draw() {
    for (const name of NAMES) {
      this.tab(name).setAttribute("aria-selected", String(name === this.name));
      document.getElementById(`panel-${name}`).hidden = name !== this.name;
    }
  }
}
