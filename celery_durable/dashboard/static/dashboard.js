// What pages do with JavaScript: they refresh while they are visible, copy commands, and continue changes of many.
"use strict";

const REFRESH_MS = 10000;

function isInUse(region) {
  return region.contains(document.activeElement) || region.querySelector("details[open]") !== null;
}

function refresh() {
  const region = document.getElementById("live");
  if (region && document.visibilityState === "visible" && !isInUse(region)) {
    document.body.dispatchEvent(new CustomEvent("durable:refresh"));
  }
}

setInterval(refresh, REFRESH_MS);

// The page of an instance follows its run while it is visible. Browsers open few connections to one origin.
const AT_MOST_EVERY_MS = 1000;
let source = null;
let planned = null;

function refreshSoon() {
  planned ??= setTimeout(() => {
    planned = null;
    refresh();
  }, AT_MOST_EVERY_MS);
}

function follow() {
  const address = document.getElementById("live")?.dataset.stream;
  const wanted = document.visibilityState === "visible" ? address : undefined;
  if (source && (!wanted || source.readyState === EventSource.CLOSED)) {
    source.close();
    source = null;
  }
  if (wanted && !source) {
    source = new EventSource(wanted);
    ["step", "log", "published", "status", "end"].forEach((kind) => source.addEventListener(kind, refreshSoon));
  }
}

document.addEventListener("visibilitychange", () => {
  follow();
  if (document.visibilityState === "visible") {
    refreshSoon();
  }
});

function prepare(root) {
  if (navigator.clipboard) {
    root.querySelectorAll("button[data-copy]").forEach((button) => { button.hidden = false; });
  }
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-copy]");
  if (button) {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  }
});

document.addEventListener("htmx:load", (event) => {
  prepare(event.detail.elt);
  follow();
});

document.addEventListener("DOMContentLoaded", () => {
  prepare(document);
  follow();
  const form = document.querySelector("form[data-continue]");
  if (form) {
    form.submit();
  }
});
