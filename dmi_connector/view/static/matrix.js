// A matrix of coloured cells on a canvas, with labels, a mark, and a tip for the cell under the pointer.

const LEFT = 46, BOTTOM = 20, FONT = "11px system-ui, 'DejaVu Sans', sans-serif";

export class Matrix {
  /**
   * height(rows, width): height of all cells in CSS pixels. pick(row, column): called for a click. tip(row, column):
   * called for the cell under the pointer, with null, null for none. down: whether row 0 is at the top.
   */
  constructor(canvas, { height, pick, tip, down = false }) {
    Object.assign(this, { canvas, height, down, data: null, pointer: null, tip });
    canvas.addEventListener("click", (event) => { const cell = this.cell(event); if (cell) pick(...cell); });
    canvas.addEventListener("pointermove", (event) => { this.pointer = { offsetX: event.offsetX, offsetY: event.offsetY }; this.point(); });
    canvas.addEventListener("pointerleave", () => { this.pointer = null; this.point(); });
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  /**
   * data: {values, rows, columns, offset, stride, colour(value, row, column), rowNames(row), columnName(column), mark:
   * {row, column}, edge}, or null to draw nothing. edge: column with a dashed line before it. Cells without colour are
   * hatched.
   */
  show(data) {
    this.data = data;
    if (!data) this.canvas.getContext("2d").clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.draw();
    this.point();
  }

  /** Shows the tip for the cell under the pointer, also after a change of values under a resting pointer. */
  point() { this.tip(...((this.pointer && this.cell(this.pointer)) ?? [null, null])); }

  cell(event) {
    if (!this.data) return null;
    const column = Math.floor(((event.offsetX - LEFT) / this.width) * this.data.columns);
    const line = Math.floor((event.offsetY / this.tall) * this.data.rows);
    if (column < 0 || column >= this.data.columns || line < 0 || line >= this.data.rows) return null;
    return [this.down ? line : this.data.rows - 1 - line, column];
  }

  draw() {
    if (!this.data?.rows || !this.data.columns) return;
    const { rows } = this.data;
    const ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.parentElement.clientWidth - LEFT - 1;
    this.tall = this.height(rows, this.width);
    this.canvas.style.height = `${this.tall + BOTTOM}px`;
    this.canvas.width = Math.round((this.width + LEFT + 1) * ratio);
    this.canvas.height = Math.round((this.tall + BOTTOM) * ratio);
    const style = getComputedStyle(document.documentElement);
    const [accent, quiet, page, none, line] = ["accent", "quiet", "page", "none", "none-line"].map((name) => style.getPropertyValue(`--${name}`));
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.imageSmoothingEnabled = false;
    this.hatch(pen, none, line);
    pen.drawImage(this.cells(), LEFT, 0, this.width, this.tall);
    this.labels(pen, quiet);
    this.marks(pen, accent, quiet, page);
  }

  cells() {
    const { values, rows, columns, colour, offset = 0, stride = columns } = this.data;
    const small = document.createElement("canvas");
    [small.width, small.height] = [columns, rows];
    const pen = small.getContext("2d"), image = pen.createImageData(columns, rows);
    for (let row = 0; row < rows; row++) {
      const line = this.down ? row : rows - 1 - row;
      for (let column = 0; column < columns; column++) {
        const rgb = colour(values[row * stride + offset + column], row, column);
        if (rgb) image.data.set([...rgb, 255], 4 * (line * columns + column));
      }
    }
    pen.putImageData(image, 0, 0);
    return small;
  }

  /** Draws the hatching that shows through cells without a value. */
  hatch(pen, ground, ink) {
    Object.assign(pen, { fillStyle: ground, strokeStyle: ink });
    pen.fillRect(LEFT, 0, this.width, this.tall);
    pen.beginPath();
    for (let x = -this.tall; x < this.width; x += 6) {
      pen.moveTo(LEFT + Math.max(x, 0), this.tall - Math.max(-x, 0));
      pen.lineTo(LEFT + Math.min(x + this.tall, this.width), Math.max(x + this.tall - this.width, 0));
    }
    pen.stroke();
  }

  labels(pen, ink) {
    const { rows, columns, rowNames, columnName } = this.data;
    Object.assign(pen, { fillStyle: ink, font: FONT, textAlign: "right", textBaseline: "middle" });
    const step = Math.max(1, Math.ceil((14 * rows) / this.tall));
    for (let row = 0; row < rows; row += step) pen.fillText(rowNames(row), LEFT - 6, Math.max(this.middle(row), 6));
    Object.assign(pen, { textAlign: "center", textBaseline: "top" });
    const wide = Math.max(1, Math.ceil((52 * columns) / this.width));
    for (let c = 0; c < columns; c += wide) pen.fillText(columnName(c), LEFT + ((c + 0.5) * this.width) / columns, this.tall + 5);
  }

  middle(row) { return (((this.down ? row : this.data.rows - 1 - row) + 0.5) * this.tall) / this.data.rows; }

  marks(pen, accent, quiet, page) {
    const { rows, columns, mark, edge } = this.data;
    const [wide, high] = [this.width / columns, this.tall / rows];
    pen.strokeStyle = quiet;
    pen.lineWidth = 1;
    pen.strokeRect(LEFT - 0.5, 0.5, this.width + 1, this.tall - 1);
    if (edge > 0 && edge < columns) {
      pen.setLineDash([4, 3]);
      pen.beginPath();
      pen.moveTo(LEFT + edge * wide, 0);
      pen.lineTo(LEFT + edge * wide, this.tall);
      pen.stroke();
      pen.setLineDash([]);
    }
    // Drawn around the cells, so that small cells stay visible.
    for (const [ink, thick] of [[page, 4], [accent, 2]]) {
      Object.assign(pen, { strokeStyle: ink, lineWidth: thick });
      if (mark.row >= 0 && mark.row < rows) pen.strokeRect(LEFT, this.middle(mark.row) - high / 2 - 1, this.width, high + 2);
      if (mark.column >= 0 && mark.column < columns) pen.strokeRect(LEFT + mark.column * wide - 1, 0, wide + 2, this.tall);
    }
  }
}
