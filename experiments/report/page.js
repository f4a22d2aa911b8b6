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

function nameFrame(frame, name) {
  frame.role = "region";
  frame.ariaLabel = name;
  const observer = new ResizeObserver(() => {  // What scrolls has to be reached by keyboard.
    const scrolls = frame.scrollWidth > frame.clientWidth || frame.scrollHeight > frame.clientHeight;
    if (scrolls) frame.tabIndex = 0;
    else frame.removeAttribute("tabindex");
  });
  for (const each of [frame, ...frame.children]) observer.observe(each);
}

const headings = [...document.querySelectorAll("h1, h2, h3, h4")], named = new Map();
function nameOf(table) {
  const above = Node.DOCUMENT_POSITION_FOLLOWING;
  const name = headings.findLast((each) => each.compareDocumentPosition(table) & above).textContent;
  named.set(name, (named.get(name) ?? 0) + 1);
  return named.get(name) === 1 ? name : `${name}, table ${named.get(name)}`;
}

for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  if (!body || body.rows.length < 2) continue;
  const frame = document.createElement("div"), bar = document.createElement("div");
  const input = document.createElement("input"), count = document.createElement("output");
  const label = document.createElement("label"), name = nameOf(table);
  frame.className = "frame";
  bar.className = "filter";
  input.type = "search";
  input.placeholder = "words of a row";
  input.ariaLabel = `Filter ${name}`;
  label.append("Filter ", input);
  bar.append(label, " ", count);
  table.replaceWith(frame);
  frame.append(table);
  frame.before(bar);
  nameFrame(frame, name);
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

const luminanceOf = (color) => {
  const [red, green, blue] = color.map((part) =>
    part / 255 <= .04045 ? part / 255 / 12.92 : ((part / 255 + .055) / 1.055) ** 2.4);
  return .2126 * red + .7152 * green + .0722 * blue;
};
const contrast = (...colors) => {
  const [low, high] = colors.map(luminanceOf).sort((a, b) => a - b);
  return (high + .05) / (low + .05);
};
const partsOf = (color) => color.startsWith("#")
  ? color.slice(1).match(/../g).map((part) => Number.parseInt(part, 16))
  : color.match(/[\d.]+/g).slice(0, 3).map(Number);

/** Of colors on white paper, those that are seen on this page: mixed with its ink, as far as needed. */
function colorsOn(paper, ink) {
  return (color, least) => {
    if (color === "#000000") return `rgb(${ink})`;
    for (let part = 0; part < 1; part += .05) {
      const mixed = partsOf(color).map((own, place) => Math.round(own + part * (ink[place] - own)));
      if (contrast(mixed, paper) >= least) return `rgb(${mixed})`;
    }
    return `rgb(${ink})`;
  };
}
const MARK = 3, TEXT = 4.5; // The least contrasts of WCAG.

function fitted(chart, width, visible) {
  const spec = structuredClone(chart.spec), inner = spec.spec ?? spec;
  let columns = spec.facet?.column?.sort.length ?? 1;
  if (columns > 1 && width / columns < 240) {  // Panels of the grid wrap.
    const [downs, acrosses] = [spec.facet.row?.sort ?? [""], spec.facet.column.sort];
    const cells = downs.flatMap((down) => acrosses.map((across) =>
      chart.rows.find((row) => row.down === down && row.across === across)));
    const sort = cells.filter((row) => row).map((row) => row.panel);
    columns = spec.columns = Math.max(1, Math.floor(width / 330));
    spec.facet = { ...spec.facet.column, field: "panel", sort };
  }
  const notes = Math.max(...chart.rows.map((row) => row.note?.length ?? 0));
  const room = width - (spec.facet?.row ? 24 : 0) - 6 * notes;
  const labels = Math.max(...chart.rows.map((row) => row.name?.length ?? 0));
  const isForest = typeof inner.height === "object";
  const margin = isForest ? 70 + Math.min(260, 6 * labels) : 80;
  inner.width = Math.max(120, (room - (isForest ? margin : 0)) / columns - (isForest ? 30 : margin));
  const legend = Math.max(1, Math.floor(width / (60 + 7 * labels)));
  const text = JSON.stringify(spec).replaceAll('"orient":"bottom"', `"orient":"bottom","columns":${legend}`);
  const colored = JSON.parse(text, (key, value) =>
    key === "range" && `${value[0]}`.startsWith("#") ? value.map((each) => visible(each, MARK)) : value);
  const values = chart.rows.map((row) => row.color
    ? { ...row, color: visible(row.color, MARK), ink: visible(row.color, TEXT) } : row);
  return { ...colored, data: { values } };
}

async function draw(charts) {
  const style = getComputedStyle(document.body), ink = style.color, rule = "#8888";
  const config = {
    background: "transparent", font: style.fontFamily, view: { stroke: rule },
    axis: { labelColor: ink, titleColor: ink, gridColor: "#8883", domainColor: rule, tickColor: rule,
      labelSeparation: 8 },
    legend: { labelColor: ink, titleColor: ink, symbolBaseFillColor: ink, symbolBaseStrokeColor: ink },
    header: { labelColor: ink }, rule: { color: ink }, text: { color: ink },
  };
  const visible = colorsOn(partsOf(style.backgroundColor), partsOf(ink));
  const theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  for (const [place, chart] of charts.entries()) {
    const box = document.querySelector(`#chart-${place} .chart`), { description } = box.dataset;
    const spec = { ...fitted(chart, box.clientWidth, visible), description };
    const bind = { input: "checkbox", name: "Single runs " };
    if (chart.rows.some((row) => row.single)) spec.params = [{ name: "singles", value: false, bind }];
    const actions = { export: true, source: false, compiled: false, editor: false };
    const logLevel = 1; // Errors; hidden single runs would warn that they have no extent.
    box.view?.finalize();
    ({ view: box.view } = await vegaEmbed(
      box, spec, { mode: "vega-lite", renderer: "canvas", config, tooltip: { theme }, actions, logLevel }));
    const canvas = box.querySelector("canvas"), caption = box.previousElementSibling.textContent;
    canvas.role = "img"; // Not what is around it, which has a menu and a checkbox.
    canvas.ariaLabel = description;
    for (const name of ["role", "aria-roledescription", "aria-label"])
      canvas.parentElement.removeAttribute(name);
    const menu = box.querySelector("summary");
    menu.ariaLabel = `Save the figure: ${caption}`;
    menu.firstElementChild.ariaHidden = "true";
    nameFrame(box, caption);
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
