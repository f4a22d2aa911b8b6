// Reads the form, and shows the ranking, the picture and the line of code. The fragment of the address has all inputs,
// so that an answer can be linked to.
"use strict";

(() => {
  const numbers = JSON.parse(document.getElementById("numbers").textContent);
  const readers = inputReaders(numbers), { advise } = costModel(numbers);
  const byId = (id) => document.getElementById(id);
  const FIELDS = ["params", "dtype", "workers", "bandwidth", "latency", "step", "sharded", "shards", "device"];

  const fixed = (value, digits) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

  function filled(element, ...children) {
    element.replaceChildren(...children);
    return element;
  }

  function made(name, text = "", attributes = {}) {
    const element = document.createElement(name);
    element.textContent = text;
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  }

  // The inputs as numbers, or null; what is wrong appears beside its field.
  function read() {
    const values = {};
    let complete = true;
    for (const [name, reader] of Object.entries(readers)) {
      const field = byId(name), shown = name !== "shards" || byId("sharded").value === "others";
      let message = "";
      if (shown) {
        try {
          values[name] = reader(field.value);
        } catch (error) {
          message = error.message;
        }
      }
      field.setAttribute("aria-invalid", String(message !== ""));
      byId(`${name}-error`).textContent = message;
      complete &&= message === "";
    }
    return complete ? values : null;
  }

  // The line to paste: in `shard_local` if another axis shards the parameters.
  function lineOf(row, sharded) {
    const plain = row.steps === 1; // Its all-reduce of a leaf leaves shards in place.
    const ofShard = (code) => (sharded && !plain ? `jaxcomm.shard_local(${code}, param_specs)` : code);
    if (row.period === 1) return `tx = optax.chain(${ofShard(row.started)}, optimizer)`;
    const local = row.started.replace(row.aggregator, () => ofShard(row.aggregator));
    return `tx = optax.chain(${row.optimizer}, ${local})`;
  }

  function verdictOf({ recommended, exact, compress }) {
    if (compress) {
      const gain = (exact.cost / recommended.cost).toFixed(2);
      return `Compress: ${gain} x as fast as the exact mean, with overlap and assumed steps.`;
    }
    return `Do not compress${recommended === exact ? "." : " further than to 16 bits."}`;
  }

  // What the fields of summed integers hold.
  function levelsOf(workers) {
    const { levels, widths } = numbers.levels, { width } = widths.find((each) => workers <= each.most_workers);
    const own = `Levels: global_qsgd has ${levels} in ${width} bits for each of ${workers} workers`;
    return `${own}; bits=8 allows ${Math.floor(255 / (2 * workers)) || "none"}.`;
  }

  function rowOf(row, best) {
    const line = made("tr", "", row === best ? { class: "best", "aria-current": "true" } : {});
    const method = made("th", "", { scope: "row" });
    method.append(made("code", row.line), made("span", row === best ? " recommended" : "", { class: "mark" }));
    line.append(
      method,
      made("td", fixed(1e3 * row.seconds, 1)),
      made("td", fixed(1e3 * row.overlapped, 1)),
      made("td", fixed(1e-6 * row.bytes, 1)),
      made("td", fixed(1e-6 * row.state, 1)),
      made("td", row.steps === null ? "?" : String(row.steps)),
      made("td", row.risk.split(":")[0]),
    );
    return line;
  }

  function timelineOf(row, longest) {
    const milliseconds = (seconds) => `${fixed(1e3 * seconds, 1)} ms`;
    const overlap = row.overlaps ? ", with overlap" : "";
    const description =
      `A step of ${milliseconds(row.own)}${overlap}: ${milliseconds(row.step)} compute, ` +
      `${milliseconds(row.encode)} encode, ${milliseconds(row.network)} link, ${milliseconds(row.decode)} decode`;
    const item = made("li"), head = made("p");
    head.append(made("code", row.line), made("span", ` ${milliseconds(row.own)}${overlap}`));
    item.append(head, Picture.draw(row, longest, description));
    return item;
  }

  function show(found, sharded, workers) {
    const { rows, omitted, recommended } = found;
    const longest = Math.max(...rows.map((row) => row.own));
    byId("verdict").textContent = verdictOf(found);
    byId("line").textContent = lineOf(recommended, sharded);
    byId("risk").textContent = `Risk: ${recommended.risk}.`;
    byId("levels").textContent = levelsOf(workers);
    filled(byId("rows"), ...rows.map((row) => rowOf(row, recommended)));
    filled(byId("timelines"), ...rows.map((row) => timelineOf(row, longest)));
    filled(byId("omitted"), ...omitted.map((each) => made("li", `Omitted: ${each.line}: more than ${fixed(each.most_params, 0)} parameters.`)));
  }

  function update() {
    const ofDevice = byId("sharded").value === "others";
    for (const name of ["shards-field", "bandwidth-note", "sharded-note"]) byId(name).hidden = !ofDevice;
    byId("bandwidth-label").textContent = `Bandwidth of ${ofDevice ? "each device" : "a worker"}`;
    const values = read(), amongWorkers = byId("sharded").value === "workers";
    byId("answer").hidden = values === null || amongWorkers;
    byId("no-answer").hidden = values !== null || amongWorkers;
    byId("among-workers").hidden = !amongWorkers;
    byId("copied").textContent = "";
    if (values === null || amongWorkers) return;
    const found = advise({
      count: Math.ceil(values.params / (ofDevice ? values.shards : 1)),
      dtype: byId("dtype").value,
      workers: values.workers,
      link: { bytesPerSecond: values.bandwidth, latency: values.latency },
      step: values.step,
      memory: numbers.devices[byId("device").value],
    });
    show(found, ofDevice, values.workers);
    const inputs = FIELDS.filter((name) => ofDevice || name !== "shards").map((name) => [name, byId(name).value]);
    history.replaceState(null, "", `#${new URLSearchParams(inputs)}`);
  }

  async function copy() {
    const selected = getSelection();
    selected.selectAllChildren(byId("line"));
    try {
      await navigator.clipboard.writeText(byId("line").textContent);
      byId("copied").textContent = "Copied.";
    } catch {
      byId("copied").textContent = "Selected: press Ctrl+C or Cmd+C to copy.";
    }
  }

  function start() {
    filled(byId("device"), ...Object.keys(numbers.devices).map((name) => made("option", name)));
    const presets = Object.entries(numbers.links);
    byId("preset").append(...presets.map(([name]) => made("option", name)));
    byId("device").value = numbers.default_device;
    for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
      const isKnown = FIELDS.includes(name) && byId(name);
      const isOption = isKnown && (!byId(name).options || [...byId(name).options].some((each) => each.value === value));
      if (isOption) byId(name).value = value;
    }
    byId("preset").addEventListener("change", () => {
      const link = numbers.links[byId("preset").value];
      if (link) [byId("bandwidth").value, byId("latency").value] = [link.bandwidth, link.latency];
    });
    for (const name of ["bandwidth", "latency"]) byId(name).addEventListener("input", () => (byId("preset").value = ""));
    for (const kind of ["input", "change"]) byId("form").addEventListener(kind, update);
    byId("form").addEventListener("submit", (event) => event.preventDefault());
    byId("copy").addEventListener("click", copy);
    update();
  }

  start();
})();
