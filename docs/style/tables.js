// Each cell of a table, but for those of the first column, knows the name of its column: see tables.css.
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const names = Array.from(table.querySelectorAll("thead th"), (head) => head.textContent.trim());
  for (const row of table.querySelectorAll("tbody tr")) {
    Array.from(row.cells).forEach((cell, i) => {
      if (i > 0 && names[i]) cell.dataset.column = names[i];
    });
  }
}
