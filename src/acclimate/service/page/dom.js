// Elements. Text from the server goes in as text nodes only, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const find = (id) => document.getElementById(id);

/** Return a new element with attributes and children; strings become text. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Return a new SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set the text of an element if it changes, so that nothing is laid out again for no reason. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Return a horizontal bar that shows a share between 0 and 1. */
export function bar(share) {
  const inner = el("span");
  inner.style.width = `${100 * Math.min(1, Math.max(0, share || 0))}%`;
  return el("span", { class: "bar", "aria-hidden": "true" }, inner);
}

/** Tell a screen reader, politely. Lines stay for a while, so that one does not cut off the one before. */
export function announce(text) {
  const line = el("p", {}, text), lines = find("announce");
  lines.append(line);
  while (lines.childElementCount > 3) lines.firstElementChild.remove();
  setTimeout(() => line.remove(), 10_000);
}
