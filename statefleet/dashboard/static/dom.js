// Elements are made of nodes and text only: what comes from state, and from whoever named anything, is never markup.

export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Set what differs: an element that is read out, selected or pointed at is left alone otherwise.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setClass(element, name) {
  if (element.className !== name) element.className = name;
}

// Children by key, in order: those that stay are kept, so that focus and scrolling stay with them.
export function keyed(parent, keys, make, update) {
  const known = (parent.known ??= new Map());
  const wanted = new Set(keys);
  for (const [key, element] of known) {
    if (!wanted.has(key)) {
      element.remove();
      known.delete(key);
    }
  }
  let place = parent.firstChild;
  for (const key of keys) {
    let element = known.get(key);
    if (!element) {
      element = make(key);
      known.set(key, element);
    }
    if (element === place) place = place.nextSibling;
    else parent.insertBefore(element, place);
    update?.(element, key);
  }
}
