// Opens pages in Debian's Chromium, clicks through them, and fails on errors of the console or violations that axe finds.
// node look.mjs FOLDER PAGE.html ...   writes screenshots into FOLDER; CHROMIUM names another browser.
import { mkdirSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { basename, join, resolve } from "node:path";
import { pathToFileURL } from "node:url";
import { chromium } from "playwright-core";

const [folder, ...pages] = process.argv.slice(2);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const profile = mkdtempSync(join(tmpdir(), "qjax-report-"));
mkdirSync(folder, { recursive: true });
const context = await chromium.launchPersistentContext(profile, {
  executablePath: process.env.CHROMIUM || "/usr/bin/chromium",
  args: "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync".split(" "),
  viewport: { width: Number(process.env.WIDTH || 1440), height: Number(process.env.HEIGHT || 1000) },
  bypassCSP: true, // axe is put in from outside; the policy itself is checked by what the page says on the console
});
let failures = 0;
const fail = (text) => {
  failures += 1;
  console.log(`FAILED ${text}`);
};
for (const path of pages) {
  const page = await context.newPage();
  const name = basename(path, ".html");
  page.on("console", (message) => message.type() === "error" && fail(`${name}: console: ${message.text()}`));
  page.on("pageerror", (error) => fail(`${name}: ${error.message}`));
  page.on("request", (request) => /^(file|data|blob):/.test(request.url()) || fail(`${name}: asks for ${request.url()}`));
  await page.goto(pathToFileURL(resolve(path)).href);
  const opened = await page.evaluate(() => performance.getEntriesByType("navigation")[0].loadEventEnd);
  console.log(`${name}: load event after ${opened.toFixed(0)} ms, ${readFileSync(path).length} bytes`);
  await page.screenshot({ path: join(folder, `${name}-top.png`) });
  if (await page.locator("#graph").count()) {
    const nodes = page.locator(".node");
    const count = await nodes.count();
    await page.locator("#network").scrollIntoViewIfNeeded();
    for (const option of await page.locator("#measure option").all())
      await page.locator("#measure").selectOption(await option.getAttribute("value"));
    await page.locator("#measure").selectOption({ index: 0 });
    const label = await nodes.nth(count - 1).getAttribute("data-name");
    await page.locator("#search").fill(label);
    if (!/^\d+ of \d+ nodes$/.test(await page.locator("#found").textContent())) fail(`${name}: search shows no count`);
    await page.locator("#search").press("Enter");
    if (!(await page.locator("#panel h3").textContent())) fail(`${name}: search opens no node`);
    await page.locator("#search").press("Escape");
    await nodes.first().focus();
    await page.keyboard.press("ArrowDown");
    await page.keyboard.press("Enter");
    const chosen = await page.evaluate(() => document.activeElement.dataset?.name);
    if ((await page.locator("#panel h3").textContent()) !== chosen) fail(`${name}: Enter opens another node than ${chosen}`);
    await page.locator("#zoom-in").click();
    await page.locator("#fit").click();
    await page.evaluate(() => document.getElementById("network").scrollIntoView());
    await page.screenshot({ path: join(folder, `${name}-network.png`) });
  }
  for (const button of await page.locator(".sortable thead button").all()) await button.click();
  await page.locator(".sortable").last().scrollIntoViewIfNeeded();
  await page.screenshot({ path: join(folder, `${name}-tables.png`) });
  for (const theme of ["light", "dark"]) {
    if ((await page.evaluate(() => getComputedStyle(document.documentElement).colorScheme)) !== theme)
      await page.locator("#theme").click();
    await page.evaluate(() => scrollTo(0, 0));
    await page.screenshot({ path: join(folder, `${name}-${theme}.png`) });
    await page.evaluate(axe);
    const found = await page.evaluate(() => globalThis.axe.run());
    for (const violation of found.violations)
      fail(`${name}, ${theme}: axe ${violation.id} (${violation.impact}): ${violation.nodes.length} nodes, ${violation.nodes[0].html.slice(0, 160)} ${violation.nodes[0].failureSummary}`);
    console.log(`${name}, ${theme}: axe passes ${found.passes.length} rules, ${found.violations.length} violations`);
  }
  if (process.env.PDF) await page.pdf({ path: join(folder, `${name}.pdf`) });
  await page.close();
}
await context.close();
rmSync(profile, { recursive: true, force: true });
process.exit(failures ? 1 : 0);
