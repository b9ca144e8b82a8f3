"use strict";
// Shared by all scripts of the page, which are one script in the order of `pages.py`.

const $ = id => document.getElementById(id);
const base = new URL(".", location.href);

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}
