// Draws the network and the plots of a report from the JSON in the page. All text goes in as text, never as markup.
import { Network } from "./network.js";
import { Panel } from "./panel.js";
import { sortable } from "./tables.js";
import { theme } from "./theme.js";

const data = JSON.parse(document.getElementById("data").textContent);

theme(document.getElementById("theme"));
document.getElementById("print").addEventListener("click", () => window.print());
for (const table of document.querySelectorAll("table.sortable")) sortable(table);

const holder = document.getElementById("graph");
if (holder) {
  const panel = new Panel(document.getElementById("panel"), data);
  const network = new Network(holder, data, (node) => panel.show(node, () => network.focus(node.name)));
  const measure = document.getElementById("measure");
  const help = document.getElementById("help");
  const colour = () => {
    const chosen = data.measures.find((one) => one.key === measure.value);
    network.colour(chosen);
    help.textContent = chosen ? `${chosen.help} ${network.legend}` : "";
  };
  measure.addEventListener("change", colour);
  colour();

  const search = document.getElementById("search");
  const found = document.getElementById("found");
  search.addEventListener("input", () => {
    const count = network.search(search.value);
    found.textContent = search.value ? `${count} of ${data.nodes.length} nodes` : "";
  });
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") network.next(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") {
      search.value = "";
      search.dispatchEvent(new Event("input"));
    }
  });
  document.getElementById("zoom-in").addEventListener("click", () => network.zoomBy(1.4));
  document.getElementById("zoom-out").addEventListener("click", () => network.zoomBy(1 / 1.4));
  document.getElementById("fit").addEventListener("click", () => network.fit());
  for (const link of document.querySelectorAll("a[data-node]"))
    link.addEventListener("click", (event) => {
      event.preventDefault();
      document.getElementById("network").scrollIntoView();
      network.choose(link.dataset.node);
    });
  const first = data.nodes.find((node) => node.first) || network.worst();
  if (first) network.choose(first.name, { quiet: true });
  window.addEventListener("beforeprint", () => network.fit());
}
window.addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("section details")) details.open = true;
});
