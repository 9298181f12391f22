// The page of `acclimate serve`: events of the server in, panels out.

import { Classify } from "./classify.js";
import { Control } from "./control.js";
import { announce, el, find, say } from "./dom.js";
import { Events } from "./events.js";
import { Histogram } from "./histogram.js";
import { Lanes } from "./lanes.js";
import { LineChart } from "./lines.js";
import { listen } from "./live.js";
import { Now } from "./now.js";
import { Predictions } from "./predictions.js";
import { Recent } from "./recent.js";
import * as words from "./words.js";

const STREAMS = 100; // names remembered for the stream fields

const share = (value) => words.percent(value);
const charts = [
  new LineChart(find("entropy"), { key: "entropy", name: "Mean entropy", format: words.short }),
  new LineChart(find("kept"), { key: "kept", name: "Kept share", format: share, axis: share, top: 1 }),
  new LineChart(find("distance"), { key: "distance", name: "Distance from the source", format: words.short }),
  new LineChart(find("probe"), { key: "evidence", name: "Evidence of the probe test", format: words.short, alarm: 1 }),
];
const histogram = new Histogram(find("confidence"), "Confidence");
const lanes = new Lanes(find("lanes"));
const recent = new Recent();
const events = new Events();
const now = new Now();
const control = new Control();
const streams = {
  names: new Set(),
  add(name) {
    if (typeof name !== "string" || this.names.has(name) || this.names.size >= STREAMS) return;
    this.names.add(name);
    find("streams").append(el("option", { value: name }));
    find("shown-stream").append(el("option", { value: name }, name));
    find("shown-stream").hidden = this.names.size < 2;
  },
};
const predictions = new Predictions(streams);
new Classify(streams);

let hello = null, last = null, span = 300, cursor = null, planned = false;

/** Draw everything that depends on time once, before the next frame. A hidden page draws when it is seen again. */
function redraw() {
  if (planned || document.hidden) return;
  planned = true;
  requestAnimationFrame(() => {
    planned = false;
    const view = recent.window(span, find("shown-stream").value);
    for (const chart of charts) chart.draw(view, events.marks, cursor);
    lanes.draw(view, events.marks);
    histogram.draw(last?.confidences ?? Array(20).fill(0));
    if (last) now.alarm(events.lastAlarm, last);
  });
}

function probe(status) {
  const test = status.probe;
  find("probe-none").hidden = Boolean(test);
  find("probe-share").hidden = !test || test.disagreement === null;
  find("probe").querySelector("svg").classList.toggle("hidden", !test);
  if (!test) {
    say(find("probe-none"), hello?.guarded
      ? "The guard has no held-out images to test with. Start the server with source images to have this test."
      : "No guard, so no test. Start the server with --guard and source images to have one.");
    return;
  }
  if (test.disagreement === null) return;
  const top = Math.min(1, Math.max(2 * test.tolerated, 1.15 * test.disagreement));
  const [fill, limit] = find("probe-share").querySelectorAll(".gauge span");
  fill.style.width = `${(100 * test.disagreement) / top}%`;
  limit.style.left = `${(100 * test.tolerated) / top}%`;
  find("probe-share").classList.toggle("above", test.disagreement > test.tolerated);
  say(find("probe-share").querySelector("p"),
    `Disagrees with the source on ${words.percent(test.disagreement, 1)} of the held-out images; ` +
    `${words.percent(test.tolerated, 1)} is tolerated. Wealth of the bet: ${words.short(test.wealth)}.`);
}

function status(next) {
  last = next;
  recent.add(next, words.doing(next).lane);
  now.update(next, hello);
  control.update(next);
  streams.add(next.stream);
  probe(next);
  redraw();
}

listen("events", {
  hello(next) {
    hello = next;
    say(find("name"), next.name);
    const facts = [next.network === next.name ? null : next.network, next.method_name, next.guarded ? "guarded" : null];
    say(find("method"), facts.filter(Boolean).join(", "));
    find("method").title = next.method;
    const { input } = next;
    const grey = input?.channels === 1 ? ", grey" : "";
    say(find("input-hint"), input ? `Resized to ${input.width} × ${input.height}${grey}.` : "");
    say(find("foot"), `acclimate ${next.version}. Batches of ${next.batch_size}. Started ${words.when(next.started)}.`);
    find("tiles").classList.toggle("roomy", !next.classes || next.classes.some((label) => String(label).length > 4));
    control.enable(next.control);
  },
  history(next) {
    for (const each of next.status) {
      recent.add(each, words.doing(each).lane);
      streams.add(each.stream);
    }
    events.add("alarm", next.alarms);
    events.add("control", next.control);
    predictions.replace(next.predictions);
    if (next.status.length) status(next.status.at(-1));
    redraw();
  },
  predictions: (next) => predictions.add(next),
  status,
  alarm(next) {
    events.add("alarm", [next], true);
    redraw();
  },
  control(next) {
    events.add("control", [next]);
    control.refresh();
    redraw();
  },
}, (state, seconds) => {
  const live = state === "live", chip = find("connection");
  if (live && !find("lost").hidden) announce("The connection is back.");
  if (!live && find("lost").hidden) announce("Connection lost, retrying.");
  chip.dataset.state = state;
  say(chip, live ? "live" : "connection lost");
  find("lost").hidden = live;
  document.body.classList.toggle("stale", !live);
  now.stale(live ? null : last?.time);
  if (!live) {
    const seen = last ? ` What you see is from ${words.when(last.time)}.` : "";
    say(find("lost"), `Connection lost, retrying in ${seconds} s.${seen}`);
  }
});

for (const chart of charts) {
  const element = chart.plot.element;
  element.addEventListener("pointermove", (event) => {
    cursor = chart.timeAt(event.clientX - element.getBoundingClientRect().left);
    redraw();
  });
  element.addEventListener("pointerleave", () => {
    cursor = null;
    redraw();
  });
}
for (const choice of document.getElementsByName("range")) {
  choice.addEventListener("change", () => {
    span = Number(choice.value);
    redraw();
  });
}
find("shown-stream").addEventListener("change", redraw);
document.addEventListener("visibilitychange", redraw);
find("command").textContent = `curl -F file=@image.png ${new URL("predict", document.baseURI).href}`;
redraw();
