// Numbers and states in words that an operator understands.

const known = (value) => typeof value === "number" && Number.isFinite(value);
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const clockOf = (options) => new Intl.DateTimeFormat("en-GB", options);
const time = clockOf({ hour: "2-digit", minute: "2-digit", second: "2-digit" });
const minute = clockOf({ hour: "2-digit", minute: "2-digit" });
const date = clockOf({ day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

export const NONE = "–";

export const count = (value) => (known(value) ? grouped.format(value) : NONE);

/** Three significant digits, without exponents for everyday sizes. */
export function short(value) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e7 || (size > 0 && size < 5e-4)) return value.toExponential(1);
  if (size >= 1000) return grouped.format(value);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 || size === 0 ? 2 : 3);
}

/** A share in percent; only a certainty is written as 100 %. */
export function percent(value, digits = 0) {
  if (!known(value)) return NONE;
  const text = (100 * value).toFixed(digits);
  return `${text === (100).toFixed(digits) && value < 1 ? (100 - 10 ** -digits).toFixed(digits) : text} %`;
}

/** One digit after the point for small numbers. */
const brief = (value) => (value >= 10 || value === 0 ? grouped.format(value) : value.toFixed(1));
export const rate = (value) => (known(value) ? `${brief(value)}/s` : NONE);
export const milliseconds = (value, unit = "") => (known(value) ? brief(value) + unit : NONE);

export function duration(seconds) {
  if (!known(seconds)) return NONE;
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function bytes(value) {
  if (!known(value)) return NONE;
  if (value < 1000) return `${value} B`;
  const power = Math.min(3, Math.floor(Math.log10(value) / 3));
  return `${(value / 1000 ** power).toFixed(1)} ${["B", "kB", "MB", "GB"][power]}`;
}

/** Unix time of a time that is a number, or text as in ISO 8601. */
export const seconds = (time) => (known(time) ? time : Date.parse(time) / 1000);

const asDate = (seconds) => new Date(seconds * 1000);
export const clock = (seconds) => (known(seconds) ? time.format(asDate(seconds)) : NONE);
export const hourMinute = (seconds) => minute.format(asDate(seconds));
export const iso = (seconds) => (known(seconds) ? asDate(seconds).toISOString() : "");

/** The time of day; with the date where that is another day. */
export function when(seconds) {
  if (!known(seconds)) return NONE;
  return asDate(seconds).toDateString() === new Date().toDateString() ? clock(seconds) : date.format(asDate(seconds));
}

// What the model does: a title, what that means, and the lane of the time line that it belongs to.
const DOING = {
  ready: ["Ready", "The server waits for its first image.", "waiting"],
  learning: ["Learning", "It answers each batch, and then learns from the images that it can trust.", "learning"],
  paused: ["Paused", "It answers as usual and does not learn for a while. Learning goes on by itself.", "paused"],
  skip: ["Not learning", "It answers as usual, and learns again when the alarm is over.", "paused"],
  source: ["The source answers", "The unchanged network answers. It does not learn until the alarm is over.", "source"],
  left: ["The source answers", "The unchanged network does better on these images at the moment, and answers them.", "source"],
  blend: ["Half source", "It answers with statistics that are half the source's, until the alarm is over.", "source"],
  frozen: ["Frozen", "It answers with what it has learned, and learns no more until someone unfreezes it.", "frozen"],
  unknown: ["Connecting", "Waiting for the first report of the server.", "other"],
};

/** The lanes of the time line, from the top. */
export const LANES = Object.entries({
  learning: "learning",
  paused: "not learning",
  source: "source answers",
  frozen: "frozen",
});

export function doing(status) {
  const key = status.frozen ? "frozen" : status.batches === 0 && !status.images ? "ready" : String(status.doing);
  const [title, meaning, lane] = Object.hasOwn(DOING, key) ? DOING[key] : [key, "", "other"];
  return { key, title, meaning, lane };
}

const SIGNALS = {
  evidence: "The probe test finds that the network forgets what it knew",
  probe: "The network forgets what it knew",
  collapse: "The predictions collapse onto few classes",
  harm: "The network does worse than the unchanged one",
  gain: "The network does not do better than the unchanged one",
  repeated: "The camera sends the same image again and again",
  novelty: "The images are unlike the held-out ones",
  skew: "The stream shows few classes at a time",
  content: "The source network sees little in the images",
  disagreement: "Adapted and source network disagree",
  distance: "The network is far from the source",
  entropy: "The predictions are unsure",
  diversity: "The predictions are all alike",
  kept: "The share of images learned from is unusual",
  shift: "The stream is shifted",
  dropped: "Steps were dropped because of gradients that were not finite",
};

const ACTIONS = {
  "roll back": "rolled back to the last healthy snapshot",
  "partial reset": "moved half of the way back to the source",
  reset: "reset to the source",
  freeze: "frozen at the last healthy snapshot",
  leave: "the source answers, and learning goes on",
  source: "the source answers",
  blend: "answers are blended with the source",
  skip: "learning stopped until it is over",
};

const CONTROLS = {
  snapshot: "Snapshot taken",
  rollback: "Rolled back",
  reset: "Reset to the source",
  freeze: "Frozen for all streams",
  unfreeze: "Unfrozen for all streams",
  load: "State loaded",
};

const look = (table, key) => (Object.hasOwn(table, key) ? table[key] : String(key));

export const alarmText = ({ signal, action }) => `${look(SIGNALS, signal)}. Action: ${look(ACTIONS, action)}.`;
export const controlTitle = (control) => look(CONTROLS, control.action);
export const learned = (value) => (value === true ? "learned" : value === false ? "not learned" : "collected");
