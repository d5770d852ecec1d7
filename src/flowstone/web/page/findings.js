// The findings of `flowstone explain`: what is stopped or lagging, why, and what to do.

import { Keyed, badge, element, mark, say } from "./dom.js";

const KINDS = { stopped: "bad", behind: "busy", warning: "busy" };
const LABELS = { stopped: "stopped", behind: "lagging", warning: "warning" };
const WARNING = "warning";
const COPIED_SECONDS = 2;

const findingKey = (finding) => `${finding.kind} ${finding.replicaset ?? ""} ${finding.member} ${finding.peer ?? ""}`;

export class Findings {
  constructor() {
    this.none = document.getElementById("findings-none");
    this.worst = new Keyed(document.getElementById("findings-list"), () => makeFinding("card"));
    this.warnings = new Keyed(document.getElementById("findings-warnings"), () => makeFinding("slim"));
  }

  update(findings) {
    mark(this.none, "hidden", findings.length > 0);
    this.worst.show(findings.filter(({ severity }) => severity !== WARNING), findingKey);
    this.warnings.show(findings.filter(({ severity }) => severity === WARNING), findingKey);
  }
}

/** A card shows the whole finding; a slim item, used for warnings, shows its first sentence until it is opened. */
function makeFinding(size) {
  const severity = badge();
  const label = element("span", { class: "who" });
  const what = element("h3");
  const why = element("p");
  const advice = element("div", { class: "advice" });
  const evidence = element("ul");
  const proofTitle = element("summary", {}, "Evidence");
  const proof = element("details", { class: "proof" }, proofTitle, evidence);
  const more = [element("h4", {}, "Why"), why, element("h4", {}, "What to do"), advice, proof];
  const head = element(size === "slim" ? "summary" : "p", { class: "finding-head" }, severity.node);
  const node = element("li", { class: `${size} finding` });
  if (size === "slim") {
    head.append(what);
    node.append(element("details", {}, head, ...more));
  } else {
    head.append(label);
    node.append(head, what, ...more);
  }
  const tellWhat = teller(what, quoted);
  const tellWhy = teller(why, quoted);
  const tellAdvice = teller(advice, (text) =>
    text.split("\n").filter(Boolean).map((line) => element("p", {}, ...prose(line))));
  const tellEvidence = teller(evidence, (lines) => lines.map((line) => element("li", {}, element("code", {}, line))));
  const update = (finding) => {
    mark(node, "data-kind", KINDS[finding.severity] ?? "quiet");
    mark(node, "data-finding", finding.kind);
    severity.update(KINDS[finding.severity] ?? "quiet", LABELS[finding.severity] ?? finding.severity);
    say(label, finding.label);
    tellWhat(finding.what);
    tellWhy(finding.why);
    tellAdvice(finding.advice);
    tellEvidence(finding.evidence);
    mark(proof, "hidden", finding.evidence.length === 0);
  };
  return { node, update };
}

/** Replaces the content of a node only if it has changed: the user may be selecting text or using a button in it. */
function teller(node, partsOf) {
  let told = null;
  return (words) => {
    const text = JSON.stringify(words);
    if (text === told) return;
    told = text;
    node.replaceChildren(...partsOf(words));
  };
}

/** Prose with names and commands in backquotes. Both become code; commands also get a copy button. */
function prose(text) {
  return text.split("`").map((piece, at) => {
    if (at % 2 === 0) return piece;
    return isCommand(piece) ? command(piece) : element("code", {}, piece);
  });
}

/** Prose with code in backquotes, without copy buttons. */
function quoted(text) {
  return text.split("`").map((piece, at) => (at % 2 ? element("code", {}, piece) : piece));
}

/** Distinguishes a command, which has arguments, from the name of an option or a space. */
function isCommand(text) {
  return /[\s({=]/.test(text.trim());
}

function command(text) {
  const code = element("code", {}, text);
  const button = element("button", { type: "button", class: "copy", "aria-label": `Copy: ${text}` }, "Copy");
  // A separate live region: screen readers do not announce a change of the button's own name.
  const outcome = element("span", { class: "outcome", role: "status" });
  let timer = null;
  button.addEventListener("click", async () => {
    const done = await copy(text, code);
    say(outcome, done ? "Copied" : "Selected");
    clearTimeout(timer);
    timer = setTimeout(() => say(outcome, ""), COPIED_SECONDS * 1000);
  });
  return element("span", { class: "command" }, code, button, outcome);
}

/** Copies the text. Without access to the clipboard (plain HTTP from another machine), selects it instead. */
async function copy(text, code) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(code);
    return false;
  }
}
