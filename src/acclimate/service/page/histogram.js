// How often which confidence is given.

import { svg } from "./dom.js";
import { niceTop, Plot } from "./plot.js";
import { NONE } from "./words.js";

const percent = (share) => `${Number((100 * share).toPrecision(3))} %`;
const sum = (counts) => counts.reduce((total, each) => total + each, 0);

export class Histogram {
  constructor(figure, name) {
    this.name = name;
    this.value = figure.querySelector(".value");
    const draw = () => this.counts && this.draw(this.counts);
    this.plot = new Plot(figure.querySelector("svg"), { height: 176, draw });
  }

  /** Draw counts of equally wide bins from 0 to 1. */
  draw(counts) {
    this.counts = counts;
    const { plot } = this;
    const size = counts.length, total = sum(counts), shares = counts.map((each) => each / (total || 1));
    const top = niceTop(Math.max(...shares));
    const sure = percent(Math.round(100 * sum(shares.slice(Math.round(0.9 * size)))) / 100);
    const unsure = percent(Math.round(100 * sum(shares.slice(0, size / 2))) / 100);
    this.value.textContent = total ? sure : NONE;
    const gap = plot.width / size > 14 ? 1.5 : 0.75;
    plot.show(
      total
        ? `${this.name} of the last ${total} predictions: ${sure} of them at 0.9 or more, ${unsure} below 0.5`
        : `${this.name}: no data yet`,
      plot.levels(top, percent),
      shares.map((share, index) => {
        const [x, end, y] = [plot.x(index / size), plot.x((index + 1) / size), plot.y(share / top)];
        return svg("rect", { class: "column", x: x + gap / 2, y, width: end - x - gap, height: plot.y(0) - y });
      }),
      [[0, "start"], [0.5, "middle"], [1, "end"]].map(([value, anchor]) =>
        plot.text(plot.x(value), plot.height - 4, anchor, String(value))),
      total ? [] : plot.nothing("no predictions yet"),
    );
  }
}
