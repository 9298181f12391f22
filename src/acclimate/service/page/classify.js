// Classify images that are chosen, dropped anywhere on the page, or pasted.

import { ask } from "./ask.js";
import { bar, el, find, say } from "./dom.js";
import { picture } from "./predictions.js";
import * as words from "./words.js";

const MOST = 12; // results shown

export class Classify {
  constructor(streams) {
    this.streams = streams;
    this.previews = [];
    this.turn = 0;
    const drop = find("drop");
    find("files").addEventListener("change", (event) => {
      this.send([...event.target.files]);
      event.target.value = ""; // so that the same file can be chosen again
    });
    document.addEventListener("dragover", (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault(); // else the browser opens the image in place of this page
      drop.classList.add("over");
    });
    document.addEventListener("dragleave", (event) => event.relatedTarget === null && drop.classList.remove("over"));
    document.addEventListener("drop", (event) => {
      drop.classList.remove("over");
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      this.send([...event.dataTransfer.files]);
    });
    document.addEventListener("paste", (event) => this.send([...(event.clipboardData?.files ?? [])]));
  }

  async send(files) {
    if (!files.length) return;
    const turn = ++this.turn;
    const form = new FormData();
    for (const file of files) form.append("file", file, file.name);
    const query = new URLSearchParams();
    const stream = find("classify-stream").value.trim();
    if (stream) query.set("stream", stream);
    if (find("only-predict").checked) query.set("adapt", "false");
    this.message(files.length === 1 ? "Sending one image …" : `Sending ${files.length} images …`);
    this.clear();
    try {
      const answer = await ask(`predict?${query}`, { method: "POST", body: form });
      if (turn === this.turn) this.show(answer, files);
    } catch (error) {
      if (turn === this.turn) this.message(error.message, true);
    }
  }

  show({ predictions, stream, milliseconds }, files) {
    this.streams.add(stream);
    this.previews = files.slice(0, MOST).map((file) => URL.createObjectURL(file));
    const shown = predictions.slice(0, MOST);
    find("results").replaceChildren(...shown.map((each, index) => result(each, this.previews[index])));
    const size = predictions.length;
    const best = predictions[0];
    this.message(
      (size === 1 ? `${best.label}, ${words.percent(best.confidence)}` : `${size} images`) +
      `, in ${words.milliseconds(milliseconds, " ms")} by stream ${stream}.` +
      (size > MOST ? ` The first ${MOST} are shown.` : ""));
  }

  clear() {
    this.previews.forEach((address) => URL.revokeObjectURL(address));
    this.previews = [];
    find("results").replaceChildren();
  }

  message(text, wrong = false) {
    find("classify-message").classList.toggle("wrong", wrong);
    say(find("classify-message"), text);
  }
}

function result({ name, label, confidence, entropy, disagreement, learned, top }, preview) {
  const facts = [
    learned === null ? "learned from when its batch is full" : words.learned(learned),
    `entropy ${words.short(entropy)} nats`,
    typeof disagreement === "number" ? `disagreement with the source ${words.percent(disagreement)}` : null,
  ];
  const rows = top?.length ? top : [{ label, confidence }];
  return el("li", {},
    picture(preview),
    el("div", {},
      name ? el("p", { class: "file" }, String(name)) : null,
      el("ol", { class: "ranking", "aria-label": "Most likely classes" }, ...rows.slice(0, 5).map((each) => el("li", {},
        el("span", { class: "label" }, String(each.label)), bar(each.confidence),
        el("span", { class: "confidence" }, words.percent(each.confidence, 1))))),
      el("p", { class: "muted" }, facts.filter(Boolean).join(", "))));
}
