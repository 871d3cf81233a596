// What the theme leaves out for screen readers, keyboards and narrow windows: names, roles, a way to scroll, whole words.

// A name such as ai-edge-quantizer or --page=docs/a.md is not broken at its hyphens. Only a long one is, after / = or a comma.
const LONGEST = 38;
function keepWhole(node) {
  const pieces = node.data.split(/(\s+)/).flatMap((word) => (word.length > LONGEST ? word.split(/(?<=[/=,])/) : [word]));
  if (!pieces.some((piece) => /\S[-/.]\S/.test(piece))) return;
  node.replaceWith(...pieces.map((piece) => {
    if (!/\S[-/.]\S/.test(piece) || piece.length > LONGEST) return piece;
    const whole = document.createElement("span");
    whole.className = "whole";
    whole.textContent = piece;
    return whole;
  }));
}

const widths = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    target.classList.remove("wide"); // it widens the table
    target.classList.toggle("wide", target.scrollWidth > target.clientWidth + 1);
  }
});

function complete() {
  document.querySelector(".md-search[role=dialog]")?.setAttribute("aria-label", "Search");
  for (const nav of document.querySelectorAll(".md-code__nav")) nav.setAttribute("role", "none");
  for (const nav of document.querySelectorAll(".md-nav .md-nav[aria-labelledby]")) {
    nav.setAttribute("aria-label", `${document.getElementById(nav.getAttribute("aria-labelledby")).textContent.trim()}, pages`);
    nav.removeAttribute("aria-labelledby");
  }
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) {
    table.tabIndex = 0;
    widths.observe(table);
  }
  for (const place of document.querySelectorAll(".md-content :is(:not(pre) > code, td, th):not([data-whole])")) {
    place.dataset.whole = "";
    const texts = document.createTreeWalker(place, NodeFilter.SHOW_TEXT);
    const found = [];
    while (texts.nextNode()) if (!texts.currentNode.parentElement.closest(".whole")) found.push(texts.currentNode);
    found.forEach(keepWhole);
  }
  // the labels of a picture are small in a narrow window, so that each picture opens in its own size
  for (const picture of document.querySelectorAll(".md-content img:not(a img)")) {
    const link = document.createElement("a");
    link.href = picture.src;
    picture.replaceWith(link);
    link.append(picture);
  }
  for (const cell of document.querySelectorAll("th:empty")) cell.replaceWith(document.createElement("td"));
}
complete();
new MutationObserver(complete).observe(document.querySelector(".md-content"), { childList: true, subtree: true });
