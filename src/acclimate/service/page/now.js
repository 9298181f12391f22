// What the model is doing now, and the numbers beside it.

import { announce, bar, el, find, say, svg } from "./dom.js";
import * as words from "./words.js";

const ICONS = {
  learning: ["M3 17l6 -6l4 4l8 -9", "M15 6h6v6"],
  waiting: ["M12 6v6l4 2", "M12 3a9 9 0 1 0 .01 0"],
  paused: ["M9 5v14", "M15 5v14"],
  source: ["M4 11l8 -7l8 7", "M6 10v10h12v-10"],
  frozen: ["M12 3v18", "M4.200 7.500l15.600 9", "M19.800 7.500l-15.600 9"],
  other: ["M12 7v6", "M12 17v.01", "M12 3a9 9 0 1 0 .01 0"],
};

const counted = (value, one, many) => `${words.count(value)} ${value === 1 ? one : many}`;
const tail = ({ p95, p99 }) => `p95 ${words.milliseconds(p95)}, p99 ${words.milliseconds(p99)}`;

// A label, the number, and what belongs to it, of a status.
const NUMBERS = {
  images: ["Images", (s) => words.count(s.images), (s) => words.rate(s.images_per_second)],
  requests: ["Requests", (s) => words.rate(s.requests_per_second), (s) => counted(s.errors, "error", "errors")],
  queue: ["Queue", (s) => words.count(s.queue), (s) => `of ${words.count(s.queue_most)} places`],
  latency: [
    "Latency",
    (s) => words.milliseconds(s.latency_ms?.p50, " ms"),
    (s) => (s.latency_ms ? tail(s.latency_ms) : "no request in the last minute"),
  ],
  state: [
    "State saved",
    (s) => (s.state_age === null ? "not yet" : `${words.duration(s.state_age)} ago`),
    (s) => `up ${words.duration(s.uptime)}`,
  ],
  rollbacks: ["Rollbacks", (s) => words.count(s.rollbacks), (s) => `in ${counted(s.batches, "batch", "batches")}`],
};

export class Now {
  constructor() {
    this.cells = {};
    for (const [key, [label]] of Object.entries(NUMBERS)) {
      const cell = { value: el("dd", { class: "value" }, words.NONE), more: el("dd", { class: "muted" }) };
      find("numbers").append(el("div", { id: `number-${key}` }, el("dt", {}, label), cell.value, cell.more));
      this.cells[key] = cell;
    }
    find("number-queue").append(el("dd", { class: "holds-bar", "aria-hidden": "true" }, (this.queue = bar(0))));
  }

  update(status, hello) {
    const now = words.doing(status);
    find("now").dataset.doing = now.lane;
    if (now.key !== this.key) {
      if (this.key !== undefined) announce(`${now.title}. ${now.meaning}`);
      this.key = now.key;
      say(find("doing"), now.title);
      say(find("doing-why"), now.meaning);
      const icon = ICONS[now.lane] ?? ICONS.other;
      find("doing-icon").replaceChildren(...icon.map((d) => svg("path", { d })));
      document.title = `${now.title} · ${hello?.name ?? "acclimate"}`;
    }
    say(find("doing-since"), this.since(status, hello));
    for (const [key, [, value, more]] of Object.entries(NUMBERS)) {
      say(this.cells[key].value, value(status));
      say(this.cells[key].more, more(status));
    }
    const full = status.queue / (status.queue_most || 1);
    this.queue.firstChild.style.width = `${100 * Math.min(1, full)}%`;
    this.queue.classList.toggle("full", full > 0.8);
  }

  since(status, hello) {
    const parts = [];
    const [begin, end] = [status.since_batch, status.batches].map(words.count);
    if (status.batches) parts.push(`Since batch ${begin}, now at batch ${end}.`);
    if (status.streams > 1) parts.push(`Stream ${status.stream}, one of ${words.count(status.streams)}.`);
    if (hello && !hello.guarded) parts.push("No guard watches this model.");
    return parts.join(" ");
  }

  /** Say that what is shown is over. */
  stale(time) {
    say(find("now-title"), time ? `What the model was doing at ${words.when(time)}` : "What the model is doing now");
  }

  /** Show the last alarm, loudly while the model does something else because of it. */
  alarm(alarm, status) {
    const line = find("last-alarm");
    line.hidden = !alarm;
    if (!alarm) return;
    const loud = ["paused", "source"].includes(words.doing(status).lane);
    line.classList.toggle("loud", loud);
    const ago = words.duration(status.time - alarm.time);
    say(line, `▲ ${loud ? "Alarm" : "Last alarm"} ${ago} ago: ${words.alarmText(alarm)}`);
  }
}
