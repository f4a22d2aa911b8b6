"use strict";
const bytesOf = (id) =>
  Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
const unpack = (id) =>
  new Response(new Blob([bytesOf(id)]).stream().pipeThrough(new DecompressionStream("gzip")));

function valueOf(cell) {
  if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
  const text = cell.textContent.trim().replaceAll(",", "");
  if (text === "-" || text === "") return null;
  const found = Number.parseFloat(text);
  return Number.isNaN(found) ? text : found;
}

function compare(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
  return typeof a === "number" ? -1 : 1;
}

for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  if (!body || body.rows.length < 2) continue;
  const frame = document.createElement("div"), bar = document.createElement("label");
  const input = document.createElement("input"), count = document.createElement("output");
  frame.className = "frame";
  bar.className = "filter";
  input.type = "search";
  input.placeholder = "words of a row";
  bar.append("Filter ", input, " ", count);
  table.replaceWith(frame);
  frame.append(table);
  frame.before(bar);
  const show = () => {
    const words = input.value.toLowerCase().split(/\s+/);
    const rows = [...body.rows];
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  input.addEventListener("input", show);
  show();
  [...table.tHead.rows[0].cells].forEach((cell, place) => {
    const button = document.createElement("button");
    button.append(...cell.childNodes);
    cell.append(button);
    button.addEventListener("click", () => {
      const down = cell.ariaSort === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      cell.ariaSort = down ? "descending" : "ascending";
      const rows = [...body.rows].map((row) => [valueOf(row.cells[place]), row]);
      rows.sort(([a], [b]) =>
        a === null || b === null || !down ? compare(a, b) : compare(b, a));
      body.append(...rows.map(([, row]) => row));
    });
  });
}

for (const button of document.querySelectorAll("button[data-of]")) {
  button.addEventListener("click", async () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await unpack(button.dataset.of).blob());
    link.download = button.dataset.name;
    link.click();
  });
}

function fitted(chart, width) {
  const spec = structuredClone(chart.spec), inner = spec.spec ?? spec;
  const panels = new Set(chart.rows.map((row) => row.panel)).size;
  const columns = Math.max(1, Math.min(panels, Math.floor(width / 330)));
  if (spec.spec) spec.columns = columns;
  const labels = Math.max(...chart.rows.map((row) => row.name?.length ?? 0));
  const named = typeof inner.height === "object";
  const margin = named ? 70 + Math.min(260, 6 * labels) : 80;
  inner.width = Math.max(120, (width - (named ? margin : 0)) / columns - (named ? 30 : margin));
  const legend = Math.max(1, Math.floor(width / (60 + 7 * labels)));
  const text = JSON.stringify(spec).replaceAll('"orient":"bottom"', `"orient":"bottom","columns":${legend}`);
  return { ...JSON.parse(text), data: { values: chart.rows } };
}

async function draw(charts) {
  const style = getComputedStyle(document.body), ink = style.color, rule = "#8888";
  const config = {
    background: "transparent", font: style.fontFamily, view: { stroke: rule },
    axis: { labelColor: ink, titleColor: ink, gridColor: "#8883", domainColor: rule, tickColor: rule },
    legend: { labelColor: ink, titleColor: ink }, header: { labelColor: ink }, rule: { color: ink },
  };
  for (const [place, chart] of charts.entries()) {
    const box = document.querySelector(`#chart-${place} .chart`);
    const spec = fitted(chart, box.clientWidth);
    const bind = { input: "checkbox", name: "Single runs " };
    if (chart.rows.some((row) => row.single)) spec.params = [{ name: "singles", value: false, bind }];
    const tooltip = { theme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light" };
    const actions = { export: true, source: false, compiled: false, editor: false };
    const logLevel = 1; // Errors; hidden single runs would warn that they have no extent.
    await vegaEmbed(box, spec, { mode: "vega-lite", renderer: "canvas", config, tooltip, actions, logLevel });
    box.dataset.drawn = "yes";
  }
}

(async () => {
  if (!document.getElementById("charts")) return;
  const script = document.createElement("script");
  script.textContent = await unpack("library").text();
  document.head.append(script);
  const charts = await unpack("charts").json();
  await draw(charts);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(charts));
})();
