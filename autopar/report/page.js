"use strict";
// Columns that sort: a button in each heading of a table that has values.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = cell.textContent;
    cell.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = cell.getAttribute("aria-sort") === "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const compare = (a, b) => {
        const [x, y] = [value(a), value(b)];
        const both = Number(x) - Number(y);
        return Number.isNaN(both) ? x.localeCompare(y) : both;
      };
      const rows = [...body.rows].sort(compare);
      body.append(...(up ? rows : rows.reverse()));
    });
  });
}
// Search: what is called so in any of the modules that are shown as one.
const search = document.getElementById("search");
const found = document.getElementById("found");
const names = (element) => {
  if (element === null) return [];
  const { name, members, shown } = element.dataset;
  const own = name === undefined ? [...JSON.parse(members), shown] : [name];
  return [...names(element.parentElement.closest("details")), own.map((one) => one.toLowerCase())];
};
const entries = [...document.querySelectorAll(".tree details, .tree .held")].map((element) => {
  return { element, path: names(element) };
});
const isNumber = (name) => /^\d+$/.test(name);
// Whether a path goes through what is wanted: names in a row, of the first one its end, of the last
// one its start; of a number all of it.
const goesThrough = (path, wanted) =>
  path.some((_, start) =>
    wanted.every((part, at) =>
      (path[start + at] ?? []).some((name) => {
        if (isNumber(part) && isNumber(name)) return part === name;
        const [isFirst, isLast] = [at === 0, at === wanted.length - 1];
        if (isFirst && isLast) return name.includes(part);
        if (isFirst) return name.endsWith(part);
        return isLast ? name.startsWith(part) : name === part;
      }),
    ),
  );
let unfolded = new Set(); // by the search, which folds them again
const look = () => {
  const wanted = search.value.trim().toLowerCase();
  const parts = wanted.split(/\.(?![^{}]*\})/);
  const hits = wanted === "" ? [] : entries.filter(({ path }) => goesThrough(path, parts));
  const shown = hits.map(({ element }) =>
    element.tagName === "DETAILS" ? element.firstElementChild : element);
  for (const one of document.querySelectorAll(".tree .hit")) one.classList.remove("hit");
  for (const one of shown) one.classList.add("hit");
  const around = new Set();
  for (const { element } of hits) {
    for (let at = element.parentElement; at; at = at.parentElement) {
      if (at.tagName === "DETAILS") around.add(at);
    }
  }
  for (const one of unfolded) if (!around.has(one)) one.open = false;
  unfolded = new Set([...around].filter((one) => unfolded.has(one) || !one.open));
  for (const one of around) one.open = true;
  // Only now are they where they stay.
  shown[0]?.scrollIntoView({ block: "nearest" });
  found.textContent = wanted === "" ? "" : `${hits.length} found`;
};
search.addEventListener("input", look);
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || /input|textarea/i.test(event.target.tagName)) return;
  event.preventDefault();
  search.focus();
});
// On paper all is unfolded.
addEventListener("beforeprint", () => {
  for (const one of document.querySelectorAll("details")) one.open = true;
});
