// What a user may type: numbers, bandwidths and times as `jaxcomm` reads them, with its units. A reader returns a number,
// or throws an Error whose message appears beside the field.
"use strict";

function inputReaders({ units, most_params, most_workers }) {
  function quantity(text, factors) {
    const found = /^([0-9.]{1,20}(?:e-?[0-9]{1,2})?) ?([^0-9]*)$/.exec(text);
    return found && Object.hasOwn(factors, found[2]) ? Number(found[1]) * factors[found[2]] : NaN;
  }

  function bandwidth(text) {
    const ending = text.slice(-3), isBytes = ending === "B/s" || ending === "Bps"; // A B means bytes, and a b bits.
    return quantity(isBytes ? text.slice(0, -3).toLowerCase() + ending : text.toLowerCase(), units.rates);
  }

  const whole = (text) => (/^[0-9]{1,9}$/.test(text) ? Number(text) : NaN);
  const seconds = (text) => quantity(text.toLowerCase(), units.seconds);
  const times = { "": 1, ...units.seconds }, many = most_workers.toLocaleString("en");
  const reader = (read, isAllowed, message) => (text) => {
    const value = read(text.trim());
    if (!isAllowed(value) || !Number.isFinite(value)) throw new Error(message);
    return value;
  };

  return {
    params: reader((text) => Math.round(quantity(text.toLowerCase(), units.counts)), (n) => n >= 1 && n <= most_params,
      "Type a number of parameters from 1 to 1T, such as 125M or 1.3B."),
    workers: reader(whole, (n) => n >= 2 && n <= most_workers, `Type a whole number of workers from 2 to ${many}.`),
    shards: reader(whole, (n) => n >= 1 && n <= most_workers, `Type a whole number of devices from 1 to ${many}.`),
    bandwidth: reader(bandwidth, (rate) => rate > 0,
      "Type a bandwidth above 0, such as 200Mbit, 10Gbit or 1GB/s. B means bytes, and b means bits."),
    latency: reader(seconds, (time) => time >= 0, "Type a time of at least 0, such as 50us or 10ms."),
    step: reader((text) => quantity(text.toLowerCase(), times), (time) => time > 0 && time <= 1e6,
      "Type a time above 0, such as 0.3s or 300ms."),
  };
}
