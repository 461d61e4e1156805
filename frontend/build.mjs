// Builds the page into src/posttrain/viewer/static, and notes from which sources it was built.
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "..", "src", "posttrain", "viewer", "static");
mkdirSync(out, { recursive: true });

const common = { bundle: true, minify: true, legalComments: "none", target: "es2022", logLevel: "info" };
await build({
  ...common,
  entryPoints: [join(here, "src", "main.tsx")],
  outfile: join(out, "app.js"),
  format: "iife",
  charset: "utf8",
  jsx: "automatic",
  jsxImportSource: "preact",
});
await build({ ...common, entryPoints: [join(here, "src", "styles.css")], outfile: join(out, "app.css") });
for (const name of ["index.html", "icon.svg"]) {
  writeFileSync(join(out, name), readFileSync(join(here, "src", name)));
}

// The same digest as tests/viewer/test_assets.py computes: sorted names and contents.
const sources = ["package.json", "package-lock.json", "tsconfig.json", "build.mjs"];
sources.push(...readdirSync(join(here, "src")).map((name) => `src/${name}`));
const digest = createHash("sha256");
for (const name of sources.sort()) {
  digest.update(`${name}\n`);
  digest.update(readFileSync(join(here, name)));
}
writeFileSync(join(out, "sources.sha256"), `${digest.digest("hex")}\n`);
