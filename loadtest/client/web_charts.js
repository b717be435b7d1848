// Charts below locust's page: requests/s by ending, tokens/s, TTFT and ITL of the last two minutes.
"use strict";
const CHARTS = [
  ["Requests/s by ending", { ok: "#3aa676", rejected: "#d98a29", cancelled: "#8a8f98", failed: "#d05a5a" }],
  ["Completion tokens/s", { tokens: "#4c8dd6" }],
  ["Time to first token (ms)", { p50_ttft_ms: "#4c8dd6", p99_ttft_ms: "#d05a5a" }],
  ["Inter-token latency (ms)", { p50_itl_ms: "#4c8dd6", p99_itl_ms: "#d05a5a" }],
];
const WIDTH = 560, HEIGHT = 150;
const section = document.createElement("section");
section.style = "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:1.5rem;" +
  "max-width:1200px;margin:0 auto;padding:1rem 1rem 3rem;font:14px system-ui,sans-serif";
document.body.append(section);

const digits = (value) => (value === null ? "–" : value >= 100 ? Math.round(value).toLocaleString() : value.toPrecision(3));

function chart(rows, title, series) {
  const most = Math.max(1e-9, ...rows.flatMap((row) => Object.keys(series).map((name) => row[name] ?? 0)));
  const x = (place) => (WIDTH * place) / Math.max(1, rows.length - 1);
  const lines = Object.entries(series).map(([name, color]) => {
    let pen = "M";  // lifted where nothing was measured
    const path = rows.map((row, place) => {
      if (row[name] === null) return (pen = "M"), "";
      const step = `${pen}${x(place).toFixed(1)} ${(HEIGHT * (1 - row[name] / most)).toFixed(1)}`;
      return (pen = "L"), step;
    });
    return `<path d="${path.join("")}" fill="none" stroke="${color}" stroke-width="1.6"/>`;
  });
  const last = rows.at(-1);
  const legend = Object.entries(series).map(([name, color]) =>
    `<span style="color:${color}">● ${name.replace(/_.*/, "")} ${digits(last[name])}</span>`);
  const seconds = Math.round(last.seconds - rows[0].seconds);
  return `<figure style="margin:0"><figcaption><b>${title}</b> ${legend.join(" ")}</figcaption>
    <svg viewBox="0 -4 ${WIDTH} ${HEIGHT + 22}" style="width:100%" fill="currentColor" font-size="11">
    <path d="M0 0H${WIDTH}M0 ${HEIGHT}H${WIDTH}" stroke="currentColor" opacity=".25"/>${lines.join("")}
    <text y="10">${digits(most)}</text><text y="${HEIGHT + 14}">${seconds} s ago</text>
    <text x="${WIDTH}" y="${HEIGHT + 14}" text-anchor="end">now</text></svg></figure>`;
}

async function update() {
  try {
    const answer = await fetch("./charts/rows");
    // The last interval is not over.
    const rows = answer.ok ? (await answer.json()).slice(0, -1) : [];
    section.innerHTML = rows.length < 2 ? "" : CHARTS.map(([title, series]) => chart(rows, title, series)).join("");
  } catch {
    // The load test has ended; keep the last charts.
  }
}
update();
setInterval(update, 2000);
