// Creates DOM nodes and updates them, touching only what has changed.
//
// Data from servers only ever becomes text: neither this module nor any other parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element; strings among the children become text. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) mark(node, name, value);
  node.append(...children);
  return node;
}

/** Sets an attribute; null, undefined and false remove it, true sets it to the empty string. */
export function mark(node, name, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
    return;
  }
  const text = value === true ? "" : String(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

/** Sets the text of a node that has no other content. */
export function say(node, text) {
  const wanted = text === null || text === undefined ? "" : String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Children of a node by key. An item that stays keeps its node, with its focus and open details. */
export class Keyed {
  /** `make(item)` returns `{node, update(item)}`, and `close()` if resources must be released with the node. */
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
    this.kept = new Map();
  }

  show(items, keyOf) {
    const wanted = new Map(items.map((item) => [String(keyOf(item)), item]));
    const focused = document.activeElement;
    for (const [key, row] of this.kept) {
      if (!wanted.has(key)) {
        row.close?.();
        row.node.remove();
        this.kept.delete(key);
      }
    }
    let place = this.parent.firstChild;
    for (const [key, item] of wanted) {
      let row = this.kept.get(key);
      if (row === undefined) {
        row = this.make(item);
        this.kept.set(key, row);
      }
      row.update(item);
      if (row.node === place) place = place.nextSibling;
      else this.parent.insertBefore(row.node, place);
    }
    // Moving a node removes its focus.
    if (document.activeElement !== focused && this.parent.contains(focused)) focused.focus({ preventScroll: true });
  }
}

/** A table that scrolls horizontally on narrow screens, also by keyboard. */
export function table(caption, headings) {
  const body = element("tbody");
  const head = element("tr", {}, ...headings.map((heading) => element("th", { scope: "col" }, heading)));
  const node = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    element("table", {}, element("caption", {}, caption), element("thead", {}, head), body));
  return { node, body, head };
}

/** A row whose first cell is its header. `update` takes one text per cell. */
export function tableRow(count) {
  const cells = Array.from({ length: count }, (_, at) => (at ? element("td") : element("th", { scope: "row" })));
  const node = element("tr", {}, ...cells);
  return { node, cells, update: (texts) => texts.forEach((text, at) => say(cells[at], text)) };
}

/** A word with a symbol. `kind` (well, busy, bad or quiet) determines symbol and colour. */
export function badge(kind = "quiet", text = "") {
  const node = element("span", { class: "badge" });
  const update = (newKind, newText) => {
    mark(node, "data-kind", newKind);
    say(node, newText);
  };
  update(kind, text);
  return { node, update };
}
