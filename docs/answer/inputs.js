// What a user may type: numbers of parameters and links as `python -m jaxcomm.advise` reads them. A reader returns a
// number, or throws an Error whose message appears beside the field.
"use strict";

function inputReaders(numbers) {
  const FACTORS = { "": 1, k: 1e3, m: 1e6, b: 1e9, t: 1e12 };
  const BITS = { "": 1, k: 1e3, m: 1e6, g: 1e9, t: 1e12 };
  const SECONDS = { s: 1, ms: 1e-3, us: 1e-6, "µs": 1e-6, ns: 1e-9 };
  const NUMBER = "([0-9.]{1,20}(?:e-?[0-9]{1,2})?)";

  function matched(pattern, text, message) {
    const found = new RegExp(`^${pattern}$`).exec(text);
    const value = found ? Number(found[1]) : NaN;
    if (!Number.isFinite(value)) throw new Error(message);
    return [value, ...found.slice(2)];
  }

  function params(text) {
    const message = "Type a number of parameters from 1 to 1T, such as 125M or 1.3B.";
    const [value, unit] = matched(`${NUMBER}([kmbt]?)`, text.trim().toLowerCase(), message);
    const count = Math.round(value * FACTORS[unit]);
    if (!(count >= 1 && count <= numbers.most_params)) throw new Error(message);
    return count;
  }

  function whole(text, most, what) {
    const value = /^[0-9]{1,9}$/.test(text.trim()) ? Number(text.trim()) : NaN;
    if (!(value >= 1 && value <= most)) throw new Error(`Type ${what} from 1 to ${most.toLocaleString("en")}.`);
    return value;
  }

  function bandwidth(text) {
    const message = "Type a bandwidth above 0, such as 200Mbit, 10Gbit or 1GB/s. B means bytes, and b means bits.";
    const typed = text.trim(), unit = typed.slice(-3);
    const lowered = /B\/s$|Bps$/.test(unit) ? typed.slice(0, -3).toLowerCase() + unit : typed.toLowerCase();
    const [value, prefix, kind] = matched(`${NUMBER} ?([kmgt]?)(bit/s|bits|bit|bps|b/s|Bps|B/s)`, lowered, message);
    const bytes = (value * BITS[prefix] * (kind.includes("B") ? 8 : 1)) / 8;
    if (!(bytes > 0 && Number.isFinite(bytes))) throw new Error(message);
    return bytes;
  }

  function latency(text) {
    const message = "Type a time of at least 0, such as 50us or 10ms.";
    const [value, unit] = matched(`${NUMBER} ?(s|ms|us|µs|ns)`, text.trim().toLowerCase(), message);
    return value * SECONDS[unit];
  }

  function step(text) {
    const message = "Type a time above 0, such as 0.3s or 300ms.";
    const [value, unit] = matched(`${NUMBER} ?(s|ms|us|µs|ns|)`, text.trim().toLowerCase(), message);
    const seconds = value * SECONDS[unit || "s"];
    if (!(seconds > 0 && seconds <= 1e6)) throw new Error(message);
    return seconds;
  }

  return {
    params,
    workers: (text) => whole(text, numbers.most_workers, "a whole number of workers"),
    shards: (text) => whole(text, numbers.most_workers, "a whole number of devices"),
    bandwidth,
    latency,
    step,
  };
}
