// What the theme leaves out for screen readers and keyboards: names, roles, and a way to scroll.
function complete() {
  document.querySelector(".md-search[role=dialog]")?.setAttribute("aria-label", "Search");
  for (const nav of document.querySelectorAll(".md-code__nav")) nav.setAttribute("role", "none");
  for (const nav of document.querySelectorAll(".md-nav .md-nav[aria-labelledby]")) {
    nav.setAttribute("aria-label", `${document.getElementById(nav.getAttribute("aria-labelledby")).textContent.trim()}, pages`);
    nav.removeAttribute("aria-labelledby");
  }
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0;
  for (const cell of document.querySelectorAll("th:empty")) cell.replaceWith(document.createElement("td"));
}
complete();
new MutationObserver(complete).observe(document.querySelector(".md-content"), { childList: true, subtree: true });
