// Alarms, rollbacks and control actions: a bounded list, and the marks that the charts show.

import { announce, el, find } from "./dom.js";
import * as words from "./words.js";

const MOST = 100;

export class Events {
  constructor() {
    this.list = []; // newest first
    this.keys = new Set();
  }

  get marks() {
    return this.list.map(({ kind, of }) => ({ kind, time: of.time }));
  }

  get lastAlarm() {
    return this.list.find((each) => each.kind === "alarm")?.of;
  }

  /** Add events of a kind, "alarm" or "control". Those already known are ignored. `live` ones are announced. */
  add(kind, events, live = false) {
    for (const of of events) {
      const key = JSON.stringify([kind, of]);
      if (this.keys.has(key)) continue;
      this.keys.add(key);
      this.list.push({ kind, of, key, element: row(kind, of) });
      if (live && kind === "alarm") announce(`Alarm. ${words.alarmText(of)}`);
    }
    this.list.sort((a, b) => b.of.time - a.of.time);
    for (const { key } of this.list.splice(MOST)) this.keys.delete(key);
    find("events").replaceChildren(...this.list.map((each) => each.element));
    find("events").hidden = this.list.length === 0;
    find("events-empty").hidden = this.list.length > 0;
  }
}

function row(kind, of) {
  const alarm = kind === "alarm";
  const details = alarm
    ? [`stream ${of.stream}`, `batch ${words.count(of.batch)}`, `${of.signal} ${words.short(of.value)}`]
    : [/freeze/.test(of.action) ? null : `stream ${of.stream}`, of.by ? `by ${of.by}` : null];
  return el("li", { class: kind },
    el("time", { datetime: words.iso(of.time) }, words.when(of.time)),
    el("span", { class: "kind" }, alarm ? "▲ Alarm" : "● Control"),
    el("span", { class: "what" },
      alarm ? words.alarmText(of) : `${words.controlTitle(of)}.`,
      " ", el("span", { class: "muted" }, details.filter(Boolean).join(", "))));
}
