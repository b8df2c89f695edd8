// What pages do with JavaScript: they refresh while they are visible, copy commands, and continue changes of many.
"use strict";

const REFRESH_MS = 10000;

function isInUse(region) {
  return region.contains(document.activeElement) || region.querySelector("details[open]") !== null;
}

setInterval(() => {
  const region = document.getElementById("live");
  if (region && document.visibilityState === "visible" && !isInUse(region)) {
    document.body.dispatchEvent(new CustomEvent("durable:refresh"));
  }
}, REFRESH_MS);

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

document.addEventListener("htmx:load", (event) => prepare(event.detail.elt));

document.addEventListener("DOMContentLoaded", () => {
  prepare(document);
  const form = document.querySelector("form[data-continue]");
  if (form) {
    form.submit();
  }
});
