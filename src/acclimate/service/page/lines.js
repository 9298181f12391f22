// A line over time, with marks for events, a line for an alarm, and a cursor.

import { svg } from "./dom.js";
import { isNumber, niceTop, Plot } from "./plot.js";
import { clock } from "./words.js";

/** A label of an axis: no zeros at the end. */
const plain = (value) => String(Number(value.toPrecision(3)));

/** Return the path through the points. A missing value or a long silence breaks the line. */
function path(points, key, gap, x, y) {
  let text = "", last = null;
  for (const { time, [key]: value } of points) {
    if (!isNumber(value)) {
      last = null;
      continue;
    }
    const joined = last !== null && time - last <= gap;
    text += `${joined ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}${joined ? "" : "h0.01"}`;
    last = time;
  }
  return text;
}

/** Return the point nearest to a time, or the last one. */
function nearest(points, time) {
  if (time === null) return points.at(-1);
  const nearer = (best, each) => (Math.abs(each.time - time) < Math.abs(best.time - time) ? each : best);
  return points.length ? points.reduce(nearer) : undefined;
}

export class LineChart {
  /** `alarm`: a value with a line of its own. `top`: a fixed top of the axis. */
  constructor(figure, { key, name, format, axis = plain, top = null, alarm = null }) {
    Object.assign(this, { key, name, format, axis, top, alarm });
    this.value = figure.querySelector(".value");
    const draw = () => this.view && this.draw(this.view, this.marks);
    this.plot = new Plot(figure.querySelector("svg"), { height: 118, draw });
  }

  /** Draw a window of the history with marks, and with a cursor at a time or without one. */
  draw(view, marks, cursor = null) {
    Object.assign(this, { view, marks });
    const { plot, key, alarm } = this;
    const { from, to, points, gap } = view;
    const values = points.map((each) => each[key]).filter(isNumber);
    const top = this.top ?? niceTop(Math.max(...values, alarm === null ? 0 : 1.2 * alarm));
    const x = (time) => plot.x((time - from) / (to - from));
    const y = (value) => plot.y(Math.min(1, Math.max(0, value / top)));
    const point = nearest(points, cursor);
    this.value.textContent = this.format(point?.[key]);
    const shown = marks.filter((mark) => mark.time >= from && mark.time <= to);
    plot.show(
      this.summary(values, to - from),
      plot.levels(top, this.axis),
      plot.times(view),
      shown.map((mark) => plot.vertical(x(mark.time), `mark ${mark.kind}`)),
      alarm === null ? [] : this.limit(y(alarm)),
      svg("path", { class: "line", d: path(points, key, gap, x, y) }),
      cursor === null || !point ? [] : this.cursor(point, x, y),
      values.length ? [] : plot.nothing("not measured yet"),
    );
  }

  limit(y) {
    const label = this.plot.text(this.plot.left + 6, y - 4, "start", `alarm at ${this.alarm}`, "alarm-text");
    return [this.plot.horizontal(y, "alarm-line"), label];
  }

  cursor({ time, [this.key]: value }, x, y) {
    const { plot } = this;
    const at = x(time), room = at < plot.width - 70;
    const label = plot.text(at + (room ? 6 : -6), plot.y(1) + 4, room ? "start" : "end", clock(time), "cursor-text");
    const dot = isNumber(value) ? [svg("circle", { class: "dot", cx: at, cy: y(value), r: 3.5 })] : [];
    return [plot.vertical(at, "cursor"), label, ...dot];
  }

  summary(values, span) {
    if (!values.length) return `${this.name}: no data yet`;
    const [now, low, high] = [values.at(-1), Math.min(...values), Math.max(...values)].map((each) => this.format(each));
    const alarm = this.alarm === null ? "" : `; an alarm at ${this.alarm}`;
    return `${this.name}, last ${span / 60} minutes: now ${now}, lowest ${low}, highest ${high}${alarm}`;
  }

  /** Return the time at a place in pixels from the left, or null outside of the axis. */
  timeAt(pixels) {
    const { plot, view } = this;
    const share = (pixels - plot.left) / (plot.end - plot.left);
    return view && share >= 0 && share <= 1 ? view.from + share * (view.to - view.from) : null;
  }
}
