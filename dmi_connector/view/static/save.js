// Saves what is shown as a picture: title, text, heat map, and the canvas of the panel.

const $ = (id) => document.getElementById(id);
const WIDE = 1200, PAD = 24, LINE = 24, FONT = "14px 'DejaVu Sans Mono', monospace";

/** Draws a text with line breaks. Returns the next free y. */
function words(pen, text, y, font, ink) {
  Object.assign(pen, { font, fillStyle: ink, textBaseline: "top" });
  let line = "";
  for (const word of text.split(" ")) {
    if (pen.measureText(`${line} ${word}`).width > WIDE - 2 * PAD && line) { pen.fillText(line, PAD, y); y += 20; line = word; }
    else line = line ? `${line} ${word}` : word;
  }
  pen.fillText(line, PAD, y);
  return y + 24;
}

/** Draws the tokens with their colours. Returns the next free y. */
function tokens(pen, box, y, ink, accent) {
  Object.assign(pen, { font: FONT, textBaseline: "middle" });
  let x = PAD;
  for (const token of box.children) {
    const style = getComputedStyle(token), parts = token.textContent.split("\n");
    parts.forEach((part, i) => {
      if (i) { x = PAD; y += LINE; }
      const wide = pen.measureText(part).width;
      if (x + wide > WIDE - PAD && x > PAD) { x = PAD; y += LINE; }
      pen.fillStyle = style.backgroundColor;
      pen.fillRect(x, y, wide, LINE - 4);
      pen.fillStyle = style.color || ink;
      pen.fillText(part, x, y + LINE / 2 - 2);
      if (token.getAttribute("aria-selected") === "true" && wide) {
        Object.assign(pen, { strokeStyle: accent, lineWidth: 2 });
        pen.strokeRect(x, y, wide, LINE - 4);
      }
      x += wide;
    });
  }
  return y + LINE + 12;
}

function canvases() {
  const found = [["heat-title", "heat"], ["side-heat-title", "side-heat"]];
  const panel = document.querySelector("[role=tabpanel]:not([hidden]) canvas:not([hidden])");
  const all = [...found.map(([title, id]) => [$(title).textContent, $(id)]), ...(panel && !panel.closest(".head") ? [[panel.getAttribute("aria-label") ?? "", panel]] : [])];
  return all.filter(([, canvas]) => canvas.width && canvas.checkVisibility());
}

function lay(pen, title) {
  const style = getComputedStyle(document.documentElement);
  const [page, ink, quiet, accent] = ["page", "ink", "quiet", "accent"].map((name) => style.getPropertyValue(`--${name}`));
  pen.fillStyle = page;
  pen.fillRect(0, 0, pen.canvas.width, pen.canvas.height);
  let y = words(pen, title, PAD, "bold 17px 'DejaVu Sans', sans-serif", ink);
  y = words(pen, $("text-legend").textContent, y, "13px 'DejaVu Sans', sans-serif", quiet);
  y = tokens(pen, $("text"), y, ink, accent);
  if (!$("side").hidden) {
    y = words(pen, $("side-name").textContent, y, "bold 14px 'DejaVu Sans', sans-serif", ink);
    y = tokens(pen, $("side-text"), y, ink, accent);
  }
  for (const [name, canvas] of canvases()) {
    y = words(pen, name, y, "13px 'DejaVu Sans', sans-serif", quiet);
    const wide = WIDE - 2 * PAD, high = Math.round((canvas.height * wide) / canvas.width);
    pen.drawImage(canvas, PAD, y, wide, high);
    y += high + 16;
  }
  return y + PAD - 16;
}

/** Draws the picture on a new canvas. */
export function picture(title) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [WIDE, 8];
  canvas.height = Math.min(lay(canvas.getContext("2d"), title), 16000); // the first drawing only gives the height
  lay(canvas.getContext("2d"), title);
  return canvas;
}

export function save(title, name) {
  picture(title).toBlob((blob) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = `${name}.png`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  });
}
