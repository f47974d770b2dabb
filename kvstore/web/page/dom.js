// Elements of the page: found, made, and filled with text. Text is never read as markup.

const SVG = "http://www.w3.org/2000/svg";

export function at(id) {
  return document.getElementById(id);
}

export function put(id, text) {
  if (at(id).textContent !== text) at(id).textContent = text;
}

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function shape(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}
