// The timeline of a step as a picture: what the device does above, and what is on the link below.
"use strict";

const Picture = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 1000, LANE = 14, GAP = 2;

  // The parts of a step, `{kind, lane, start, seconds}`. With overlap, messages begin after the forward pass, and the
  // last bucket is sent when the backward pass is over.
  function parts({ step, backward, network, encode, decode, last, overlaps }) {
    const early = overlaps ? (1 - last) * network : 0;
    const late = network - early;
    const ready = Math.max(step, step - backward + early);
    const found = [
      { kind: "compute", lane: 0, start: 0, seconds: step },
      { kind: "link", lane: 1, start: step - backward, seconds: early },
      { kind: "encode", lane: 0, start: ready, seconds: encode },
      { kind: "link", lane: 1, start: ready + encode, seconds: late },
      { kind: "decode", lane: 0, start: ready + encode + late, seconds: decode },
    ];
    return found.filter((part) => part.seconds > 0);
  }

  function made(name, attributes, parent) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    parent?.append(element);
    return element;
  }

  // An SVG whose whole width is `longest` seconds, with a description for those who do not see it.
  function draw(row, longest, description) {
    const height = 2 * LANE + GAP;
    const svg = made("svg", {
      viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": description,
    });
    for (const { kind, lane, start, seconds } of parts(row)) {
      const box = { x: (WIDTH * start) / longest, y: lane * (LANE + GAP), height: LANE, class: kind };
      const rect = made("rect", { ...box, width: Math.max((WIDTH * seconds) / longest, 1) }, svg);
      made("title", {}, rect).textContent = `${kind}: ${(1e3 * seconds).toPrecision(3)} ms`;
    }
    return svg;
  }

  return { draw, parts };
})();
