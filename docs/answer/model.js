// Predicts a step with each method as `jaxcomm.perf.predict`, and ranks them as `jaxcomm.advise`. What a method sends and
// keeps is interpolated between programs that Python has traced for this page: see `tools/answer_page.py`. Tests compare
// the results with those of Python.
"use strict";

function costModel(numbers) {
  // What amounts depend on: parameters, rows of all square matrices, parameters in a vector of what is left, and 1; then
  // the same per worker.
  function featuresOf(count, workers) {
    const layers = Math.max(numbers.layers, Math.ceil(count / numbers.most_of_leaf));
    const side = Math.floor(Math.sqrt(count / layers));
    const shape = [count, layers * side, count - layers * side ** 2, 1];
    return [...shape, ...shape.map((value) => value / workers)];
  }

  function predict(method, { count, dtype, workers, link, step, memory }) {
    const amounts = method.amounts.find((each) => workers <= each.most_workers)[dtype];
    const features = featuresOf(count, workers), others = workers - 1;
    const amount = (name) => amounts[name].reduce((total, each, i) => total + each * features[i], 0);
    const bytes = others * amount("bytes"), messages = others * amounts.messages;
    const state = amount("state"), payload = amount("payload");
    // Of local steps, the average step; they also keep the parameters of the last exchange, in 32 bits. An exchange
    // overlaps with nothing.
    const share = 1 / method.period, kept = method.period > 1 ? 4 * count : 0;
    const network = share * (messages * link.latency + bytes / link.bytesPerSecond);
    const gradients = numbers.itemsizes[dtype] * count;
    // Gradients and payloads are once read and once written; the state belongs to encoding.
    const rate = payload < (1 - 1e-6) * gradients ? numbers.efficiency * memory : Infinity;
    const encode = share * (gradients + 2 * state + payload) / rate;
    const decode = share * (gradients + payload + bytes) / rate;
    // What is sent when the backward pass is over: the last bucket.
    const last = Math.min(1, numbers.last_bucket_bytes / gradients), backward = numbers.backward * step;
    const seconds = step + encode + decode + network;
    const hidden = Math.max(backward, (1 - last) * network);
    const beside = step - backward + hidden + last * network + encode + decode;
    const overlapped = method.period > 1 ? seconds : beside;
    const own = method.overlaps ? overlapped : seconds;
    return {
      ...method, bytes: share * bytes, messages, state: state + kept, network, encode, decode, seconds, overlapped, last, backward, step, own,
      cost: method.steps === null ? Infinity : own * method.steps,
    };
  }

  const differ = (a, b) => (a === b ? 0 : a - b); // Infinity - Infinity is not a number.

  function advise(given) {
    const omitted = numbers.methods.filter((method) => given.count > method.most_params);
    const rows = numbers.methods.filter((method) => !omitted.includes(method)).map((method) => predict(method, given));
    rows.sort((a, b) => differ(a.cost, b.cost) || a.seconds - b.seconds);
    const near = rows.filter((row) => row.cost <= numbers.near * rows[0].cost);
    near.sort((a, b) => a.steps - b.steps || a.cost - b.cost);
    const exact = rows.find((row) => row.steps === 1);
    return { rows, omitted, recommended: near[0], exact, compress: !near[0].overlaps };
  }

  return { advise };
}
