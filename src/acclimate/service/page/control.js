// Buttons that change the model. They need the token of the server, which is kept for this tab only.

import { ask } from "./ask.js";
import { el, find, say } from "./dom.js";
import * as words from "./words.js";

const KEY = "acclimate-token";
const OFF = "Control is off: this server has no token. Start it with ACCLIMATE_TOKEN set, or with --token-file.";
const ON = "Give the control token of this server. It stays in this tab.";
const READY = "The token is accepted. Use an empty one to forget it.";
const GLOBAL = ["freeze", "unfreeze"]; // for all streams
const MOST = 50; // snapshots listed

export class Control {
  constructor() {
    this.token = sessionStorage.getItem(KEY) ?? "";
    this.on = null; // not known before the server says hello
    this.busy = false;
    find("token").value = this.token;
    find("token-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.use(find("token").value.trim());
    });
    for (const button of this.buttons) button.addEventListener("click", () => this.press(button.dataset.action));
    find("confirm").addEventListener("close", (event) => {
      if (event.target.returnValue === "reset") this.act("reset", { stream: this.asked });
    });
  }

  get buttons() {
    return find("actions").querySelectorAll("button");
  }

  /** The stream that is meant: the one named, else the only one. */
  get stream() {
    return find("control-stream").value.trim() || this.only;
  }

  /** Show whether the server takes control calls at all. */
  enable(on) {
    this.on = on;
    this.help();
    find("token-form").hidden = !on;
    for (const button of this.buttons) button.setAttribute("aria-disabled", String(!on));
    this.refresh();
  }

  update(status) {
    this.only = status.streams > 1 ? "" : status.stream || "default";
    find("control-stream").placeholder = this.only || "which one?";
    const button = find("freeze");
    button.dataset.action = status.frozen ? "unfreeze" : "freeze";
    say(button, status.frozen ? "Unfreeze" : "Freeze");
  }

  help() {
    say(find("control-help"), this.on === false ? OFF : this.accepted ? READY : ON);
  }

  /** Take a token if the server does; an empty one is forgotten. */
  async use(token) {
    this.forget();
    if (!token) return this.message("The token is forgotten.");
    if (/[^\x21-\x7e]/.test(token)) return this.message("A token has ASCII letters, digits and signs only.", true);
    this.token = token;
    if (await this.refresh(true)) {
      sessionStorage.setItem(KEY, token);
      this.message("The buttons can be used.");
    }
    return undefined;
  }

  forget() {
    this.token = "";
    sessionStorage.removeItem(KEY);
    this.list(null);
  }

  press(action) {
    if (!this.on) return this.message(OFF, true);
    if (!this.token) return this.want("token", "Give the token first.");
    if (GLOBAL.includes(action)) return this.act(action);
    if (!this.stream) return this.want("control-stream", "Name the stream first: there are several.");
    if (action !== "reset") return this.act(action, { stream: this.stream });
    this.asked = this.stream;
    say(find("confirm-text"), `Stream ${this.asked} forgets all that it has learned. Only a snapshot brings it back.`);
    find("confirm").returnValue = "cancel";
    return find("confirm").showModal();
  }

  async act(action, content = {}) {
    if (this.busy) return;
    this.busy = true;
    this.message("Asking the server …");
    try {
      const headers = { "Content-Type": "application/json" };
      await this.call(`control/${action}`, { method: "POST", body: JSON.stringify(content), headers });
      this.message(`${words.controlTitle({ action })}${content.stream ? `, stream ${content.stream}` : ""}.`);
    } catch (error) {
      this.message(error.message, true);
    } finally {
      this.busy = false;
    }
    await this.refresh();
  }

  /** Ask for the snapshots and list them. Return whether the server accepts the token. */
  async refresh(loud = false) {
    if (!this.on || !this.token) return false;
    try {
      this.list((await this.call("control/snapshots")).snapshots);
      return true;
    } catch (error) {
      if (loud) this.message(error.message, true);
      return false;
    }
  }

  async call(address, options = {}) {
    const { token } = this;
    try {
      return await ask(address, { ...options, headers: { ...options.headers, Authorization: `Bearer ${token}` } });
    } catch (error) {
      if (error.status !== 401) throw error;
      if (token === this.token) this.forget();
      throw new Error("The server does not accept this token.");
    }
  }

  /** Show the snapshots; null where there is no token that the server accepts. */
  list(snapshots) {
    this.accepted = snapshots !== null;
    this.help();
    const newest = [...(snapshots ?? [])].sort((a, b) => words.seconds(b.time) - words.seconds(a.time)).slice(0, MOST);
    const focused = document.activeElement?.dataset.snapshot;
    find("snapshots").replaceChildren(...newest.map((each) => this.row(each)));
    const buttons = [...find("snapshots").querySelectorAll("button")];
    if (focused) buttons.find((button) => button.dataset.snapshot === focused)?.focus();
    find("snapshots-empty").hidden = newest.length > 0;
    say(find("snapshots-empty"), snapshots
      ? "No snapshots yet. Take one to have a state to return to."
      : "Snapshots are listed when a token is given.");
  }

  row({ name, stream, time, bytes }) {
    const attributes = { type: "button", class: "quiet", "data-snapshot": name, "aria-label": `Restore ${name}` };
    const button = el("button", attributes, "Restore");
    button.addEventListener("click", () => this.act("rollback", { snapshot: name, stream: stream || this.stream }));
    return el("li", {},
      el("span", { class: "name" }, String(name)),
      el("span", { class: "muted" }, `${words.when(words.seconds(time))}, stream ${stream}, ${words.bytes(bytes)}`),
      button);
  }

  want(field, text) {
    this.message(text, true);
    find(field).focus();
  }

  message(text, wrong = false) {
    find("control-message").classList.toggle("wrong", wrong);
    say(find("control-message"), text);
  }
}
