"""The style and the script of the report page, kept inside the page so that it needs nothing else."""

from __future__ import annotations

# Colours follow the Okabe-Ito set, told apart with common kinds of colour blindness; they are lighter on a dark page.
CSS = """
:root { color-scheme: light dark; --page: #ffffff; --panel: #f6f7f9; --text: #1d2430; --soft: #5b6675; --grid: #dfe3e8;
  --peak: #0072b2; --predicted: #d55e00; --bound: #b3261e; --base: #8a94a3; --demand: #a9b3c1; --recompute: #0072b2;
  --offload: #e69f00; --quantize: #009e73; --tokens: #56789a; --imbalance: #aa5f93; --error: #d55e00;
  --hidden: #a9b3c1; --exposed: #d55e00; --forward: #0072b2; --backward: #aa5f93; --counts: #8a94a3;
  --dispatch: #e69f00; --combine: #009e73; --gather: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14181f; --panel: #1c222b; --text: #e6eaf0; --soft: #9aa5b4; --grid: #303845; --peak: #56b4e9;
    --predicted: #ff9a56; --bound: #ff7b72; --base: #76808f; --demand: #5d6877; --recompute: #56b4e9;
    --offload: #f0b93a; --quantize: #2fc79b; --tokens: #8db2d6; --imbalance: #d48fbd; --error: #ff9a56;
    --hidden: #5d6877; --exposed: #ff9a56; --forward: #56b4e9; --backward: #d48fbd; --counts: #76808f;
    --dispatch: #f0b93a; --combine: #2fc79b; --gather: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 24px 60px; max-width: 1060px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 25px; margin: 0 0 4px; }
h2 { font-size: 17px; margin: 0; }
p { margin: 4px 0 0; color: var(--soft); max-width: 112ch; }
section { background: var(--panel); border-radius: 10px; padding: 16px 20px 14px; margin-top: 18px; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; margin: 14px 0 0; }
.facts dt { color: var(--soft); } .facts dd { margin: 0; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(205px, 1fr)); gap: 10px 20px;
  margin: 12px 0 2px; }
.tiles div { border-left: 3px solid var(--grid); padding-left: 10px; }
.tiles dt { color: var(--soft); font-size: 13px; } .tiles dd { margin: 0; font-size: 17px; font-weight: 600; }
.tiles dd small { display: block; font-size: 12.5px; font-weight: 400; color: var(--soft); }
.tiles .bad dd { color: var(--bound); }
svg { display: block; width: 100%; height: auto; margin-top: 8px; }
.grid { stroke: var(--grid); stroke-width: 1; }
.tick { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
.line { fill: none; stroke: var(--colour); stroke-width: 1.6; stroke-linejoin: round; }
.line.dashed { stroke-dasharray: 6 4; }
.area { fill: var(--colour); stroke: none; opacity: 0.22; }
.stack .area { opacity: 1; }
.cursor { stroke: var(--text); stroke-width: 1; opacity: 0.45; }
.spike { fill: var(--offload); stroke: var(--panel); stroke-width: 0.8; }
.over { fill: var(--bound); stroke: var(--panel); stroke-width: 0.8; }
.series-peak, .series-actual { --colour: var(--peak); }
.series-predicted_peak, .series-predicted { --colour: var(--predicted); }
.series-limit, .series-budget { --colour: var(--bound); }
.series-baseline { --colour: var(--base); } .series-demand { --colour: var(--demand); }
.series-recompute { --colour: var(--recompute); } .series-offload { --colour: var(--offload); }
.series-quantize { --colour: var(--quantize); } .series-tokens { --colour: var(--tokens); }
.series-imbalance { --colour: var(--imbalance); } .series-error { --colour: var(--error); }
.series-exposed { --colour: var(--exposed); } .series-hidden { --colour: var(--hidden); }
.series-forward { --colour: var(--forward); } .series-backward { --colour: var(--backward); }
.series-counts { --colour: var(--counts); } .series-dispatch { --colour: var(--dispatch); }
.series-combine { --colour: var(--combine); } .series-gather { --colour: var(--gather); }
.bar { fill: var(--colour); stroke: var(--panel); stroke-width: 0.5; }
.bar:hover { stroke: var(--text); stroke-width: 1.2; }
.lane { fill: var(--grid); opacity: 0.35; }
.idle { fill: var(--text); opacity: 0.13; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 20px; margin: 6px 0 0; padding: 0; font-size: 13px;
  color: var(--soft); }
.key { display: inline-block; width: 22px; border-top: 3px solid var(--colour); vertical-align: middle;
  margin-right: 7px; }
.key.dashed { border-top-style: dashed; }
.key.dot { width: 9px; height: 9px; border: 0; border-radius: 50%; }
.key.box { width: 12px; height: 12px; border: 0; border-radius: 2px; background: var(--colour); }
.key.box.idle { background: var(--text); }
.key.dot.spike { background: var(--offload); } .key.dot.over { background: var(--bound); }
output { color: var(--text); font-weight: 600; font-variant-numeric: tabular-nums; }
#where { position: sticky; bottom: 0; text-align: center; font-size: 13px; color: var(--soft); padding: 6px;
  background: var(--page); margin-top: 10px; }
.scroll { overflow-x: auto; margin-top: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; }
td.bad { color: var(--bound); font-weight: 600; }
"""

# One cursor for all charts: the same micro-batch everywhere, its values behind the names in the legends.
SCRIPT = """
(() => {
  const first = JSON.parse(document.body.dataset.first), last = JSON.parse(document.body.dataset.last);
  const charts = document.querySelectorAll("svg[data-num-points]"), where = document.getElementById("where");
  const left = Number(document.body.dataset.left), plot = Number(document.body.dataset.plot);
  const show = (index) => {
    const on = index >= 0 && index < first.length;
    const x = on ? left + plot * (index + 0.5) / first.length : -9;
    charts.forEach((svg) => {
      const cursor = svg.querySelector(".cursor");
      cursor.setAttribute("x1", x); cursor.setAttribute("x2", x);
    });
    document.querySelectorAll("li[data-values]").forEach((item) => {
      const value = on ? item.dataset.values.split(",")[index] + " " + item.dataset.unit : "";
      item.querySelector("output").textContent = value;
    });
    if (!on) where.textContent = "Point at a chart to read one micro-batch in all of them.";
    else if (first[index] === last[index]) where.textContent = "micro-batch " + first[index];
    else where.textContent = "micro-batches " + first[index] + " to " + last[index] + ", the largest of each value";
  };
  charts.forEach((svg) => {
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
      show(Math.floor((x - left) / plot * first.length));
    });
    svg.addEventListener("pointerleave", () => show(-1));
  });
  show(-1);
})();
"""
