// The controls above the text: hook, statistic, index, layer.

const $ = (id) => document.getElementById(id);

export function options(select, items) {
  const old = select.value;
  select.replaceChildren(...items.map(([value, label]) => new Option(label, value)));
  if (items.some(([value]) => String(value) === String(old))) select.value = old;
}

export class Choices {
  constructor() { Object.assign(this, { store: null, hook: null, row: 0, chosen: false }); }

  /** Makes the next capture begin with default choices. */
  forget() { this.chosen = false; }

  /** Fills the controls for a capture. The first capture is shown at a middle layer of the residual stream. */
  fill(store) {
    this.store = store;
    options($("hook"), store.hooks.map((h) => [h.name, h.reduce ? `${h.name} (${h.reduce})` : h.name]));
    const stream = store.hooks.find((hook) => hook.name === "resid_pre");
    if (!this.chosen && stream) $("hook").value = stream.name;
    this.hookChosen(this.chosen ? null : Math.floor((this.hookNow()?.layers.length ?? 0) / 2));
    this.chosen = true;
    options($("att-layer"), store.attention.layers.map((layer) => [layer, layer]));
    options($("head"), Array.from({ length: store.heads }, (_, head) => [head, head]));
  }

  /** Handles new rows of the capture. */
  grown() { this.hook = this.hookNow(); }

  hookNow() { return this.store.hooks.find((hook) => hook.name === $("hook").value); }

  /** Handles the choice of a hook. row: index of the layer among those of the hook; null for the previous index. */
  hookChosen(row = null) {
    this.hook = this.hookNow();
    options($("statistic"), this.hook.statistics.map((s) => [s.name, s.name]));
    if (row !== null) $("statistic").selectedIndex = 0;
    const old = row ?? Number($("layer").value);
    options($("layer"), (this.hook.layers.length ? this.hook.layers : ["–"]).map((layer, at) => [at, layer]));
    this.row = Math.min(old || 0, Math.max(0, this.hook.layers.length - 1));
    $("layer").value = this.row;
    $("layer").disabled = this.hook.layers.length < 2;
    this.statisticChosen();
  }

  statistic() { return this.hook.statistics.find((s) => s.name === $("statistic").value); }

  statisticChosen() {
    const { index } = this.statistic();
    $("index-label").hidden = index === null;
    $("index-name").textContent = index ?? "";
    $("index").max = (index === "head" ? this.store.heads : this.hook.width) - 1;
    this.keepIndex();
  }

  /** Limits the index to its range, because another hook may have fewer neurons. */
  keepIndex() {
    const wanted = Math.trunc(Number($("index").value)) || 0;
    $("index").value = Math.min(Math.max(wanted, 0), Math.max(0, Number($("index").max)));
  }

  setRow(at) {
    this.row = at;
    $("layer").value = at;
  }

  /** The hook and its statistic, as text. */
  words() {
    const { name, index } = this.statistic();
    return `${this.hook.name}, ${name}${index === null ? "" : ` ${$("index").value}`}`;
  }

  query() { return { hook: this.hook.name, statistic: this.statistic().name, index: $("index").value }; }

  /** The choices for the address. */
  place() {
    const { index } = this.statistic();
    const layer = this.hook.layers.length ? this.hook.layers[this.row] : null;
    return { hook: this.hook.name, statistic: this.statistic().name, index: index === null ? null : $("index").value, layer, scale: $("scale").value };
  }

  /** Applies the choices of an address. Choices that the capture lacks are ignored. */
  take(what) {
    if (this.store.hooks.some((hook) => hook.name === what.hook)) { $("hook").value = what.hook; this.hookChosen(); }
    if (this.hook.statistics.some((s) => s.name === what.statistic)) { $("statistic").value = what.statistic; this.statisticChosen(); }
    if (what.index !== undefined) { $("index").value = what.index; this.keepIndex(); }
    const at = what.layer === undefined ? -1 : this.hook.layers.indexOf(Number(what.layer));
    if (at >= 0) this.setRow(at);
    for (const [id, value] of [["scale", what.scale], ["att-layer", what.attlayer], ["head", what.head]]) {
      if ([...$(id).options].some((option) => option.value === value)) $(id).value = value;
    }
  }
}
