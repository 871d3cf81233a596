// A click on a header sorts; a second click turns the order round.
export function sortable(table) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const order = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order === 1 ? "ascending" : "descending");
      const rows = [...body.rows].map((row, index) => ({ row, index, key: key(row.cells[column].textContent) }));
      rows.sort((a, b) => order * compare(a.key, b.key) || a.index - b.index);
      body.append(...rows.map((entry) => entry.row));
    });
  });
}

// "1,234", "3 of 40", "-12.5" and "inf" are numbers; "-" is nothing and comes last in both orders' weak end.
function key(text) {
  const plain = text.trim().replaceAll(",", "");
  if (plain === "-") return -Infinity;
  if (plain === "inf") return Infinity;
  const match = /^[+-]?\d+(\.\d+)?(e[+-]?\d+)?/i.exec(plain);
  return match && /^[+-]?[\d.e+-]+( |%|$)/i.test(plain) ? Number(match[0]) : plain;
}

function compare(a, b) {
  if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
  return typeof a === "number" ? -1 : 1;
}
