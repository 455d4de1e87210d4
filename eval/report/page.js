"use strict";
// Tables sort by a click, or Enter, on the title of a column; a second one turns the order around, a third one restores it.
for (const table of document.querySelectorAll("table.sortable")) {
  const titles = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  const original = [...body.rows];

  const key = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
  const compare = (one, other) => {
    const [a, b] = [Number(one), Number(other)];
    return Number.isNaN(a) || Number.isNaN(b) ? one.localeCompare(other) : a - b;
  };

  titles.forEach((title, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...title.childNodes);
    title.append(button);
    button.addEventListener("click", () => {
      const first = title.dataset.better === "high" ? "descending" : "ascending";
      const second = first === "ascending" ? "descending" : "ascending";
      const order = { none: first, [first]: second, [second]: "none" }[title.getAttribute("aria-sort") ?? "none"];
      for (const other of titles) other.removeAttribute("aria-sort");
      if (order !== "none") title.setAttribute("aria-sort", order);
      const sign = order === "descending" ? -1 : 1;
      const rows = [...original];
      if (order !== "none") {
        rows.sort((one, other) => {
          const [a, b] = [key(one, column), key(other, column)];
          if (a === "-" || b === "-") return (a === "-") - (b === "-"); // rows without a value stay last
          return sign * compare(a, b);
        });
      }
      body.append(...rows);
    });
  });
}
document.documentElement.dataset.script = "ready";
