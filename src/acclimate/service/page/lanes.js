// The time line: one lane for each thing that the model can do, so that place and not only colour says which.

import { svg } from "./dom.js";
import { Plot } from "./plot.js";
import { LANES } from "./words.js";

const FIRST = 24, ROW = 18; // pixels

/** Return stretches of the same doing. One lasts until the next begins, unless nothing was heard for long. */
function stretches(points, gap) {
  const found = [];
  for (const { time, doing } of points) {
    const last = found.at(-1);
    const near = last && time - last.to <= gap;
    if (near) last.to = time;
    if (!near || last.doing !== doing) found.push({ doing, from: time, to: time });
  }
  return found;
}

export class Lanes {
  constructor(element) {
    const draw = () => this.view && this.draw(this.view, this.marks);
    this.plot = new Plot(element, { height: FIRST + LANES.length * ROW + 20, left: 100, draw });
  }

  draw(view, marks) {
    Object.assign(this, { view, marks });
    const { plot } = this;
    const { from, to, points, gap } = view;
    const x = (time) => plot.x((time - from) / (to - from));
    const found = stretches(points, gap);
    const shown = marks.filter((mark) => mark.time >= from && mark.time <= to);
    plot.show(
      this.summary(found, shown, to - from),
      LANES.map(([, label], lane) => {
        const y = FIRST + lane * ROW + 8;
        return svg("g", { class: "tick" }, plot.horizontal(y), plot.text(plot.left - 8, y + 4, "end", label));
      }),
      plot.times(view),
      found.map(({ doing, from: start, to: end }) => {
        const y = FIRST + LANES.findIndex(([key]) => key === doing) * ROW + 2;
        if (y < FIRST) return []; // something that has no lane
        const width = Math.max(2, x(end) - x(start));
        return [svg("rect", { class: `run ${doing}`, x: x(start), y, width, height: 12, rx: 3 })];
      }).flat(),
      shown.map(({ kind, time }) => {
        const at = x(time), sign = kind === "alarm"
          ? svg("path", { d: `M${at - 6} 16l6 -11l6 11z` })
          : svg("circle", { cx: at, cy: 11, r: 4.5 });
        return svg("g", { class: `mark ${kind}` }, plot.vertical(at, null, 16), sign);
      }),
    );
  }

  summary(found, marks, span) {
    if (!found.length) return "What the model was doing: no data yet";
    const seconds = (some) => some.reduce((sum, each) => sum + each.to - each.from, 0);
    const share = (key) => seconds(found.filter((each) => each.doing === key)) / (seconds(found) || 1);
    const lived = LANES.filter(([key]) => share(key) > 0);
    const shares = lived.map(([key, label]) => `${label} ${Math.round(100 * share(key))} %`);
    const count = (kind) => marks.filter((mark) => mark.kind === kind).length;
    return `What the model was doing in the last ${span / 60} minutes: ${shares.join(", ") || "nothing yet"}; ` +
      `alarms: ${count("alarm")}, control actions: ${count("control")}`;
  }
}
