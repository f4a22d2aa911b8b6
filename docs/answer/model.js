// The cost model of `jaxcomm.perf` and the ranking of `jaxcomm.advise`, for a model that is known by its number of
// parameters. A function is a translation of the Python function of its name, and tests compare the results of both.
// Python traces a program to count what a method sends. Here the shapes on the wire are computed. All numbers that both
// share, such as sizes of buckets, are exported from Python: `numbers`.
"use strict";

function costModel(numbers) {
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const repeated = (value, times) => Array.from({ length: times }, () => value);

  function isqrt(value) {
    let root = Math.floor(Math.sqrt(value));
    while (root * root > value) root -= 1;
    while ((root + 1) * (root + 1) <= value) root += 1;
    return root;
  }

  // Halves are rounded to even numbers, as Python does.
  function round(value) {
    const below = Math.floor(value), rest = value - below;
    return rest < 0.5 || (rest === 0.5 && below % 2 === 0) ? below : below + 1;
  }

  // Square matrices, and a vector of what is left.
  function shapesOfCount(count) {
    const layers = Math.max(numbers.layers, Math.ceil(count / numbers.most_of_leaf));
    const side = isqrt(Math.floor(count / layers));
    const matrices = side ? layers : 0;
    const vector = count - matrices * side ** 2;
    return { count, side, matrices, vector, sizes: [...repeated(side ** 2, matrices), ...(vector ? [vector] : [])] };
  }

  // Consecutive leaves, up to a size; a larger leaf has its own bucket.
  function buckets(sizes) {
    const found = [];
    let room = 0;
    for (const size of sizes) {
      if (!found.length || size > room) {
        found.push([]);
        room = Math.floor(numbers.bucket_bytes / 4);
      }
      found.at(-1).push(size);
      room -= size;
    }
    return found;
  }

  // All small leaves as one unit, and each large leaf alone.
  function parts(sizes) {
    const small = sizes.filter((size) => size < numbers.large);
    const large = sizes.filter((size) => size >= numbers.large);
    return [...(small.length ? [sum(small)] : []), ...large];
  }

  const collective = (primitive, elements, itemsize, group) => ({ primitive, elements, itemsize, group });
  // The loss, and the flag that reports non-finite updates.
  const LOSS = collective("all_reduce", 1, 4, "sum of float32, round 1");
  const FLAG = collective("all_reduce", 1, 4, "maximum of float32");

  // A large message fills whole tiles.
  const inTiles = (words) => (words < numbers.large ? words : Math.ceil(words / numbers.tile) * numbers.tile);

  // Rows of units to their owners, and the means of the rows to all workers.
  function byOwners(units, workers, wordsOfRow, itemsize) {
    const words = inTiles(sum(units.map((size) => wordsOfRow(Math.ceil(size / workers)))));
    const rows = collective("all_to_all", workers * words, itemsize, "rows");
    return [...(workers > 1 ? [rows] : []), collective("all_gather", words, itemsize, "means")];
  }

  // The bits of an integer field in which a sum of all workers' levels fits, and how many fit in a word.
  const mostLevels = (width, workers) => Math.floor((2 ** width - 1) / (2 * workers));

  function chooseField(levels, workers) {
    const most = (width) => mostLevels(width, workers);
    const lanes = (width) => Math.floor(32 / width);
    const fitting = numbers.widths.filter((width) => most(width) >= levels);
    const width = fitting.reduce((best, each) => (lanes(each) >= lanes(best) ? each : best));
    return { width, lanes: lanes(width) };
  }

  // The bits of the shortest code of `count` ascending indices below `size`.
  function bitsOfIndices(count, size) {
    const length = (value) => 32 - Math.clz32(value);
    const fixed = count * length(size - 1);
    const unary = (low) => count + Math.floor((size - 1) / 2 ** low);
    const eliasFano = Array.from({ length: length(size) }, (_, low) => count * low + unary(low));
    return Math.min(fixed, size, ...eliasFano);
  }

  // What each kind of method sends and keeps: `(model, workers, parameter of the method) -> {sent, state}`.
  const EXCHANGES = {
    exact({ sizes, count, itemsize }, workers) {
      if (itemsize === 2 && workers > 1) {
        return { sent: [...byOwners(parts(sizes), workers, (size) => size, 2), LOSS], state: 0 };
      }
      return { sent: [collective("all_reduce", count, 4, LOSS.group), LOSS], state: 0 };
    },

    rounded({ sizes }, workers) {
      const units = buckets(sizes).flatMap(parts);
      return { sent: [FLAG, ...byOwners(units, workers, (size) => size, 2), LOSS], state: numbers.state_bytes };
    },

    summed({ sizes }, workers) {
      const filled = buckets(sizes), field = chooseField(numbers.levels, workers);
      const elements = (size) => (field.width === 8 ? size : Math.ceil(size / field.lanes));
      const codes = sum(filled.flatMap(parts).map(elements));
      const sent = [
        collective("all_reduce", filled.length + 1, 4, FLAG.group),
        collective("all_reduce", codes, field.width === 8 ? 1 : 4, "codes"),
        LOSS,
      ];
      return { sent, state: numbers.state_bytes };
    },

    blocks({ sizes }, workers, { bits, block }) {
      const wordsOfBlock = Math.ceil(block / Math.floor(32 / bits)) + 1; // And the norm.
      const words = (size) => Math.ceil(size / block) * wordsOfBlock;
      const units = buckets(sizes).flatMap(parts);
      return { sent: [FLAG, ...byOwners(units, workers, words, 4), LOSS], state: numbers.state_bytes };
    },

    largest({ sizes, count }, workers, { ratio }) {
      if (count > numbers.most_of_codec) throw new RangeError("more than 2^31 - 1 parameters");
      const words = buckets(sizes).map(sum).map((size) => {
        const kept = Math.min(Math.max(round(ratio * size), 1), size);
        return Math.ceil(bitsOfIndices(kept, size) / 32) + kept;
      });
      const sent = [collective("all_gather", inTiles(sum(words) + 1), 4, "payloads"), LOSS];
      return { sent, state: numbers.state_bytes + 4 * count };
    },

    signs({ sizes, count }) {
      const words = sizes.map((size) => Math.ceil(size / 32) + 1); // And the magnitude.
      const sent = [collective("all_gather", inTiles(sum(words) + 1), 4, "payloads"), LOSS];
      return { sent, state: numbers.state_bytes + 4 * count };
    },

    factors({ side, matrices, vector, count }, workers, { rank }) {
      const columns = Math.min(rank, side);
      const kept = (2 * columns + 1) * side < side ** 2 ? columns : 0;
      const right = kept ? matrices * (kept + 1) * side : matrices * side ** 2;
      const sent = [
        collective("all_reduce", matrices * kept * side + 1, 4, LOSS.group),
        collective("all_reduce", right + vector, 4, kept ? "sum of float32, round 2" : LOSS.group),
        LOSS,
      ];
      return { sent, state: numbers.state_bytes + 4 * count + 4 * matrices * kept * side };
    },
  };

  // In ring schedules: bytes sent over bytes of the operand, and sequential messages.
  const SCHEDULES = {
    all_reduce: (n) => [(2 * (n - 1)) / n, 2 * (n - 1)],
    all_to_all: (n) => [(n - 1) / n, n - 1],
    all_gather: (n) => [n - 1, n - 1],
  };

  function rooflineSeconds(payload, received, gradients, state, memory) {
    if (payload >= gradients) return { encode: 0, decode: 0 };
    const rate = numbers.efficiency * memory;
    // Gradients and payloads are once read and once written; the state belongs to encoding.
    return { encode: (gradients + 2 * state + payload) / rate, decode: (gradients + payload + received) / rate };
  }

  function predict(method, model, { workers, link, step, memory }) {
    const { sent, state } = EXCHANGES[method.exchange](model, workers, method.parameters);
    const bytesOf = (each) => SCHEDULES[each.primitive](workers)[0] * each.elements * each.itemsize;
    const groups = new Map(sent.map((each) => [each.group, SCHEDULES[each.primitive](workers)[1]]));
    const bytes = sum(sent.map(bytesOf)), messages = sum([...groups.values()]);
    const network = messages * link.latency + bytes / link.bytesPerSecond;
    const gradients = model.count * model.itemsize;
    const payload = sum(sent.map((each) => each.elements * each.itemsize));
    const { encode, decode } = rooflineSeconds(payload, bytes, gradients, state, memory);
    // What is sent when the backward pass is over: the last bucket.
    const last = Math.min(1, numbers.last_bucket_bytes / gradients), backward = numbers.backward * step;
    const hidden = Math.max(backward, (1 - last) * network);
    const overlapped = step - backward + hidden + last * network + encode + decode;
    const seconds = step + encode + decode + network;
    const own = method.overlaps ? overlapped : seconds;
    return {
      ...method, bytes, messages, state, network, encode, decode, seconds, overlapped, last, backward, step, own,
      cost: method.steps === null ? Infinity : own * method.steps,
    };
  }

  const differ = (a, b) => (a === b ? 0 : a - b); // Infinity - Infinity is not a number.

  function advise({ count, itemsize, workers, link, step, memory }) {
    const model = { ...shapesOfCount(count), itemsize };
    const rows = [], omitted = [];
    for (const method of numbers.methods) {
      try {
        rows.push(predict(method, model, { workers, link, step, memory }));
      } catch (error) {
        if (!(error instanceof RangeError)) throw error;
        omitted.push({ line: method.line, reason: error.message });
      }
    }
    rows.sort((a, b) => differ(a.cost, b.cost) || a.seconds - b.seconds);
    const near = rows.filter((row) => row.cost <= numbers.near * rows[0].cost);
    near.sort((a, b) => a.steps - b.steps || a.cost - b.cost);
    const exact = rows.find((row) => row.steps === 1);
    const field = { levels: numbers.levels, width: chooseField(numbers.levels, workers).width };
    const levels = { ...field, workers, ofEight: mostLevels(8, workers) };
    return { rows, omitted, levels, recommended: near[0], exact, compress: !near[0].overlaps };
  }

  return { advise };
}
