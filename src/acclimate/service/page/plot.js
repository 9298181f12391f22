// A drawing area in SVG that knows its size in pixels, with axes.

import { svg } from "./dom.js";
import { hourMinute } from "./words.js";

const NICE = [1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10];
const STEPS = [60, 120, 300, 600, 900, 1800]; // seconds between labels of time

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Return a round number not below `value`, for the top of an axis. */
export function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * NICE.find((step) => step * power >= value * 0.999);
}

export class Plot {
  /** `draw` is called when the width changes. */
  constructor(element, { height, left = 44, draw }) {
    Object.assign(this, { element, height, left, top: 8, right: 10, bottom: 20 });
    element.setAttribute("height", height);
    new ResizeObserver(() => draw()).observe(element);
  }

  get width() {
    return Math.max(160, this.element.clientWidth);
  }

  get end() {
    return this.width - this.right;
  }

  /** Where a share between 0 and 1 of an axis lies. */
  x(share) {
    return this.left + share * (this.end - this.left);
  }

  y(share) {
    return this.height - this.bottom - share * (this.height - this.top - this.bottom);
  }

  /** Replace what is drawn, and the summary for those who cannot see it. */
  show(summary, ...children) {
    this.element.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.element.setAttribute("aria-label", summary);
    this.element.replaceChildren(...children.flat());
  }

  text(x, y, anchor, content, name = null) {
    return svg("text", { x, y, "text-anchor": anchor, class: name }, content);
  }

  horizontal(y, name = null) {
    return svg("line", { x1: this.left, x2: this.end, y1: y, y2: y, class: name });
  }

  vertical(x, name = null, from = this.y(1), to = this.y(0)) {
    return svg("line", { x1: x, x2: x, y1: from, y2: to, class: name });
  }

  /** What to say where there is nothing to draw. */
  nothing(content) {
    return this.text(this.x(0.5), this.y(0.5) - 6, "middle", content);
  }

  /** Lines and labels for zero, half and the top of the vertical axis. */
  levels(top, format) {
    return [0, 0.5, 1].map((share) => {
      const y = this.y(share);
      const label = this.text(this.left - 6, y + 3.5, "end", format(share * top));
      return svg("g", { class: "tick" }, this.horizontal(y), label);
    });
  }

  /** Times of day along the bottom, as many as fit. */
  times({ from, to }) {
    const fits = Math.max(2, Math.floor((this.width - this.left) / 56));
    const step = STEPS.find((each) => (to - from) / each <= fits) ?? 3600;
    const marks = [];
    for (let time = Math.ceil(from / step) * step; time <= to; time += step) {
      const x = this.x((time - from) / (to - from));
      if (x < this.left + 12 || x > this.width - 18) continue;
      const [line, label] = [this.vertical(x, null, this.y(0), this.y(0) + 4), hourMinute(time)];
      marks.push(svg("g", { class: "tick" }, line, this.text(x, this.height - 4, "middle", label)));
    }
    return marks;
  }
}
