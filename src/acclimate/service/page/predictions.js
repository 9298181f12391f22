// The wall of predictions: drawn at most twice a second, still on request, with a bounded number of tiles.

import { bar, el, find, say } from "./dom.js";
import * as words from "./words.js";

const MOST = 48;
const EVERY = 500;
const SMALL = 48; // pixels: smaller images are enlarged without blur

export class Predictions {
  constructor(streams) {
    this.streams = streams;
    this.latest = new Map(); // by id, oldest first
    this.tiles = new Map();
    this.held = false;
    this.timer = null;
    find("hold").addEventListener("click", () => this.hold(!this.held));
  }

  hold(held) {
    this.held = held;
    find("hold").setAttribute("aria-pressed", String(held));
    say(find("order"), held ? "held still, not updated" : "newest first");
    if (!held) this.soon();
  }

  /** Start again from a history. */
  replace(predictions) {
    this.latest.clear();
    this.add(predictions);
  }

  /** Add predictions; one with an id that is known replaces it, as when its batch has been learned from. */
  add(predictions) {
    for (const each of predictions) {
      this.latest.set(each.id, each);
      this.streams.add(each.stream);
    }
    for (const id of this.latest.keys()) {
      if (this.latest.size <= MOST) break;
      this.latest.delete(id);
    }
    this.soon();
  }

  soon() {
    this.timer ??= setTimeout(() => {
      this.timer = null;
      if (!this.held) this.draw();
    }, this.tiles.size ? EVERY : 0);
  }

  draw() {
    const next = new Map();
    for (const each of this.latest.values()) {
      const old = this.tiles.get(each.id);
      next.set(each.id, old?.of === each ? old : { of: each, element: tile(each, !old && this.tiles.size > 0) });
    }
    this.tiles = next;
    find("tiles").replaceChildren(...[...next.values()].reverse().map((each) => each.element));
    find("tiles").hidden = next.size === 0;
    find("predictions-empty").hidden = next.size > 0;
  }
}

function tile(prediction, fresh) {
  const { label, confidence, stream, thumbnail, learned } = prediction;
  const more = [
    String(label),
    `entropy ${words.short(prediction.entropy)} nats`,
    prediction.disagreement === null ? null : `disagreement with the source ${words.percent(prediction.disagreement)}`,
    words.milliseconds(prediction.milliseconds, " ms"),
    `stream ${stream}`,
    words.clock(prediction.time),
  ];
  const title = more.filter(Boolean).join("\n");
  return el("li", { class: fresh ? "tile fresh" : "tile", title, "data-learned": String(learned) },
    picture(thumbnail),
    el("div", { class: "answer" },
      el("span", { class: "label" }, String(label)), el("span", { class: "confidence" }, words.percent(confidence))),
    bar(confidence),
    el("span", { class: "learned" }, words.learned(learned)));
}

/** Return the thumbnail, or a blank of the same size. */
export function picture(address) {
  if (typeof address !== "string" || !/^(data:image\/|blob:)/.test(address)) {
    return el("span", { class: "picture", "aria-hidden": "true" });
  }
  const image = el("img", { class: "picture", alt: "", decoding: "async", draggable: "false" });
  image.addEventListener("load", () => image.classList.toggle("pixels", image.naturalWidth <= SMALL));
  image.src = address;
  return image;
}
