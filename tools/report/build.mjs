// Bundles src/ and its libraries into qjax/reporting/assets: report.js, report.css and the licences of what is inside.
// tools/report.sh runs this. The first line of report.js names the sources by hash: a test compares it with the sources,
// so that nobody changes one without the other.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync, existsSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const assets = join(here, "..", "..", "qjax", "reporting", "assets");

function digest() {
  const hash = createHash("sha256");
  const names = ["package-lock.json", ...readdirSync(join(here, "src")).sort().map((name) => `src/${name}`)];
  for (const name of names) hash.update(name).update("\0").update(readFileSync(join(here, name))).update("\0");
  return hash.digest("hex");
}

const common = { bundle: true, minify: true, legalComments: "none", write: false, metafile: true, charset: "ascii" };
const script = await build({
  ...common,
  entryPoints: [join(here, "src", "main.js")],
  format: "iife",
  target: ["chrome111", "firefox113", "safari16.2"],
});
const style = await build({ ...common, entryPoints: [join(here, "src", "report.css")] });

// A page holds the script inside an element, which "</script" would end.
const text = script.outputFiles[0].text.replaceAll("</script", "<\\/script").replaceAll("<!--", "<\\!--");
writeFileSync(join(assets, "report.js"), `/* sources ${digest()} */\n${text}`);
writeFileSync(join(assets, "report.css"), style.outputFiles[0].text);

const packages = new Set();
for (const path of Object.keys(script.metafile.inputs)) {
  const match = /node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(path);
  if (match) packages.add(match[1]);
}
const parts = [];
for (const name of [...packages].sort()) {
  const folder = join(here, "node_modules", name);
  const about = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  const file = readdirSync(folder).find((entry) => /^licen[cs]e/i.test(entry));
  const licence = file && existsSync(join(folder, file)) ? readFileSync(join(folder, file), "utf8").trim() : about.license;
  parts.push(`${name} ${about.version} (${about.license})\n\n${licence}\n`);
}
writeFileSync(join(assets, "licences.txt"), parts.join("\n" + "-".repeat(80) + "\n\n"));
console.log(`${packages.size} packages, ${text.length} bytes of script`);
