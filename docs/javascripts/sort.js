// Tables of results.md: a click on the head of a column sorts its rows.
for (const table of document.querySelectorAll("article table")) {
  const heads = [...table.querySelectorAll("thead th")];
  if (heads[0]?.textContent !== "implementation") continue;
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.ariaSort === "ascending";
      heads.forEach(each => each.removeAttribute("aria-sort"));
      head.ariaSort = down ? "descending" : "ascending";
      const text = row => row.cells[column].textContent;
      const order = (a, b) => text(a).localeCompare(text(b), "en", { numeric: true });
      const rows = [...table.tBodies[0].rows].sort((a, b) => (down ? order(b, a) : order(a, b)));
      table.tBodies[0].append(...rows);
    });
  });
}
